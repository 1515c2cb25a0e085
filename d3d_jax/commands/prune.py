"""`d3d prune`: removes a drafter's layers one by one and recovers after each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from d3d_jax.commands import prune_report
from d3d_jax.commands.evaluate import find_checked, load_checked
from d3d_jax.commands.loading import split_mesh
from d3d_jax.commands.prune_options import Prune
from d3d_jax.commands.runtime import Bar, note, start_jax
from d3d_jax.files import write_json
from d3d_jax.infer.measure_rounds import machine
from d3d_jax.models.registry import resolve_model
from d3d_jax.train.config import load_config
from d3d_jax.train.dataset import check_data, open_dataset
from d3d_jax.train.pruning import Outcome, PruneConfig, Pruning, Step
from d3d_jax.train.responses import SPLITS


def run(options: Prune) -> None:
    """Checks that everything fits together, prunes, and prints what each step came to."""
    training = load_config(options.config, options.overrides)
    config = PruneConfig(
        options.layers, options.keep, options.by, options.recovery, options.documents
    )
    dataset, validation = (open_dataset(options.data, split) for split in SPLITS)
    drafter = find_checked(options.drafter, options.target)[2]
    check_data(drafter.drafter, dataset)
    config.check_depth(drafter.model.num_hidden_layers)
    start_jax(cpu_devices=options.mesh.num_devices)
    mesh = split_mesh(options.mesh)
    drafter, params = load_checked(options.drafter, options.target)
    with Bar("pruning", 1) as bar:
        pruning = Pruning(
            drafter,
            params,
            config,
            training,
            dataset,
            validation,
            resolve_model(options.target),
            options.out,
            _Progress(bar),
            mesh,
        )
        outcome = pruning.run()
    note(f"the pruned drafter, {outcome.exported} layers, is in {options.out / 'drafter'}")
    console, report = Console(highlight=False), dataclasses.asdict(outcome)
    if not options.json:
        console.print(table(outcome.tau, outcome.steps))
        if options.by in ("tau", "kl"):
            console.print(candidates(options.by, outcome.steps))
    if options.speed:
        depths = _speeds(options, pruning, outcome)
        report["depths"] = [dataclasses.asdict(depth) for depth in depths]
        report["machine"] = machine()
        write_json(options.out / "report.json", report)
        prune_report.draw(depths, options.out / "depth.png")
        if not options.json:
            console.print(prune_report.table(depths))
    if options.json:
        print(json.dumps(report))


def _speeds(options: Prune, pruning: Pruning, outcome: Outcome) -> list[prune_report.Depth]:
    """What the unpruned drafter and that of every step are worth in decoding."""
    drafters: dict[int, str | Path] = {pruning.drafter.model.num_hidden_layers: options.drafter}
    drafters |= {step.depth: options.out / f"depth-{step.depth}/drafter" for step in outcome.steps}
    return prune_report.measure(
        options.target, drafters, pruning.validation, options.speed, options.documents
    )


class _Progress:
    """Shows how far a pruning is with what it is doing: ranking, or recovering."""

    def __init__(self, bar: Bar):
        self.bar, self.doing = bar, ""

    def __call__(self, doing: str, metrics: dict[str, Any]) -> None:
        if doing != self.doing:
            self.doing = doing
            self.bar.begin(metrics["steps"])
        loss = f", loss {metrics['loss']:.2f}" if "loss" in metrics else ""
        self.bar.update(metrics["step"], doing + loss)


def table(tau: float, steps: list[Step]) -> Table:
    """Depth against τ."""
    found = Table("layers", "removed", "τ without it", "τ recovered", "kept", "ranking", "recovery")
    for step in steps:
        found.add_row(
            str(step.depth),
            str(step.removed),
            f"{step.tau_removed:.3f}",
            f"{step.tau:.3f}",
            f"{step.tau / tau:.1%}",
            f"{step.ranking_seconds:.0f} s",
            f"{step.recovery_seconds:.0f} s",
        )
    return found


def candidates(criterion: str, steps: list[Step]) -> Table:
    """What every removal would have come to, a column for each step."""
    score = "τ" if criterion == "tau" else "negative KL"
    found = Table("without layer", title=f"{score} without each layer, by layers left")
    for step in steps:
        found.add_column(str(step.depth), justify="right")
    for layer in steps[0].candidates:
        scores = (step.candidates.get(layer) for step in steps)
        found.add_row(layer, *("" if score is None else f"{score:.3f}" for score in scores))
    return found
