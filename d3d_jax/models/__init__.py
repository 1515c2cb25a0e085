"""Decoder models, their caches, and reading and writing their checkpoints."""
