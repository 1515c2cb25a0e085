"""What `d3d prune` takes; as light as `commands.options`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from d3d_jax.commands.option_groups import DrafterMesh, arg, at_least
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class Prune:
    """Remove a drafter's least harmful layers one by one, with recovery training after each.

    An interrupted pruning continues where it stopped when the same command is given again.

    Attributes:
      drafter: Folder or hub id of the drafter to prune.
      target: Its target model.
      data: Dataset folder of greedy responses of that target.
      config: Name of a shipped training config, or a YAML file, for each recovery.
      out: Folder of the pruning; the result is exported to its drafter/.
      layers: Depth to stop at.
      keep: Stop, and export what was before, when τ after recovery falls below this fraction of
        the unpruned drafter's.
      by: Which layer goes: the one whose removal costs the least τ, or changes the drafter's
        distributions the least (kl); every n-th (even); the last.
      recovery: What recovery trains on: the unpruned drafter's distributions with a margin for the
        response's token, or as they are (plain); the responses alone; or no training.
      documents: How many validation responses τ is measured on, evenly spread; for kl, how many
        packed rows of them are read. 0 for all.
      speed: Afterwards decode so many validation prompts with the drafter of every step, time its
        steps, and write depth against speed to report.json and depth.png.
      json: Print one JSON object instead of a table.
      mesh: Which devices to use.
      overrides: Settings that replace those of the training config: key=value ...
    """

    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    data: Annotated[Path, arg("DIR")]
    config: Annotated[str, arg("NAME|FILE")]
    out: Annotated[Path, arg("DIR")]
    layers: int = 1
    keep: float = 0.99
    by: Literal["tau", "kl", "even", "last"] = "tau"
    recovery: Literal["margin", "plain", "responses", "none"] = "margin"
    documents: int = 0
    speed: Annotated[int, arg("PROMPTS")] = 0
    json: bool = False
    mesh: DrafterMesh = dataclasses.field(default_factory=DrafterMesh)
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], arg("[KEY=VALUE ...]", "")] = ()

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers)
        at_least(0, documents=self.documents, speed=self.speed)
        if not 0 <= self.keep <= 1:
            raise D3DError(f"--keep must be between 0 and 1, found {self.keep}")
