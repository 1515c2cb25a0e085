"""Responses, datasets and drafter training, imported as `d3d_jax.train`."""
