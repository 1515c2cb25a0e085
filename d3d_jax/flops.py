"""Floating-point operations that a traced function asks for.

XLA's own count takes the body of a loop once, however often it runs, which for a scan over layers
is off by their number; here loops count as often as they run. Nothing here compiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def count(jaxpr: Any) -> int:
    """FLOPs of all devices together: of matrix products, and what kernels say of themselves.

    A kernel without an estimate counts nothing (those of GPUs have none), a loop of unknown length
    as one turn, a conditional as its costlier branch. What is recomputed counts again.

    Args:
      jaxpr: of `jax.jit(f).trace(...)`, open or closed.
    """
    return sum(_of(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
    if name == "pallas_call":
        return params["cost_estimate"].flops if params.get("cost_estimate") else 0
    inner = [count(jaxpr) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        return params["mesh"].size * sum(inner)
    return sum(inner)


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(part, "jaxpr", part), "eqns"):
                yield part
