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
# Rows of a tile (before folding) that visits all keys. A call of no more rows is one tile, on CPU
# too: there the loop over tiles of keys would take 1.2 to 2 times as long.
TILE_ROWS = 128
# Rows and keys of a tile where tiles of keys are skipped. Of packed documents larger ones compute
# more pairs that are not visible: 128 × 128 takes 1.3 times as long, 1.8 with the backward pass.
SKIP_ROWS, SKIP_KEYS = 32, 64


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


def _row_tiles(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Splits rows ([B, T] bounds, [B, K, T, …] the rest) into [tiles, …, size, …].

    The last tile is filled up with zeros: rows that see nothing.
    """

    def split(x: jax.Array) -> jax.Array:
        axis = 1 if x.ndim == 2 else 2
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, -x.shape[axis] % size)
        x = jnp.pad(x, pad)
        x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return tuple(split(x) for x in arrays)


def _join(tiles: jax.Array, rows: int) -> jax.Array:
    """[tiles, B, K, size, …] → [B, K, rows, …]."""
    x = jnp.moveaxis(tiles, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :rows]


def _pad_keys(x: jax.Array) -> jax.Array:
    """Keys up to a whole number of tiles; the added ones are beyond every hi."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % SKIP_KEYS), (0, 0)))


def _key_tile(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * SKIP_KEYS, SKIP_KEYS, axis=2)


def _key_tiles_seen(lo: jax.Array, hi: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The first tile of keys that a row of a tile [B, t] sees, and the one after the last."""
    sees = lo < hi
    first = jnp.min(jnp.where(sees, lo, keys)) // SKIP_KEYS
    last = jnp.max(jnp.where(sees, hi, 0))
    return first, -(-last // SKIP_KEYS)


def _forward_static(q, k, v, lo, hi):
    tiles = _row_tiles(TILE_ROWS, q, lo, hi)
    out, lse = jax.lax.map(lambda tile: _forward_tile(k, v, *tile), tiles)
    return _join(out, q.shape[2]), _join(lse, q.shape[2])


def _forward_skipping(q, k, v, lo, hi):
    k, v = _pad_keys(k), _pad_keys(v)

    def one(tile):
        q, lo, hi = tile

        def step(index, carry):
            out, lse = carry
            shift = index * SKIP_KEYS
            part = _forward_tile(
                _key_tile(k, index), _key_tile(v, index), q, lo - shift, hi - shift
            )
            return merge(out, lse, *part)

        none = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf))
        return jax.lax.fori_loop(*_key_tiles_seen(lo, hi, k.shape[2]), step, none)

    out, lse = jax.lax.map(one, _row_tiles(SKIP_ROWS, q, lo, hi))
    return _join(out, q.shape[2]), _join(lse, q.shape[2])


@jax.custom_vjp
def _attend(q, k, v, lo, hi):
    """q [B, K, T, G, H], k and v [B, K, S, H] → out like q, lse [B, K, T, G]."""
    if q.shape[2] <= TILE_ROWS:
        out, lse = _forward_tile(k, v, q, lo, hi)
    else:
        out, lse = jax.lax.platform_dependent(
            q, k, v, lo, hi, cpu=_forward_skipping, default=_forward_static
        )
    return out.astype(q.dtype), lse


def _backward_static(k, v, *per_row):
    def step(carry, tile):
        dq, dk, dv = _backward_tile(k, v, *tile)
        return (carry[0] + dk, carry[1] + dv), dq

    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(step, (zero, zero), _row_tiles(TILE_ROWS, *per_row))
    return _join(dq, per_row[0].shape[2]), dk, dv


def _backward_skipping(k, v, *per_row):
    keys = k.shape[2]
    k, v = _pad_keys(k), _pad_keys(v)

    def one(carry, tile):
        q, lo, hi, *rest = tile

        def step(index, carry):
            dq, *totals = carry
            shift = index * SKIP_KEYS
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
    (dk, dv), dq = jax.lax.scan(one, (zero, zero), _row_tiles(SKIP_ROWS, *per_row))
    return _join(dq, per_row[0].shape[2]), dk[:, :, :keys], dv[:, :, :keys]


def backward(q, k, v, lo, hi, out, lse, d_out, d_lse):
    """Gradients in q, k and v, for any implementation of the forward pass.

    Args:
      q, out, d_out: [B, K, T, G, H]. k, v: [B, K, S, H].
      lo, hi: [B, T] with 0 <= lo and hi <= S.
      lse, d_lse: [B, K, T, G] float32.
    """
    # ∂lse/∂scores are the weights themselves, so its cotangent only shifts the row delta.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    arrays = (k, v, q, lo, hi, lse, d_out, delta)
    if q.shape[2] <= TILE_ROWS:
        dq, dk, dv = _backward_tile(*arrays)
    else:
        dq, dk, dv = jax.lax.platform_dependent(
            *arrays, cpu=_backward_skipping, default=_backward_static
        )
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
    lo, hi = jnp.maximum(lo, 0), jnp.minimum(hi, k.shape[2])
    out, lse = _attend(fold(q, k.shape[1]), k, v, lo, hi)
    return unfold(out), unfold(lse)
