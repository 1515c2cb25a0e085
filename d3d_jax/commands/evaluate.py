"""`d3d evaluate`: a drafter's acceptance length, and its hit rates, on recorded responses."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from d3d_jax.commands.loading import split_mesh
from d3d_jax.commands.options import Evaluate
from d3d_jax.commands.runtime import busy, start_jax
from d3d_jax.drafter import Drafter, Params, check_drafter_files, read_drafter
from d3d_jax.infer.loading import check_drafter
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.sharding import model_mesh
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.acceptance import Acceptance, OfflineAcceptance
from d3d_jax.train.dataset import ResponseDataset, check_data, open_dataset
from d3d_jax.train.outcomes import check_offline
from d3d_jax.train.policies import compare, most_candidates


def run(options: Evaluate) -> None:
    """Measures and prints a table, or one JSON object."""
    dataset = open_dataset(options.data, options.split)
    check_data(find_checked(options.drafter, options.target)[2].drafter, dataset)
    start_jax(cpu_devices=options.mesh.num_devices)
    mesh = split_mesh(options.mesh)
    drafter, params = load_checked(options.drafter, options.target, mesh)
    figures = measure(
        drafter, params, dataset, options.documents, options.block_size, options.policies, mesh
    )
    if options.json:
        print(json.dumps(figures, ensure_ascii=False))
    else:
        print_figures(figures)


def load_checked(
    name_or_path: str | Path, target: str, mesh: Mesh | None = None
) -> tuple[Drafter, Params]:
    """A drafter with stacked float32 parameters, checked against its target.

    Args:
      mesh: of `sharding.make_mesh`: each process reads what its own devices hold. None: whole
        NumPy arrays.

    Raises:
      D3DError: not a drafter, or one of another target or tokenizer.
    """
    folder, target_folder, _ = find_checked(name_or_path, target)
    return read_drafter(folder, target_folder, stacked=True, mesh=mesh, dtype=np.float32)


def find_checked(name_or_path: str | Path, target: str) -> tuple[Path, Path, Drafter]:
    """The folders of a drafter and its target, and what the drafter is; no weights are read.

    Raises:
      D3DError: as of `load_checked`.
    """
    folder, target_folder = resolve_model(name_or_path), resolve_model(target)
    drafter = Drafter(*check_drafter_files(folder, target_folder))
    check_drafter(drafter.drafter, Tokenizer.from_folder(target_folder), folder)
    return folder, target_folder, drafter


def measure(
    drafter: Drafter,
    params: Params,
    dataset: ResponseDataset,
    documents: int = 0,
    block_size: int | None = None,
    policies: bool = False,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """τ pooled, per response and by task, and how often each offset was reached.

    Args:
      documents: how many, evenly spread; 0 for all.
      block_size: W; None for the drafter's own.
      policies: also compares policies of asynchronous decoding (`train.policies.compare`).
      mesh: of `sharding.make_mesh`, whose devices read responses side by side; None: one device.

    Raises:
      D3DError: no responses, a block size above the trained one, or policies of a drafter of
        shift 0.
    """
    mesh = mesh and model_mesh(mesh, drafter.model)
    acceptance = OfflineAcceptance(drafter, dataset, documents, block_size, mesh)
    with busy(f"measuring {len(acceptance.indices)} responses"):
        found, compared = _observe(acceptance, acceptance.place(params), policies)
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
        "sampling": dataset.manifest.sampling,
        "block_size": found.block_size,
        **compared,
    }


def _observe(
    acceptance: OfflineAcceptance, params: Params, policies: bool
) -> tuple[Acceptance, dict[str, Any]]:
    """One pass over the data; the second result is empty unless policies are to be compared."""
    if not policies:
        return acceptance.measure(params), {}
    config, width = acceptance.drafter.drafter, acceptance.width
    check_offline(config)
    offsets = width - 1 + config.label_shift
    temperatures = np.array([config.calibration or (1.0,) * config.block_size])[:, :offsets]
    vocabulary = config.draft_vocab_size or acceptance.drafter.model.vocab_size
    count = min(most_candidates(width), vocabulary)
    found, rounds = acceptance.observe(params, count, temperatures)
    calibrated = None
    if config.calibration is not None:
        calibrated = rounds.calibrated(np.zeros(offsets, int))
    return found, {
        "calibration": config.calibration,
        "policies": compare(rounds, calibrated),
        "chances": len(rounds.chances),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }


def print_figures(figures: dict[str, Any]) -> None:
    """The figures of `measure` as text."""
    kind = figures["split"] if figures["sampling"].get("greedy") else f"sampled {figures['split']}"
    low, high = figures["tau_interval"]
    print(
        f"τ {figures['tau']:.3f} pooled over {figures['documents']} {kind} responses "
        f"({low:.3f} to {high:.3f} in 95 % of resamplings)"
    )
    print(f"τ {figures['tau_per_response']:.3f} mean of the responses' own")
    reached = Table("drafts accepted", "share of rounds")
    for count, share in enumerate(figures["reached"], start=1):
        reached.add_row(f"at least {count}", f"{share:.1%}")
    tasks = Table("task", "τ")
    for task, tau in figures["tasks"].items():
        tasks.add_row(task or "(none)", f"{tau:.3f}")
    Console(highlight=False).print(reached, tasks)
    if "policies" in figures:
        print(f"hit rates of asynchronous decoding, {figures['chances']} blocks")
        print_policies(figures["policies"], figures["block_size"])


def print_policies(rows: list[dict[str, Any]], block_size: int) -> None:
    """The hit rates of `train.policies.compare` as a table."""
    table = Table("branches", "rows", "best-first", "calibrated", "best rectangle", "all outcomes")
    for row in rows:
        rates = row["rectangles"]
        best = max(rates, key=rates.__getitem__)
        # The paper's shape, as far as N goes: rejection at every offset.
        full = next((name for name in rates if name.startswith(f"rectangle:{block_size},")), None)
        calibrated = row["best_first_calibrated"]
        table.add_row(
            str(row["branches"]),
            str(row["rows"]),
            f"{row['best_first']:.1%}",
            "" if calibrated is None else f"{calibrated:.1%}",
            f"{rates[best]:.1%} ({best.removeprefix('rectangle:')})",
            "" if full is None else f"{rates[full]:.1%} ({full.removeprefix('rectangle:')})",
        )
    Console(highlight=False).print(table)
