"""Which layer of a drafter to remove next: a score for every candidate, the best of which goes.

The drafter without a layer is the drafter with that layer's gate at 0 (`decoder.forward`), so all
candidates of a step run one compiled function. The loop around it is `train.pruning`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax.drafter import Drafter, Params
from d3d_jax.models import sharding
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.dataset import ResponseDataset
from d3d_jax.train.distillation import Teacher
from d3d_jax.train.objective import Batch, drafter_loss, make_labels
from d3d_jax.train.packing import PackedBatches
from d3d_jax.train.step import draft_index

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


def by_measure(
    measure: Measure,
    params: Params,
    layers: Sequence[int],
    found: Ranking | None = None,
    keep: Callable[[Ranking], None] = lambda found: None,
) -> Ranking:
    """Tries every layer.

    Args:
      params: of the drafter that has only the remaining layers, stacked.
      layers: their indices in the unpruned drafter, in order.
      found: what an interrupted ranking had found.
      keep: called with all that is known after each measurement.
    """
    found, gates = found or Ranking(None, {}), np.ones(len(layers), np.float32)
    if found.whole is None:
        found = Ranking(measure(params, gates), found.scores)
        keep(found)
    for place, layer in enumerate(layers):
        if layer not in found.scores:
            without = gates.copy()
            without[place] = 0
            found = Ranking(found.whole, {**found.scores, layer: measure(params, without)})
            keep(found)
    return found


def of_acceptance(acceptance: OfflineAcceptance) -> Measure:
    """τ on validation responses, the paper's criterion (D3D, section on pruning)."""
    return lambda params, gates: acceptance.measure(params, gates).tau


def of_divergence(
    drafter: Drafter,
    teacher: Teacher,
    validation: ResponseDataset,
    config: TrainConfig,
    documents: int,
    mesh: Mesh,
) -> Measure:
    """−KL(teacher ‖ drafter) of block rows, weighted as in training, on validation responses.

    Args:
      teacher: its parameters on the mesh.
      config: says how responses are packed and weighted.
      documents: packed rows to take, at most; 0 for those of all validation responses.
      mesh: of `sharding.model_mesh`.
    """
    batches = PackedBatches(
        validation,
        max_tokens=config.max_tokens,
        max_blocks=config.max_blocks,
        anchors_per_document=config.anchors_per_document,
        batch_rows=1,
        seed=config.seed,
    )
    rows = len(batches.plan(0))
    rows = min(documents or rows, rows)
    index = draft_index(drafter, teacher.params)
    index = None if index is None else jnp.asarray(index)

    # The teacher is an argument: what a program closes over is compiled into it.
    def sums(
        params: Params, teacher: Teacher, index: jax.Array | None, gates: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        labels = make_labels(
            batch,
            block_size=drafter.drafter.block_size,
            label_shift=drafter.drafter.label_shift,
            gamma=config.gamma,
            draft_index=index,
        )
        one = jnp.ones(())
        metrics = drafter_loss(
            drafter, params, batch, labels, (one, one), 0.0, teacher=teacher, gates=gates
        )[1]
        return metrics["diffusion"], jnp.sum(labels.block_weights)

    read = jax.jit(sharding.on_mesh(mesh, sums))

    def measure(params: Params, gates: np.ndarray) -> float:
        given = params, teacher, index, gates
        found = [read(*given, batches.batch(row)) for row in range(rows)]
        divergence, weight = (float(sum(x)) for x in zip(*found, strict=True))
        return -divergence / max(weight, 1e-6)

    return measure


def by_place(criterion: Literal["even", "last"], layers: Sequence[int]) -> Ranking:
    """Scores that look at no data: thinning out evenly, or cutting the last layers off.

    Evenly: the layer whose neighbours are nearest to each other goes, the first and the last stay
    as long as there are others.
    """
    if criterion == "last" or len(layers) < 3:
        return Ranking(None, {layer: float(layer) for layer in layers})
    gaps = {b: float(a - c) for a, b, c in zip(layers, layers[1:], layers[2:], strict=False)}
    return Ranking(None, gaps)
