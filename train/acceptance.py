"""Offline acceptance: the τ that decoding would have, measured without running the target.

Responses are what the target says, greedily or with the noise of a seed, so one packed pass over
one, with a block anchored at every response token, tells how many drafts would be accepted from
every position; walking those jumps gives the exact τ of decoding it again synchronously. What the
drafter said at every round is recorded on the way; `train/outcomes.py` makes hit rates and
calibrations of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax import intervals
from d3d_jax import layout as layouts
from d3d_jax.drafter import Drafter, Params, candidates, predictions
from d3d_jax.errors import D3DError
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.train.dataset import ResponseDataset
from d3d_jax.train.outcomes import Rounds
from d3d_jax.train.step import place

# Document lengths and anchor counts are rounded up to 1, 2, 3, 4, 6, 8, 12, 16, … times these, so
# that few shapes are compiled; the logits of as many anchors of a document exist at once.
TOKENS, ANCHORS = 128, 64
# Tokens of blocks in one pass of a document, at most: a long response takes several, each with all
# of its tokens. At W = 16 the four over 4,096 tokens compute a fifth more than one would.
MOST_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What the walk over every document gave.

    Attributes:
      tokens: [documents] tokens emitted by rounds (the first response token is the prefill's).
      rounds: [documents] rounds that emitted them.
      accepted: [documents] of [rounds] drafts accepted in each round, cut at the document's end.
      room: [documents] of [rounds] drafts that fitted before the document's end, at most W − 1.
      block_size: W the blocks were drafted with.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    accepted: list[np.ndarray]
    room: list[np.ndarray]
    block_size: int

    @property
    def tau(self) -> float:
        """Pooled acceptance length: tokens emitted per round, the bonus or correction included."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))

    @property
    def tau_per_response(self) -> float:
        """Mean over responses of each one's own acceptance length."""
        return float(np.mean(self.tokens[self.rounds > 0] / self.rounds[self.rounds > 0]))

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of τ over responses (`intervals.pooled`)."""
        return intervals.pooled(self.tokens, self.rounds)

    def reached(self) -> list[float]:
        """Fraction of rounds with at least 1, 2, … W − 1 drafts accepted, of those with room."""
        counts, room = np.concatenate(self.accepted), np.concatenate(self.room)
        return [
            round(float(np.sum(counts >= i) / max(np.sum(room >= i), 1)), 4)
            for i in range(1, self.block_size)
        ]

    def summary(self) -> dict[str, Any]:
        """The figures for a metrics line."""
        return {
            "tau": round(self.tau, 4),
            "tau_interval": [round(bound, 4) for bound in self.interval()],
            "tau_per_response": round(self.tau_per_response, 4),
            "reached": self.reached(),
        }


def walk(accepted: np.ndarray) -> np.ndarray:
    """Jumps through one response as greedy decoding would.

    Args:
      accepted: [A] drafts accepted by a block anchored at each response token but the last.

    Returns:
      [rounds] which of the anchors begin a round.
    """
    at, rounds = 0, []
    while at < len(accepted):
        rounds.append(at)
        at += int(accepted[at]) + 1
    return np.array(rounds, np.int32)


class OfflineAcceptance:
    """Measures a drafter's acceptance on documents of a dataset.

    Args:
      documents: how many, evenly spread; 0 for all.
      block_size: W to draft with; None for the drafter's own.
      mesh: of `sharding.model_mesh`, that the parameters lie on; None: one device. Documents of a
        shape are read as many at a time as its data and fsdp axes have devices.
    """

    def __init__(
        self,
        drafter: Drafter,
        dataset: ResponseDataset,
        documents: int = 0,
        block_size: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise D3DError("the validation split is empty; build it with validation prompts")
        width = block_size or drafter.drafter.block_size
        if width > drafter.drafter.block_size:
            raise D3DError(
                f"block size {width} is above the {drafter.drafter.block_size} the drafter was "
                "trained for"
            )
        count = min(documents or len(dataset), len(dataset))
        self.indices = np.linspace(0, len(dataset) - 1, count).round().astype(int)
        self.drafter, self.dataset, self.width, self.mesh = drafter, dataset, width, mesh
        read, whole = functools.partial(read_blocks, drafter), None
        self._at_once = 1
        if mesh is not None:
            self._at_once = mesh.shape["data"] * mesh.shape["fsdp"]
            # Whole in every process, each of which walks all documents.
            read, whole = sharding.on_mesh(mesh, read), NamedSharding(mesh, PartitionSpec())
        self._read = jax.jit(read, static_argnames=("block_size", "count"), out_shardings=whole)

    def place(self, params: Params) -> Params:
        """Parameters on the devices that documents are read on."""
        if self.mesh is None:
            return jax.device_put(params)
        return place(params, parameters.shardings(params, self.mesh))

    def measure(self, params: Params, gates: np.ndarray | None = None) -> Acceptance:
        """Walks every chosen document.

        Args:
          params: stacked or per-layer device arrays.
          gates: [L] float32 for stacked ones, of `decoder.forward`: layers to leave out.
        """
        return self.observe(params, gates=gates)[0]

    def observe(
        self,
        params: Params,
        num_candidates: int = 1,
        temperatures: np.ndarray | None = None,
        gates: np.ndarray | None = None,
    ) -> tuple[Acceptance, Rounds]:
        """Walks every chosen document and records what the drafter said at every round.

        Args:
          num_candidates: M to record of every offset.
          temperatures: [G, W − 1 + shift] to record the normalisers of; None: 1 everywhere.

        Raises:
          D3DError: fewer than M tokens in the drafter's vocabulary.
        """
        config = self.drafter.drafter
        tokens = config.draft_vocab_size or self.drafter.model.vocab_size
        if num_candidates > tokens:
            raise D3DError(f"{num_candidates} candidates are asked of a vocabulary of {tokens}")
        if temperatures is None:
            temperatures = np.ones((1, self.width - 1 + config.label_shift))
        documents = [self.dataset[int(index)] for index in self.indices]
        passes = [self._passes(document, temperatures.shape[1]) for document in documents]
        of_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, own in enumerate(passes):
            for part, (tokens, anchors, _) in enumerate(own):
                of_shape.setdefault((len(tokens), len(anchors)), []).append((number, part))
        waiting: list[dict[int, Blocks]] = [{} for _ in passes]
        rounds: dict[int, Rounds] = {}
        for places in of_shape.values():
            for start in range(0, len(places), self._at_once):
                group = places[start : start + self._at_once]
                whole = group + group[-1:] * (self._at_once - len(group))
                inputs = (passes[number][part] for number, part in whole)
                read = self._read(
                    params,
                    *(np.stack(arrays) for arrays in zip(*inputs, strict=True)),
                    temperatures.astype(np.float32),
                    gates,
                    block_size=self.width,
                    count=num_candidates,
                )
                read = [np.asarray(leaf) for leaf in read]
                for at, (number, part) in enumerate(group):
                    waiting[number][part] = Blocks(*(leaf[at] for leaf in read))
                    if len(waiting[number]) < len(passes[number]):
                        continue
                    # Of all its anchors only the rounds are kept.
                    blocks = [waiting[number].pop(i) for i in range(len(passes[number]))]
                    rounds[number] = self._rounds(
                        number,
                        documents[number],
                        np.concatenate([labels for _, _, labels in passes[number]]),
                        Blocks(*(np.concatenate(leaves) for leaves in zip(*blocks, strict=True))),
                        temperatures,
                    )
        walked = [rounds[number] for number in range(len(documents))]
        acceptance = Acceptance(
            np.array([len(d["tokens"]) - 1 - d["prompt_length"] for d in documents]),
            np.array([len(own.accepted) for own in walked]),
            [own.accepted for own in walked],
            [np.sum(own.labels[:, : self.width - 1] >= 0, axis=1) for own in walked],
            self.width,
        )
        return acceptance, Rounds.join(walked)

    def _passes(
        self, document: dict[str, Any], offsets: int
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Tokens [S], anchors [A] and labels [A, P] of every pass over a document."""
        tokens = document["tokens"]
        padded = np.zeros((_rounded(len(tokens), TOKENS),), np.int32)
        padded[: len(tokens)] = tokens
        every = np.arange(document["prompt_length"], len(tokens) - 1, dtype=np.int32)
        # A power of 2 of units, which are not rounded up.
        most = ANCHORS * 2 ** (max(MOST_ROWS // (self.width * ANCHORS), 1).bit_length() - 1)
        passes = []
        for start in range(0, max(len(every), 1), most):
            anchors = every[start : start + most]
            slots = np.full((_rounded(len(anchors), ANCHORS),), -1, np.int32)
            slots[: len(anchors)] = anchors
            ahead = slots[:, None] + np.arange(1, offsets + 1)
            # Past the end no draft matches, which cuts the last round as decoding does.
            known = (slots[:, None] >= 0) & (ahead < len(tokens))
            labels = np.where(known, tokens[np.minimum(ahead, len(tokens) - 1)], -1)
            passes.append((padded, slots, labels.astype(np.int32)))
        return passes

    def _rounds(
        self,
        number: int,
        document: dict[str, Any],
        labels: np.ndarray,
        said: Blocks,
        temperatures: np.ndarray,
    ) -> Rounds:
        """The rounds of one document, of which the drafter said something at every anchor."""
        tokens, first = document["tokens"], document["prompt_length"]
        drafts = said.candidate_ids[:, : self.width - 1, 0]
        accepted = np.cumprod(drafts == labels[:, : self.width - 1], axis=1).sum(axis=1)
        rows = walk(accepted[: max(len(tokens) - 1 - first, 0)])
        block = np.concatenate([tokens[first + rows, None], drafts[rows]], axis=1).astype(np.int32)
        return Rounds(
            self.drafter.drafter,
            temperatures,
            np.full(len(rows), number),
            block,
            *(leaf[rows] for leaf in (labels, accepted, *said)),
        )


def _rounded(count: int, unit: int) -> int:
    """Up to 2ⁿ or 3 · 2ⁿ units."""
    units = max(-(-count // unit), 1)
    power = 2 ** (units - 1).bit_length()
    return unit * (power * 3 // 4 if power * 3 // 4 >= units else power)


class Blocks(NamedTuple):
    """What a drafter says of A blocks a document.

    P = W − 1 + shift offsets are predicted, with M candidates each.

    Attributes:
      candidate_ids: [B, A, P, M] int32, likeliest first.
      log_probs: [B, A, P, M] float32, uncalibrated.
      label_log_probs: [B, A, P] float32 of the labels; −inf where the vocabulary lacks one.
      log_normalisers: [B, A, P, G] float32, log Σ_v q(v)^(1/T).
    """

    candidate_ids: Any
    log_probs: Any
    label_log_probs: Any
    log_normalisers: Any


def read_blocks(
    drafter: Drafter,
    params: Params,
    tokens: jax.Array,
    anchors: jax.Array,
    labels: jax.Array,
    temperatures: jax.Array,
    gates: jax.Array | None,
    *,
    block_size: int,
    count: int,
) -> Blocks:
    """One packed pass over documents with a block at every anchor.

    Args:
      tokens: [B, S], padded at the end with anything.
      anchors: [B, A] key indices, −1 where unused; A is a multiple of `ANCHORS`.
      labels: [B, A, P] what the target says at the offsets predicted, −1 where that is unknown.
      temperatures: [G, P].
      gates: [L] of `decoder.forward`, or None.
      block_size: W.
      count: M.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    layout = layouts.packed_documents(
        positions,
        jnp.zeros_like(positions),
        anchors,
        block_size=block_size,
        in_block=drafter.drafter.in_block,
    )
    of_anchors = jnp.take_along_axis(tokens, jnp.maximum(anchors, 0), axis=1)
    rows = jnp.concatenate([tokens, of_anchors], axis=1)
    hidden, _ = decoder.forward(drafter.model, params, rows, layout, gates=gates)

    def grouped(x: jax.Array) -> jax.Array:
        """[B, A, …] → [A / ANCHORS, B · ANCHORS, …]."""
        x = jnp.moveaxis(x.reshape(batch, -1, ANCHORS, *x.shape[2:]), 1, 0)
        return x.reshape(-1, batch * ANCHORS, *x.shape[3:])

    def ungrouped(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(-1, batch, ANCHORS, *x.shape[2:]), 1, 0)
        return x.reshape(batch, -1, *x.shape[3:])

    blocks = hidden[:, length:].reshape(batch, -1, block_size, hidden.shape[-1])
    vocabulary = params.get("draft_vocab", jnp.arange(drafter.model.vocab_size))

    def read(part: tuple[jax.Array, jax.Array]) -> Blocks:
        hidden, labels = part
        hidden = predictions(drafter.drafter, hidden)
        ids, log_probs = candidates(params, hidden, count)
        every = jax.nn.log_softmax(decoder.logits(params, hidden))
        is_label = vocabulary == labels[..., None]
        of_label = jnp.max(jnp.where(is_label, every, -jnp.inf), axis=-1)
        # One after the other: each needs an array as large as the logits.
        missing = jax.lax.map(
            lambda slots: jax.nn.logsumexp(every / slots[:, None], axis=-1), temperatures
        )
        return Blocks(ids, log_probs, of_label, jnp.moveaxis(missing, 0, -1))

    # A group of anchors at a time: the logits of all of them would be the largest array by far.
    said = jax.lax.map(read, (grouped(blocks), grouped(labels)))
    return jax.tree.map(ungrouped, said)
