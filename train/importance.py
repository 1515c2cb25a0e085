"""Which layer of a drafter to remove next: a score for every candidate, the best of which goes.

The drafter without a layer is the drafter with that layer's gate at 0 (`decoder.forward`), so all
candidates of all steps run one compiled function. The loop around it is `train.pruning`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from d3d_jax.drafter import Params
from d3d_jax.train.acceptance import OfflineAcceptance

Criterion = Literal["tau", "kl", "even", "last"]
# Higher is better: what the drafter is worth with the given gates [L].
Measure = Callable[[Params, np.ndarray], float]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What removing each remaining layer would come to.

    Attributes:
      whole: the score with every remaining layer, or None where scores come from places alone.
      scores: by index of the layer; higher is better.
    """

    whole: float | None
    scores: dict[int, float]

    @property
    def least(self) -> int:
        """The layer whose removal is the least harmful; of equals the last."""
        return max(self.scores, key=lambda layer: (self.scores[layer], layer))


def by_measure(measure: Measure, params: Params, layers: Sequence[int]) -> Ranking:
    """Tries every layer.

    Args:
      params: of the drafter that has only the remaining layers, stacked.
      layers: their indices in the unpruned drafter, in order.
    """
    whole = np.ones(len(layers), np.float32)
    scores = {}
    for place, layer in enumerate(layers):
        gates = whole.copy()
        gates[place] = 0
        scores[layer] = measure(params, gates)
    return Ranking(measure(params, whole), scores)


def of_acceptance(acceptance: OfflineAcceptance) -> Measure:
    """τ on validation responses, the paper's criterion (D3D, section on pruning)."""
    return lambda params, gates: acceptance.measure(params, gates).tau


def by_place(criterion: Literal["even", "last"], layers: Sequence[int]) -> Ranking:
    """Scores that look at no data: thinning out evenly, or cutting the last layers off.

    Evenly: the layer whose neighbours are nearest to each other goes, the first and the last stay
    as long as there are others.
    """
    if criterion == "last" or len(layers) < 3:
        return Ranking(None, {layer: float(layer) for layer in layers})
    gaps = {b: float(a - c) for a, b, c in zip(layers, layers[1:], layers[2:], strict=False)}
    return Ranking(None, gaps)
