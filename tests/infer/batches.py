"""Batches of slots in the middle of their work, for tests of the steps."""

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.role import pieces
from d3d_jax.sampling import SamplingParams


def started(target, drafter, prompts, limits=None):
    """A batch that has read the prompts."""
    count = len(prompts)
    batch = Batch(target, drafter, DecodeConfig(mode="async"), count, 64)
    limits = limits or [100] * count
    batch.configure([SamplingParams()] * count, limits)
    reports = [batch.read([piece]) for s, p in enumerate(prompts) for piece in pieces(s, p)]
    return batch, sum(reports)
