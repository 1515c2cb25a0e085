"""The training objective: diffusion loss on block rows and next-token loss on clean rows.

    Σ w_i · CE(block rows) / Σ w  +  λ · Σ CE(clean response rows) / count

where w_i = exp(−(i − 1) / γ) and i is the predicted offset from the anchor (D3D paper, training
section; γ as in DFlash). The denominators are those of the whole batch, so that micro-batches and
devices only add. With a teacher, block rows have KL(teacher ‖ drafter) instead
(`train.distillation`).
Pure functions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax import layout as layouts
from d3d_jax.config import Remat
from d3d_jax.drafter import Drafter
from d3d_jax.models import decoder
from d3d_jax.train.cross_entropy import cross_entropy
from d3d_jax.train.distillation import Teacher

Batch = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_labels", "block_weights", "ar_labels", "ar_weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Labels:
    """What each row should predict and how much it counts.

    Attributes:
      block_labels, block_weights: [B, A, W], token of each slot and w_i (0: no label).
      ar_labels, ar_weights: [B, S], the next token and 1 where it is a response token.
    """

    block_labels: jax.Array
    block_weights: jax.Array
    ar_labels: jax.Array
    ar_weights: jax.Array


def make_labels(
    batch: Batch,
    *,
    block_size: int,
    label_shift: int,
    gamma: float,
    draft_index: jax.Array | None = None,
) -> Labels:
    """Labels of a packed batch (`train.packing`).

    Args:
      gamma: γ of the position weights.
      draft_index: [V] int32, place of each token in the draft vocabulary, −1 if it has none:
        labels are then draft indices and rows whose label has none count nothing.
    """
    tokens, segments, anchors = batch["tokens"], batch["segments"], batch["anchors"]
    size = tokens.shape[1]
    slots = jnp.arange(block_size)
    offsets = slots + label_shift
    at = jnp.maximum(anchors, 0)[..., None] + offsets
    inside = jnp.minimum(at, size - 1)

    def gather(rows: jax.Array) -> jax.Array:
        flat = jnp.take_along_axis(rows, inside.reshape(rows.shape[0], -1), axis=1)
        return flat.reshape(inside.shape)

    anchor_segment = jnp.take_along_axis(segments, jnp.maximum(anchors, 0), axis=1)
    valid = (
        (anchors >= 0)[..., None] & (at < size) & (gather(segments) == anchor_segment[..., None])
    )
    weight = jnp.where(offsets >= 1, jnp.exp(-(offsets - 1) / gamma), 0.0)
    labels, weights = gather(tokens), jnp.where(valid, weight, 0.0)

    next_tokens = jnp.roll(tokens, -1, axis=1)
    same = (jnp.roll(segments, -1, axis=1) == segments) & (jnp.arange(size) < size - 1)
    ar_weights = (same & jnp.roll(batch["loss_mask"], -1, axis=1)).astype(jnp.float32)
    if draft_index is not None:
        labels, next_tokens = draft_index[labels], draft_index[next_tokens]
        weights = jnp.where(labels >= 0, weights, 0.0)
        ar_weights = jnp.where(next_tokens >= 0, ar_weights, 0.0)
    return Labels(jnp.maximum(labels, 0), weights, jnp.maximum(next_tokens, 0), ar_weights)


def drafter_loss(
    drafter: Drafter,
    params: decoder.Params,
    batch: Batch,
    labels: Labels,
    denominators: tuple[jax.Array, jax.Array],
    ar_weight: float,
    *,
    remat: Remat = "none",
    compute: Any = None,
    teacher: Teacher | None = None,
    gates: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This batch's part of the objective.

    Args:
      batch: tokens, positions, starts [B, S] and anchors [B, A] of `train.packing`.
      denominators: Σ w of block rows and count of clean rows over the *whole* batch.
      ar_weight: λ.
      compute: type of activations; None: that of the embedding.
      teacher: a fixed drafter, with arrays on devices: block rows learn its distributions instead
        of their labels.
      gates: [L] of `decoder.forward`.

    Returns:
      The loss, and sums for metrics: its two terms and, for the offsets 1, 2, … that are predicted,
      hits and counts [W − 1 + shift].
      Only the loss has a gradient.
    """
    config = drafter.drafter
    layout = layouts.packed_documents(
        batch["positions"],
        batch["starts"],
        batch["anchors"],
        block_size=config.block_size,
        in_block=config.in_block,
    )
    anchors = jnp.take_along_axis(batch["tokens"], jnp.maximum(batch["anchors"], 0), axis=1)
    tokens = jnp.concatenate([batch["tokens"], anchors], axis=1)
    hidden, _ = decoder.forward(
        drafter.model, params, tokens, layout, remat=remat, dtype=compute, gates=gates
    )

    def rows(of_clean: jax.Array, of_blocks: jax.Array) -> jax.Array:
        return jnp.concatenate([of_clean, of_blocks.reshape(tokens.shape[0], -1)], axis=1)

    scaled = rows(
        labels.ar_weights * (ar_weight / denominators[1]), labels.block_weights / denominators[0]
    )
    row_labels = rows(labels.ar_labels, labels.block_labels)
    clean, head = layout.clean_len, decoder.head_weight(params)

    def found(rows: slice, *fixed: Any) -> tuple[jax.Array, ...]:
        parts = (x[:, rows] for x in (row_labels, scaled))
        return cross_entropy(hidden[:, rows], head, *parts, *fixed)

    if teacher is None:
        total, loss, hit = found(slice(None))
    else:
        fixed, _ = decoder.forward(
            teacher.drafter.model, teacher.params, tokens, layout, dtype=compute
        )
        fixed = fixed[:, clean:], decoder.head_weight(teacher.params)
        of_both = found(slice(clean)), found(slice(clean, None), fixed, teacher.margin)
        total = of_both[0][0] + of_both[1][0]
        loss, hit = (jnp.concatenate([x[i] for x in of_both], axis=1) for i in (1, 2))
    ar = jnp.sum(loss[:, :clean] * labels.ar_weights) / denominators[1]
    block_loss = loss[:, clean:].reshape(labels.block_weights.shape)
    diffusion = jnp.sum(block_loss * labels.block_weights) / denominators[0]
    counted = labels.block_weights > 0
    block_hit = hit[:, clean:].reshape(counted.shape) & counted
    first = 1 - config.label_shift  # at shift 0 the anchor's slot predicts nothing
    metrics = {
        "diffusion": diffusion,
        "ar": ar,
        "hits": jnp.sum(block_hit, axis=(0, 1))[first:],
        "counts": jnp.sum(counted, axis=(0, 1))[first:],
    }
    return total, metrics


def denominators(labels: Labels) -> tuple[jax.Array, jax.Array]:
    """Σ w and count, kept above 0 so that a batch without labels gives a loss of 0."""
    return (
        jnp.maximum(jnp.sum(labels.block_weights), 1e-6),
        jnp.maximum(jnp.sum(labels.ar_weights), 1.0),
    )
