"""The drafter of decoding: it drafts one block, or prepares blocks for many outcomes at once.

What a block is drafted from is `d3d_jax.drafter`; which outcomes are prepared, `d3d_jax.branches`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax import acceptance, layout
from d3d_jax.branches import Branches, Policy
from d3d_jax.config import Miss
from d3d_jax.drafter import Drafter, candidates, predictions
from d3d_jax.infer.role import Chunk, Place, Role
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder, sharding
from d3d_jax.models.cache import KVCache


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "candidate_ids", "candidate_log_probs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Block:
    """A drafted block of each row, and what else the drafter thought likely.

    Attributes:
      tokens: [B, W], anchor and drafts.
      candidate_ids: [B, W − 1 + shift, M] likeliest tokens at offsets 1, 2, …
      candidate_log_probs: their log-probabilities, float32.
    """

    tokens: jax.Array
    candidate_ids: jax.Array
    candidate_log_probs: jax.Array

    def where(self, rows: jax.Array, other: Block) -> Block:
        """This block in some rows [B] and another in the rest."""
        return jax.tree.map(
            lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y), self, other
        )

    def at(self, rows: jax.Array, own: Block) -> Block:
        """The block with that of [P] rows replaced; rows that do not exist are dropped."""
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), self, own)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "block"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DraftState:
    """The drafter's side of a batch.

    Attributes:
      cache: keys and values of everything before the block's anchor.
      block: last handed to the target.
    """

    cache: KVCache
    block: Block


class DrafterRole(Role):
    """A drafter on its mesh.

    Every drafting step returns a *handover* [B, W]: whether the row's block was prepared ahead
    (1 a hit, 0 a miss or a synchronous draft), then the W − 1 drafts.

    Args:
      policy: which outcomes are prepared, and the block size W.
    """

    def __init__(
        self,
        drafter: Drafter,
        params: decoder.Params,
        mesh: Mesh,
        policy: Policy,
        dtype: Any = jnp.float32,
    ):
        super().__init__(drafter.model, params, mesh, dtype)
        self.drafter, self.policy, self.width = drafter.drafter, policy, policy.block_size
        self._prefill = self._step(self._prefill_step, donate_argnums=1)
        self._first = self._step(self._first_step)
        self._draft = self._step(self._draft_step, donate_argnums=1)
        self._prepare = self._step(self._prepare_step, donate_argnums=1)
        self._resolve = self._step(self._resolve_step, static_argnames="miss")

    def start(self, batch: int, capacity: int) -> tuple[jax.Array, DraftState]:
        """A handover and a batch of empty slots."""
        slots = self.width - 1 + self.drafter.label_shift
        size = (batch, slots, self.policy.num_candidates)
        tokens = np.zeros((batch, self.width), np.int32)
        block = Block(tokens, np.zeros(size, np.int32), np.zeros(size, np.float32))  # type: ignore[arg-type]
        handover, block = self.put((tokens, block))
        return handover, DraftState(self.empty_cache(batch, capacity), block)

    def prefill(self, state: DraftState, chunk: Chunk) -> DraftState:
        """Reads a chunk of prompts. The state's cache is consumed."""
        return dataclasses.replace(state, cache=self._prefill(self.weights, state.cache, chunk))

    def first_draft(
        self, state: DraftState, handover: jax.Array, place: Place, report: jax.Array
    ) -> tuple[jax.Array, DraftState]:
        """Drafts the first block of the slots whose prompts ended in a chunk.

        Args:
          place: of the chunk.
          report: [B, 4] of the target's prefill, which names their anchors.
        """
        handover, block = self._first(
            self.weights, state.cache, state.block, handover, place, report
        )
        return handover, dataclasses.replace(state, block=block)

    def draft(self, state: DraftState, report: jax.Array) -> tuple[jax.Array, DraftState]:
        """Synchronous drafting: encodes the block just verified and drafts the next in one pass.

        The state is consumed.
        """
        return self._draft(self.weights, state, report)

    def prepare(self, state: DraftState) -> tuple[DraftState, jax.Array, Branches]:
        """The packed pass, dispatched while the target verifies: branches for likely outcomes.

        Returns:
          The state with the block's own keys and values in its cache (its length not advanced),
          the hidden states of all branches [B, N, W, D], and what they are for.
        """
        cache, hidden, *arrays = self._prepare(self.weights, state.cache, state.block)
        return dataclasses.replace(state, cache=cache), hidden, Branches(*arrays)

    def resolve(
        self,
        state: DraftState,
        hidden: jax.Array,
        prepared: Branches,
        report: jax.Array,
        miss: Miss = "stall",
    ) -> tuple[jax.Array, DraftState]:
        """Picks each row's branch for the outcome reported.

        A row without one drafts synchronously (`stall`) or takes the nearest branch's drafts after
        its own anchor (`reuse`). No K/V leaves this step: the cache advances by its length alone.
        """
        arrays = (prepared.anchors, prepared.offsets, prepared.outcome)
        handover, block, length = self._resolve(
            self.weights, state.cache, hidden, arrays, report, miss=miss
        )
        return handover, DraftState(state.cache.at(length), block)

    def _prefill_step(self, params, cache, chunk: Chunk):
        return self._read_chunk(params, cache, chunk)[1]

    def _read(self, params, hidden, anchor) -> Block:
        """What hidden states [B, W, D] of a block say."""
        temperatures = self.drafter.temperatures(self.width)
        found = candidates(params, hidden, self.policy.num_candidates, temperatures)
        ids, log_probs = (predictions(self.drafter, x) for x in found)
        return sharding.replicate(self._block(anchor, ids, log_probs))

    def _block(self, anchor, ids, log_probs) -> Block:
        tokens = jnp.concatenate([anchor[:, None], ids[:, : self.width - 1, 0]], axis=1)
        return Block(tokens, ids, log_probs)

    def _one_block(self, params, cache, anchor) -> Block:
        """A block after everything cached; nothing is written to the cache."""
        rows = layout.branches(
            cache.length,
            jnp.zeros((anchor.shape[0], 1), jnp.int32),
            spine_len=0,
            block_size=self.width,
            in_block=self.drafter.in_block,
        )
        hidden, _ = decoder.forward(self.config, params, anchor[:, None], rows, cache)
        return self._read(params, hidden, anchor)

    def _first_step(self, params, cache, block: Block, handover, place: Place, report):
        batch = handover.shape[0]
        slots = place.rows(batch)
        own = caches.take(cache, place.slot).at(place.start + place.count)
        anchor = acceptance.last_token(report).at[slots].get(mode="clip")
        fresh = self._one_block(params, own, anchor)
        # Slots whose prompts go on keep what they have: their first block comes later.
        ended = jnp.where(place.last, slots, batch)
        first = _handover(jnp.zeros(place.count.shape, bool), fresh)
        handover = handover.at[ended].set(first, mode="drop")
        return sharding.replicate((handover, block.at(ended, fresh)))

    def _draft_step(self, params, state: DraftState, report):
        count, anchor = report[:, acceptance.COUNT], acceptance.last_token(report)
        cache = state.cache
        rows = layout.branches(
            cache.length,
            count[:, None],
            spine_len=self.width,
            block_size=self.width,
            in_block=self.drafter.in_block,
        )
        tokens = jnp.concatenate([state.block.tokens, anchor[:, None]], axis=1)
        hidden, cache = decoder.forward(self.config, params, tokens, rows, cache)
        block = self._read(params, hidden[:, self.width :], anchor)
        length = sharding.replicate(cache.length + count)
        handover = _handover(jnp.zeros(count.shape, bool), block)
        return handover, DraftState(cache.at(length), block)

    def _prepare_step(self, params, cache, block: Block):
        prepared = self.policy.choose(
            self.drafter, block.tokens, block.candidate_ids, block.candidate_log_probs
        )
        rows = layout.branches(
            cache.length,
            prepared.offsets,
            spine_len=self.width,
            block_size=self.width,
            in_block=self.drafter.in_block,
        )
        tokens = jnp.concatenate([block.tokens, prepared.anchors], axis=1)
        hidden, cache = decoder.forward(self.config, params, tokens, rows, cache)
        hidden = hidden[:, self.width :].reshape(*prepared.anchors.shape, self.width, -1)
        arrays = (prepared.anchors, prepared.offsets, prepared.outcome)
        return cache, hidden, *sharding.replicate(arrays)

    def _resolve_step(self, params, cache, hidden, arrays, report, *, miss: Miss):
        count, anchor = report[:, acceptance.COUNT], acceptance.last_token(report)
        prepared = Branches(*arrays)
        at, hit = prepared.find(count, anchor)
        if miss == "reuse":
            at = prepared.nearest(count, anchor)
        chosen = jnp.take_along_axis(hidden, at[:, None, None, None], axis=1)[:, 0]
        block = self._read(params, chosen, anchor)
        if self.drafter.label_shift == 0:
            # The full-acceptance branch is anchored one token early: its first draft must be the
            # bonus, and the rest move up by one, which leaves the next block a draft short.
            early = jnp.take_along_axis(prepared.early, at[:, None], axis=1)[:, 0]
            hit = hit & (~early | (block.candidate_ids[:, 0, 0] == anchor))
            ids, log_probs = (
                jnp.roll(x, -1, axis=1) for x in (block.candidate_ids, block.candidate_log_probs)
            )
            block = self._block(anchor, ids, log_probs).where(early, block)
        length = cache.length + count
        if miss == "stall":
            missed = ~hit & (report[:, acceptance.ACTIVE] > 0)
            # One shared pass serves every row that missed; when none did, it is skipped.
            block = jax.lax.cond(
                jnp.any(missed),
                lambda: self._one_block(params, cache.at(length), anchor).where(missed, block),
                lambda: block,
            )
        block, length = sharding.replicate((block, length))
        return _handover(hit, block), block, length


def _handover(hit: jax.Array, block: Block) -> jax.Array:
    handover = jnp.concatenate([hit[:, None].astype(jnp.int32), block.tokens[:, 1:]], axis=1)
    return sharding.replicate(handover)
