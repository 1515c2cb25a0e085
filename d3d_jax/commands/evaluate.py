"""`d3d evaluate`: a drafter's acceptance length on recorded responses of its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from d3d_jax.commands.options import Evaluate
from d3d_jax.commands.runtime import busy, start_jax
from d3d_jax.drafter import Drafter, Params, read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.loading import check_drafter
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.dataset import ResponseDataset, open_dataset


def run(options: Evaluate) -> None:
    """Measures and prints a table, or one JSON object."""
    drafter, params = load_checked(options.drafter, options.target)
    dataset = open_dataset(options.data, options.split)
    check_data(drafter, dataset)
    start_jax()
    figures = measure(drafter, params, dataset, options.documents, options.block_size)
    if options.json:
        print(json.dumps(figures, ensure_ascii=False))
    else:
        print_figures(figures)


def load_checked(name_or_path: str | Path, target: str) -> tuple[Drafter, Params]:
    """A drafter with stacked parameters, checked against its target.

    Raises:
      D3DError: not a drafter, or one of another target or tokenizer.
    """
    folder, target_folder = resolve_model(name_or_path), resolve_model(target)
    drafter, params = read_drafter(folder, target_folder, stacked=True, dtype=np.float32)
    check_drafter(drafter.drafter, Tokenizer.from_folder(target_folder), folder)
    return drafter, params


def check_data(drafter: Drafter, dataset: ResponseDataset) -> None:
    """Refuses responses of another target, tokenizer or chat template than the drafter's.

    Raises:
      D3DError: naming what differs.
    """
    config, manifest = drafter.drafter, dataset.manifest
    for what, ours, theirs in (
        ("target", config.target, manifest.target),
        ("tokenizer", config.tokenizer_fingerprint, manifest.tokenizer_fingerprint),
        ("chat template", config.template_fingerprint, manifest.template_fingerprint),
    ):
        if ours != theirs:
            raise D3DError(
                f"{dataset.folder} holds responses with {what} {theirs:.80}, the drafter was made "
                f"for {ours:.80}"
            )


def measure(
    drafter: Drafter,
    params: Params,
    dataset: ResponseDataset,
    documents: int = 0,
    block_size: int | None = None,
) -> dict[str, Any]:
    """τ pooled, per response and by task, and how often each offset was reached.

    Raises:
      D3DError: sampled responses, which do not say what greedy decoding would, or a block size
        above the trained one.
    """
    acceptance = OfflineAcceptance(drafter, dataset, documents, block_size)
    with busy(f"measuring {len(acceptance.indices)} responses"):
        found = acceptance.measure(jax.device_put(params))
    tasks = dataset.tasks[acceptance.indices]
    by_task = {}
    for task in sorted(set(tasks.tolist())):
        rows = tasks == task
        by_task[task] = round(float(found.tokens[rows].sum() / max(found.rounds[rows].sum(), 1)), 4)
    return {
        **found.summary(),
        "tasks": by_task,
        "documents": len(acceptance.indices),
        "split": dataset.split,
        "block_size": found.block_size,
    }


def print_figures(figures: dict[str, Any]) -> None:
    """The figures of `measure` as text."""
    print(f"τ {figures['tau']:.3f} pooled over {figures['documents']} {figures['split']} responses")
    print(f"τ {figures['tau_per_response']:.3f} mean of the responses' own")
    reached = Table("drafts accepted", "share of rounds")
    for count, share in enumerate(figures["reached"], start=1):
        reached.add_row(f"at least {count}", f"{share:.1%}")
    tasks = Table("task", "τ")
    for task, tau in figures["tasks"].items():
        tasks.add_row(task or "(none)", f"{tau:.3f}")
    Console(highlight=False).print(reached, tasks)
