"""Interval attention with a dense mask: the meaning of the op, for tests and small inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def interval_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lo: jax.Array, hi: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `d3d_jax.kernels.interval_attention.api.interval_attention`."""
    batch, rows, heads, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "btkgh,bksh->btkgs", grouped, k, precision=HIGHEST, preferred_element_type=jnp.float32
    )
    index = jnp.arange(keys)
    visible = (index >= lo[..., None]) & (index < hi[..., None])
    scores = jnp.where(visible[:, :, None, None, :], scores * dim**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    # A row that sees nothing has lse = -inf; -inf - -inf must not become NaN.
    shift = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    out = jnp.einsum("btkgs,bksh->btkgh", weights.astype(v.dtype), v, precision=HIGHEST)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, rows, heads)
