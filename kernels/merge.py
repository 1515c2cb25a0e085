"""Attention over disjoint sets of keys, merged exactly by log-sum-exp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two sets of keys that share none.

    Args:
      out_a, out_b: […, H] attention over either set.
      lse_a, lse_b: […] float32 log-sum-exp of the scores over it, −inf where a row sees none.

    Returns:
      out […, H] and lse […], float32; 0 and −inf where a row sees none of either.
    """
    peak = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = out_a * (weight_a / safe)[..., None] + out_b * (weight_b / safe)[..., None]
    return out, jnp.where(seen, jnp.log(safe) + peak, -jnp.inf)
