"""The Hopper kernel of interval attention: one CTA for each item and head (Pallas Mosaic GPU).

A CTA owns 64 or 128 query rows of a head and a range of key tiles. One warpgroup brings tiles of
K and V into a ring buffer (TMA); the others hold 64 rows each and run online softmax on them:

    memory warpgroup   K0 V0 K1 V1 K2 V2 …        waits for free places in the ring
    consumer 0         [QK0]  softmax  [PV0 QK1]  softmax   …
    consumer 1                [QK0]     softmax  [PV0 QK1]  …      brackets: tensor cores

Two consumers take turns at the tensor cores, so that one computes softmax while the other
multiplies (FlashAttention-3, arXiv 2407.08608, section 3.1). Which rows and keys an item has is
decided in `gpu_schedule`; the public op and its gradient are in `gpu`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from d3d_jax.kernels.interval_attention import gpu_schedule as schedule

# wgmma multiplies 64 rows at a time: one warpgroup's share of a tile.
WARPGROUP_ROWS = 64
LOG2E = math.log2(math.e)
# Below every score, and finite: −inf − peak is then −inf and never NaN.
LOWEST = -1e30
# Registers as wgmma leaves a matrix, and one number for each row of it.
MATRIX = plgpu.Layout.WGMMA
COLUMN = MATRIX.reduce(1)
ACCUMULATOR = plgpu.ACC  # type: ignore[reportPrivateImportUsage]


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that TMA writes and wgmma reads without bank conflicts."""
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static shape of a CTA.

    Attributes:
      consumers: warpgroups that compute, 1 or 2.
      stages: tiles of K, and tiles of V, in the ring buffer.
      block_keys: keys of a tile.
      partial: the keys of a row are split over items: write float32 results of each item, instead
        of final rows.
    """

    consumers: int
    stages: int
    block_keys: int = 128
    partial: bool = False

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS

    def scratch(self, dim: int) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        own, ring = (self.consumers, WARPGROUP_ROWS), (self.stages, self.block_keys)
        scratch = dict(
            q=_swizzled((*own, dim), jnp.bfloat16),
            k=_swizzled((*ring, dim), jnp.bfloat16),
            v=_swizzled((*ring, dim), jnp.bfloat16),
            lo=plgpu.SMEM(own, jnp.int32),
            hi=plgpu.SMEM(own, jnp.int32),
            lse=plgpu.SMEM(own, jnp.float32),
            rows_ready=plgpu.Barrier(num_arrivals=3, num_barriers=self.consumers),
            k_ready=plgpu.Barrier(num_barriers=self.stages),
            v_ready=plgpu.Barrier(num_barriers=self.stages),
            k_free=plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.stages),
            v_free=plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.stages),
        )
        if self.partial:
            scratch["out"] = _swizzled((*own, dim // 2), jnp.float32)
        if self.consumers > 1:
            scratch["turn"] = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=1)
            scratch["v_clean"] = plgpu.Barrier(num_barriers=1)
        return scratch


@dataclasses.dataclass(frozen=True)
class _Cta:
    """What a warpgroup works with.

    Attributes:
      group: its number; the memory warpgroup comes after the consumers.
      gmem, smem: references by name; smem holds the barriers too.
    """

    item: schedule.Item
    head: jax.Array
    kv_head: jax.Array
    group: jax.Array
    tiling: Tiling
    gmem: types.SimpleNamespace
    smem: types.SimpleNamespace

    def own_rows(self, row_tile: jax.Array | int) -> Any:
        """The rows of a consumer. The compiler must see that they start at a multiple of 64."""
        return pl.ds(
            (row_tile * self.tiling.consumers + self.group) * WARPGROUP_ROWS, WARPGROUP_ROWS
        )

    def take_turn(self) -> None:
        """Waits until the other consumer has come as far as its next `take_turn`."""
        if self.tiling.consumers > 1:
            plgpu.barrier_arrive(self.smem.turn.at[0])
            plgpu.barrier_wait(self.smem.turn.at[0])


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), MATRIX)


def _column(ref: Any) -> jax.Array:
    return plgpu.layout_cast(ref[...], COLUMN)


def _across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[rows] → [rows, columns]."""
    return lax.broadcast_in_dim(column, shape, [0])


