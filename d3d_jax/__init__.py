"""Lossless speculative decoding with standalone block-diffusion drafters, in JAX."""
