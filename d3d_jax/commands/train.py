"""`d3d train`: trains a drafter in a run folder and exports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from d3d_jax.commands.evaluate import find_checked, load_checked
from d3d_jax.commands.loading import split_mesh
from d3d_jax.commands.options import Train
from d3d_jax.commands.runtime import Bar, join_processes, note, start_jax
from d3d_jax.drafter import Drafter, Params
from d3d_jax.memory import enough_memory
from d3d_jax.models.sharding import model_mesh
from d3d_jax.processes import is_first
from d3d_jax.train.config import TrainConfig, load_config
from d3d_jax.train.dataset import ResponseDataset, check_data, open_dataset
from d3d_jax.train.trainer import MORE_ROOM, Trainer, packed_batches


def run(options: Train) -> None:
    """Checks that config, data, drafter and target fit together, then trains."""
    config = load_config(options.config, options.overrides)
    if options.processes.several:
        start_jax()
        join_processes(options.processes)
    else:
        start_jax(cpu_devices=options.mesh.num_devices)
    mesh = split_mesh(options.mesh)
    # All that can be refused is, before weights are read.
    drafter = find_checked(options.drafter, options.target)[2]
    dataset = _datasets(drafter, options.data)[0]
    packed_batches(config, dataset, model_mesh(mesh, drafter.model))
    with enough_memory(MORE_ROOM):
        drafter, params = load_checked(options.drafter, options.target, mesh)
    exported = train(drafter, params, config, options.data, options.out, mesh)
    if is_first():
        note(f"the trained drafter is in {exported}")


def train(
    drafter: Drafter,
    params: Params,
    config: TrainConfig,
    data: Path,
    out: Path,
    mesh: Mesh | None = None,
) -> Path:
    """Trains with a progress bar; continues the run that `out` holds.

    Args:
      mesh: what to train on; None: all devices, each with its own rows.

    Returns:
      The exported drafter's folder.

    Raises:
      D3DError: data of another target, a run of other settings, or what `Trainer.train` raises.
    """
    dataset, validation = _datasets(drafter, data)
    with Bar("training", config.steps) as bar:
        report = _Report(bar) if is_first() else lambda metrics: None
        trainer = Trainer(drafter, params, config, dataset, validation, out, report, mesh)
        return trainer.train()


def _datasets(drafter: Drafter, data: Path) -> tuple[ResponseDataset, ResponseDataset]:
    """The training and the validation split (`D3DError` if they are not the drafter's)."""
    dataset, validation = open_dataset(data, "train"), open_dataset(data, "validation")
    check_data(drafter.drafter, dataset)
    return dataset, validation


class _Report:
    """Passes a step's metrics on to a bar: loss, the last τ measured, speed, and what slows it."""

    def __init__(self, bar: Bar):
        self.bar, self.tau = bar, ""

    def __call__(self, metrics: dict[str, Any]) -> None:
        if "tau" in metrics:
            self.tau = f"τ {metrics['tau']:.2f}"
        figures = [
            f"loss {metrics['loss']:.2f}",
            self.tau,
            f"{metrics['tokens_per_second']:.0f} tokens/s",
            f"{metrics['utilisation']:.0%} of peak" if "utilisation" in metrics else "",
        ]
        # Below these nobody needs to look.
        for name, most in (("input", 0.02), ("checkpoint", 0.05)):
            if (share := metrics[f"{name}_wait"]) >= most:
                figures.append(f"{share:.0%} waiting for {name}")
        self.bar.update(metrics["step"], ", ".join(filter(None, figures)))
