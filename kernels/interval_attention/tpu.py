"""Interval attention for TPUs (Pallas, Mosaic): the op, its tile sizes and the forward kernel.

The backward kernels are in `tpu_backward`, what all of them share in `tpu_common`, and which tiles
are visited is computed in `tiles`. Pallas runs these kernels on a CPU too, under `interpret`.

A grid step is one (row tile, key tile) pair of a work list whose length is known only on the
device, so a step exists for needed pairs alone: cost follows the filled part of a cache, and batch
rows of very different lengths cost their sum. Consecutive steps of a row tile keep its queries and
accumulators in VMEM while the pipeline fetches the next key tile. Large tiles keep the matrix units
busy and the fetches few; where a tile is not wholly seen, only the needed chunks of keys of each of
its parts are computed, so that packed documents cost little more than the pairs they see.

A tile of rows holds `block_rows` rows of each of the G query heads of one kv head, head-major, so
keys and values are read once for all of them. The forward kernel has those rows along sublanes
(scores [rows, keys]), the backward kernels along lanes (scores [keys, rows]): the forward compiles
to 15–20 % fewer instruction bundles that way in training and to half with the 32 rows of a small
verification; the backward needs no transposed [rows, keys] array.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_jax.kernels.interval_attention import tpu_backward
from d3d_jax.kernels.interval_attention.tiles import FIRST, LAST, work_list
from d3d_jax.kernels.interval_attention.tpu_common import (
    LANES,
    LOG2E,
    MASKED,
    SUBLANES,
    Geometry,
    Specs,
    Window,
    call,
    dot,
    from_tiles,
    interval_tiles,
    limits,
    load_keys,
    load_rows,
    round_up,
    split_refs,
    stored_keys,
    window_keys,
)

HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, and of the pieces in which a tile that is not wholly seen is computed.

    Attributes:
      rows: most rows in a tile, of all query heads of a kv head together.
      keys: keys in a tile.
      part: most rows of each head in a part, a multiple of `LANES`; None for undivided tiles.
      chunk: keys in a chunk, a divisor of `keys`.
    """

    rows: int
    keys: int
    part: int | None
    chunk: int


def tile_sizes(rows: int, group: int, keys: int, dtype: Any) -> Tiles:
    """Tile sizes of a pass, chosen by the instruction bundles that the kernels compile to.

    Many rows: per score, 1024 × 512 compiles to 15–50 % fewer bundles than 512 × 256 and to at most
    13 % more than tiles of twice the size (v5e, v6e; all kernels). Where intervals end, parts and
    chunks of 128 compute the fewest bundles: in all kernels together 14–26 % fewer than undivided
    tiles for packed documents and 3–9 % fewer for a causal one of 4096 (v5e, training shapes).
    Parts of 64 rows and chunks of 256 keys take more. Dividing needs whole parts, so it waits for
    eight of them.

    With at most 256 rows the keys are the traffic: fetching 1024 of them and their values, 512 KiB,
    outweighs the fixed cost of a grid step. float32 products are made of several bfloat16 ones,
    whose operands take room: half the size. All of these take less than 8 MiB of VMEM, of the 16
    that a v5e kernel gets by default.

    Args:
      rows: T.
      group: G.
      keys: S.
      dtype: of q, k and v.
    """
    most_rows = 1024 if jnp.dtype(dtype).itemsize == 2 else 512
    most_keys = most_rows if rows * group <= 256 else most_rows // 2
    key_tile = min(most_keys, round_up(keys, LANES))
    if rows < 8 * LANES:
        return Tiles(most_rows, key_tile, part=None, chunk=key_tile)
    return Tiles(most_rows, key_tile, part=LANES, chunk=LANES)


