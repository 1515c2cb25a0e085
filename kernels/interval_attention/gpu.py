"""Interval attention for Hopper GPUs in bfloat16: shapes, rows of a kv head, and the gradient.

Two ways to use the kernel, chosen by shape alone:

- many rows (training, prefill): one item a tile of 128 rows of one query head, straight from q to
  out without a copy; the heads that share K and V run side by side and read them through L2;
- few rows (decoding): the query heads of a kv head are folded into rows, K and V are read once for
  all of them, and the keys are split over the SMs; partial results are merged by log-sum-exp.

The kernel is in `gpu_kernel`, the choice of tiles in `gpu_schedule`. The backward pass is XLA's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from d3d_jax.kernels.interval_attention import gpu_kernel, gpu_schedule, xla

HEAD_DIMS = (64, 128)
# An H100 or H200 has 132 SMs; a CTA of this kernel fills one.
NUM_SMS = 132


def splits_keys(rows: int, heads: int) -> bool:
    """Whether the rows of one sequence are too few to give every SM a tile of its own.

    Decided for one sequence, so that a batch of unequal lengths is split evenly too.
    """
    return rows * heads < NUM_SMS * 2 * gpu_kernel.WARPGROUP_ROWS


def tiling(rows: int, heads: int, kv_heads: int, dim: int) -> gpu_kernel.Tiling:
    """The tiling of a call with T rows; with `partial`, of rows that the heads are folded into."""
    stages = 256 // dim  # 128 KB of shared memory for the ring buffer
    if not splits_keys(rows, heads):
        return gpu_kernel.Tiling(consumers=2, stages=stages)
    one = rows * heads // kv_heads <= gpu_kernel.WARPGROUP_ROWS
    return gpu_kernel.Tiling(consumers=1 if one else 2, stages=stages, partial=True)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Pads axis 1 to a multiple of `rows`. Padded rows have lo = hi = 0 and see nothing."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % rows)
    return jnp.pad(x, pad)


def _pad_keys(x: jax.Array, keys: int) -> jax.Array:
    """TMA wants a multiple of 8 keys, and a tile at least. A cache should have that anyway."""
    if x.shape[2] % 8 == 0 and x.shape[2] >= keys:
        return x
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % keys), (0, 0)])


def _many_rows(q, k, v, lo, hi, tiling):
    rows = q.shape[1]
    q, lo, hi = (_pad_rows(x, tiling.rows) for x in (q, lo, hi))
    tiles = gpu_schedule.row_tiles(lo, hi, k.shape[2], tiling.rows, tiling.block_keys)
    items = gpu_schedule.longest_first(tiles).table()
    out, lse = gpu_kernel.attend(items, lo, hi, q, k, v, tiling)
    return out[:, :rows], lse[:, :, :rows].swapaxes(1, 2)


def _few_rows(q, k, v, lo, hi, tiling):
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = rows * group
    # Row t · G + g of kv head k is token t of query head k · G + g.
    q = q.reshape(batch, rows, kv_heads, group, dim).swapaxes(2, 3)
    q = _pad_rows(q.reshape(batch, folded, kv_heads, dim), tiling.rows)
    lo, hi = (_pad_rows(jnp.repeat(x, group, axis=1), tiling.rows) for x in (lo, hi))
    tiles = gpu_schedule.row_tiles(lo, hi, k.shape[2], tiling.rows, tiling.block_keys)
    most = max(NUM_SMS // kv_heads, 1)
    # With more row tiles than that, only those longer than the mean are split.
    parts = max(tiles.count.size, most)
    items, pieces = gpu_schedule.split(tiles, parts, most)
    out, lse = gpu_kernel.attend(items.table(), lo, hi, q, k, v, tiling)
    out, lse = gpu_schedule.merge(out, lse, pieces, most)
    out = out.astype(q.dtype).reshape(batch, -1, kv_heads, dim)[:, :folded]
    out = out.reshape(batch, rows, group, kv_heads, dim).swapaxes(2, 3)
    lse = lse.swapaxes(1, 2).reshape(batch, -1, kv_heads)[:, :folded]
    lse = lse.reshape(batch, rows, group, kv_heads).swapaxes(2, 3)
    return out.reshape(batch, rows, heads, dim), lse.reshape(batch, rows, heads)


@jax.custom_vjp
def _attend(q, k, v, lo, hi):
    k, v = (_pad_keys(x, gpu_kernel.Tiling.block_keys) for x in (k, v))
    choice = tiling(q.shape[1], q.shape[2], k.shape[1], q.shape[3])
    return (_few_rows if choice.partial else _many_rows)(q, k, v, lo, hi, choice)


def _attend_fwd(q, k, v, lo, hi):
    out, lse = _attend(q, k, v, lo, hi)
    return (out, lse), (q, k, v, lo, hi, out, lse)


def _attend_bwd(saved, cotangents):
    q, k, v, lo, hi, *results = saved
    kv_heads = k.shape[1]

    def fold(x):
        """[B, T, N, …] → [B, K, T, G, …]."""
        return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]).swapaxes(1, 2)

    q, *results = (fold(x) for x in (q, *results, *cotangents))
    dq, dk, dv = xla.backward(q, k, v, lo, hi, *results)
    return xla.unfold(dq), dk, dv, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.named_call, name="interval_attention_gpu")
def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `d3d_jax.kernels.interval_attention.api.interval_attention`.

    Raises:
      ValueError: a dtype other than bfloat16, or a head dimension other than 64 and 128.
    """
    if q.dtype != jnp.bfloat16:
        raise ValueError(
            f"implementation 'gpu' takes bfloat16, got {q.dtype}: Hopper's matrix units would "
            "round float32 to TF32. Use implementation 'xla'"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"implementation 'gpu' takes head dimensions {HEAD_DIMS}, got {q.shape[3]}. "
            "Use implementation 'xla'"
        )
    return _attend(q, k, v, jnp.maximum(lo, 0), jnp.minimum(hi, k.shape[2]))
