"""What a program needs on the devices it was compiled for: memory, work, exchange."""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from typing import Any

import jax

from d3d_jax import flops, hlo

GIB = 2**30
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"')
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments: held before the program runs.
      temporaries: held only while it runs.
      outputs: results, those included that take the place of arguments.
      aliased: of these, how many do.
      code: of the program itself.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    code: int

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.arguments + self.temporaries + self.outputs - self.aliased + self.code


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The collectives of one kind in a run of a program.

    Attributes:
      count: how many are executed.
      bytes: what they give, on one device.
      largest: bytes of the largest of them.
    """

    count: int
    bytes: int
    largest: int


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a program needs.

    Attributes:
      seconds: it took to compile.
      total: bytes on one device; of a program that does not fit, as far as the compiler got.
      memory: None where the compiler gave up because the program does not fit.
      flops: of one device, if all share the work alike (`d3d_jax.flops`: kernels of GPUs count 0).
      collectives: by kind.
      kernels: attention kernels in the program, one in a loop's body counting once.
    """

    seconds: float
    total: int
    memory: Memory | None
    flops: int
    collectives: dict[str, Exchange]
    kernels: int


def compile_and_measure(traced: Any, devices: int) -> Needs:
    """Compiles what was traced for the devices that its arguments lie on.

    Args:
      traced: `jax.jit(f).trace(...)`.
      devices: how many.
    """
    work = flops.count(traced.jaxpr) // devices
    lowered = traced.lower()
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (used := _USED.search(str(error))) is None:
            raise
        total = int(float(used[1]) * _UNITS[used[2]])
        return Needs(time.perf_counter() - began, total, None, work, {}, 0)
    seconds = time.perf_counter() - began
    memory, text = _memory(compiled), compiled.as_text()
    kernels = len(_KERNEL.findall(text))
    return Needs(seconds, memory.total, memory, work, _exchanges(text), kernels)


def _memory(compiled: Any) -> Memory:
    sizes = compiled.memory_analysis()
    return Memory(
        sizes.argument_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.generated_code_size_in_bytes,
    )


def _exchanges(text: str) -> dict[str, Exchange]:
    kinds: dict[str, list[hlo.Collective]] = collections.defaultdict(list)
    for one in hlo.find_collectives(text):
        kinds[one.kind].append(one)
    return {
        kind: Exchange(
            sum(one.times for one in found),
            sum(one.times * one.bytes for one in found),
            max(one.bytes for one in found),
        )
        for kind, found in sorted(kinds.items())
    }
