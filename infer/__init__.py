"""Decoding with a target and a drafter, imported as `d3d_jax.infer`."""
