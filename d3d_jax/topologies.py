"""Devices of accelerators that are not here, for compiling what would run on them.

The compilers of TPUs (libtpu) and NVIDIA GPUs (jax's CUDA plugin) need no hardware. A topology is
named as jax names it, `v5p:4x4x4`, counted in chips; `h200:8` is one node of eight H200s. Nothing
here compiles or allocates.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, Literal

import jax
from jax.experimental import topologies

from d3d_jax.errors import D3DError

# GiB of HBM on a chip: the GB of TPUs are GiB, those of GPUs are not.
TPU_HBM = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
H200_HBM = 141e9 / 2**30
# bfloat16 FLOP/s of a device, dense, by `jax.Device.device_kind`, as the makers state them; a chip
# of tpu7x is two devices.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
_NODE = 8
# libtpu looks for the TPUs of this machine otherwise, which takes minutes and ends with warnings.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}

# What XLA asks of a GPU: those of an H200 SXM.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      platform: as `kernels.interval_attention.compiling_for` takes it.
      devices: they hold no arrays and run nothing.
      chips: how many chips they are; a chip may be two devices (v4, tpu7x).
      hbm: bytes of memory of a device.
    """

    name: str
    platform: Literal["tpu", "hopper"]
    devices: tuple[Any, ...]
    chips: int
    hbm: int


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """A topology's generation and the chips along its dimensions: `v5e:4x4` is ("v5e", (4, 4)).

    Raises:
      D3DError: another form, or a generation that is not known.
    """
    generations = (*TPU_HBM, "h200")
    match = re.fullmatch(r"(\w+):(\d{1,4}(?:x\d{1,4})*)", name)
    if match is None or match[1] not in generations:
        raise D3DError(
            f"a topology is a generation ({', '.join(generations)}) and its chips, such as "
            f"v5e:4x4, v5p:4x4x4 or h200:8; found {name!r}"
        )
    return match[1], tuple(int(n) for n in match[2].split("x"))


def find(name: str) -> Topology:
    """The devices of a topology.

    Call it before anything touches a device: this process then uses its own CPU only, and looks for
    no accelerator.

    Raises:
      D3DError: no such topology, or its compiler is not installed.
    """
    generation, chips = parse(name)
    jax.config.update("jax_platforms", "cpu")
    if generation == "h200":
        return _h200(name, chips)
    if not _installed("libtpu"):
        raise D3DError(
            "the TPU compiler is not installed: pip install 'd3d_jax[tpu]', or set it up beside "
            "the environment with make compile-tpu and name it in PYTHONPATH"
        )
    for variable, value in _NO_TPU_HERE.items():
        os.environ.setdefault(variable, value)
    devices = _describe(name, platform="tpu", topology_name=name)
    found = len({tuple(device.coords) for device in devices})
    hbm = TPU_HBM[generation] * 2**30 * found // len(devices)
    return Topology(name, "tpu", devices, found, hbm)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _h200(name: str, chips: tuple[int, ...]) -> Topology:
    count = math.prod(chips)
    if len(chips) != 1 or not 1 <= count <= _NODE:
        raise D3DError(f"a node has 1 to {_NODE} H200s, as in h200:8; found {name!r}")
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if not (_installed("jax_plugins") and any(map(_installed, plugins))):
        raise D3DError(
            "the CUDA compiler is not installed: pip install 'd3d_jax[cuda13]', or set it up "
            "beside the environment with make compile-gpu and name it in PYTHONPATH"
        )
    devices = _describe(
        name, platform="cuda", topology_name="", target_config=_H200, topology=f"1x1x{count}"
    )
    return Topology(name, "hopper", devices, count, int(H200_HBM * 2**30))


def _describe(name: str, **request: Any) -> tuple[Any, ...]:
    try:
        return tuple(topologies.get_topology_desc(**request).devices)
    except (RuntimeError, ValueError) as error:
        raise D3DError(f"topology {name} cannot be compiled for: {error}") from None
