"""The two roles of decoding, each with its own mesh, parameters, cache and jitted steps.

A role's methods only dispatch: none waits for a device. What passes between the roles is small
int32 arrays moved by `jax.device_put`; the loop that calls the steps in order is `infer.decoding`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax import acceptance, layout
from d3d_jax.branches import Branches, Rectangle
from d3d_jax.config import ModelConfig
from d3d_jax.drafter import Drafter, candidates, predictions
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.models.cache import KVCache

# Prompts are padded to one of a few lengths, so that few prefill shapes are compiled: multiples of
# this, and above eight of them the four steps between powers of two (a quarter wasted at most).
PROMPT_ROWS = 64


def prompt_bucket(length: int) -> int:
    """The padded length of a prompt."""
    step = max(PROMPT_ROWS, 1 << max(length - 1, 0).bit_length() >> 3)
    return max(-(-length // step), 1) * step


def prompt_buckets(longest: int) -> list[int]:
    """Every padded length of prompts up to `longest` tokens."""
    buckets = [prompt_bucket(1)]
    while buckets[-1] < longest:
        buckets.append(prompt_bucket(buckets[-1] + 1))
    return buckets


def pad_prompts(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, P] padded at the end, and lengths [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), prompt_bucket(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "anchor", "active", "remaining"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TargetState:
    """The target's side of a batch.

    Attributes:
      cache: keys and values of everything before the anchor.
      anchor: [B] int32, the last token emitted: not yet in the cache.
      active: [B] bool; False once a row met a stop token or its limit. Its length is then frozen.
      remaining: [B] int32, tokens each row may still emit.
    """

    cache: KVCache
    anchor: jax.Array
    active: jax.Array
    remaining: jax.Array


class _Role:
    """Parameters on a mesh, and where small arrays of this role go: to all of its devices.

    Args:
      mesh: of `sharding.make_mesh`, of any devices; batch rows are split over its data axis.
    """

    def __init__(self, config: ModelConfig, params: decoder.Params, mesh: Mesh, dtype: Any):
        self.config = config
        self.mesh = sharding.model_mesh(mesh, config)
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        self.params = jax.device_put(params, parameters.shardings(params, self.mesh))
        self.dtype = dtype
        self._grow = self._jit(caches.grow, static_argnums=1)

    def _jit(self, step: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(sharding.on_mesh(self.mesh, step), **options)

    def put(self, x: Any) -> Any:
        """Moves an array to this role's mesh without waiting for it."""
        return jax.device_put(x, self.sharding)

    def grown(self, cache: KVCache, capacity: int) -> KVCache:
        """The cache with at least `capacity` tokens a row; one copy a bucket."""
        return cache if cache.capacity >= capacity else self._grow(cache, caches.bucketed(capacity))

    def _prefill_cache(self, batch: int, capacity: int) -> KVCache:
        return caches.empty(
            self.config, len(self.params["layers"]), batch, caches.bucketed(capacity), self.dtype
        )


