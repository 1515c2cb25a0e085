"""The product of activations with a weight, and its gradient.

A float32 weight may be used in a narrower type; what its gradient sums is summed in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Below this many rows XLA:CPU is about twice as fast with the dot's output as [features, rows].
SKINNY_ROWS = 48
# What checkpoint policies know the results of `linear` by.
PRODUCT = "product"


def precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 means float32: unless told, accelerators use TF32 or bfloat16 passes."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(spec: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """An einsum of two arrays of one type, in `dtype`, summed in float32."""

    def plainly(a: jax.Array, b: jax.Array, out: Any = dtype) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision(a.dtype), preferred_element_type=out)

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        # With a bfloat16 result XLA:CPU multiplies in float32; with this one by the CPU's own
        # bfloat16 instructions, where it has them: three to seven times as fast.
        return plainly(a, b, jnp.float32).astype(dtype)

    if a.dtype == dtype == jnp.bfloat16:
        return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=plainly)
    return plainly(a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """x [..., in] · weight [out, in] → [..., out] in `dtype`, or x's where it is None.

    The weight is used in x's type. Its gradient comes in its own: that of a float32 weight is
    summed in float32, over rows as over devices, whatever type it was used in.
    """
    rows = x.size // x.shape[-1]
    out_dtype = dtype or x.dtype

    def plainly(x: jax.Array, weight: jax.Array) -> jax.Array:
        return product("...d,ed->...e", x, weight, out_dtype)

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        # Without the barrier XLA folds the transpose back into the dot and the gain is lost.
        out = product("rd,ed->er", x.reshape(rows, -1), weight, out_dtype)
        return jax.lax.optimization_barrier(out).T.reshape(*x.shape[:-1], -1)

    weight = weight.astype(x.dtype)
    if rows > SKINNY_ROWS:
        return plainly(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=plainly)


def _linear_forward(x: jax.Array, weight: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    # A policy that keeps products sees this name; the product itself is hidden in a custom VJP.
    return checkpoint_name(linear(x, weight, dtype), PRODUCT), (x, weight)


def _linear_backward(dtype: Any, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    gradient = gradient.astype(x.dtype)
    of_x = product("...e,ed->...d", gradient, weight.astype(x.dtype), x.dtype)
    return of_x, weight_gradient(gradient, x, weight.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def weight_gradient(gradient: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """gradient [..., out] and x [..., in] → that of the weight [out, in], summed in `dtype`."""
    rows = tuple(range(x.ndim - 1))
    return jnp.tensordot(
        gradient, x, (rows, rows), precision=precision(x.dtype), preferred_element_type=dtype
    )
