"""The KV cache: a pytree updated in place, rolled back by setting its length.

Keys and values are head-major, [B, K, S, H] per layer: on CPU attention over them is twice as fast
as over [B, S, K, H], and it is the order the kernels read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from d3d_jax.config import ModelConfig
from d3d_jax.models.sharding import ACTIVATION_RULES, locally, named

LayerKV = tuple[jax.Array, jax.Array]
# The smallest capacity. Larger ones double, so that a step compiles a handful of times and not once
# per length, and attention never reads more than twice the filled length.
BUCKET = 256


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "length"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens decoded so far.

    Attributes:
      layers: L pairs of keys and values, each [B, K, S, H].
      length: [B] int32, tokens of each row that count; rows past it are stale and masked by `hi`.
    """

    layers: tuple[LayerKV, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """S, the tokens a row can hold."""
        return self.layers[0][0].shape[2]

    def at(self, length: jax.Array) -> KVCache:
        """The same buffers with another length: how a cache advances and rolls back."""
        return dataclasses.replace(self, length=length)


def bucketed(length: int) -> int:
    """The capacity of the smallest bucket that holds `length` tokens."""
    capacity = BUCKET
    while capacity < length:
        capacity *= 2
    return capacity


def empty(
    config: ModelConfig,
    num_layers: int,
    batch: int,
    capacity: int,
    dtype: Any,
    mesh: Mesh | None = None,
) -> KVCache:
    """A cache of zeros for `batch` rows of `capacity` tokens, on a mesh or the default device."""

    def zeros(axes: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        where = None if mesh is None else named(axes, shape, mesh, ACTIVATION_RULES)
        return jnp.zeros(shape, dtype, device=where)

    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    layers = tuple(
        (zeros("bk..", shape, dtype), zeros("bk..", shape, dtype)) for _ in range(num_layers)
    )
    return KVCache(layers, zeros(".", (batch,), jnp.int32))


def write(kv: LayerKV, k: jax.Array, v: jax.Array, length: jax.Array) -> LayerKV:
    """Writes k and v [B, C, K, H] after each row's `length`; what passes the capacity is dropped.

    A scatter, because dynamic_update_slice clamps its start: it would overwrite good keys.
    """
    batch, rows = k.shape[:2]
    keys, values = kv
    if batch * rows == 1:
        # XLA turns a scatter of one row into an update slice, and XLA:CPU repeats that inside every
        # reader's fusion, out of place: three copies of the cache a layer. The second row given
        # here is dropped.
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        at = jnp.stack([length, jnp.full_like(length, keys.shape[2])], axis=1)
    else:
        at = length[:, None] + jnp.arange(rows, dtype=jnp.int32)
    row = jnp.arange(batch)[:, None]
    return keys.at[row, :, at].set(k, mode="drop"), values.at[row, :, at].set(v, mode="drop")


def take(cache: KVCache, slot: jax.Array) -> KVCache:
    """One row of each of the batch's P parts, which are split over devices.

    Args:
      slot: [P] int32, the row within the part.

    Returns:
      A cache of P rows, of length 0: a copy, or the cache itself where a part is one row.
    """
    if slot.shape == cache.length.shape:
        return cache.at(jnp.zeros_like(slot))

    def one(rows: jax.Array, slot: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows, slot[0], 1)

    local = locally(one, ("bk..", "b"), ("bk..",))
    layers = tuple((local(k, slot), local(v, slot)) for k, v in cache.layers)
    return KVCache(layers, jnp.zeros_like(slot))


def put(cache: KVCache, slot: jax.Array, own: KVCache) -> KVCache:
    """The cache with the keys and values of `own`, P rows of `take`, back in their places."""
    if slot.shape == cache.length.shape:
        return dataclasses.replace(cache, layers=own.layers)

    def one(rows: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, row, slot[0], axis=0)

    local = locally(one, ("bk..", "bk..", "b"), ("bk..",))
    layers = tuple(
        (local(keys, k, slot), local(values, v, slot))
        for (keys, values), (k, v) in zip(cache.layers, own.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=layers)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """A copy with room for `capacity` tokens a row."""
    extra = capacity - cache.capacity
    pad = ((0, 0), (0, 0), (0, extra), (0, 0))
    layers = tuple((jnp.pad(k, pad), jnp.pad(v, pad)) for k, v in cache.layers)
    return dataclasses.replace(cache, layers=layers)
