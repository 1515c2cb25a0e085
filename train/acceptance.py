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

from d3d_jax import layout as layouts
from d3d_jax.drafter import Drafter, Params, candidates, predictions
from d3d_jax.errors import D3DError
from d3d_jax.models import decoder, sharding
from d3d_jax.train.dataset import ResponseDataset
from d3d_jax.train.outcomes import Rounds

# Document lengths and anchor counts are rounded up to these, so that few shapes are compiled; the
# logits of as many anchors exist at once.
TOKENS, ANCHORS = 128, 64


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

    def interval(self, resamples: int = 1000) -> tuple[float, float]:
        """The middle 95 % of the pooled τ of responses drawn anew from these (bootstrap)."""
        documents = len(self.rounds)
        drawn = np.random.default_rng(0).integers(0, documents, (resamples, documents))
        taus = self.tokens[drawn].sum(1) / np.maximum(self.rounds[drawn].sum(1), 1)
        low, high = np.percentile(taus, [2.5, 97.5])
        return float(low), float(high)

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
      mesh: of `sharding.model_mesh`, that the parameters lie on; None: one device.
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
        self.drafter, self.dataset, self.width = drafter, dataset, width
        read, whole = functools.partial(read_blocks, drafter), None
        if mesh is not None:
            # Whole in every process, each of which walks all documents.
            read, whole = sharding.on_mesh(mesh, read), NamedSharding(mesh, PartitionSpec())
        self._read = jax.jit(read, static_argnames=("block_size", "count"), out_shardings=whole)

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
        found = Rounds.join(
            [
                self._rounds(params, gates, number, document, num_candidates, temperatures)
                for number, document in enumerate(documents)
            ]
        )
        of = [found.document == number for number in range(len(documents))]
        room = np.sum(found.labels[:, : self.width - 1] >= 0, axis=1)
        acceptance = Acceptance(
            np.array([len(d["tokens"]) - 1 - d["prompt_length"] for d in documents]),
            np.array([np.sum(rows) for rows in of]),
            [found.accepted[rows] for rows in of],
            [room[rows] for rows in of],
            self.width,
        )
        return acceptance, found

    def _rounds(
        self,
        params: Params,
        gates: np.ndarray | None,
        number: int,
        document: dict[str, Any],
        num_candidates: int,
        temperatures: np.ndarray,
    ) -> Rounds:
        """The rounds of one document."""
        tokens = document["tokens"]
        anchors = np.arange(document["prompt_length"], len(tokens) - 1, dtype=np.int32)
        padded = np.zeros((-(-len(tokens) // TOKENS) * TOKENS,), np.int32)
        padded[: len(tokens)] = tokens
        slots = np.full((max(-(-len(anchors) // ANCHORS), 1) * ANCHORS,), -1, np.int32)
        slots[: len(anchors)] = anchors
        ahead = slots[:, None] + np.arange(1, temperatures.shape[1] + 1)
        # Past the end no draft matches, which cuts the last round as decoding does.
        known = (slots[:, None] >= 0) & (ahead < len(tokens))
        labels = np.where(known, tokens[np.minimum(ahead, len(tokens) - 1)], -1).astype(np.int32)
        said = self._read(
            params,
            padded,
            slots,
            labels,
            temperatures.astype(np.float32),
            gates,
            block_size=self.width,
            count=num_candidates,
        )
        said = Blocks(*map(np.asarray, said))
        drafts = said.candidate_ids[:, : self.width - 1, 0]
        accepted = np.cumprod(drafts == labels[:, : self.width - 1], axis=1).sum(axis=1)
        rows = walk(accepted[: len(anchors)])
        block = np.concatenate([tokens[slots, None], drafts], axis=1).astype(np.int32)
        return Rounds(
            self.drafter.drafter,
            temperatures,
            np.full(len(rows), number),
            *(leaf[rows] for leaf in (block, labels, accepted, *said)),
        )


class Blocks(NamedTuple):
    """What a drafter says of A blocks; P = W − 1 + shift offsets predicted, M candidates.

    Attributes:
      candidate_ids: [A, P, M] int32, likeliest first.
      log_probs: [A, P, M] float32, uncalibrated.
      label_log_probs: [A, P] float32 of the labels; −inf where the vocabulary lacks one.
      log_normalisers: [A, P, G] float32, log Σ_v q(v)^(1/T).
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
    """One packed pass over a document with a block at every anchor.

    Args:
      tokens: [S], padded at the end with anything.
      anchors: [A] key indices, −1 where unused; A is a multiple of `ANCHORS`.
      labels: [A, P] what the target says at the offsets predicted, −1 where that is unknown.
      temperatures: [G, P].
      gates: [L] of `decoder.forward`, or None.
      block_size: W.
      count: M.
    """
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    layout = layouts.packed_documents(
        positions,
        jnp.zeros_like(positions),
        anchors[None],
        block_size=block_size,
        in_block=drafter.drafter.in_block,
    )
    rows = jnp.concatenate([tokens, tokens[jnp.maximum(anchors, 0)]])[None]
    hidden, _ = decoder.forward(drafter.model, params, rows, layout, gates=gates)
    blocks = hidden[0, tokens.shape[0] :].reshape(-1, ANCHORS, block_size, hidden.shape[-1])
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
    said = jax.lax.map(read, (blocks, labels.reshape(-1, ANCHORS, labels.shape[-1])))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), said)