def _load_tiles(cta: _Cta) -> None:
    """The memory warpgroup. It ends when every place in the ring is free again."""
    item, tiling, gmem, smem = cta.item, cta.tiling, cta.gmem, cta.smem

    @pl.loop(0, item.count + tiling.stages)
    def _step(step):
        place = lax.rem(step, jnp.int32(tiling.stages))
        keys = pl.ds(item.tile(step) * tiling.block_keys, tiling.block_keys)

        def load(source, target, free, ready):
            pl.when(step >= tiling.stages)(lambda: plgpu.barrier_wait(free.at[place]))

            @pl.when(step < item.count)
            def _copy():
                tile = source.at[item.batch, cta.kv_head, keys]
                plgpu.copy_gmem_to_smem(tile, target.at[place], ready.at[place])

        load(gmem.k, smem.k, smem.k_free, smem.k_ready)
        load(gmem.v, smem.v, smem.v_free, smem.v_ready)


def _clear_unseen_values(cta: _Cta, values: Any, start: jax.Array) -> None:
    """Zeroes the rows of a V tile that no query row of the tile sees.

    Their weights are 0, but 0 times what lies behind the end of a cache may be NaN. The first
    consumer does it for both. It cannot clear the next tile before the second one has waited for
    this: a turn lies between.
    """
    block_keys, dim = values.shape
    begin, end = cta.item.key_begin - start, cta.item.key_end - start
    two = cta.tiling.consumers > 1

    @pl.when((begin > 0) | (end < block_keys))
    def _():
        @pl.when(cta.group == 0)
        def _clear():
            for first in range(0, block_keys, WARPGROUP_ROWS):
                piece = values.at[pl.ds(first, WARPGROUP_ROWS)]
                key = _iota((WARPGROUP_ROWS, dim), 0) + first
                old = plgpu.layout_cast(piece[...], MATRIX)
                piece[...] = jnp.where((key >= begin) & (key < end), old, jnp.zeros_like(old))
            plgpu.commit_smem()
            if two:
                plgpu.barrier_arrive(cta.smem.v_clean.at[0])

        if two:
            pl.when(cta.group == 1)(lambda: plgpu.barrier_wait(cta.smem.v_clean.at[0]))


def _attend_tile(step, carry, *, cta: _Cta, q, lo, hi, masked: bool):
    """One key tile: scores, online softmax, and the weighted sum of values."""
    acc, peak, total = carry
    item, tiling, smem = cta.item, cta.tiling, cta.smem
    place = lax.rem(step, jnp.int32(tiling.stages))
    start = item.tile(step) * tiling.block_keys
    keys, values = smem.k.at[place], smem.v.at[place]
    if masked:
        # Before there are scores, because clearing takes registers.
        plgpu.barrier_wait(smem.v_ready.at[place])
        _clear_unseen_values(cta, values, start)
    plgpu.barrier_wait(smem.k_ready.at[place])

    def multiply_keys(scores_ref):
        plgpu.wgmma(scores_ref, q, keys.transpose((1, 0)))
        cta.take_turn()
        return scores_ref[...]

    shape = (WARPGROUP_ROWS, tiling.block_keys)
    scores = pl.run_scoped(multiply_keys, ACCUMULATOR(shape, jnp.float32))
    plgpu.barrier_arrive(smem.k_free.at[place])
    if masked:
        key = _iota(shape, 1)
        left, right = (_across(_column(bound) - start, shape) for bound in (lo, hi))
        scores = jnp.where((key >= left) & (key < right), scores, -jnp.inf)

    # Powers of 2: exp2 is one instruction, and the scale joins the subtraction of the peak.
    scale = q.shape[-1] ** -0.5 * LOG2E
    new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
    weights = jnp.exp2(scores * scale - _across(new_peak, shape))
    shrink = jnp.exp2(peak - new_peak)
    total = total * shrink + weights.sum(axis=1)
    weights = weights.astype(jnp.bfloat16)
    if not masked:
        plgpu.barrier_wait(smem.v_ready.at[place])
    cta.take_turn()

    def multiply_values(update_ref):
        plgpu.wgmma(update_ref, weights, values)
        return update_ref[...]

    update = pl.run_scoped(multiply_values, ACCUMULATOR(acc.shape, jnp.float32))
    plgpu.barrier_arrive(smem.v_free.at[place])
    return acc * _across(shrink, acc.shape) + update, new_peak, total


