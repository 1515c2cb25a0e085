"""95 % intervals: of repeated measurements, and of τ over responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's t interval of the mean of independent measurements; None for fewer than two."""
    from scipy.special import stdtrit  # takes half a second to import

    count = len(values)
    if count < 2:
        return None
    t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    half = t * float(np.std(values, ddof=1)) / count**0.5
    middle = float(np.mean(values))
    return middle - half, middle + half


def pooled(tokens: np.ndarray, rounds: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    """The middle of the pooled τ of responses drawn anew from these (bootstrap).

    Args:
      tokens, rounds: [responses] of each.
    """
    count = len(rounds)
    drawn = np.random.default_rng(0).integers(0, count, (resamples, count))
    taus = tokens[drawn].sum(1) / np.maximum(rounds[drawn].sum(1), 1)
    rest = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(taus, [rest, 100 - rest])
    return float(low), float(high)
