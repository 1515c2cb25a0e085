"""Offline acceptance: the τ that greedy decoding would have, measured without running the target.

Greedy responses are what the target would say, so one packed pass over a response, with a block
anchored at every response token, tells how many drafts would be accepted from every position;
walking those jumps gives the exact τ of synchronous greedy decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax import layout as layouts
from d3d_jax.drafter import Drafter, Params, candidates, predictions
from d3d_jax.errors import D3DError
from d3d_jax.models import decoder
from d3d_jax.train.dataset import ResponseDataset

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
            "tau_per_response": round(self.tau_per_response, 4),
            "reached": self.reached(),
        }


def walk(prompt_length: int, total_length: int, accepted: np.ndarray) -> np.ndarray:
    """Jumps through one response as greedy decoding would.

    Args:
      accepted: [total_length] drafts accepted by a block anchored at each position.

    Returns:
      [rounds, 2] int32, the anchor's position and the drafts accepted in each round.
    """
    position, rounds = prompt_length, []
    while position < total_length - 1:
        rounds.append((position, int(accepted[position])))
        position += rounds[-1][1] + 1
    return np.array(rounds, np.int32).reshape(-1, 2)


class OfflineAcceptance:
    """Measures a drafter's acceptance on documents of a dataset.

    Args:
      documents: how many, evenly spread; 0 for all.
      block_size: W to draft with; None for the drafter's own.
    """

    def __init__(
        self,
        drafter: Drafter,
        dataset: ResponseDataset,
        documents: int = 0,
        block_size: int | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise D3DError("the validation split is empty; build it with validation prompts")
        if not dataset.manifest.sampling.get("greedy"):
            raise D3DError("offline acceptance needs greedy responses; this dataset was sampled")
        width = block_size or drafter.drafter.block_size
        if width > drafter.drafter.block_size:
            raise D3DError(
                f"block size {width} is above the {drafter.drafter.block_size} the drafter was "
                "trained for"
            )
        count = min(documents or len(dataset), len(dataset))
        self.indices = np.linspace(0, len(dataset) - 1, count).round().astype(int)
        self.drafter, self.dataset, self.width = drafter, dataset, width
        self._accepted = jax.jit(functools.partial(accepted_drafts, drafter, width))

    def measure(self, params: Params) -> Acceptance:
        """Walks every chosen document. `params` are stacked or per-layer device arrays."""
        tokens, accepted, room = [], [], []
        for index in self.indices:
            document = self.dataset[int(index)]
            prompt, total = document["prompt_length"], len(document["tokens"])
            counts = np.zeros((total,), np.int32)
            anchors = np.arange(prompt, total - 1, dtype=np.int32)
            if len(anchors):
                padded = np.zeros((1, -(-total // TOKENS) * TOKENS), np.int32)
                padded[0, :total] = document["tokens"]
                slots = np.full((1, -(-len(anchors) // ANCHORS) * ANCHORS), -1, np.int32)
                slots[0, : len(anchors)] = anchors
                found = np.asarray(self._accepted(params, padded, slots))
                counts[anchors] = found[0, : len(anchors)]
            rounds = walk(prompt, total, counts)
            tokens.append(len(anchors))
            room.append(np.minimum(total - 1 - rounds[:, 0], self.width - 1))
            accepted.append(np.minimum(rounds[:, 1], room[-1]))
        rounds = np.array([len(jumps) for jumps in accepted])
        return Acceptance(np.array(tokens), rounds, accepted, room, self.width)


def accepted_drafts(
    drafter: Drafter, width: int, params: Params, tokens: jax.Array, anchors: jax.Array
) -> jax.Array:
    """Drafts that the target would accept from blocks anchored at `anchors`.

    Args:
      tokens: [B, S] one document a row, padded at the end with anything.
      anchors: [B, A] key indices, −1 where unused.

    Returns:
      [B, A] int32 in 0 … W − 1. Past the document's end the count is meaningless; the walk's
      clipping makes it irrelevant.
    """
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    layout = layouts.packed_documents(
        positions,
        jnp.zeros_like(positions),
        anchors,
        block_size=width,
        in_block=drafter.drafter.in_block,
    )
    at = jnp.maximum(anchors, 0)
    rows = jnp.concatenate([tokens, jnp.take_along_axis(tokens, at, axis=1)], axis=1)
    hidden, _ = decoder.forward(drafter.model, params, rows, layout)
    # A group of anchors at a time: the logits of all of them would be the largest array by far.
    groups = -(-anchors.shape[1] // ANCHORS)
    blocks = hidden[:, size:].reshape(groups, -1, width, hidden.shape[-1])
    drafts = jax.lax.map(lambda part: candidates(params, part, 1)[0][..., 0], blocks)
    drafts = predictions(drafter.drafter, drafts.reshape(-1, width))[:, : width - 1]
    drafts = drafts.reshape(batch, anchors.shape[1], width - 1)
    ahead = jnp.minimum(at[..., None] + jnp.arange(1, width), size - 1)
    truth = jnp.take_along_axis(tokens, ahead.reshape(batch, -1), axis=1).reshape(ahead.shape)
    return jnp.sum(jnp.cumprod((drafts == truth).astype(jnp.int32), axis=-1), axis=-1)