def _attend_rows(cta: _Cta) -> None:
    """A consumer: attends its 64 rows to the keys of the item."""
    item, gmem, smem, group = cta.item, cta.gmem, cta.smem, cta.group
    rows = cta.own_rows(item.row_tile)
    q, lo, hi = smem.q.at[group], smem.lo.at[group], smem.hi.at[group]
    ready = smem.rows_ready.at[group]
    plgpu.copy_gmem_to_smem(gmem.q.at[item.batch, rows, cta.head], q, ready)
    plgpu.copy_gmem_to_smem(gmem.lo.at[item.batch, rows], lo, ready)
    plgpu.copy_gmem_to_smem(gmem.hi.at[item.batch, rows], hi, ready)
    plgpu.barrier_wait(ready)

    carry = (
        plgpu.layout_cast(jnp.zeros(q.shape, jnp.float32), MATRIX),
        plgpu.layout_cast(jnp.full(lo.shape, LOWEST, jnp.float32), COLUMN),
        plgpu.layout_cast(jnp.zeros(lo.shape, jnp.float32), COLUMN),
    )
    tile = functools.partial(_attend_tile, cta=cta, q=q, lo=lo, hi=hi)
    # The second consumer starts a turn late and the first one ends a turn late.
    pl.when(group > 0)(cta.take_turn)
    carry = lax.fori_loop(0, item.masked, functools.partial(tile, masked=True), carry)
    carry = lax.fori_loop(item.masked, item.count, functools.partial(tile, masked=False), carry)
    pl.when(group == 0)(cta.take_turn)
    # A row that sees nothing took part in the tiles without a comparison.
    acc, peak, total = carry
    _write_rows(cta, acc, peak, jnp.where(_column(lo) < _column(hi), total, 0.0))


def _write_rows(cta: _Cta, acc: jax.Array, peak: jax.Array, total: jax.Array) -> None:
    item, gmem, smem = cta.item, cta.gmem, cta.smem
    partial = cta.tiling.partial
    block, row_tile = (item.index, 0) if partial else (item.batch, item.row_tile)
    rows = cta.own_rows(row_tile)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    lse = smem.lse.at[cta.group]
    lse[...] = jnp.where(seen, (peak + jnp.log2(safe)) / LOG2E, -jnp.inf)
    result = acc * _across(jnp.where(seen, 1.0 / safe, 0.0), acc.shape)
    # q is no longer needed: final rows leave through its memory. Float32 rows go in two halves.
    out = (smem.out if partial else smem.q).at[cta.group]
    width = out.shape[-1]
    for first in range(0, acc.shape[-1], width):
        columns = slice(first, first + width)
        out[...] = result[:, columns].astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, gmem.out.at[block, rows, cta.head, columns])
        if first == 0:
            plgpu.copy_smem_to_gmem(lse, gmem.lse.at[block, cta.head, rows])
        plgpu.wait_smem_to_gmem(0)


# Under jit the layers of a model share one lowering, which takes a second.
@functools.partial(jax.jit, static_argnames="tiling")
def attend(
    items: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiling: Tiling,
) -> tuple[jax.Array, jax.Array]:
    """Runs the items of a schedule.

    Args:
      items: [I, FIELDS] int32, `gpu_schedule.Item.table`.
      lo, hi: [B, R] int32; R is a multiple of tiling.rows.
      q: [B, R, N, H] bfloat16, H a multiple of 64.
      k, v: [B, K, S, H] bfloat16.

    Returns:
      out [B, R, N, H] bfloat16 and lse [B, N, R] float32; with tiling.partial
      out [I, tiling.rows, N, H] and lse [I, N, tiling.rows], both float32, where an unused item
      leaves its part unwritten.
    """
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[1]
    blocks, dtype = (batch, rows), q.dtype
    if tiling.partial:
        blocks, dtype = (items.shape[0], tiling.rows), jnp.float32

    names = ("lo", "hi", "q", "k", "v", "out", "lse")

    def interval_attention(items, *refs, **scratch):
        index = lax.axis_index("cta")
        head = lax.rem(index, jnp.int32(heads))
        cta = _Cta(
            schedule.Item.read(items, lax.div(index, jnp.int32(heads))),
            head,
            lax.div(head, jnp.int32(group)),
            lax.axis_index("warpgroup"),
            tiling,
            types.SimpleNamespace(**dict(zip(names, refs, strict=True))),
            types.SimpleNamespace(**scratch),
        )
        # Two consumers need more than a third of the registers each; one has enough anyway.
        share = tiling.consumers > 1

        @pl.when(cta.item.used & (cta.group < tiling.consumers))
        def _consumer():
            if share:
                plgpu.set_max_registers(232, action="increase")
            _attend_rows(cta)

        @pl.when(cta.item.used & (cta.group == tiling.consumers))
        def _memory():
            if share:
                plgpu.set_max_registers(40, action="decrease")
            _load_tiles(cta)

    return plgpu.kernel(
        interval_attention,
        out_type=(
            jax.ShapeDtypeStruct((*blocks, heads, dim), dtype),
            jax.ShapeDtypeStruct((blocks[0], heads, blocks[1]), jnp.float32),
        ),
        scratch_types=tiling.scratch(dim),
        # Heads run fastest: those that share K and V run at the same time.
        grid=(items.shape[0] * heads,),
        grid_names=("cta",),
        num_threads=tiling.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(items, lo, hi, q, k, v)
