"""`d3d demo`: the three ways of decoding side by side, with a shipped or a freshly made drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console

import d3d_jax
from d3d_jax.commands.from_scratch import make_drafter
from d3d_jax.commands.loading import drafter_mesh, target_mesh
from d3d_jax.commands.option_groups import thinking_switch
from d3d_jax.commands.options import Demo
from d3d_jax.commands.runtime import busy, duration, note, prompt_ids, start_jax
from d3d_jax.config import Mode
from d3d_jax.errors import D3DError
from d3d_jax.files import check_folder
from d3d_jax.infer import demo, demo_report
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.demo_view import make_view
from d3d_jax.infer.loading import drafter_caveat, model_name, open_drafter, shipped_drafter
from d3d_jax.infer.model import open_model
from d3d_jax.models.registry import cache_dir, model_source
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.prompts import Prompt, read_prompts

PROMPTS = Path(d3d_jax.__file__).parent / "assets" / "prompts.jsonl"


def run(options: Demo) -> None:
    """Finds or makes the drafter, decodes in all modes, prints the table, saves the figures."""
    check_folder(options.out)
    asked = held_out(read_prompts(PROMPTS), options.prompts)
    texts = [prompt.text for prompt in asked]
    thinking = thinking_switch(options.thinking)
    start_jax(cpu_devices=options.placement.num_devices)
    files = open_model(options.target)
    mesh = target_mesh(files, options.placement)
    prompts = [prompt_ids(files, prompt, thinking=thinking) for prompt in asked]
    drafter_files = open_drafter(
        files,
        _drafter_folder(options),
        drafter_mesh("async", options.placement),
        block_size=options.block_size,
        policy=options.policy,
    )
    if caveat := drafter_caveat(drafter_files.config, files.tokenizer, options.target):
        note(caveat)
    with busy(f"loading {options.target} and the drafter"):
        model = files.load(mesh)
        drafter = drafter_files.load(model)
    decoders = demo.make_decoders(model.target, drafter, options.max_new_tokens)
    comparison = _compare(decoders, model.tokenizer, texts, prompts)
    settings = {
        "target": model_name(options.target),
        "weights": _weights(model.folder),
        "drafter": dataclasses.asdict(drafter.drafter),
        "policy": str(drafter.policy),
        "max_new_tokens": options.max_new_tokens,
        "thinking": thinking,
        "batch": 1,
        "dtype": jnp.dtype(model.dtype).name,
    }
    saved = demo_report.save(options.out, comparison, settings, texts)
    note(f"Saved {saved[0]} and {saved[1]}.")


def _drafter_folder(options: Demo) -> str | Path:
    if options.from_scratch:
        work = options.work or cache_dir() / "demo" / model_name(options.target)
        return make_drafter(options.target, PROMPTS, work, options.thinking, options.placement)
    folder = options.drafter or shipped_drafter(options.target)
    if folder is None:
        raise D3DError(
            f"no drafter ships for {options.target}: name one with --drafter or make one with "
            "--from-scratch"
        )
    return folder


def _compare(
    decoders: dict[Mode, Decoder],
    tokenizer: Tokenizer,
    texts: list[str],
    prompts: list[list[int]],
) -> demo.Comparison:
    """Runs and shows the comparison, its table and its verdict."""
    for decoder in decoders.values():
        decoder.check(prompts)
    with busy("compiling, which is not counted in the figures"):
        seconds = demo.warm_up(decoders, prompts)
    note(f"Compiling and warming up took {duration(seconds)}; no figure below counts them.")
    console = Console(highlight=False)
    with make_view(console, tokenizer, texts) as view:
        comparison = demo.compare(decoders, prompts, view, seconds)
    console.print(demo_report.table(comparison))
    for sentence in [*demo_report.differences(comparison), demo_report.verdict(comparison)]:
        console.print(sentence, markup=False)
    return comparison


def _weights(folder: Path) -> str | None:
    """What a model fetched by its short name was made from; None for a folder of the user's."""
    return model_source(folder)["weights"] if (folder / "source.json").is_file() else None


def held_out(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` validation prompts, taken from each task in turn.

    Raises:
      D3DError: there are not as many.
    """
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.split == "validation":
            tasks.setdefault(prompt.task, []).append(prompt)
    total = sum(map(len, tasks.values()))
    if count > total:
        raise D3DError(f"--prompts may be at most {total}, the held-out prompts there are")
    in_turn = [
        group[place]
        for place in range(max(map(len, tasks.values())))
        for group in tasks.values()
        if place < len(group)
    ]
    return in_turn[:count]
