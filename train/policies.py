"""Which policy prepares the right blocks: hit rates at the same number of branches.

The rounds are recorded by `OfflineAcceptance.observe`; what a policy is, is in `d3d_jax.branches`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d3d_jax.branches import BestFirst, Policy, Rectangle
from d3d_jax.train.outcomes import Rounds, hit_rate


def budgets(block_size: int) -> list[int]:
    """Numbers of branches N to compare at: of full rectangles of F = 1 to 4, and fewer."""
    others = block_size - 1
    return sorted(
        {max(others // 2, 1), others, *(others * fan_out + 1 for fan_out in (1, 2, 3, 4))}
    )


def rectangles(num_branches: int, block_size: int) -> list[Rectangle]:
    """Of every C the widest rectangle that at most N branches make."""
    most = min(block_size, num_branches)
    found = [Rectangle(c, (num_branches - 1) // (c - 1), block_size) for c in range(2, most + 1)]
    return found or [Rectangle(1, 1, block_size)]


def most_candidates(block_size: int) -> int:
    """M that `compare` needs recorded of every offset."""
    return max(
        policy.num_candidates
        for n in budgets(block_size)
        for policy in (BestFirst(n, block_size), *rectangles(n, block_size))
    )


def compare(rounds: Rounds, calibrated: np.ndarray | None) -> list[dict[str, Any]]:
    """Hit rates of best-first and of every rectangle, at several numbers of branches.

    Policies of more candidates than were recorded are left out.

    Args:
      calibrated: the candidates' log-probabilities [R, P, M] at the drafter's own temperatures;
        None where it has none.

    Returns:
      For each number of branches N, also the rows of the packed pass, the rates of best-first
      (`calibrated` or None) and those of the rectangles by name.

    Raises:
      D3DError: a drafter of shift 0 (`hit_rate`).
    """
    width, size = rounds.block.shape[1], rounds.candidate_ids.shape[-1]

    def rate(policy: Policy, log_probs: np.ndarray | None = None) -> float:
        return round(hit_rate(policy, rounds, log_probs), 4)

    rows = []
    for count in budgets(width):
        best = BestFirst(count, width)
        if best.num_candidates > size:
            continue
        rows.append(
            {
                "branches": count,
                "rows": best.budget,
                "best_first": rate(best),
                "best_first_calibrated": None if calibrated is None else rate(best, calibrated),
                "rectangles": {
                    str(policy): rate(policy)
                    for policy in rectangles(count, width)
                    if policy.num_candidates <= size
                },
            }
        )
    return rows
