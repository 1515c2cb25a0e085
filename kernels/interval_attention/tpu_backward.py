"""The backward kernels of interval attention for TPUs: dq, and dk with dv.

Both recompute a tile's weights from lse and hold scores transposed, [keys, rows]: what belongs to a
row (lo, hi, lse, delta) is then a vector along lanes, as it lies in HBM. dq runs over the work list
of the forward pass; dk and dv over the list whose owners are key tiles, since rows come in any
order and those that see a key tile are not contiguous.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_jax.kernels.interval_attention.tiles import FIRST, LAST, work_list
from d3d_jax.kernels.interval_attention.tpu_common import (
    LANES,
    LOG2E,
    MASKED,
    Geometry,
    Specs,
    Step,
    Window,
    call,
    dot,
    interval_tiles,
    limits,
    load_keys,
    load_rows,
    split_refs,
    stored_keys,
    to_tiles,
)


def _lanes(ref, heads) -> jax.Array:
    """Values of some rows, one head after the other, of a [1, lanes] block."""
    return jnp.concatenate([ref[:, rows] for rows in heads], axis=1)


def _visible(lo_ref, hi_ref, step: Step, window: Window, geometry: Geometry) -> jax.Array:
    """Which row of a window sees which key, [keys, R]; where a head's rows fill lanes, computed for
    one head and repeated."""
    once = window.rows % LANES == 0
    rows = pl.ds(window.row, window.rows) if once else pl.ds(0, geometry.tile_rows)
    lo, hi = lo_ref[:, rows], hi_ref[:, rows]
    key = jax.lax.broadcasted_iota(jnp.int32, (window.keys, lo.shape[1]), 0)
    key += step.key(geometry, window)
    visible = (key >= lo) & (key < hi)
    return jnp.concatenate([visible] * geometry.group, axis=1) if once else visible


def _weights(refs, step: Step, window: Window, geometry: Geometry):
    """Weights and score gradients of a window, [keys, R] float32, and its q, k and dO."""
    q_ref, k_ref, v_ref, d_out_ref, lo_ref, hi_ref, lse_ref, delta_ref = refs
    heads, features = window.heads(geometry), (geometry.feature_axis, 1)
    q, d_out = (load_rows(ref, window) for ref in (q_ref, d_out_ref))
    k, v = (load_keys(ref, geometry, step, window) for ref in (k_ref, v_ref))
    scores = dot(k, q, features) * geometry.score_scale
    if window.masked:
        visible = _visible(lo_ref, hi_ref, step, window, geometry)
        scores = jnp.where(visible, scores, MASKED)
    weights = jnp.exp2(scores - _lanes(lse_ref, heads))
    d_weights = dot(v, d_out, features)
    return weights, weights * (d_weights - _lanes(delta_ref, heads)), q, k, d_out


def _dq_kernel(*refs, geometry: Geometry):
    step, (*inputs, dq_ref, dq_sum) = split_refs(refs, geometry)

    @step.when(FIRST)
    def _():
        dq_sum[...] = jnp.zeros_like(dq_sum)

    def accumulate(window: Window):
        _, d_scores, _, k, _ = _weights(inputs, step, window, geometry)
        dq = dot(k, d_scores.astype(k.dtype), (1 - geometry.feature_axis, 0))
        heads = window.heads(geometry)
        for rows, part in zip(heads, jnp.split(dq, len(heads), axis=1), strict=True):
            dq_sum[:, rows] += part

    step.each_window(geometry, accumulate)

    @step.when(LAST)
    def _():
        dq = dq_sum[...].T * geometry.dim**-0.5
        dq_ref[...] = dq.reshape(dq_ref.shape).astype(dq_ref.dtype)


def _dkv_kernel(*refs, geometry: Geometry):
    step, (*inputs, dk_ref, dv_ref, dk_sum, dv_sum) = split_refs(refs, geometry)

    @step.when(FIRST)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    def accumulate(window: Window):
        weights, d_scores, q, _, d_out = _weights(inputs, step, window, geometry)
        keys = pl.ds(window.key, window.keys)
        dk_sum[keys] += dot(d_scores.astype(q.dtype), q, (1, 0))
        dv_sum[keys] += dot(weights.astype(q.dtype), d_out, (1, 0))

    step.each_window(geometry, accumulate)

    @step.when(LAST)
    def _():
        dk_ref[...] = (dk_sum[...] * geometry.dim**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)


def backward(
    geometry: Geometry,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q [B, N, T, H], k and v [B, K, S, H].

    Args:
      out, d_out: like q.
      lse, d_lse: [B, K, Q, 1, lanes] float32, in tiles; lo, hi: [B, T].
    """
    lo_tiles, hi_tiles = interval_tiles(lo, geometry), interval_tiles(hi, geometry)
    seeing = lo_tiles < hi_tiles
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # ∂lse/∂scores are the weights themselves, so its cotangent only shifts the row delta.
    delta = jnp.where(seeing, to_tiles(delta, geometry) - d_lse, 0.0)
    # exp2(score − inf) = 0: a row that sees nothing has no weight in full tiles either.
    lse = jnp.where(seeing, lse * LOG2E, jnp.inf)
    bounds, scalars = geometry.bounds(lo, hi), limits(lo, hi, geometry)
    specs = Specs(geometry)
    inputs = [
        (q, specs.rows),
        (stored_keys(k, geometry), specs.keys),
        (stored_keys(v, geometry), specs.keys),
        (d_out, specs.rows),
        (lo_tiles, specs.interval),
        (hi_tiles, specs.interval),
        (lse, specs.lanes),
        (delta, specs.lanes),
    ]
    (dq,) = call(
        functools.partial(_dq_kernel, geometry=geometry),
        geometry,
        work_list(bounds, geometry.key_tiles),
        scalars,
        inputs,
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), specs.rows)],
        [pltpu.VMEM((geometry.dim, geometry.tile_rows), jnp.float32)],
        name="interval_attention_dq",
        dots=3,
    )
    key_sums = pltpu.VMEM((geometry.key_tile, geometry.dim), jnp.float32)
    dk, dv = call(
        functools.partial(_dkv_kernel, geometry=geometry),
        geometry,
        work_list(bounds, geometry.key_tiles, by_keys=True),
        scalars,
        inputs,
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), specs.key_gradients) for x in (k, v)],
        [key_sums, key_sums],
        name="interval_attention_dkv",
        dots=4,
    )
    return dq, dk, dv
