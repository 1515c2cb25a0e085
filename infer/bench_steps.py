"""Benchmark of the decoding floor: `python -m d3d_jax.infer.bench_steps --out FILE.json`.

Measures, in one run on this machine: how fast memory can be streamed, a step of plain decoding and
a verification of 16 rows, how the step's time grows with the tokens cached, the host's own time per
round, recompilations, and greedy `generate` of transformers + torch on the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import DecodeConfig, ModelConfig
from d3d_jax.drafter import Drafter
from d3d_jax.files import write_json
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import load_drafter, shipped_drafter
from d3d_jax.infer.measure import Spread, counted_compilations, prefilled, timed
from d3d_jax.infer.model import load_model
from d3d_jax.infer.placement import role_meshes
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder
from d3d_jax.models.sharding import make_mesh
from d3d_jax.sampling import SamplingParams

PROMPT = (
    "A baker sold 48 rolls on Monday and half as many on Tuesday. How many rolls did she sell in "
    "all? Explain step by step."
)


def streaming_rate() -> Spread:
    """Bytes per second of a float32 matrix-vector product far larger than the caches."""
    matrix, vector = jnp.ones((49152, 2048)), jnp.ones((2048,))
    product = jax.jit(lambda m, v: m @ v)
    measured = timed(lambda: product(matrix, vector), 10)
    size = matrix.size * 4
    return Spread(size / measured.median, size / measured.median * measured.iqr / measured.median)


def step_times(target: Target, prompt: list[int], rows: int, cached: int) -> Spread:
    """A verification of `rows` rows (1: a plain step) with about `cached` tokens in the cache."""
    ids = (prompt * (cached // len(prompt) + 1))[:cached]
    settings = target.settings([SamplingParams()], [2**30])
    _, state = prefilled(target, settings, ids, cached + 64)
    block = target.put(np.zeros((1, rows), np.int32))

    def step() -> jax.Array:
        nonlocal state
        report, state = target.verify(state, settings, block)
        return report

    return timed(step, 20)


def decode(decoding: Decoder, prompt: list[int]) -> dict[str, Any]:
    """Tokens per second of a whole reply, and the host's milliseconds per round."""
    decoding.generate([prompt])
    with counted_compilations() as compiled:
        reply = decoding.generate([prompt])[0]
    timing = decoding.timing
    return {
        "tokens_per_second": (len(reply.token_ids) - 1) / timing.decode,
        "host_ms_per_round": 1e3 * timing.host / timing.rounds,
        "recompilations": compiled(),
        "tau": reply.tau,
        "hit_rate": reply.hit_rate if decoding.config.mode == "async" else None,
    }


@contextlib.contextmanager
def own_core() -> Iterator[None]:
    """This thread on one core and the process's other threads on the rest (Linux, two or more).

    So the threads that stand for the devices do not take the core of the one that dispatches.
    """
    every = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(every) < 2:
        yield
        return

    def place(mine: set[int], others: set[int]) -> None:
        for name in os.listdir("/proc/self/task"):
            own = int(name) == threading.get_native_id()
            os.sched_setaffinity(int(name), mine if own else others)

    place({max(every)}, every - {max(every)})
    try:
        yield
    finally:
        place(every, every)


def host_alone(
    target: Target, drafter: DrafterRole, tokens: int, batch: int = 1
) -> dict[str, float]:
    """The host's milliseconds per round where it has the machine to itself.

    The same programs with as many layers and arrays, but so narrow that computing them takes
    little, and on other cores: on a CPU the real ones keep every core busy, which the host's clock
    would count.
    """

    def narrow(config: ModelConfig) -> ModelConfig:
        return dataclasses.replace(
            config, vocab_size=64, hidden_size=16, intermediate_size=16, head_dim=4
        )

    model, own = narrow(target.config), narrow(drafter.config)
    params = decoder.init_params(model, jax.random.key(0))
    drafts = decoder.init_params(own, jax.random.key(1)) | {"mask": params["embed"][1]}
    settings = dataclasses.replace(drafter.drafter, draft_vocab_size=None)
    home = [next(iter(role.sharding.device_set)) for role in (target, drafter)]
    small = Target(model, decoder.unstack(params), make_mesh(home[:1]), ())
    small_drafter = DrafterRole(
        Drafter(own, settings), decoder.unstack(drafts), make_mesh(home[1:]), drafter.policy
    )
    result = {}
    for mode in ("plain", "sync", "async"):
        decoding = Decoder(small, small_drafter, DecodeConfig(mode=mode, max_new_tokens=tokens))
        decoding.generate([[1, 2, 3]] * batch)
        found = []
        for _ in range(5):
            with own_core():
                decoding.generate([[1, 2, 3]] * batch)
            found.append(1e3 * decoding.timing.host / decoding.timing.rounds)
        result[mode] = float(np.median(found))
    return result


def torch_generate(folder: Path, prompt: list[int], count: int) -> tuple[float, list[int]]:
    """Tokens per second of transformers' greedy generate, its first token left out."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32
    )
    ids = torch.tensor([prompt])

    def run(new: int) -> tuple[float, list[int]]:
        began = time.perf_counter()
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
            )
        return time.perf_counter() - began, output[0, len(prompt) :].tolist()

    run(4)
    first, _ = run(1)
    whole, tokens = run(count)
    return (count - 1) / (whole - first), tokens


def main() -> None:
    """Runs everything and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("bench-steps.json"))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3, help="alternations of ours and torch")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    target_mesh, drafter_mesh = role_meshes("async")
    model = load_model(args.model, target_mesh)
    target = model.target
    prompt = model.tokenizer.chat([{"role": "user", "content": PROMPT}])
    weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
    result: dict[str, Any] = {"weights_bytes": weights}
    bound, plain = [], []
    for _ in range(args.rounds):
        rate = streaming_rate()
        bound.append(weights / rate.median)
        plain.append(step_times(target, prompt, 1, 100).median)
    result["streaming_bound_ms"] = 1e3 * float(np.median(bound))
    result["plain_step_ms"] = 1e3 * float(np.median(plain))
    result["share_of_bound"] = [round(b / p, 3) for b, p in zip(bound, plain, strict=True)]
    shapes = [(1, 100), (2, 100), (4, 100), (8, 100), (16, 100), (1, 1000)]
    for rows, cached in shapes:
        spread = step_times(target, prompt, rows, cached)
        result[f"rows_{rows}_cached_{cached}_ms"] = [1e3 * spread.median, 1e3 * spread.iqr]
    result["decode"] = {}
    home = shipped_drafter(args.model)
    modes = ("plain",) if home is None else ("plain", "sync", "async")
    for mode in modes:
        drafter = None
        if mode != "plain" and home is not None:
            drafter = load_drafter(model, home, drafter_mesh)
        decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=args.tokens))
        result["decode"][mode] = decode(decoding, prompt)
        if mode == "async" and drafter is not None:
            result["host_ms_per_round_alone"] = host_alone(target, drafter, args.tokens)
    decoding = Decoder(target, None, DecodeConfig(mode="plain", max_new_tokens=args.tokens))
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(decode(decoding, prompt)["tokens_per_second"])
        theirs.append(torch_generate(model.folder, prompt, args.tokens)[0])
    result["plain_tokens_per_second"] = ours
    result["torch_tokens_per_second"] = theirs
    result["speedup_over_torch"] = float(np.median(ours) / np.median(theirs))
    result |= {
        "jax": jax.__version__,
        "platform": jax.devices()[0].platform,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    write_json(args.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
