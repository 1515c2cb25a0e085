"""What `d3d report` takes; as light as `commands.options`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from d3d_jax.commands.option_groups import arg
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class Report:
    """Put measured figures side by side: Markdown tables and plots of several files.

    Attributes:
      files: benchmark.json of d3d benchmark, sweep.json of d3d sweep, metrics.jsonl of training
        runs and report.json of d3d prune --speed, in any number and order.
      out: Folder for report.md and its plots; those there are replaced.
      published: Also show what papers state, marked as not measured here.
    """

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], arg("FILE ...")]
    out: Annotated[Path, arg("DIR")]
    published: bool = False

    def __post_init__(self) -> None:
        if not self.files:
            raise D3DError("d3d report takes at least one file")
