"""The public interval attention op: argument checks and the choice of an implementation."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Implementation = Literal["reference", "xla", "tpu", "gpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "xla", "tpu", "gpu")
KERNEL_HEAD_DIMS = (64, 128)
_KERNEL_DTYPES = {"tpu": ("float32", "bfloat16"), "gpu": ("bfloat16",)}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What programs traced from here on are for: a platform, or one implementation by force."""

    platform: str | None = None
    implementation: Implementation | None = None


_HERE = _Choice()
_choice = contextvars.ContextVar("choice", default=_HERE)


@contextlib.contextmanager
def compiling_for(
    platform: Literal["cpu", "gpu", "hopper", "tpu"] | None = None,
    implementation: Implementation | None = None,
) -> Iterator[None]:
    """Chooses for programs traced inside: another platform than this process has, or by force.

    Only tracing looks at it; a function that jit has traced before stays as it is.

    Args:
      platform: what is compiled for; `hopper` is a GPU with wgmma.
      implementation: what every call that names none takes.
    """
    token = _choice.set(_Choice(platform, implementation))
    try:
        yield
    finally:
        _choice.reset(token)


def _platform() -> str:
    if (platform := _choice.get().platform) is not None:
        return platform
    backend = jax.default_backend()
    return "hopper" if backend == "gpu" and _is_hopper() else backend


@functools.cache
def _is_hopper() -> bool:
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    return str(capability).startswith("9.")


def available(
    implementation: Implementation, platform: str, dtype: Any, head_dim: int
) -> str | None:
    """None where an implementation can do the work on a platform, else why it cannot."""
    if implementation in ("reference", "xla"):
        return None
    needs = {"tpu": "tpu", "gpu": "hopper"}[implementation]
    if platform != needs:
        return f"it runs on {'a TPU' if needs == 'tpu' else 'a Hopper GPU'}, and this is {platform}"
    dtypes = _KERNEL_DTYPES[implementation]
    if jnp.dtype(dtype).name not in dtypes:
        return f"it takes {' and '.join(dtypes)}, not {jnp.dtype(dtype).name}"
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"it takes head dimensions 64 and 128, not {head_dim}"
    return None


@functools.cache
def _say(message: str) -> None:
    """Logged once a process, not at every layer of every program."""
    _log.info(message)


def choose(dtype: Any, head_dim: int) -> Implementation:
    """The implementation of a call that names none: the platform's kernel, or XLA."""
    if (forced := _choice.get().implementation) is not None:
        return forced
    platform = _platform()
    kernels: dict[str, Implementation] = {"tpu": "tpu", "hopper": "gpu"}
    kernel = kernels.get(platform)
    if kernel is None:
        _say(f"interval attention: xla, as there is no kernel for {platform}")
        return "xla"
    if (why := available(kernel, platform, dtype, head_dim)) is not None:
        _say(f"interval attention: xla and not the {kernel} kernel: {why}")
        return "xla"
    _say(f"interval attention: the {kernel} kernel")
    return kernel


def _load(implementation: Implementation) -> Callable[..., tuple[jax.Array, jax.Array]]:
    # Imported when used: Pallas takes half a second, and CPU programs need none of it.
    if implementation == "tpu":
        from d3d_jax.kernels.interval_attention import tpu

        return tpu.interval_attention
    if implementation == "gpu":
        from d3d_jax.kernels.interval_attention import gpu

        return gpu.interval_attention
    if implementation == "xla":
        from d3d_jax.kernels.interval_attention import xla

        return xla.interval_attention
    from d3d_jax.kernels.interval_attention import reference

    return reference.interval_attention


def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array | np.ndarray,
    hi: jax.Array | np.ndarray,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention in which row t sees the keys lo[t] <= j < hi[t].

    Args:
      q: [B, T, N, H] queries; scores are scaled by H ** -0.5 here.
      k, v: [B, K, S, H] keys and values, head-major as the cache stores them; N = G · K.
      lo, hi: [B, T] int32 key indices. A row with lo >= hi sees nothing; what lies beyond S does
        not exist.
      implementation: `tpu` or `gpu` (Pallas kernels), `xla` (tiled, everywhere), `reference` (dense
        mask); None takes the platform's kernel where it can do the work, and says so in the log.

    Returns:
      out [B, T, N, H] in q's dtype and lse [B, T, N] float32, the log-sum-exp of the visible
      scores. A row that sees nothing gives out = 0 and lse = −inf. Differentiable in q, k and v,
      through lse too.

    Raises:
      ValueError: shapes, head counts or dtypes that do not fit, key indices beyond S where they
        are known, or an implementation that cannot do the work here.
    """
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must have rank 4, got q {q.shape} and k {k.shape}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch or head dimension")
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} kv heads")
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound.shape != q.shape[:2] or bound.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 {q.shape[:2]}, got {bound.dtype} {bound.shape}")
        # Known only outside jit, where looking costs no wait for a device.
        if isinstance(bound, np.ndarray) and bound.size and bound.max() > k.shape[2]:
            raise ValueError(f"{name} reaches {bound.max()}, and there are {k.shape[2]} keys")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if implementation is None:
        implementation = choose(q.dtype, q.shape[3])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}"
        )
    why = available(implementation, _platform(), q.dtype, q.shape[3])
    if why is not None:
        raise ValueError(f"implementation {implementation!r} cannot do this: {why}")
    return _load(implementation)(q, k, v, lo, hi)
