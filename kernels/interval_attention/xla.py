"""Interval attention in plain XLA: runs everywhere, differentiable in q, k, v and through lse.

Rows are processed in tiles, so that no [T, S] array of all rows exists at once; the backward pass
recomputes each tile's weights from lse (as in FlashAttention). Query heads of one kv head are
folded into rows, so keys and values are read once for all of them.

On CPU a tile of rows visits only the tiles of keys that one of its rows sees. Elsewhere it visits
all keys at once: XLA:GPU lets the host decide how often a loop of data-dependent length runs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from d3d_jax.kernels.merge import merge

HIGHEST = jax.lax.Precision.HIGHEST
# Rows of a tile before folding, and keys of a tile where tiles of keys are skipped.
TILE_ROWS = 128
TILE_KEYS = 128


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
    """Attention of some rows over some keys: out [B, K, t, G, H] float32 and lse."""
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
    return out, lse


def _backward_tile(k, v, q, lo, hi, lse, d_out, delta):
    """Gradients of some rows over some keys, in float32: dq of the rows, dk and dv of the keys."""
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
    return dq, dk, dv


def _tiles(x: jax.Array, axis: int) -> jax.Array:
    """Splits the row axis into [tiles, …, TILE_ROWS, …], padding the last tile with zeros."""
    rows = x.shape[axis]
    count = -(-rows // TILE_ROWS)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * TILE_ROWS - rows)
    shape = (*x.shape[:axis], count, TILE_ROWS, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, pad).reshape(shape), axis, 0)


def _untile(x: jax.Array, axis: int, rows: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, rows, axis=axis)


def _pad_keys(x: jax.Array) -> jax.Array:
    """Keys up to a whole number of tiles; the added ones are beyond every hi."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % TILE_KEYS), (0, 0)))


def _key_tile(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * TILE_KEYS, TILE_KEYS, axis=2)


def _key_tiles_seen(lo: jax.Array, hi: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The first tile of keys that a row of a tile [B, t] sees, and the one after the last."""
    sees = lo < hi
    first = jnp.min(jnp.where(sees, lo, keys)) // TILE_KEYS
    last = jnp.max(jnp.where(sees, jnp.minimum(hi, keys), 0))
    return first, -(-last // TILE_KEYS)


def _forward_static(q, k, v, lo, hi):
    tiles = (_tiles(q, 2), _tiles(lo, 1), _tiles(hi, 1))
    return jax.lax.map(lambda tile: _forward_tile(k, v, *tile), tiles)


def _forward_skipping(q, k, v, lo, hi):
    k, v = _pad_keys(k), _pad_keys(v)

    def one(tile):
        q, lo, hi = tile

        def step(index, carry):
            shift = index * TILE_KEYS
            part = _forward_tile(
                _key_tile(k, index), _key_tile(v, index), q, lo - shift, hi - shift
            )
            return merge(*carry, *part)

        none = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf))
        return jax.lax.fori_loop(*_key_tiles_seen(lo, hi, k.shape[2]), step, none)

    return jax.lax.map(one, (_tiles(q, 2), _tiles(lo, 1), _tiles(hi, 1)))


@jax.custom_vjp
def _attend(q, k, v, lo, hi):
    """q [B, K, T, G, H], k and v [B, K, S, H] → out like q, lse [B, K, T, G]."""
    rows = q.shape[2]
    if rows <= TILE_ROWS:
        out, lse = _forward_tile(k, v, q, lo, hi)
    else:
        out, lse = jax.lax.platform_dependent(
            q, k, v, lo, hi, cpu=_forward_skipping, default=_forward_static
        )
        out, lse = _untile(out, 2, rows), _untile(lse, 2, rows)
    return out.astype(q.dtype), lse


def _backward_static(k, v, *tiles):
    def step(carry, tile):
        dq, dk, dv = _backward_tile(k, v, *tile)
        return (carry[0] + dk, carry[1] + dv), dq

    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(step, (zero, zero), tiles)
    return dq, dk, dv


def _backward_skipping(k, v, *tiles):
    keys = k.shape[2]
    k, v = _pad_keys(k), _pad_keys(v)

    def one(carry, tile):
        q, lo, hi, *rest = tile

        def step(index, carry):
            dq, *totals = carry
            shift = index * TILE_KEYS
            own, *parts = _backward_tile(
                _key_tile(k, index), _key_tile(v, index), q, lo - shift, hi - shift, *rest
            )
            added = [
                jax.lax.dynamic_update_slice_in_dim(
                    total, _key_tile(total, index) + part, shift, axis=2
                )
                for total, part in zip(totals, parts, strict=True)
            ]
            return dq + own, *added

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        dq, *carry = jax.lax.fori_loop(*_key_tiles_seen(lo, hi, k.shape[2]), step, start)
        return tuple(carry), dq

    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(one, (zero, zero), tiles)
    return dq, dk[:, :, :keys], dv[:, :, :keys]


def backward(q, k, v, lo, hi, out, lse, d_out, d_lse):
    """Gradients in q, k and v, for any implementation of the forward pass.

    Args:
      q, out, d_out: [B, K, T, G, H]. k, v: [B, K, S, H]. lo, hi: [B, T].
      lse, d_lse: [B, K, T, G] float32.
    """
    rows = q.shape[2]
    # ∂lse/∂scores are the weights themselves, so its cotangent only shifts the row delta.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    per_row = (q, lo, hi, lse, d_out, delta)
    if rows <= TILE_ROWS:
        dq, dk, dv = _backward_tile(k, v, *per_row)
    else:
        axes = (2, 1, 1, 2, 2, 2)
        tiles = tuple(_tiles(x, axis) for x, axis in zip(per_row, axes, strict=True))
        dq, dk, dv = jax.lax.platform_dependent(
            k, v, *tiles, cpu=_backward_skipping, default=_backward_static
        )
        dq = _untile(dq, 2, rows)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _attend_fwd(q, k, v, lo, hi):
    out, lse = _attend(q, k, v, lo, hi)
    return (out, lse), (q, k, v, lo, hi, out, lse)


def _attend_bwd(saved, cotangents):
    return *backward(*saved, *cotangents), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def fold(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] → [B, K, T, G, H], the query heads of one kv head together."""
    batch, rows, heads, dim = q.shape
    return q.reshape(batch, rows, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)


def unfold(x: jax.Array) -> jax.Array:
    """[B, K, T, G, …] → [B, T, N, …]."""
    batch, kv_heads, rows, group, *rest = x.shape
    return x.swapaxes(1, 2).reshape(batch, rows, kv_heads * group, *rest)


@functools.partial(jax.named_call, name="interval_attention_xla")
def interval_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lo: jax.Array, hi: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `d3d_jax.kernels.interval_attention.api.interval_attention`."""
    out, lse = _attend(fold(q, k.shape[1]), k, v, lo, hi)
    return unfold(out), unfold(lse)
