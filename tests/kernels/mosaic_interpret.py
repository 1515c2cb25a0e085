"""Mosaic GPU kernels on the CPU: interpret mode of jax 0.10.2 (private there) and of 0.11.

Interpret mode is taught the wgmma operands it lacks: a left operand in registers (both versions)
and a transposed right operand (0.10.2).
"""
# Private interfaces that differ between those versions.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalOperand=false

from __future__ import annotations

import contextlib
import threading

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params
from jax._src.state.types import TransposeTransform
from jax.interpreters import mlir

# A layout says which thread holds what; interpret mode of 0.10.2 does not know that.
mlir.register_lowering(core.layout_cast_p, lambda ctx, x, **layout: [x], platform="cpu")


def _read_010(memory, call, key, transforms):
    indexers = tuple(t for t in transforms if not isinstance(t, TransposeTransform))
    _, value = gpu_callbacks._get(
        *(call[name] for name in ("token", "device_id", "grid_point_coords", "thread_id")),
        allocation_key_as_array=key,
        transforms=jax.tree.map(int, indexers),
    )
    return value.T if len(indexers) < len(transforms) else value


def _read_011(memory, call, key, transforms):
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    transforms = gpu_callbacks._remove_noop_transforms(transforms)
    where = memory.access(key, jax.tree.map(int, transforms))
    thread = call["thread"]
    value, _, _ = memory.get_buffer_content(key, where, thread, logging_info=None)
    # wgmma reads through the async proxy, as TMA writes. What it read, it has read before it ends.
    clock = memory.get_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())
    gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock, key, where)
    with memory.lock:
        memory.clocks[thread].update(clock)
    return value


def _wgmma(**call):
    """acc += a @ b in float32. Reads of shared memory take part in race detection."""
    memory = gpu_callbacks._get_shared_memory()
    acc = gpu_callbacks.HostAllocationKey.from_array(call["acc_allocation_key_as_array"])
    if "thread" in call:
        read, thread, where = _read_011, call["thread"], memory.access(acc, ())
    else:
        thread = memory.get_global_thread_id(int(call["device_id"]), int(call["thread_id"]))
        read, where = _read_010, ()

    def operand(name):
        value = call[f"{name}_allocation_key_as_array"]
        if value.dtype == np.int32:  # A key; values of an operand in registers are floats.
            value = read(memory, call, value, call[f"{name}_transforms"])
        return np.asarray(value, np.float32)

    old, _, _ = memory.get_buffer_content(acc, where, thread, logging_info=None)
    new = old + operand("a") @ operand("b")
    memory.store_buffer_content(acc, where, new, thread, logging_info=None)
    return call["token"]


# Compiling takes longer than running.
_FAST = {"xla_backend_optimization_level": 0}
_compiled = {}
_compiling = threading.Lock()


def _run_jaxpr(jaxpr, consts, *args):
    """As in 0.10.2, but compiled once: not for every thread of every grid point."""
    with _compiling:
        if jaxpr not in _compiled:
            run = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
            _compiled[jaxpr] = run.lower(consts, *args).compile(_FAST)
    _compiled[jaxpr](consts, *args)


@contextlib.contextmanager
def interpret(monkeypatch):
    """Runs Mosaic GPU kernels traced inside on the CPU, and fails on data races.

    Shared memory starts as NaN, and reads past the end of an array give NaN.
    """
    monkeypatch.setattr(gpu_callbacks, "wgmma", _wgmma)
    if jax.__version_info__ < (0, 11):
        monkeypatch.setattr(thread_map, "_run_jaxpr", _run_jaxpr)
    mode = params.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with params.force_gpu_interpret_mode(mode):
        yield
    assert not gpu_callbacks.get_races().races_found
