"""Packing of documents into training rows: which documents, which anchors, which arrays.

Pure NumPy functions, and `PackedBatches`, which makes the batch of any step from its number alone.
Attention masks and objectives do not live here; a row holds only what they are computed from.

S tokens a row, A anchors (blocks) a row, K anchors a document at most, B rows a global batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from d3d_jax.errors import D3DError

# Distinct, non-zero streams: SeedSequence ignores trailing zeros, so [seed, epoch] alone
# would collide with [seed, epoch, index 0].
_ORDER_STREAM = 1
_ANCHOR_STREAM = 2


class Source(Protocol):
    """What packing needs of a dataset (`train.dataset.ResponseDataset` is one)."""

    @property
    def lengths(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> dict[str, Any]: ...


def count_anchors(prompt_length: Any, total_length: Any, max_anchors: int) -> Any:
    """How many anchors `sample_anchors` returns; ints or int arrays [documents]."""
    return np.clip(np.asarray(total_length) - 1 - np.asarray(prompt_length), 0, max_anchors)


def sample_anchors(
    prompt_length: int, total_length: int, max_anchors: int, seed: int, epoch: int, index: int
) -> np.ndarray:
    """Draws up to `max_anchors` distinct anchor positions of one document, sorted, int32.

    An anchor is a response token with at least one token after it (its first label), so
    `prompt_length <= a <= total_length - 2`; the first response token is one. When there are at
    most `max_anchors` such positions, all are taken. Depends on (seed, epoch, index) only.
    """
    available = max(0, total_length - 1 - prompt_length)
    if available <= max_anchors:
        return np.arange(prompt_length, prompt_length + available, dtype=np.int32)
    generator = _generator(seed, epoch, _ANCHOR_STREAM, index)
    chosen = generator.choice(available, size=max_anchors, replace=False, shuffle=False)
    return (prompt_length + np.sort(chosen)).astype(np.int32)


def shuffled_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits `count` documents, int64 [count]."""
    return _generator(seed, epoch, _ORDER_STREAM).permutation(count)


def plan_rows(
    total_lengths: np.ndarray,
    anchor_counts: np.ndarray,
    order: np.ndarray,
    max_tokens: int,
    max_blocks: int,
) -> list[np.ndarray]:
    """Fills rows with documents in the given order; a row closes when the next does not fit.

    A row holds at most `max_tokens` tokens and `max_blocks` anchors. A document longer than
    `max_tokens` counts as `max_tokens` (the row builder cuts its end) and has a row alone.

    Args:
        total_lengths, anchor_counts: int [documents], by document.
        order: int [n], the documents to place.

    Returns:
        For each row its documents, int64, in order.

    Raises:
        D3DError: a document has more anchors than a row may hold.
    """
    rows: list[np.ndarray] = []
    start = tokens = blocks = 0
    lengths = np.minimum(total_lengths[order], max_tokens).tolist()
    counts = anchor_counts[order].tolist()
    for at, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count > max_blocks:
            raise D3DError(f"a document has {count} anchors, a row holds {max_blocks} blocks")
        if tokens + length > max_tokens or blocks + count > max_blocks:
            rows.append(order[start:at])
            start, tokens, blocks = at, 0, 0
        tokens += length
        blocks += count
    if start < len(order):
        rows.append(order[start:])
    return rows


def build_row(
    documents: Sequence[tuple[np.ndarray, int, np.ndarray]], max_tokens: int, max_blocks: int
) -> dict[str, np.ndarray]:
    """Lays documents side by side in one row of fixed shape.

    Args:
        documents: (tokens int [T], prompt_length, anchors int [n] within the document). The row
            takes the first `max_tokens` tokens of a document; anchors must lie within those.

    Returns:
        tokens int32 [S], 0 in padding;
        segments int32 [S], 1, 2, ... by document, 0 in padding;
        positions int32 [S], restarting at 0 in each document, 0 in padding;
        starts int32 [S], the row index of the document's first token (a clean row sees
            `starts[i] <= j <= i`); in padding i itself, so that a padding row sees only itself;
        loss_mask bool [S], True where the token is of a response;
        anchors int32 [A], row indices, ascending, then -1.

    Raises:
        ValueError: the documents do not fit in one row.
    """
    row = {
        "tokens": np.zeros(max_tokens, np.int32),
        "segments": np.zeros(max_tokens, np.int32),
        "positions": np.zeros(max_tokens, np.int32),
        "starts": np.arange(max_tokens, dtype=np.int32),
        "loss_mask": np.zeros(max_tokens, bool),
        "anchors": np.full(max_blocks, -1, np.int32),
    }
    start = blocks = 0
    for segment, (tokens, prompt_length, anchors) in enumerate(documents, start=1):
        tokens = tokens[:max_tokens]
        end = start + len(tokens)
        if end > max_tokens or blocks + len(anchors) > max_blocks:
            raise ValueError(f"{len(documents)} documents do not fit in one row")
        row["tokens"][start:end] = tokens
        row["segments"][start:end] = segment
        row["positions"][start:end] = np.arange(len(tokens))
        row["starts"][start:end] = start
        row["loss_mask"][start + prompt_length : end] = True
        row["anchors"][blocks : blocks + len(anchors)] = start + anchors
        start, blocks = end, blocks + len(anchors)
    return row


