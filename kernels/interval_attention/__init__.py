"""Interval attention: every row sees one interval of the keys, given by two integers."""

from d3d_jax.kernels.interval_attention.api import Implementation, interval_attention

__all__ = ["Implementation", "interval_attention"]
