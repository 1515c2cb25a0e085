"""Cross-entropy of rows against a large vocabulary, fused with its gradient.

The logits of all rows are never held: they are made a chunk at a time, and since a weighted sum's
gradient is known as soon as its weights are, it is taken from each chunk at once and nothing is
computed a second time (Liger kernels do the same, arXiv 2410.10989, section 3.2). Over a mesh each
device has its own rows and its own part of the vocabulary; what is exchanged is written out here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.models.linear import linear, product, weight_gradient
from d3d_jax.models.sharding import locally, mesh_axes, shared_axes
from d3d_jax.train.distillation import taught

# Rows of a sequence whose logits exist at once: 1024 × 151,936 float32 is 0.6 GB.
LOSS_CHUNK = 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    teacher: tuple[jax.Array, jax.Array] | None = None,
    margin: float | None = None,
    chunk: int = LOSS_CHUNK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sum of the rows' cross-entropies, or of divergences from a teacher.

    Only the sum has a gradient, and only in `hidden` and `head`.

    Args:
      hidden: [B, T, D]. head: [V, D], used in hidden's type; its gradient has its own type.
      labels: [B, T] int32.
      weights: [B, T] float32.
      teacher: its hidden states [B, T, D'] and head [V, D'], if it teaches instead of the labels.
      margin: δ of the label in what it teaches (`train.distillation`).
      chunk: rows of T whose logits exist at once.

    Returns:
      Σ w · loss, float32; each row's CE or KL(teacher ‖ student) [B, T] float32; whether the
      likeliest token is the label [B, T].
    """
    return _whole_pass(hidden, head, labels, weights, teacher, margin, chunk, False)[0]


def _forward(
    hidden: Any, head: Any, labels: Any, weights: Any, teacher: Any, margin: Any, chunk: int
) -> Any:
    def value(x: Any) -> Any:
        return x.value

    fixed = jax.tree.map(value, teacher, is_leaf=lambda x: hasattr(x, "perturbed"))
    values = map(value, (hidden, head, labels, weights))
    return _whole_pass(*values, fixed, margin, chunk, head.perturbed)


def _backward(margin: Any, chunk: int, gradients: Any, cotangents: Any) -> Any:
    scale = cotangents[0]
    if isinstance(scale, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None
    of_hidden, of_head = (x if x is None else (scale * x).astype(x.dtype) for x in gradients)
    return of_hidden, of_head, None, None, None


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _whole_pass(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    teacher: tuple[jax.Array, jax.Array] | None,
    margin: float | None,
    chunk: int,
    head_trained: bool,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]:
    """What `cross_entropy` returns, and the sum's gradients in hidden and, if wanted, head."""
    rows = hidden.shape[1]
    count = -(-rows // chunk)
    chunk = -(-rows // count)

    def cut(x: jax.Array) -> jax.Array:
        """[B, T, …] → [chunks, B, t, …], with rows of weight 0 at the end."""
        pad = ((0, 0), (0, count * chunk - rows)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, pad).reshape(x.shape[0], count, chunk, *x.shape[2:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :rows]

    def split(head: jax.Array) -> tuple[str, ...]:
        # Devices that a head's hidden size is split over have rows of their own, too.
        return shared_axes("b", hidden.shape[0], "d", head.shape[1])

    def gather(head: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.all_gather(head, axes, axis=1, tiled=True) if axes else head

    gathered, fixed_axes = split(head), () if teacher is None else split(teacher[1])
    summed = tuple(a for a in mesh_axes("b", hidden.shape[0]) if a not in gathered)
    vocabulary = mesh_axes("v", head.shape[0])

    def own(
        hidden: jax.Array,
        head: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *fixed: jax.Array,
    ) -> Any:
        whole = gather(head.astype(hidden.dtype), gathered)
        fixed_head = gather(fixed[1].astype(fixed[0].dtype), fixed_axes) if fixed else None

        def one(total: jax.Array | None, part: tuple[jax.Array, ...]) -> Any:
            wanted = None
            if fixed_head is not None:
                wanted = linear(part[3], fixed_head, jnp.float32), margin
            loss, hit, slope = _chunk(part[0], whole, *part[1:3], vocabulary, wanted)
            of_hidden = product("...v,vd->...d", slope, whole, hidden.dtype)
            if total is not None:
                total += weight_gradient(slope, part[0], total.dtype)
            return total, (loss, hit, jax.lax.psum(of_hidden, vocabulary))

        total = jnp.zeros(whole.shape, head.dtype) if head_trained else None
        parts = tuple(map(cut, (hidden, labels, weights, *fixed[:1])))
        total, found = jax.lax.scan(one, total, parts)
        loss, hit, of_hidden = map(join, found)
        if total is None:
            return loss, hit, of_hidden
        # Once for all chunks, in the head's own type, and each device keeps its part.
        if gathered:
            # By a leading axis: by another the TPU compiler would sum all of it everywhere.
            parts_first = total.reshape(total.shape[0], -1, head.shape[1]).swapaxes(0, 1)
            total = jax.lax.psum_scatter(parts_first, gathered, scatter_dimension=0)
        return loss, hit, of_hidden, jax.lax.psum(total, summed)

    table = "vd" if gathered else "v."
    outputs = ("b.", "b.", "b..", table)[: 4 if head_trained else 3]
    inputs, fixed = ("b..", table, "b.", "b."), teacher or ()
    if fixed:
        inputs += ("b..", "vd" if fixed_axes else "v.")
    run = locally(own, inputs, outputs)
    loss, hit, of_hidden, *of_head = run(hidden, head, labels, weights, *fixed)
    return (jnp.sum(loss * weights), loss, hit), (of_hidden, of_head[0] if of_head else None)


def _chunk(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    axes: tuple[str, ...],
    teacher: tuple[jax.Array, float | None] | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One device's part of the vocabulary against some rows.

    Args:
      axes: of the mesh, that the vocabulary is split over.
      teacher: its logits [B, t, V'] and margin; None: the labels teach.

    Returns:
      Losses and hits [B, t] over the whole vocabulary, and the slope of Σ w · loss in this device's
      logits [B, t, V'], in hidden's type.
    """
    logits = linear(hidden, head, jnp.float32)
    size = logits.shape[-1]
    first = jax.lax.axis_index(axes) * size if axes else 0
    tokens = first + jnp.arange(size, dtype=jnp.int32)
    is_label = tokens == labels[..., None]
    # Whatever teaches, the loss is Σ p' (log p' − log q); a sum also where the label alone does,
    # because to look up one of a split axis every device would need all of it.
    wanted = is_label if teacher is None else taught(teacher[0], is_label, teacher[1], axes)
    label = jnp.where(is_label, logits, 0.0) if teacher is None else wanted * logits
    if teacher is not None:
        label -= jax.scipy.special.xlogy(wanted, wanted)
    label = jax.lax.psum(jnp.sum(label, axis=-1), axes)
    top = jax.lax.pmax(jnp.max(logits, axis=-1), axes)
    likeliest = jnp.min(jnp.where(logits == top[..., None], tokens, jnp.iinfo(jnp.int32).max), -1)
    powers = jnp.exp(logits - top[..., None])
    total = jax.lax.psum(jnp.sum(powers, axis=-1), axes)
    slope = (powers / total[..., None] - wanted) * weights[..., None]
    hit = jax.lax.pmin(likeliest, axes) == labels
    return jnp.log(total) + top - label, hit, slope.astype(hidden.dtype)
