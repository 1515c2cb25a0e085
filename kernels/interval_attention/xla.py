"""Interval attention in plain XLA: runs everywhere, differentiable in q, k, v and through lse.

Rows are processed in tiles so that no [T, S] array of all rows exists at once; the backward pass
recomputes each tile's weights from lse (as in FlashAttention). Query heads of one kv head are
folded into rows, so keys and values are read once for all of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
# Rows of a tile before folding: a tile's float32 scores at S = 1024, N = 9 are 4.7 MB per sequence.
TILE_ROWS = 128


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def _visible(lo: jax.Array, hi: jax.Array, keys: int) -> jax.Array:
    """[B, t] bounds → [B, 1, t, 1, S] mask."""
    index = jnp.arange(keys, dtype=jnp.int32)
    return ((index >= lo[..., None]) & (index < hi[..., None]))[:, None, :, None, :]


def _scores(
    q: jax.Array, k: jax.Array, lo: jax.Array, hi: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """[B, K, t, G, H], [B, K, S, H] → masked scores [B, K, t, G, S] in float32, and the mask."""
    batch, kv_heads, rows, group, dim = q.shape
    folded = q.reshape(batch, kv_heads, rows * group, dim)
    scores = _dot("bkrh,bksh->bkrs", folded, k).reshape(batch, kv_heads, rows, group, -1)
    mask = _visible(lo, hi, k.shape[2])
    return jnp.where(mask, scores * dim**-0.5, -jnp.inf), mask


def _forward_tile(k, v, q, lo, hi):
    scores, _ = _scores(q, k, lo, hi)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1)
    batch, kv_heads, rows, group, keys = weights.shape
    folded = weights.astype(v.dtype).reshape(batch, kv_heads, rows * group, keys)
    out = _dot("bkrs,bksh->bkrh", folded, v).reshape(*total.shape, -1)
    seen = total > 0
    out = out / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, jnp.log(jnp.where(seen, total, 1.0)) + peak[..., 0], -jnp.inf)
    return out.astype(q.dtype), lse


def _backward_tile(k, v, q, lo, hi, lse, d_out, delta):
    """Gradients of one tile: dq of the tile, and its contributions to dk and dv."""
    scores, mask = _scores(q, k, lo, hi)
    shift = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    batch, kv_heads, rows, group, _ = weights.shape

    def fold(x):
        return x.reshape(batch, kv_heads, rows * group, x.shape[-1])

    d_weights = _dot("bkrh,bksh->bkrs", fold(d_out), v).reshape(weights.shape)
    d_scores = jnp.where(mask, weights * (d_weights - delta[..., None]), 0.0) * q.shape[-1] ** -0.5
    d_scores, weights = fold(d_scores).astype(q.dtype), fold(weights).astype(q.dtype)
    dq = _dot("bkrs,bksh->bkrh", d_scores, k).reshape(q.shape)
    dk = _dot("bkrs,bkrh->bksh", d_scores, fold(q))
    dv = _dot("bkrs,bkrh->bksh", weights, fold(d_out))
    return dq.astype(q.dtype), dk, dv


def _tiles(x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
    """Splits the row axis into [tiles, …, TILE_ROWS, …], padding the last tile."""
    rows = x.shape[axis]
    count = -(-rows // TILE_ROWS)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * TILE_ROWS - rows)
    x = jnp.pad(x, pad, constant_values=fill)
    shape = (*x.shape[:axis], count, TILE_ROWS, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _untile(x: jax.Array, axis: int, rows: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, rows, axis=axis)


@jax.custom_vjp
def _attend(q, k, v, lo, hi):
    """q [B, K, T, G, H], k and v [B, K, S, H] → out like q, lse [B, K, T, G]."""
    rows = q.shape[2]
    if rows <= TILE_ROWS:
        return _forward_tile(k, v, q, lo, hi)
    tiles = (_tiles(q, 2), _tiles(lo, 1), _tiles(hi, 1))
    out, lse = jax.lax.map(lambda tile: _forward_tile(k, v, *tile), tiles)
    return _untile(out, 2, rows), _untile(lse, 2, rows)


def _attend_fwd(q, k, v, lo, hi):
    out, lse = _attend(q, k, v, lo, hi)
    return (out, lse), (q, k, v, lo, hi, out, lse)


def _attend_bwd(saved, cotangents):
    q, k, v, lo, hi, out, lse = saved
    d_out, d_lse = cotangents
    rows = q.shape[2]
    # ∂lse/∂scores are the weights themselves, so its cotangent only shifts the row delta.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    per_row = (q, lo, hi, lse, d_out, delta)
    if rows <= TILE_ROWS:
        dq, dk, dv = _backward_tile(k, v, *per_row)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None
    axes = (2, 1, 1, 2, 2, 2)
    tiles = tuple(_tiles(x, axis) for x, axis in zip(per_row, axes, strict=True))

    def step(carry, tile):
        dq, dk, dv = _backward_tile(k, v, *tile)
        return (carry[0] + dk, carry[1] + dv), dq

    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(step, (zero, zero), tiles)
    return _untile(dq, 2, rows), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.named_call, name="interval_attention_xla")
def interval_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lo: jax.Array, hi: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `d3d_jax.kernels.interval_attention.api.interval_attention`."""
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    out, lse = _attend(grouped, k, v, lo, hi)
    return out.swapaxes(1, 2).reshape(q.shape), lse.swapaxes(1, 2).reshape(batch, rows, heads)
