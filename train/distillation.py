"""What recovery training teaches: the unpruned drafter's distribution, made to prefer the label.

With the least weight α that gives the supervised token y a margin of δ over every other,

    p' = (1 − α) p + α onehot(y),   α = max(0, (δ − m) / (1 − m)),   m = p_y − max_{v ≠ y} p_v

the student is never pushed towards a token that the target does not say (D3D paper, section on
recovery). Pure functions.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from d3d_jax.drafter import Drafter, Params

# δ of the paper.
MARGIN = 0.01


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["drafter", "margin"]
)
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A fixed drafter that another of the same vocabulary is distilled from.

    Attributes:
      params: stacked.
      margin: δ; None teaches its distributions as they are.
    """

    drafter: Drafter
    params: Params
    margin: float | None = MARGIN


def taught(
    logits: jax.Array, is_label: jax.Array, margin: float | None, axes: tuple[str, ...] = ()
) -> jax.Array:
    """The distribution p' of every row.

    Args:
      logits: [..., V] float32, the teacher's; this device's part of a split vocabulary.
      is_label: [..., V], where the supervised token is; nowhere in a row without one.
      margin: δ; None: the teacher's own distribution.
      axes: of the mesh, that the vocabulary is split over.

    Returns:
      [..., V] float32.
    """
    top = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axes)
    powers = jnp.exp(logits - top)
    p = powers / jax.lax.psum(jnp.sum(powers, axis=-1, keepdims=True), axes)
    if margin is None:
        return p
    label = jax.lax.psum(jnp.sum(jnp.where(is_label, p, 0), axis=-1, keepdims=True), axes)
    rival = jax.lax.pmax(jnp.max(jnp.where(is_label, 0, p), axis=-1, keepdims=True), axes)
    # m = 1 only where everything is on the label already.
    lead = jnp.minimum(label - rival, 1 - 1e-6)
    alpha = jnp.maximum(0, (margin - lead) / (1 - lead))
    return (1 - alpha) * p + alpha * is_label
