"""How many (row, key) pairs an implementation computes for those that are visible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.kernels.interval_attention import xla
from d3d_jax.kernels.interval_attention.bench_candidates import dense_mask, splash_block
from d3d_jax.kernels.interval_attention.shapes import BLOCK, Shape, intervals
from d3d_jax.kernels.interval_attention.tiles import tile_bounds


def visible_pairs(shape: Shape) -> int:
    """(row, key) pairs of one query head, blocks included."""
    lo, hi = intervals(shape)
    return int(np.maximum(hi - lo, 0).sum()) + shape.batch * shape.blocks * BLOCK * BLOCK


def computed_pairs(shape: Shape, name: str, dtype: Any) -> int:
    """(row, key) pairs of one query head that an implementation computes, blocks included."""
    in_blocks = shape.batch * shape.blocks * BLOCK * BLOCK
    if name.startswith("dense mask"):
        return shape.batch * shape.rows * (shape.keys + shape.blocks * BLOCK)
    if name == "splash":
        return _splash_pairs(shape)
    if name == "tpu":
        return _tpu_pairs(shape, dtype) + in_blocks
    if name == "gpu":
        return _gpu_pairs(shape) + in_blocks
    if name == "xla" and shape.rows > xla.TILE_ROWS and jax.default_backend() == "cpu":
        return _tile_pairs(*intervals(shape), xla.SKIP_ROWS, xla.SKIP_KEYS, shape.keys) + in_blocks
    return shape.batch * shape.rows * shape.keys + in_blocks


def _tile_pairs(lo: Any, hi: Any, rows: int, keys: int, num_keys: int) -> int:
    """Pairs in the needed tiles of so many rows and keys."""
    return int(tile_bounds(lo, hi, rows, keys, num_keys).count.sum()) * rows * keys


def _splash_pairs(shape: Shape) -> int:
    mask = np.asarray(dense_mask(shape, *intervals(shape)))[0, 0]
    block = splash_block(shape)
    assert block is not None
    seen = mask.reshape(mask.shape[0] // block, block, -1, block).any(axis=(1, 3))
    return int(seen.sum()) * block**2


def _gpu_pairs(shape: Shape) -> int:
    from d3d_jax.kernels.interval_attention import gpu

    tiling = gpu.tiling(shape.rows, shape.heads, shape.kv_heads, shape.head_dim)
    folded = shape.heads // shape.kv_heads if tiling.partial else 1
    lo, hi = (np.repeat(x, folded, axis=1) for x in intervals(shape))
    return _tile_pairs(lo, hi, tiling.rows, tiling.block_keys, shape.keys) // folded


def _tpu_pairs(shape: Shape, dtype: Any) -> int:
    """Pairs in full tiles, and in the chunks that parts need of the other tiles."""
    from d3d_jax.kernels.interval_attention import tpu

    q = jax.ShapeDtypeStruct((shape.batch, shape.rows, shape.heads, shape.head_dim), dtype)
    k = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.keys, shape.head_dim), dtype)
    g = tpu.geometry(q, k)
    folded = shape.heads // shape.kv_heads // g.group
    lo, hi = (np.repeat(x, folded, axis=1) for x in intervals(shape))
    lo, hi = (np.pad(x, ((0, 0), (0, g.rows - x.shape[1]))) for x in (lo, hi))
    tiles, parts = g.bounds(lo, hi), g.part_bounds(lo, hi)
    first, count = (
        jnp.repeat(x * g.chunks, g.parts, axis=1) for x in (tiles.full_first, tiles.full_count)
    )
    stop = jnp.minimum(first + count, parts.first + parts.count)
    in_full = jnp.maximum(stop - jnp.maximum(first, parts.first), 0)
    pairs = int(tiles.full_count.sum()) * g.block_rows * g.key_tile
    return (pairs + int((parts.count - in_full).sum()) * g.part_rows * g.chunk) // folded