class Target(_Role):
    """The model whose text is being generated: it prefills and verifies, greedily."""

    def __init__(
        self,
        config: ModelConfig,
        params: decoder.Params,
        mesh: Mesh,
        stop_ids: tuple[int, ...],
        dtype: Any = jnp.float32,
    ):
        super().__init__(config, params, mesh, dtype)
        self.stop_tokens = frozenset(stop_ids)
        self.stop_ids = self.put(np.array(stop_ids or (-1,), np.int32))
        self._prefill = self._jit(self._prefill_step, static_argnames="capacity")
        self._verify = self._jit(self._verify_step, donate_argnums=1)

    def prefill(
        self, tokens: np.ndarray, lengths: np.ndarray, limits: np.ndarray, capacity: int
    ) -> tuple[jax.Array, TargetState]:
        """Reads the prompts and says the first token of each.

        Args:
          tokens, lengths: of `pad_prompts`.
          limits: [B] int32, tokens each row may emit.

        Returns:
          The report [B, 3] of the first tokens and the state.
        """
        rows = self.put((tokens, lengths, limits))
        capacity = caches.bucketed(max(capacity, tokens.shape[1]))
        return self._prefill(self.params, self.stop_ids, *rows, capacity=capacity)

    def verify(self, state: TargetState, handover: jax.Array) -> tuple[jax.Array, TargetState]:
        """One round: the block is the state's anchor and the drafts of a handover [B, W].

        With no drafts (W = 1) this is a step of plain decoding. The state is consumed.

        Returns:
          The report [B, W + 2] and the new state.
        """
        return self._verify(self.params, state, self.stop_ids, handover)

    def _prefill_step(self, params, stop_ids, tokens, lengths, limits, *, capacity):
        batch, rows = tokens.shape
        cache = self._prefill_cache(batch, capacity)
        hidden, cache = decoder.forward(
            self.config, params, tokens, layout.causal(cache.length, rows), cache
        )
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        choices = decoder.likeliest(decoder.logits(params, last))
        report, active, remaining = acceptance.emit(
            jnp.zeros_like(lengths), choices, jnp.ones_like(lengths, bool), limits, stop_ids
        )
        return self._outcome(cache, lengths, report, active, remaining)

    def _verify_step(self, params, state: TargetState, stop_ids, handover):
        drafts = handover[:, 1:]
        block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
        length = state.cache.length
        rows = layout.causal(length, block.shape[1])
        hidden, cache = decoder.forward(self.config, params, block, rows, state.cache)
        choices = decoder.likeliest(decoder.logits(params, hidden))
        accepted = acceptance.accepted_length(drafts, choices)
        report, active, remaining = acceptance.emit(
            accepted, choices, state.active, state.remaining, stop_ids
        )
        length = length + report[:, acceptance.COUNT]
        return self._outcome(cache, length, report, active, remaining)

    def _outcome(self, cache, length, report, active, remaining):
        report, length, active, remaining = sharding.replicate((report, length, active, remaining))
        anchor = acceptance.last_token(report)
        return report, TargetState(cache.at(length), anchor, active, remaining)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "block", "candidate_ids"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DraftState:
    """The drafter's side of a batch.

    Attributes:
      cache: keys and values of everything before the block's anchor.
      block: [B, W] the block last handed to the target: anchor and drafts.
      candidate_ids: [B, W − 1 + shift, M] likeliest tokens at offsets 1, 2, … of that block.
    """

    cache: KVCache
    block: jax.Array
    candidate_ids: jax.Array


