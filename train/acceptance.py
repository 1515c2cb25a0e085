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

# Document lengths and anchor counts are rounded up to these, so that few shapes are compiled.
TOKENS, ANCHORS = 128, 64


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What the walk over every document gave.

    Attributes:
      tokens: [documents] tokens emitted by rounds (the first response token is the prefill's).
      rounds: [documents] rounds that emitted them.
      accepted: [documents] of [rounds] drafts accepted in each round, before clipping.
      block_size: W the blocks were drafted with.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    accepted: list[np.ndarray]
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
        """Fraction of rounds in which at least 1, 2, … W − 1 drafts were accepted."""
        counts = np.concatenate(self.accepted)
        return [round(float(np.mean(counts >= i)), 4) for i in range(1, self.block_size)]

    def summary(self) -> dict[str, Any]:
        """The figures for a metrics line."""
        return {
            "tau": round(self.tau, 4),
            "tau_per_response": round(self.tau_per_response, 4),
            "reached": self.reached(),
        }


def walk(prompt_length: int, total_length: int, accepted: np.ndarray) -> tuple[int, np.ndarray]:
    """Jumps through one response as greedy decoding would.

    Args:
      accepted: [total_length] drafts accepted by a block anchored at each position.

    Returns:
      Tokens emitted by rounds and the drafts accepted in each round.
    """
    position, jumps = prompt_length, []
    while position < total_length - 1:
        jumps.append(int(accepted[position]))
        position += jumps[-1] + 1
    return max(total_length - 1 - prompt_length, 0), np.array(jumps, np.int32)


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
            raise D3DError(
                "the validation split is empty; build the dataset with validation prompts"
            )
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
        tokens, accepted = [], []
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
            emitted, jumps = walk(prompt, total, counts)
            tokens.append(emitted)
            accepted.append(jumps)
        rounds = np.array([len(jumps) for jumps in accepted])
        return Acceptance(np.array(tokens), rounds, accepted, self.width)


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
    blocks = hidden[:, size:].reshape(batch * anchors.shape[1], width, -1)
    drafts = predictions(drafter.drafter, candidates(params, blocks, 1)[0][..., 0])
    drafts = drafts[:, : width - 1].reshape(batch, anchors.shape[1], width - 1)
    ahead = jnp.minimum(at[..., None] + jnp.arange(1, width), size - 1)
    truth = jnp.take_along_axis(tokens, ahead.reshape(batch, -1), axis=1).reshape(ahead.shape)
    return jnp.sum(jnp.cumprod((drafts == truth).astype(jnp.int32), axis=-1), axis=-1)
