"""Packed attention: interval attention over clean keys, plus attention inside each block.

The two parts see disjoint keys, so they are merged exactly by their log-sum-exp. What a layout is
and how one is built lives in `d3d_jax.layout`; this module knows only arrays and static sizes.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from d3d_jax.kernels.interval_attention import Implementation, interval_attention
from d3d_jax.kernels.merge import merge

HIGHEST = jax.lax.Precision.HIGHEST


def _in_block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """q [B, A, W, N, H], k and v [B, A, W, K, H] → float32 out like q and lse [B, A, W, N]."""
    batch, blocks, width, heads, dim = q.shape
    kv_heads = k.shape[3]
    grouped = q.reshape(batch, blocks, width, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "bawkgh,baukh->bakgwu", grouped, k, precision=HIGHEST, preferred_element_type=jnp.float32
    )
    scores = scores * dim**-0.5
    if causal:
        rows = jnp.arange(width)
        scores = jnp.where(rows[:, None] >= rows, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum(
        "bakgwu,baukh->bawkgh", weights, v, precision=HIGHEST, preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape), jnp.moveaxis(lse, -1, 2).reshape(batch, blocks, width, heads)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    clean_len: int,
    num_blocks: int,
    in_block: Literal["bidirectional", "causal"],
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention of a pass: clean rows see clean keys, block rows see clean keys and their block.

    Args:
      q: [B, T, N, H] queries of all rows, clean ones first.
      k, v: [B, T, K, H] keys and values of the same rows; only the block rows' are read here.
      keys, values: [B, K, S, H] clean keys: the cache, or the clean rows themselves.
      lo, hi: [B, T] int32, the interval of clean keys each row sees.
      clean_len, num_blocks: C and A; T = C + A · W.
      in_block: whether the rows of a block see each other both ways or causally.
      implementation: of the interval part; None takes the platform's (`interval_attention`).

    Returns:
      [B, T, N, H] in q's dtype.
    """
    out, lse = interval_attention(q, keys, values, lo, hi, implementation=implementation)
    if num_blocks == 0:
        return out

    def blocks(x: jax.Array) -> jax.Array:
        return x[:, clean_len:].reshape(x.shape[0], num_blocks, -1, *x.shape[2:])

    block_out, block_lse = _in_block_attention(
        blocks(q), blocks(k), blocks(v), in_block == "causal"
    )
    merged, _ = merge(blocks(out), blocks(lse), block_out, block_lse)
    merged = merged.astype(q.dtype).reshape(q.shape[0], -1, *q.shape[2:])
    return jnp.concatenate([out[:, :clean_len], merged], axis=1)
