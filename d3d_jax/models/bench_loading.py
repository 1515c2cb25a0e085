"""Benchmark of loading: `python -m d3d_jax.models.bench_loading --out FILE.json [--dir FOLDER]`.

Writes a random Qwen3 folder of about 1 GB, then measures in turns how fast its files are read one
after the other and how fast `load_params` puts them onto devices, without and with the page cache.
A fresh process each measures the host memory that loading takes beside the arrays. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import Mesh

from d3d_jax.files import write_json
from d3d_jax.models import checkpoint, checkpoint_writing, parameters, sharding
from d3d_jax.presets import preset

CONFIG = dataclasses.replace(preset("Qwen/Qwen3-1.7B"), num_hidden_layers=8, vocab_size=32768)
TINY = dataclasses.replace(CONFIG, num_hidden_layers=1, vocab_size=64, intermediate_size=64)
SHARD_BYTES = 256 * 2**20
MESH_DEVICES = 8
READ = "sequential_read"


def write_model(folder: Path, config: Any) -> None:
    """A folder of random bits that are finite bfloat16 numbers: no disk can compress them."""
    rng = np.random.default_rng(0)

    def make(row: parameters.Parameter, _: Any) -> np.ndarray:
        shape = parameters.shape(row, config)
        return rng.integers(0, 0x7F80, shape, np.uint16).view(ml_dtypes.bfloat16)

    layers = tuple(range(config.num_hidden_layers))
    params = parameters.build(parameters.stored(config), layers, False, make)
    checkpoint_writing.save_model(folder, config, params, max_shard_bytes=SHARD_BYTES)


def drop_cache(files: Sequence[Path]) -> float:
    """Asks the kernel to forget the files; returns the share of their pages it still holds."""
    # A mapping that lives on would keep its pages.
    gc.collect()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    flags = np.concatenate([_resident(path) for path in files])
    return float(flags.mean())


def _resident(path: Path) -> np.ndarray:
    """Whether each page of a file is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        content = np.frombuffer(pages, np.uint8)
        flags = np.zeros(-(-content.size // mmap.PAGESIZE), np.uint8)
        size = ctypes.c_size_t(content.size)
        address, into = map(ctypes.c_void_p, (content.ctypes.data, flags.ctypes.data))
        failed = ctypes.CDLL(None).mincore(address, size, into)
        del content  # the mapping cannot be closed while an array points into it
    if failed:
        raise OSError(f"mincore of {path} failed")
    return flags & 1


def read_files(files: Sequence[Path]) -> None:
    """The yardstick: every byte once, in order, by one thread."""
    buffer = bytearray(8 * 2**20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load(folder: Path, devices: int, stacked: bool) -> Any:
    """The parameters on the first devices, all transfers done."""
    return jax.block_until_ready(
        checkpoint.load_params(folder, CONFIG, stacked=stacked, mesh=_mesh(devices))
    )


def _mesh(devices: int) -> Mesh:
    mesh = sharding.make_mesh(jax.devices()[:devices], tensor=devices)
    return sharding.model_mesh(mesh, CONFIG)


def rates(folder: Path, rounds: int) -> dict[str, Any]:
    """GB/s of reading and of each way of loading, in turns, and their ratio in each turn."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    several = 1 << (min(len(jax.devices()), MESH_DEVICES).bit_length() - 1)
    ways: dict[str, Callable[[], Any]] = {
        READ: lambda: read_files(files),
        "one_device": lambda: load(folder, 1, stacked=False),
        f"tensor_{several}": lambda: load(folder, several, stacked=False),
        "one_device_stacked": lambda: load(folder, 1, stacked=True),
    }
    load(folder, several, stacked=True)  # imports and the backend's start
    measured: dict[str, dict[str, list[float]]] = {
        state: {name: [] for name in ways} for state in ("cold", "warm")
    }
    kept = 0.0
    for _ in range(rounds):
        for state, runs in measured.items():
            for name, way in ways.items():
                if state == "cold":
                    kept = max(kept, drop_cache(files))
                began = time.perf_counter()
                loaded = way()
                runs[name].append(size / (time.perf_counter() - began) / 1e9)
                del loaded
    figures: dict[str, Any] = {"cached_share_after_drop": kept, "drop_worked": kept < 0.01}
    for state, runs in measured.items():
        figures[state] = {name: {"gb_per_s": _spread(runs[name])} for name in ways}
        for name in ways:
            if name != READ:
                ratios = np.divide(runs[name], runs[READ])
                figures[state][name]["of_sequential"] = _spread(ratios)
    return figures


def _spread(values: Any) -> dict[str, Any]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    runs = [round(float(value), 3) for value in values]
    return {"median": round(float(middle), 3), "iqr": round(float(high - low), 3), "runs": runs}


def memory(folder: Path, devices: int, stacked: bool) -> dict[str, Any]:
    """Peak host memory of loading onto CPU devices, in a fresh process."""
    command = [sys.executable, "-m", "d3d_jax.models.bench_loading", "--memory-of", str(folder)]
    command += ["--devices", str(devices), *(["--stacked"] if stacked else [])]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def print_memory(folder: Path, devices: int, stacked: bool) -> None:
    """The child of `memory`: the arrays are in host memory too, and are subtracted.

    `largest_part` is what one device holds of a leaf. The kernel's counters may lag by some pages.
    """
    tiny, mesh = folder.with_name("tiny"), _mesh(devices)
    jax.block_until_ready(checkpoint.load_params(tiny, TINY, stacked=stacked, mesh=mesh))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is held now
    before = _status("VmRSS")
    params = load(folder, devices, stacked)
    peak = _status("VmHWM") - before
    # Parts that devices share are counted once.
    parts = {
        part.data.unsafe_buffer_pointer(): part.data.nbytes
        for leaf in jax.tree.leaves(params)
        for part in leaf.addressable_shards
    }
    arrays = sum(parts.values())
    figures = {"beyond_arrays": peak - arrays, "peak": peak, "arrays": arrays}
    print(json.dumps(figures | {"largest_part": max(parts.values())}))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def disk(folder: Path) -> dict[str, Any]:
    """The file system that holds a folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, at, kind, options, *_ = max(holding, key=lambda mount: len(mount[1]))
    usage = shutil.disk_usage(folder)
    free = round(usage.free / 1e9, 1)
    return {"device": device, "mount": at, "kind": kind, "options": options, "free_gb": free}


def run(where: Path, rounds: int) -> dict[str, Any]:
    """All figures, on a temporary folder inside `where`."""
    with tempfile.TemporaryDirectory(prefix="bench-loading-", dir=where) as temporary:
        folder = Path(temporary) / "model"
        write_model(folder, CONFIG)
        write_model(folder.with_name("tiny"), TINY)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        result: dict[str, Any] = {
            "model": dataclasses.asdict(CONFIG),
            "bytes": sum(sizes),
            "files": len(sizes),
            "largest_file": max(sizes),
            "rounds": rounds,
            "load_average_at_start": os.getloadavg()[0],
            **rates(folder, rounds),
        }
        result["host_memory_bytes"] = {
            "one_device": memory(folder, 1, stacked=False),
            f"tensor_{MESH_DEVICES}": memory(folder, MESH_DEVICES, stacked=False),
            "one_device_stacked": memory(folder, 1, stacked=True),
        }
        result["disk"] = disk(folder)
    return result | {
        "jax": jax.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": jax.devices()[0].platform,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Runs everything and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-loading.json"))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stacked", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", MESH_DEVICES)
    if args.memory_of is not None:
        print_memory(args.memory_of, args.devices, args.stacked)
        return
    result = run(args.dir, args.rounds)
    write_json(args.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
