"""How much of the machine's speed a training step reaches: `python -m d3d_jax.train.bench_step`.

Times the step of a training config on a drafter with random weights, and float32 matrix products
of the shapes that the step is made of, in turns, and prints one JSON object. The share that the
step reaches counts its products with weights alone; attention, whose whole tiles are in
`flops.counted`, takes time and counts nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax import flops
from d3d_jax.config import DrafterConfig
from d3d_jax.drafter import Drafter
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.presets import preset
from d3d_jax.train import step as steps
from d3d_jax.train.config import TrainConfig, load_config
from d3d_jax.train.packing import build_row


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="demo", help="a shipped training config or a file")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    print(json.dumps(measure(options), indent=2))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times both sides in turns; warm-up is not counted."""
    config = dataclasses.replace(load_config(options.config), compute="float32")
    drafter, params = _drafter(options)
    step, state, rest = _prepare(drafter, params, config)
    counted = flops.count(step.trace(state, *rest, 1).jaxpr)
    rate, layer, head = _products(drafter, config, params)
    products = layer + head
    # Forward, and backward both ways; of a frozen head one way.
    work = (3 * options.layers * layer + 2 * head) * config.micro_batches
    numbers = itertools.count(1)

    def train() -> None:
        nonlocal state
        state, metrics = step(state, *rest, next(numbers))
        jax.block_until_ready((state, metrics))

    sides = {"step": train, "matrix_products": rate}
    times = _alternate(sides, options.repeat)
    reached = [work / a / (products / b) for a, b in zip(*times.values(), strict=True)]
    return {
        "config": dataclasses.asdict(config),
        "drafter": {"layers": options.layers, "block_size": options.block_size},
        "flops": {"step": work, "counted": counted, "matrix_products": products},
        "seconds": {name: _spread(found) for name, found in times.items()},
        "gflops_per_second": {
            "step": round(work / statistics.median(times["step"]) / 1e9, 1),
            "matrix_products": round(
                products / statistics.median(times["matrix_products"]) / 1e9, 1
            ),
        },
        "share_of_matrix_products": _spread(reached),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _drafter(options: argparse.Namespace) -> tuple[Drafter, dict[str, Any]]:
    """Random weights, with the target's embedding and head shared as `d3d demo` does."""
    model = dataclasses.replace(preset(options.model), num_hidden_layers=options.layers)
    section = DrafterConfig(
        block_size=options.block_size,
        mask_token_id=model.vocab_size - 1,
        label_shift=1,
        in_block="bidirectional",
        target=options.model,
        tokenizer_fingerprint="",
        template_fingerprint="",
        source_layers=tuple(range(options.layers)),
        shares=("embed", "head"),
        draft_vocab_size=options.draft_vocab,
    )
    params = jax.device_get(decoder.init_params(model, jax.random.key(0)))
    params["mask"] = params["embed"][section.mask_token_id].copy()
    params["draft_vocab"] = np.arange(options.draft_vocab, dtype=np.int32)
    params["head"] = params["embed"][: options.draft_vocab].copy()
    return Drafter(model, section), params


def _prepare(
    drafter: Drafter, params: dict[str, Any], config: TrainConfig
) -> tuple[Any, Any, tuple[Any, ...]]:
    """The jitted step of one device, its state and its other arguments."""
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:1]), drafter.model)
    optimizer = steps.make_optimizer(config)
    frozen, trained = steps.split(drafter, params)
    shardings = steps.state_shardings(optimizer, trained, mesh)
    state = steps.initial_state(optimizer, trained, shardings)
    frozen = steps.place(frozen, parameters.shardings(frozen, mesh))
    batch = jax.device_put(_batch(drafter, config))
    step = steps.make_step(drafter, config, optimizer, shardings)
    index = jnp.asarray(steps.draft_index(drafter, params))
    return step, state, (frozen, index, batch, jnp.zeros((1,), jnp.int32))


def _batch(drafter: Drafter, config: TrainConfig) -> dict[str, np.ndarray]:
    """Full rows: as many documents as their anchors allow, of equal length."""
    documents = max(config.max_blocks // config.anchors_per_document, 1)
    size = config.max_tokens // documents
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(config.batch_rows):
        tokens = rng.integers(0, drafter.drafter.draft_vocab_size, (documents, size))
        anchors = np.linspace(size // 4, size - 2, config.anchors_per_document).astype(np.int32)
        row = [(ids.astype(np.int32), size // 4, anchors) for ids in tokens]
        rows.append(build_row(row, config.max_tokens, config.max_blocks))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _products(
    drafter: Drafter, config: TrainConfig, params: dict[str, Any]
) -> tuple[Callable[[], None], int, int]:
    """Products of a micro-batch's rows with a layer's matrices and the head; FLOPs of both."""
    blocks = config.max_blocks * drafter.drafter.block_size
    rows = config.batch_rows // config.micro_batches * (config.max_tokens + blocks)
    matrices = [leaf[0] for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim == 3]
    pairs = [
        (jax.random.normal(jax.random.key(i), (rows, w.shape[1])), jnp.asarray(w))
        for i, w in enumerate([*matrices, params["head"]])
    ]

    @jax.jit
    def multiply(pairs: Any) -> Any:
        return [x @ w.T for x, w in pairs]

    *layer, head = (2 * rows * w.size for _, w in pairs)
    return lambda: jax.block_until_ready(multiply(pairs)), sum(layer), head


def _alternate(sides: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    for run in sides.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "iqr": round(high - low, 4)}


if __name__ == "__main__":
    main()
