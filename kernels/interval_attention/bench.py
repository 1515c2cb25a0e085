"""Benchmark of packed attention: `python -m d3d_jax.kernels.interval_attention.bench`.

Each named shape is timed with every implementation there is here and with what one would use
otherwise: `jax.nn.dot_product_attention` with a dense mask over the clean keys and the blocks (on a
GPU by cuDNN too), and on a TPU splash attention with a mask that never changes. A pass is the whole
packed attention, blocks included. Times are medians with interquartile range, all sides in one run;
FLOPs count visible (row, key) pairs alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from d3d_jax.files import write_json
from d3d_jax.kernels.interval_attention import api
from d3d_jax.kernels.interval_attention.bench_candidates import (
    Inputs,
    candidates,
    decode_forms,
    make_inputs,
)
from d3d_jax.kernels.interval_attention.bench_pairs import computed_pairs, visible_pairs
from d3d_jax.kernels.interval_attention.shapes import SHAPES, Shape

# Multiply-adds are two operations; scores and output take one product each, and the backward pass
# five in all.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
_WARM_UP = 2


def timed(step: Callable[[], Any], repeats: int, seconds: float) -> dict[str, float]:
    """Median and interquartile range in seconds; at least three runs, then until time is up."""
    for _ in range(_WARM_UP):
        jax.block_until_ready(step())
    runs, began = [], time.perf_counter()
    while len(runs) < repeats and (len(runs) < 3 or time.perf_counter() - began < seconds):
        clock = time.perf_counter()
        jax.block_until_ready(step())
        runs.append(time.perf_counter() - clock)
    low, middle, high = np.percentile(runs, [25, 50, 75])
    return {"median_s": float(middle), "iqr_s": float(high - low), "runs": len(runs)}


def roofs(dtype: Any) -> dict[str, float]:
    """FLOP/s of a large matrix product and bytes/s of a copy, measured here."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    product = jax.jit(functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST))
    copy = jax.jit(lambda x: x + 1)
    matmul = timed(lambda: product(a, a), 10, 5.0)["median_s"]
    moved = timed(lambda: copy(a), 20, 5.0)["median_s"]
    return {"matmul_flops": 2 * size**3 / matmul, "copy_bytes": 2 * a.nbytes / moved}


def measure(
    shape: Shape, name: str, run: Callable[..., jax.Array], inputs: Inputs, backward: bool
) -> dict[str, Any]:
    """Time, memory and achieved rate of one candidate."""
    arrays = tuple(getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    if backward:
        # With respect to every float input; in decoding there is no backward pass.
        weight = jnp.ones(inputs.q.shape, inputs.q.dtype)

        def step(q, k, v, lo, hi):
            clean = shape.clean_rows
            keys, values = (x[:, :clean].swapaxes(1, 2) for x in (k, v))
            return jnp.sum((run(q, k, v, keys, values, lo, hi) * weight).astype(jnp.float32))

        function = jax.jit(jax.grad(step, argnums=(0, 1, 2)))
        arrays = (inputs.q, inputs.k, inputs.v, inputs.lo, inputs.hi)
    else:
        function = jax.jit(run)
    compiled = function.lower(*arrays).compile()
    memory = compiled.memory_analysis()
    result = timed(lambda: compiled(*arrays), 20, 8.0)
    flops = FORWARD_FLOPS + (BACKWARD_FLOPS if backward else 0)
    work = flops * visible_pairs(shape) * shape.heads * shape.head_dim
    return result | {
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "visible_flops_per_s": work / result["median_s"],
    }


def bench(shape: Shape, dtype: Any, roof: dict[str, float]) -> dict[str, Any]:
    """All candidates of a shape, forward and in training with the backward pass too."""
    inputs = make_inputs(shape, dtype)
    # The least to move: every row once, and of the keys what is seen.
    filled = int(np.asarray(inputs.hi).max(axis=1).sum()) / shape.batch / shape.keys
    moved = 2 * inputs.q.nbytes + filled * (inputs.keys.nbytes + inputs.values.nbytes)
    record: dict[str, Any] = {"shape": dataclasses.asdict(shape), "least_bytes": moved}
    for mode in ("forward", "forward+backward") if shape.kind == "train" else ("forward",):
        record[mode] = {}
        for name, run in candidates(shape, dtype).items():
            result = measure(shape, name, run, inputs, mode != "forward")
            result["of_matmul_roof"] = result["visible_flops_per_s"] / roof["matmul_flops"]
            result["of_copy_roof"] = moved / result["median_s"] / roof["copy_bytes"]
            pairs = computed_pairs(shape, name, dtype)
            result["computed_over_visible"] = pairs / visible_pairs(shape)
            record[mode][name] = result
    if shape.kind == "decode" and not shape.blocks:
        record["other_forms_ms"] = {
            name: 1e3 * timed(functools.partial(jax.jit(run), *arrays), 20, 8.0)["median_s"]
            for name, (run, arrays) in decode_forms(shape, inputs).items()
        }
    return record


def show(record: dict[str, Any], console: Console) -> None:
    """One shape as a table."""
    for mode in ("forward", "forward+backward"):
        if mode not in record:
            continue
        table = Table(title=f"{record['shape']['name']}, {mode}")
        for column in ("", "ms", "± iqr", "GFLOP/s", "of matmul", "of copy", "pairs", "MB"):
            table.add_column(column, justify="right" if column else "left")
        for name, r in record[mode].items():
            table.add_row(
                name,
                f"{1e3 * r['median_s']:.3g}",
                f"{1e3 * r['iqr_s']:.2g}",
                f"{r['visible_flops_per_s'] / 1e9:.4g}",
                f"{r['of_matmul_roof']:.1%}",
                f"{r['of_copy_roof']:.1%}",
                f"{r['computed_over_visible']:.2f} ×",
                f"{(r['temporary_bytes'] or 0) / 1e6:.4g}",
            )
        console.print(table)
    for name, milliseconds in record.get("other_forms_ms", {}).items():
        console.print(f"  {name}: {milliseconds:.3g} ms")


def main() -> None:
    """Runs the shapes asked for and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["smollm2"], help="parts of their names")
    parser.add_argument("--dtype", default=None, help="float32 on CPU, else bfloat16")
    parser.add_argument("--out", type=Path, default=Path("bench-attention.json"))
    args = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype(args.dtype or ("float32" if on_cpu else "bfloat16"))
    chosen = [shape for shape in SHAPES if any(part in shape.name for part in args.shapes)]
    if not chosen:
        parser.error(f"no shape is named like {' '.join(args.shapes)}")
    console, roof = Console(highlight=False), roofs(dtype)
    result: dict[str, Any] = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "platform": api._platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "dtype": dtype.name,
        "roofs": roof,
        "shapes": [],
    }
    for shape in chosen:
        result["shapes"].append(bench(shape, dtype, roof))
        show(result["shapes"][-1], console)
        write_json(args.out, result)


if __name__ == "__main__":
    main()