def _across(x: jax.Array, width: int) -> jax.Array:
    """[R, LANES], the same in all lanes → [R, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _load(ref, heads) -> jax.Array:
    """Some rows, one head after the other."""
    return jnp.concatenate([ref[rows] for rows in heads], axis=0)


def _store(ref, heads, value: jax.Array) -> None:
    for rows, part in zip(heads, jnp.split(value, len(heads)), strict=True):
        ref[rows] = part


def _forward_kernel(*refs, geometry: Geometry):
    step, refs = split_refs(refs, geometry)
    q_ref, k_ref, v_ref, lo_ref, hi_ref, out_ref, lse_ref = refs[:7]
    # [lanes, LANES]: what belongs to a row lies in its sublane, repeated across lanes. Only
    # `totals` differs across lanes; they are added up at the end. All heads share lo and hi.
    lo_rows, hi_rows, peaks, totals, sums = refs[7:]
    rows, features = geometry.tile_rows, geometry.feature_axis

    @step.when(FIRST)
    def _():
        for vector, ref in ((lo_ref, lo_rows), (hi_ref, hi_rows)):
            ref[...] = jnp.broadcast_to(vector[:, : ref.shape[0]], ref.shape[::-1]).T
        peaks[...] = jnp.full_like(peaks, MASKED)
        totals[...] = jnp.zeros_like(totals)
        sums[...] = jnp.zeros_like(sums)

    def accumulate(window: Window):
        heads, width = window.heads(geometry), window.keys
        k = window_keys(k_ref, geometry, window)
        scores = dot(load_rows(q_ref, window), k, (1, features)) * geometry.score_scale
        if window.masked:
            row = pl.ds(window.row, window.rows)
            lo, hi = (_across(ref[row], width) for ref in (lo_rows, hi_rows))
            key = jax.lax.broadcasted_iota(jnp.int32, lo.shape, 1) + step.key(geometry, window)
            visible = ((key >= lo) & (key < hi))[None]
            by_head = scores.reshape(geometry.group, *lo.shape)
            scores = jnp.where(visible, by_head, MASKED).reshape(scores.shape)
        v = load_keys(v_ref, geometry, step, window)
        old = _load(peaks, heads)
        peak = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - _across(peak, width))
        shrink = jnp.exp2(old - peak)
        parts = [weights[:, i : i + LANES] for i in range(0, width, LANES)]
        update = dot(weights.astype(v.dtype), v, (1, 1 - features))
        _store(peaks, heads, peak)
        _store(totals, heads, _load(totals, heads) * shrink + functools.reduce(jnp.add, parts))
        _store(sums, heads, _load(sums, heads) * _across(shrink, geometry.dim) + update)

    step.each_window(geometry, accumulate)

    @step.when(LAST)
    def _():
        total = jnp.sum(totals[...], axis=1, keepdims=True)
        lse = (peaks[...] / LOG2E + jnp.log(total)).T[:1]
        lse_ref[...] = jnp.where(lo_ref[...] < hi_ref[...], lse, -jnp.inf)
        lo, hi = (_across(ref[: geometry.block_rows], geometry.dim) for ref in (lo_rows, hi_rows))
        out = (sums[...] / total[:rows]).reshape(out_ref.shape)
        out_ref[...] = jnp.where((lo < hi)[None], out, 0.0).astype(out_ref.dtype)


def _forward(geometry: Geometry, q, k, v, lo, hi) -> tuple[jax.Array, jax.Array]:
    """q [B, N, T, H], k and v [B, K, S, H], lo and hi [B, T] → out like q, lse in tiles."""
    g, specs = geometry, Specs(geometry)
    lse_shape = (g.batch, g.kv_heads, g.row_tiles, 1, g.tile_lanes)
    out, lse = call(
        functools.partial(_forward_kernel, geometry=g),
        g,
        work_list(g.bounds(lo, hi), g.key_tiles),
        limits(lo, hi, g),
        [
            (q, specs.rows),
            (stored_keys(k, g), specs.keys),
            (stored_keys(v, g), specs.keys),
            (interval_tiles(lo, g), specs.interval),
            (interval_tiles(hi, g), specs.interval),
        ],
        [
            (jax.ShapeDtypeStruct(q.shape, q.dtype), specs.rows),
            (jax.ShapeDtypeStruct(lse_shape, jnp.float32), specs.lanes),
        ],
        [
            pltpu.VMEM((round_up(g.block_rows, LANES), LANES), jnp.int32),
            pltpu.VMEM((round_up(g.block_rows, LANES), LANES), jnp.int32),
            pltpu.VMEM((g.tile_lanes, LANES), jnp.float32),
            pltpu.VMEM((g.tile_lanes, LANES), jnp.float32),
            pltpu.VMEM((g.tile_rows, g.dim), jnp.float32),
        ],
        name="interval_attention",
        dots=2,
    )
    return out, lse


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _attend_fwd(geometry: Geometry, q, k, v, lo, hi):
    out, lse = _forward(geometry, q, k, v, lo, hi)
    return (out, lse), (q, k, v, lo, hi, out, lse)


def _attend_bwd(geometry: Geometry, saved, cotangents):
    return *tpu_backward.backward(geometry, *saved, *cotangents), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _block_rows(rows: int, group: int, tiles: Tiles) -> tuple[int, int]:
    """Rows of each head in a tile, and in a part of it.

    Of all tiles of whole parts (whole sublanes) those that need the fewest rows of padding, then
    the largest.
    """
    most = max(SUBLANES, tiles.rows // group // SUBLANES * SUBLANES)
    unit = min(tiles.part or SUBLANES, most)
    if (size := round_up(rows, unit)) > most:
        sizes = range(round_up(most // 2, unit), most + 1, unit)
        size = min(sizes, key=lambda size: (round_up(rows, size), -size))
    return size, unit if tiles.part else size


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, …] → [B, K, T · G, …]: row t of head k · G + g is row t · G + g of kv head k."""
    batch, rows, heads = x.shape[:3]
    x = x.reshape(batch, rows, kv_heads, heads // kv_heads, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(batch, kv_heads, -1, *x.shape[4:])


def _unfold(x: jax.Array, rows: int) -> jax.Array:
    """The inverse of `_fold`, on [B, K, T · G, …]."""
    x = x.reshape(*x.shape[:2], rows, -1, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(x.shape[0], rows, -1, *x.shape[4:])


def geometry(q: Any, k: Any, tiles: Tiles | None = None, interpret: Any = False) -> Geometry:
    """The sizes of a call with such q [B, T, N, H] and k [B, K, S, H].

    Few rows are folded into one head (G = 1), so that all heads' rows share a tile without padding
    each head's. Many rows stay head-major: XLA reorders whole axes without moving data within them.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    tiles = tiles or tile_sizes(rows, group, keys, q.dtype)
    if rows * group <= tiles.rows or group * SUBLANES > tiles.rows:
        rows, group = rows * group, 1
    block_rows, part_rows = _block_rows(rows, group, tiles)
    return Geometry(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        rows=round_up(rows, block_rows),
        keys=keys,
        block_rows=block_rows,
        key_tile=tiles.keys,
        part_rows=part_rows,
        chunk=tiles.chunk,
        interpret=interpret,
    )


def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array | np.ndarray,
    hi: jax.Array | np.ndarray,
    *,
    interpret: Any = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `d3d_jax.kernels.interval_attention.api.interval_attention`.

    Args:
      interpret: False on a TPU; elsewhere `pltpu.InterpretParams(...)` simulates one.
      tiles: tile sizes, for tests and tuning; by default `tile_sizes`.

    Raises:
      ValueError: a head dimension other than 64 and 128, or a dtype other than float32 and
        bfloat16.
    """
    rows, dim, kv_heads, keys = q.shape[1], q.shape[3], *k.shape[1:3]
    if dim not in HEAD_DIMS:
        raise ValueError(f"q has head dimension {dim}; the tpu kernel supports 64 and 128")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q has dtype {q.dtype}; the tpu kernel supports float32 and bfloat16")
    g = geometry(q, k, tiles, interpret)
    lo, hi = jnp.clip(lo, 0, keys), jnp.clip(hi, 0, keys)
    folded = g.group * kv_heads < q.shape[2]
    if folded:
        group = q.shape[2] // kv_heads
        q, lo, hi = _fold(q, kv_heads), jnp.repeat(lo, group, 1), jnp.repeat(hi, group, 1)
    else:
        q = q.swapaxes(1, 2)
    length = q.shape[2]
    padding = g.rows - length
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    lo, hi = (jnp.pad(x, ((0, 0), (0, padding))) for x in (lo, hi))
    out, lse = _attend(g, q, k, v, lo, hi)
    out, lse = out[:, :, :length], from_tiles(lse, g)[:, :, :length]
    if folded:
        return _unfold(out, rows), _unfold(lse, rows)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)
