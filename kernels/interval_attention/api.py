"""The public interval attention op: argument checks and the choice of an implementation."""

from __future__ import annotations

from typing import Literal

import jax

from d3d_jax.kernels.interval_attention import reference, xla

Implementation = Literal["reference", "xla"]
_IMPLEMENTATIONS = {
    "reference": reference.interval_attention,
    "xla": xla.interval_attention,
}


def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    implementation: Implementation = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention in which row t sees the keys lo[t] <= j < hi[t].

    Args:
      q: [B, T, N, H] queries; scores are scaled by H ** -0.5 here.
      k, v: [B, K, S, H] keys and values, head-major as the cache stores them; N = G · K.
      lo, hi: [B, T] int32 key indices. A row with lo >= hi sees nothing.
      implementation: `xla` (tiled, everywhere) or `reference` (dense mask).

    Returns:
      out [B, T, N, H] in q's dtype and lse [B, T, N] float32, the log-sum-exp of the visible
      scores. A row that sees nothing gives out = 0 and lse = −inf. Differentiable in q, k and v,
      through lse too.

    Raises:
      ValueError: shapes, head counts or dtypes that do not fit, or an unknown implementation.
    """
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must have rank 4, got q {q.shape} and k {k.shape}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or head dimension")
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} kv heads")
    if lo.shape != q.shape[:2] or hi.shape != q.shape[:2]:
        raise ValueError(f"lo {lo.shape} and hi {hi.shape} must be {q.shape[:2]}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is not one of {', '.join(_IMPLEMENTATIONS)}"
        )
    return _IMPLEMENTATIONS[implementation](q, k, v, lo, hi)
