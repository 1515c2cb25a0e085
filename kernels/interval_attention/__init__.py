"""Interval attention: every row sees one interval of the keys, given by two integers."""

from d3d_jax.kernels.interval_attention.api import (
    Implementation,
    compiling_for,
    interval_attention,
)

__all__ = ["Implementation", "compiling_for", "interval_attention"]
