"""What `d3d report` reads: benchmarks, sweeps, metrics of training runs, reports of prunings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from d3d_jax.commands.benchmark_options import KIND as BENCHMARK
from d3d_jax.commands.sweep_options import KIND as SWEEP
from d3d_jax.errors import D3DError
from d3d_jax.train.jsonl import json_lines

Kind = Literal["benchmark", "sweep", "training", "pruning"]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
      name: tells it from the others: its folder's name, or as much of the path as that takes.
      content: of a training run {"points": [(step, τ), …]}, else the file's JSON.
    """

    name: str
    kind: Kind
    content: dict[str, Any]


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Reads files of any kind.

    Raises:
      D3DError: one cannot be read, is damaged, of no known kind, or named twice.
    """
    full = [path.expanduser().resolve() for path in paths]
    if len(set(full)) < len(full):
        raise D3DError("a file is named twice")
    names = [path.parent.name for path in full]
    found = []
    for path, given in zip(full, paths, strict=True):
        name = path.parent.name if names.count(path.parent.name) == 1 else str(given)
        kind, content = _read(path)
        found.append(Source(name, kind, content))
    return found


def _read(path: Path) -> tuple[Kind, dict[str, Any]]:
    if path.suffix == ".jsonl":
        points = [(r["step"], r["tau"]) for _, r in json_lines(path) if {"step", "tau"} <= set(r)]
        if not points:
            raise D3DError(f"{path} holds no step with a τ: it is no metrics.jsonl of d3d train")
        return "training", {"points": points}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise D3DError(f"cannot read {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise D3DError(f"{path} is not JSON: {error}") from None
    if isinstance(raw, dict):
        if raw.get("kind") == BENCHMARK:
            return "benchmark", raw
        if raw.get("kind") == SWEEP:
            return "sweep", raw
        if isinstance(raw.get("depths"), list):
            return "pruning", raw
    raise D3DError(
        f"{path} is neither benchmark.json, sweep.json, metrics.jsonl of a training run nor "
        "report.json of d3d prune --speed"
    )
