"""What the attention benchmark times: the implementations here, and other ways to do the same.

The inputs of a shape are here too. Timing is in `bench`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.kernels.interval_attention import api
from d3d_jax.kernels.interval_attention.shapes import BLOCK, Shape, intervals
from d3d_jax.kernels.packed_attention import packed_attention


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one shape: q, k, v of all rows, the clean keys and values, lo and hi."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    keys: jax.Array
    values: jax.Array
    lo: jax.Array
    hi: jax.Array


def make_inputs(shape: Shape, dtype: Any) -> Inputs:
    """Random arrays; in training the clean keys are the clean rows' own."""
    rng = np.random.default_rng(0)

    def draw(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32), dtype)

    q = draw(shape.batch, shape.rows, shape.heads, shape.head_dim)
    k, v = (draw(shape.batch, shape.rows, shape.kv_heads, shape.head_dim) for _ in range(2))
    lo, hi = map(jnp.asarray, intervals(shape))
    if shape.kind == "train":
        keys, values = (x[:, : shape.clean_rows].swapaxes(1, 2) for x in (k, v))
    else:
        size = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
        keys, values = draw(*size), draw(*size)
    return Inputs(q, k, v, keys, values, lo, hi)


def ours(shape: Shape, implementation: api.Implementation) -> Callable[..., jax.Array]:
    """Packed attention with one implementation of its interval part."""

    def run(q, k, v, keys, values, lo, hi):
        return packed_attention(
            q,
            k,
            v,
            keys,
            values,
            lo,
            hi,
            clean_len=shape.clean_rows,
            num_blocks=shape.blocks,
            in_block="bidirectional",
            implementation=implementation,
        )

    return run


def dense_mask(shape: Shape, lo: Any, hi: Any) -> jax.Array:
    """[B, 1, T, S + A · W]: who sees which clean key and which row of a block."""
    index = jnp.arange(shape.keys)
    clean = (index >= lo[..., None]) & (index < hi[..., None])
    block = (jnp.arange(shape.rows) - shape.clean_rows) // BLOCK
    block = jnp.where(jnp.arange(shape.rows) < shape.clean_rows, -1, block)
    own = (block[:, None] == block[None, shape.clean_rows :]) & (block[:, None] >= 0)
    own = jnp.broadcast_to(own, (shape.batch, *own.shape))
    return jnp.concatenate([clean, own], axis=2)[:, None]


def dense(shape: Shape, implementation: str | None) -> Callable[..., jax.Array]:
    """`jax.nn.dot_product_attention` over clean keys and block rows side by side."""

    def run(q, k, v, keys, values, lo, hi):
        clean = shape.clean_rows
        k = jnp.concatenate([keys.swapaxes(1, 2), k[:, clean:]], axis=1)
        v = jnp.concatenate([values.swapaxes(1, 2), v[:, clean:]], axis=1)
        mask = dense_mask(shape, lo, hi)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)  # type: ignore[arg-type]

    return run


def splash_block(shape: Shape) -> int | None:
    """Rows and keys of a block of splash attention, None where it cannot do the shape's work."""
    block = math.gcd(512, shape.rows, shape.keys + shape.blocks * BLOCK)
    fits = block >= 128 and shape.head_dim % 128 == 0 and shape.batch == 1
    return block if fits else None


@functools.cache
def splash(shape: Shape, interpret: bool = False) -> Callable[..., jax.Array]:
    """Pallas' splash attention for TPUs over clean keys and block rows side by side.

    A yardstick alone: the mask is fixed when a program is traced, and the host works through all of
    it; documents and anchors are others in every batch.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.NumpyMask(np.asarray(dense_mask(shape, *intervals(shape)))[0, 0])
    block = splash_block(shape)
    names = [field.name for field in dataclasses.fields(kernel.BlockSizes)]
    sizes: dict[str, Any] = {name: block for name in names if name.startswith("block")}
    attend = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * shape.heads),
        block_sizes=kernel.BlockSizes(**sizes),
        interpret=interpret,
    )

    def run(q, k, v, keys, values, lo, hi):
        del lo, hi
        clean = shape.clean_rows
        k, v = (x[0, clean:].swapaxes(0, 1) for x in (k, v))
        k, v = (jnp.concatenate(x, axis=1) for x in ((keys[0], k), (values[0], v)))
        q = q[0].swapaxes(0, 1) * shape.head_dim**-0.5
        return jnp.asarray(attend(q, k, v)).swapaxes(0, 1)[None]

    return run


def candidates(shape: Shape, dtype: Any) -> dict[str, Callable[..., jax.Array]]:
    """By name, everything that can do the shape's work here."""
    here = api._platform()
    found = {
        name: ours(shape, name)
        for name in api.IMPLEMENTATIONS
        if api.available(name, here, dtype, shape.head_dim) is None
    }
    found["dense mask"] = dense(shape, None)
    if here in ("gpu", "hopper") and jnp.dtype(dtype).itemsize == 2:
        found["dense mask, cudnn"] = dense(shape, "cudnn")
    if here == "tpu" and splash_block(shape) is not None:
        found["splash"] = splash(shape)
    return found


def decode_forms(shape: Shape, inputs: Inputs) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Other ways to write causal attention of a few rows over a cache, each with its own layout."""
    group = shape.heads // shape.kv_heads
    scale = shape.head_dim**-0.5
    q, lo, hi = inputs.q, inputs.lo, inputs.hi
    grouped = q.reshape(*q.shape[:2], shape.kv_heads, group, shape.head_dim)

    def attend(scores: str, output: str, mask: str) -> Callable[..., jax.Array]:
        def run(q, k, v, lo, hi):
            index = jnp.arange(shape.keys)
            visible = (index >= lo[..., None]) & (index < hi[..., None])
            s = jnp.einsum(scores, q, k, precision="highest") * scale
            visible = jnp.expand_dims(visible, [i for i, a in enumerate(mask) if a not in "bts"])
            weights = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
            return jnp.einsum(output, weights, v, precision="highest")

        return run

    seq = [x.swapaxes(1, 2) for x in (inputs.keys, inputs.values)]  # [B, S, K, H]
    turned = inputs.keys.swapaxes(2, 3)  # [B, K, H, S]
    repeated = [jnp.repeat(x, group, axis=1) for x in (inputs.keys, inputs.values)]
    rows = [q, *repeated, lo, hi]
    return {
        "keys [B, S, K, H]": (
            attend("btkgh,bskh->btkgs", "btkgs,bskh->btkgh", "btkgs"),
            [grouped, *seq, lo, hi],
        ),
        "keys [B, K, S, H]": (
            attend("btkgh,bksh->btkgs", "btkgs,bksh->btkgh", "btkgs"),
            [grouped, inputs.keys, inputs.values, lo, hi],
        ),
        "keys [B, K, H, S]": (
            attend("btkgh,bkhs->btkgs", "btkgs,bksh->btkgh", "btkgs"),
            [grouped, turned, inputs.values, lo, hi],
        ),
        "heads repeated": (attend("btnh,bnsh->btns", "btns,bnsh->btnh", "btns"), rows),
    }
