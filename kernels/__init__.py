"""Attention ops, imported as `d3d_jax.kernels`: one folder per op."""
