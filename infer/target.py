"""The target of decoding: it reads prompts and verifies blocks, greedily or by sampling.

What passes to the drafter and to the host is the small int32 report of `d3d_jax.acceptance`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax import acceptance, layout
from d3d_jax.config import ModelConfig
from d3d_jax.infer.role import Chunk, Role
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder, sharding
from d3d_jax.models.cache import KVCache
from d3d_jax.sampling import MAX_STOP_IDS, Sampling, SamplingParams, choose


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["limit", "stop_ids", "sampling"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Settings:
    """What the requests in a batch's slots ask for.

    Attributes:
      limit: [B] int32, tokens each may emit.
      stop_ids: [B, any] int32, −1 where there is none.
      sampling: of each row; what its rule needs is compiled.
    """

    limit: Any
    stop_ids: Any
    sampling: Sampling


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
      anchor: [B] int32, the last token emitted, not yet in the cache; of no meaning where inactive.
      active: [B] bool; False once a row met a stop token or its limit, and while its prompt is
        being read. Its length is then frozen.
      remaining: [B] int32, tokens each row may still emit.
    """

    cache: KVCache
    anchor: jax.Array
    active: jax.Array
    remaining: jax.Array


class Target(Role):
    """The model whose text is being generated.

    Args:
      stop_ids: tokens that end any reply.
    """

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
        self._prefill = self._step(self._prefill_step, donate_argnums=1)
        self._verify = self._step(self._verify_step, donate_argnums=1)
        self._score = self._step(self._score_step)
        self._stop = self._jit(lambda active, rows: active & ~rows)

    def settings(self, params: Sequence[SamplingParams], limits: Sequence[int]) -> Settings:
        """What the requests in the slots ask for, a row each, on this role's mesh.

        Args:
          limits: tokens each may emit.
        """
        # As many columns as there can be, so that no request needs another program.
        most = len(self.stop_tokens) + MAX_STOP_IDS
        stop_ids = np.full((len(params), most), -1, np.int32)
        for row, one in zip(stop_ids, params, strict=True):
            own = sorted(self.stop_tokens | set(one.stop_token_ids))
            row[: len(own)] = own
        return self.put(Settings(np.array(limits, np.int32), stop_ids, Sampling.of(params)))

    def start(self, batch: int, capacity: int) -> TargetState:
        """A batch of empty slots."""
        none = np.zeros((batch,), np.int32)
        small = self.put((none, none.astype(bool), none))
        return TargetState(self.empty_cache(batch, capacity), *small)

    def prefill(
        self, state: TargetState, settings: Settings, chunk: Chunk
    ) -> tuple[jax.Array, TargetState]:
        """Reads a chunk of prompts, and says the first token of those that end in it.

        The state is consumed.

        Returns:
          The report [B, 4] of the first tokens, which emits nothing for other slots, and the state.
        """
        return self._prefill(self.weights, state, settings, chunk)

    def verify(
        self, state: TargetState, settings: Settings, handover: jax.Array
    ) -> tuple[jax.Array, TargetState]:
        """One round: the block is the state's anchor and the drafts of a handover [B, W].

        With no drafts (W = 1) this is a step of plain decoding. The state is consumed.

        Returns:
          The report [B, W + 3] and the new state.
        """
        return self._verify(self.weights, state, settings, handover)

    def stop(self, state: TargetState, rows: np.ndarray) -> TargetState:
        """The state with some rows [B] bool ended."""
        return dataclasses.replace(state, active=self._stop(state.active, self.put(rows)))

    def logits_after(self, token_ids: Sequence[int]) -> np.ndarray:
        """Scores [V] float32 of the token after a whole sequence, read without a cache."""
        # One program for many lengths: what is behind a token changes nothing for it.
        tokens = np.zeros((1, caches.bucketed(len(token_ids))), np.int32)
        tokens[0, : len(token_ids)] = token_ids
        return np.asarray(self._score(self.weights, *self.put((tokens, len(token_ids) - 1))))

    def _score_step(self, params, tokens: jax.Array, last: jax.Array):
        rows = layout.causal(jnp.zeros((1,), jnp.int32), tokens.shape[1])
        hidden, _ = decoder.forward(self.config, params, tokens, rows)
        return sharding.replicate(decoder.logits(params, hidden[:, last])[0])

    def _prefill_step(self, params, state: TargetState, settings: Settings, chunk: Chunk):
        hidden, cache = self._read_chunk(params, state.cache, chunk)
        place = chunk.place
        end = jnp.maximum(place.count - 1, 0)[:, None, None]
        scores = decoder.logits(params, jnp.take_along_axis(hidden, end, axis=1))
        batch = state.active.shape[0]
        slots = place.rows(batch)
        own = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), settings)
        position = (place.start + place.count)[:, None]
        choices = choose(scores, own.sampling, position)
        none = jnp.zeros_like(place.count)
        report, active, remaining = acceptance.emit(
            none, choices, none, place.last, own.limit, own.stop_ids
        )
        report, active, remaining = sharding.replicate((report, active, remaining))

        def placed(rows: jax.Array, values: jax.Array) -> jax.Array:
            return rows.at[slots].set(values, mode="drop")

        silent = jnp.zeros((batch, report.shape[1]), report.dtype)
        state = TargetState(
            cache,
            placed(state.anchor, acceptance.last_token(report)),
            placed(state.active, active),
            placed(state.remaining, remaining),
        )
        return placed(silent, report), state

    def _verify_step(self, params, state: TargetState, settings: Settings, handover):
        drafts = handover[:, 1:]
        block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
        length = state.cache.length
        rows = layout.causal(length, block.shape[1])
        hidden, cache = decoder.forward(self.config, params, block, rows, state.cache)
        # A row's choice is the token at the position after its own.
        scores = decoder.logits(params, hidden)
        choices = choose(scores, settings.sampling, rows.positions + 1)
        accepted = acceptance.accepted_length(drafts, choices)
        report, active, remaining = acceptance.emit(
            accepted, choices, handover[:, 0], state.active, state.remaining, settings.stop_ids
        )
        length = length + report[:, acceptance.COUNT]
        report, length, active, remaining = sharding.replicate((report, length, active, remaining))
        anchor = acceptance.last_token(report)
        return report, TargetState(cache.at(length), anchor, active, remaining)
