"""Benchmark of batches: `python -m d3d_jax.infer.bench_batch --out FILE.json`.

Throughput of every mode and miss policy at 1 … 16 concurrent requests with one drafter or several
(of both label shifts, say), what a row that misses costs the others, and the host's own time per
round, in one run on this machine. Prompts are the demo's held-out ones; each run decodes all of
them, a freed slot going to the next.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

import d3d_jax
from d3d_jax import acceptance
from d3d_jax.config import DecodeConfig
from d3d_jax.files import write_json
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.bench_steps import host_alone
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import load_drafter
from d3d_jax.infer.measure import Spread, timed
from d3d_jax.infer.model import Model, load_model
from d3d_jax.infer.placement import role_meshes
from d3d_jax.infer.role import pieces
from d3d_jax.sampling import SamplingParams

WAYS = {
    "plain": DecodeConfig("plain"),
    "sync": DecodeConfig("sync"),
    "async, stall": DecodeConfig("async", miss="stall"),
    "async, reuse": DecodeConfig("async", miss="reuse"),
}


def throughput(
    model: Model,
    drafter: DrafterRole,
    prompts: list[list[int]],
    concurrency: list[int],
    tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Tokens per second of whole runs, prefill included; the ways take turns."""
    params = [SamplingParams(max_new_tokens=tokens)] * len(prompts)
    table = []
    for slots in concurrency:
        decoders = {
            way: Decoder(model.target, drafter, config, slots) for way, config in WAYS.items()
        }
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        said = {way: decoder.generate(prompts, params) for way, decoder in decoders.items()}
        for _ in range(repeats):
            for way, decoder in decoders.items():
                total = sum(len(reply.token_ids) for reply in decoder.generate(prompts, params))
                rates[way].append(total / (decoder.timing.prefill + decoder.timing.decode))
        for way, replies in said.items():
            rounds, chances = (sum(getattr(r, n) for r in replies) for n in ("rounds", "chances"))
            spread = Spread.of(rates[way])
            table.append(
                {
                    "concurrency": slots,
                    "way": way,
                    "label_shift": drafter.drafter.label_shift,
                    "tokens_per_second": spread.median,
                    "iqr": spread.iqr,
                    "speedup": spread.median / Spread.of(rates["plain"]).median,
                    "tau": sum(len(r.token_ids) - 1 for r in replies) / rounds,
                    "hit_rate": sum(r.hits for r in replies) / chances if way[0] == "a" else None,
                    "identical": [r.token_ids for r in replies]
                    == [r.token_ids for r in said["plain"]],
                }
            )
            print(json.dumps(table[-1]))
    return table


def cost_of_misses(
    model: Model, drafter: DrafterRole, prompt: list[int], rows: int
) -> dict[str, list[float]]:
    """Milliseconds of resolving a batch in which none, one or every row missed (`stall`)."""
    config = DecodeConfig("async")
    batch = Batch(model.target, drafter, config, rows, len(prompt) + 4 * drafter.width)
    batch.configure([SamplingParams()] * rows, [2**30] * rows)
    for slot in range(rows):
        for piece in pieces(slot, prompt):
            batch.read([piece])
    found: dict[str, list[float]] = {}
    drafts, hidden, prepared = drafter.prepare(batch.drafts)
    for name, missed in (("none", 0), ("one", 1), ("all", rows)):
        report = np.full((rows, acceptance.TOKENS + drafter.width), -1, np.int32)
        report[:, acceptance.COUNT], report[:, acceptance.ACTIVE] = 1, 1
        first = np.asarray(prepared.outcome) == 1
        hit = np.asarray(prepared.anchors)[np.arange(rows), first.argmax(axis=1)]
        # The first draft itself is no rejection, so no branch was prepared for it.
        drafted = np.asarray(drafts.block.tokens)[:, 1]
        report[:, acceptance.TOKENS] = np.where(np.arange(rows) < missed, drafted, hit)
        moved = drafter.put(report)
        handover, _ = drafter.resolve(drafts, hidden, prepared, moved)
        assert int(handover[:, 0].sum()) == rows - missed
        spread = timed(functools.partial(drafter.resolve, drafts, hidden, prepared, moved), 20)
        found[name] = [1e3 * spread.median, 1e3 * spread.iqr]
    return found


def main() -> None:
    """Runs everything and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--drafter", nargs="+", default=[None], help="default: the one shipped for the model"
    )
    parser.add_argument("--policy", default=None)
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench-batch.json"))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    target_mesh, drafter_mesh = role_meshes("async")
    model = load_model(args.model, target_mesh)
    sizes = {"block_size": args.block_size, "policy": args.policy}
    drafters = [load_drafter(model, name, drafter_mesh, **sizes) for name in args.drafter]
    drafter = drafters[0]
    lines = (Path(d3d_jax.__file__).parent / "assets" / "prompts.jsonl").read_text().splitlines()
    texts = [p["turns"][0] for p in map(json.loads, lines) if p["split"] == "validation"]
    prompts = [model.encode(text) for text in texts[: args.prompts]]
    result = {
        "model": args.model,
        "policy": str(drafter.policy),
        "block_size": drafter.width,
        "prompts": len(prompts),
        "tokens": args.tokens,
        "repeats": args.repeats,
        "throughput": [
            row | {"drafter": name}
            for name, own in zip(args.drafter, drafters, strict=True)
            for row in throughput(model, own, prompts, args.concurrency, args.tokens, args.repeats)
        ],
        "resolve_ms_batch_8": cost_of_misses(model, drafter, prompts[0], 8),
        "host_ms_per_round_alone": {
            str(batch): host_alone(model.target, drafter, args.tokens, batch) for batch in (1, 16)
        },
        "jax": jax.__version__,
        "platform": jax.devices()[0].platform,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    write_json(args.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
