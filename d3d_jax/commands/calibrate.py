"""`d3d calibrate`: makes a drafter's probabilities match how often its tokens come true.

One temperature for each offset, fitted on recorded responses of the target. The tokens that
are drafted stay as they are; policies that go by probabilities (best-first) choose better branches.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from d3d_jax.branches import BestFirst
from d3d_jax.commands.evaluate import find_checked, load_checked
from d3d_jax.commands.loading import split_mesh
from d3d_jax.commands.options import Calibrate
from d3d_jax.commands.runtime import busy, note, start_jax
from d3d_jax.errors import D3DError
from d3d_jax.files import replacing
from d3d_jax.models.sharding import model_mesh
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.dataset import check_data, open_dataset
from d3d_jax.train.outcomes import (
    ENOUGH,
    TEMPERATURES,
    Rounds,
    fit_temperatures,
    hit_rate,
    likelihood,
)


def run(options: Calibrate) -> None:
    """Fits on every other response, measures on the rest, and writes the temperatures.

    Raises:
      D3DError: not a local folder of a drafter, data of another target, or too little of it.
    """
    folder = options.drafter
    if not (folder / "config.json").is_file():
        raise D3DError(f"{folder} is no folder of a drafter, whose config.json could be changed")
    if not os.access(folder, os.W_OK):
        raise D3DError(f"{folder} cannot be written; calibrate a copy of it")
    dataset = open_dataset(options.data, options.split)
    check_data(find_checked(folder, options.target)[2].drafter, dataset)
    start_jax(cpu_devices=options.mesh.num_devices)
    mesh = split_mesh(options.mesh)
    drafter, params = load_checked(folder, options.target, mesh)
    mesh = model_mesh(mesh, drafter.model)
    acceptance = OfflineAcceptance(drafter, dataset, options.documents, mesh=mesh)
    width, offsets = acceptance.width, acceptance.width - 1 + drafter.drafter.label_shift
    # As many branches as the paper's fan-out of two takes.
    policy = BestFirst(2 * (width - 1) + 1, width)
    grid = np.tile(TEMPERATURES[:, None], (1, offsets))
    documents = len(acceptance.indices)
    with busy(f"measuring {documents} responses"):
        rounds = acceptance.observe(acceptance.place(params), policy.num_candidates, grid)[1]
    fitted = np.arange(documents) % 2 == 0
    labels = likelihood(rounds.of(fitted))[1]
    if labels[0] < ENOUGH or documents < 2:
        raise D3DError(
            f"{documents} responses hold too few tokens to calibrate with and to measure on; "
            "give more documents"
        )
    best = fit_temperatures(rounds.of(fitted))
    calibration = tuple(TEMPERATURES[best].tolist())
    print_fit(rounds.of(~fitted), best, policy)
    config = dataclasses.replace(drafter.drafter, calibration=calibration)
    write_calibration(folder, config.calibration)
    note(f"the temperatures are in {folder / 'config.json'}")


def print_fit(held_out: Rounds, best: np.ndarray, policy: BestFirst) -> None:
    """What the temperatures change on responses that they were not fitted on.

    Args:
      best: [P] rows of `TEMPERATURES`.
      policy: whose hit rate is shown; there is none offline for a drafter of shift 0.
    """
    loss, number = likelihood(held_out)
    unchanged = int(np.flatnonzero(TEMPERATURES == 1)[0])
    table = Table("offset", "tokens reached", "temperature", "nats a token before", "after")
    for offset, setting in enumerate(best):
        before, after = loss[unchanged, offset], loss[setting, offset]
        shown = (f"{before:.4f}", f"{after:.4f}") if number[offset] else ("", "")
        table.add_row(str(offset + 1), str(number[offset]), f"{TEMPERATURES[setting]:.3f}", *shown)
    Console(highlight=False).print(table)
    if held_out.drafter.label_shift == 1:
        before = hit_rate(policy, held_out)
        after = hit_rate(policy, held_out, held_out.calibrated(best))
        print(f"hit rate of {policy}: {before:.1%} before, {after:.1%} after")


def write_calibration(folder: Path, calibration: tuple[float, ...] | None) -> None:
    """Replaces the calibration in a drafter's config.json, whole or not at all."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["d3d"]["calibration"] = calibration
    with replacing(path) as partial:
        partial.write_text(json.dumps(raw, indent=2) + "\n")
        partial.chmod(path.stat().st_mode)