class DrafterRole(_Role):
    """The drafter: prefills, drafts one block, or prepares blocks for many outcomes at once.

    Every drafting step returns a *handover* [B, W]: whether the row's block was prepared ahead
    (1 a hit, 0 a miss or a synchronous draft), then the W − 1 drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        params: decoder.Params,
        mesh: Mesh,
        policy: Rectangle,
        dtype: Any = jnp.float32,
    ):
        super().__init__(drafter.model, params, mesh, dtype)
        self.drafter, self.policy, self.width = drafter.drafter, policy, policy.block_size
        self._prefill = self._jit(self._prefill_step, static_argnames="capacity")
        self._first = self._jit(self._first_step)
        self._draft = self._jit(self._draft_step, donate_argnums=1)
        self._prepare = self._jit(self._prepare_step, donate_argnums=1)
        self._resolve = self._jit(self._resolve_step)

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray, capacity: int) -> KVCache:
        """Reads the prompts (`pad_prompts`)."""
        rows = self.put((tokens, lengths))
        capacity = caches.bucketed(max(capacity, tokens.shape[1]))
        return self._prefill(self.params, *rows, capacity=capacity)

    def first_draft(self, cache: KVCache, report: jax.Array) -> tuple[jax.Array, DraftState]:
        """The first block, anchored at the token that the target's prefill reported [B, 3]."""
        handover, block, ids = self._first(self.params, cache, report)
        return handover, DraftState(cache, block, ids)

    def draft(self, state: DraftState, report: jax.Array) -> tuple[jax.Array, DraftState]:
        """Synchronous drafting: encodes the block just verified and drafts the next in one pass."""
        return self._draft(self.params, state, report)

    def prepare(self, state: DraftState) -> tuple[DraftState, jax.Array, Branches]:
        """The packed pass, dispatched while the target verifies: branches for likely outcomes.

        Returns:
          The state with the block's own keys and values in its cache (its length not advanced),
          the hidden states of all branches [B, N, W, D], and what they are for.
        """
        cache, hidden, *arrays = self._prepare(
            self.params, state.cache, state.block, state.candidate_ids
        )
        return dataclasses.replace(state, cache=cache), hidden, Branches(*arrays)

    def resolve(
        self, state: DraftState, hidden: jax.Array, prepared: Branches, report: jax.Array
    ) -> tuple[jax.Array, DraftState]:
        """Picks each row's branch for the outcome reported; rows without one draft synchronously.

        No K/V leaves this step: the cache advances by its length alone.
        """
        arrays = (prepared.anchors, prepared.offsets, prepared.outcome)
        handover, block, ids, length = self._resolve(
            self.params, state.cache, hidden, arrays, report
        )
        return handover, DraftState(state.cache.at(length), block, ids)

    def _prefill_step(self, params, tokens, lengths, *, capacity):
        batch, rows = tokens.shape
        cache = self._prefill_cache(batch, capacity)
        _, cache = decoder.forward(
            self.config, params, tokens, layout.causal(cache.length, rows), cache
        )
        return cache.at(sharding.replicate(lengths))

    def _read(self, params, hidden, anchor):
        """hidden [B, W, D] → block [B, W], candidate ids [B, W − 1 + shift, M]."""
        ids = candidates(params, hidden, self.policy.num_candidates)[0]
        ids = predictions(self.drafter, ids)
        block = jnp.concatenate([anchor[:, None], ids[:, : self.width - 1, 0]], axis=1)
        return sharding.replicate((block, ids))

    def _one_block(self, params, cache, anchor):
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

    def _first_step(self, params, cache, report):
        block, ids = self._one_block(params, cache, acceptance.last_token(report))
        return _handover(jnp.zeros(block.shape[:1], bool), block), block, ids

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
        tokens = jnp.concatenate([state.block, anchor[:, None]], axis=1)
        hidden, cache = decoder.forward(self.config, params, tokens, rows, cache)
        block, ids = self._read(params, hidden[:, self.width :], anchor)
        length = sharding.replicate(cache.length + count)
        state = DraftState(cache.at(length), block, ids)
        return _handover(jnp.zeros(block.shape[:1], bool), block), state

    def _prepare_step(self, params, cache, block, candidate_ids):
        prepared = self.policy.choose(self.drafter, block, candidate_ids)
        rows = layout.branches(
            cache.length,
            prepared.offsets,
            spine_len=self.width,
            block_size=self.width,
            in_block=self.drafter.in_block,
        )
        tokens = jnp.concatenate([block, prepared.anchors], axis=1)
        hidden, cache = decoder.forward(self.config, params, tokens, rows, cache)
        hidden = hidden[:, self.width :].reshape(*prepared.anchors.shape, self.width, -1)
        arrays = (prepared.anchors, prepared.offsets, prepared.outcome)
        return cache, hidden, *sharding.replicate(arrays)

    def _resolve_step(self, params, cache, hidden, arrays, report):
        count, anchor = report[:, acceptance.COUNT], acceptance.last_token(report)
        prepared = Branches(*arrays)
        at, hit = prepared.find(count, anchor)
        chosen = jnp.take_along_axis(hidden, at[:, None, None, None], axis=1)[:, 0]
        block, ids = self._read(params, chosen, anchor)
        if self.drafter.label_shift == 0:
            # The full-acceptance branch is anchored one token early: its first draft must be the
            # bonus, and the rest move up by one, which leaves the next block a draft short.
            early = jnp.take_along_axis(prepared.early, at[:, None], axis=1)[:, 0]
            hit = hit & (~early | (ids[:, 0, 0] == anchor))
            ids = jnp.where(early[:, None, None], jnp.roll(ids, -1, axis=1), ids)
            block = jnp.concatenate([anchor[:, None], ids[:, : self.width - 1, 0]], axis=1)
        length = cache.length + count
        missed = ~hit & (report[:, acceptance.ACTIVE] > 0)

        def draft(_):
            fresh = self._one_block(params, cache.at(length), anchor)
            return jax.tree.map(
                lambda new, old: jnp.where(missed.reshape(-1, *[1] * (new.ndim - 1)), new, old),
                fresh,
                (block, ids),
            )

        # One shared pass serves every row that missed; when none did, it is skipped.
        block, ids = jax.lax.cond(jnp.any(missed), draft, lambda _: (block, ids), None)
        block, ids, length = sharding.replicate((block, ids, length))
        return _handover(hit, block), block, ids, length


def _handover(hit: jax.Array, block: jax.Array) -> jax.Array:
    handover = jnp.concatenate([hit[:, None].astype(jnp.int32), block[:, 1:]], axis=1)
    return sharding.replicate(handover)