class PackedBatches:
    """Batches of packed rows as a pure function of the global step number.

    The rows of all epochs form one endless sequence: epoch e visits every document once, in an
    order and with anchors drawn from (seed, e); step n takes rows n·B ... n·B + B - 1. A batch may
    span two epochs, so no document is ever dropped, and resuming is starting at a step.
    Documents whose prompt leaves no response token within S are left out (`skipped` counts them).
    Of B rows, shard i of n (one a process) makes rows i·B/n ... (i + 1)·B/n - 1 of each batch.

    Raises:
        D3DError: limits that cannot be met, or no document to train on.
    """

    def __init__(
        self,
        dataset: Source,
        *,
        max_tokens: int,
        max_blocks: int,
        anchors_per_document: int,
        batch_rows: int,
        seed: int,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> None:
        _check_settings(max_tokens, max_blocks, anchors_per_document, batch_rows, seed)
        if not 0 <= shard_index < shard_count or batch_rows % shard_count:
            raise D3DError(
                f"shard {shard_index} of {shard_count} cannot share batches of {batch_rows} rows; "
                "make the rows of a batch a multiple of the processes"
            )
        self.dataset = dataset
        self.max_tokens, self.max_blocks = max_tokens, max_blocks
        self.anchors_per_document = anchors_per_document
        self.batch_rows, self.seed = batch_rows, seed
        self.local_rows = batch_rows // shard_count
        self._first_local_row = shard_index * self.local_rows
        prompt = np.asarray(dataset.lengths.prompt)
        self._lengths = np.minimum(dataset.lengths.total, max_tokens)
        self._anchor_counts = count_anchors(prompt, self._lengths, anchors_per_document)
        self._usable = np.flatnonzero(prompt < self._lengths)
        self.skipped = len(dataset) - len(self._usable)
        if not len(self._usable):
            raise D3DError(f"no document has a response within {max_tokens} tokens")
        # Rows before each epoch; an epoch's row count is known only once it is planned.
        self._epoch_starts = [0]
        self._plans: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The rows of an epoch, each an array of positions in the dataset."""
        with self._lock:
            return self._plan(epoch)

    def epoch_at(self, step: int) -> float:
        """Epochs finished when `step` begins, as a fraction."""
        epoch, row = self._locate(step * self.batch_rows)
        return epoch + row / len(self.plan(epoch))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This shard's rows of a global batch: `build_row`'s arrays, stacked [B / shards, ...]."""
        first = step * self.batch_rows + self._first_local_row
        rows = [self._row(*self._locate(first + i)) for i in range(self.local_rows)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def iterate(self, start_step: int = 0, prefetch: int = 4) -> Iterator[dict[str, np.ndarray]]:
        """Yields `batch(start_step)`, `batch(start_step + 1)`, ... made ahead by a grain thread."""
        import grain  # it imports jax, which the pure functions above do without

        steps = grain.MapDataset.range(start_step, np.iinfo(np.int64).max)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        return iter(steps.map(self.batch).to_iter_dataset(options))

    def _row(self, epoch: int, row: int) -> dict[str, np.ndarray]:
        documents = []
        for position in self.plan(epoch)[row].tolist():
            record = self.dataset[position]
            anchors = sample_anchors(
                record["prompt_length"],
                int(self._lengths[position]),
                self.anchors_per_document,
                self.seed,
                epoch,
                position,
            )
            documents.append((record["tokens"], record["prompt_length"], anchors))
        return build_row(documents, self.max_tokens, self.max_blocks)

    def _locate(self, row: int) -> tuple[int, int]:
        """(epoch, row within it) of a row of the endless sequence."""
        with self._lock:
            while self._epoch_starts[-1] <= row:
                self._plan(len(self._epoch_starts) - 1)
            epoch = int(np.searchsorted(self._epoch_starts, row, side="right")) - 1
            return epoch, row - self._epoch_starts[epoch]

    def _plan(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._plans:
            order = self._usable[shuffled_order(len(self._usable), self.seed, epoch)]
            rows = plan_rows(
                self._lengths, self._anchor_counts, order, self.max_tokens, self.max_blocks
            )
            # Two epochs meet in a batch; older plans are not needed again.
            while len(self._plans) >= 2:
                self._plans.pop(min(self._plans))
            self._plans[epoch] = rows
            if epoch == len(self._epoch_starts) - 1:
                self._epoch_starts.append(self._epoch_starts[-1] + len(rows))
        return self._plans[epoch]


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def _check_settings(
    max_tokens: int, max_blocks: int, anchors_per_document: int, batch_rows: int, seed: int
) -> None:
    for name, value in (
        ("max_tokens", max_tokens),
        ("max_blocks", max_blocks),
        ("anchors_per_document", anchors_per_document),
        ("batch_rows", batch_rows),
    ):
        if value < 1:
            raise D3DError(f"{name} is {value}, it must be at least 1")
    if anchors_per_document > max_blocks:
        raise D3DError(
            f"anchors_per_document is {anchors_per_document}, more than the {max_blocks} blocks "
            "of a row; raise max_blocks or take fewer anchors"
        )
    if seed < 0:
        raise D3DError(f"seed is {seed}, it must not be negative")
