"""The plots of `d3d report` and `d3d sweep`: PNG files, each whole or not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d_jax.commands.benchmark_options import OVERALL
from d3d_jax.commands.report_files import Source
from d3d_jax.commands.report_tables import Row, label, way, whole_rows
from d3d_jax.files import picture

Line = Sequence[tuple[float, float]]


@contextlib.contextmanager
def plot(path: Path, **labels: Any) -> Iterator[Any]:
    """Yields the axes of one figure, which is then saved (`D3DError` where it cannot be).

    Args:
      labels: as matplotlib's `Axes.set` takes them.
    """
    with picture(path) as figure:
        axes = figure.subplots()
        yield axes
        axes.set(**labels)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")


def lines(
    path: Path, of_name: Mapping[str, Line], dashed: Sequence[str] = (), **labels: Any
) -> None:
    """One line of points for each name.

    Args:
      dashed: names of what was not measured.
    """
    with plot(path, **labels) as axes:
        for name, points in of_name.items():
            style = "x--" if name in dashed else "o-"
            axes.plot(*zip(*points, strict=True), style, label=name)


def speedups(path: Path, sources: Sequence[Source]) -> None:
    """Bars by task, for every run and mode; of the first temperature and concurrency of each."""
    bars: dict[str, dict[str, Row]] = {}
    for source in sources:
        rows = source.content["results"]
        first = rows[0]["temperature"], rows[0]["concurrency"]
        for row in rows:
            measured = row.get("speedup_decode") is not None and row["mode"] != "plain"
            if measured and (row["temperature"], row["concurrency"]) == first:
                bars.setdefault(f"{source.name}: {way(row)}", {})[row["task"]] = row
    tasks = list(dict.fromkeys(task for own in bars.values() for task in own if task != OVERALL))
    tasks += [OVERALL] if any(OVERALL in own for own in bars.values()) else []
    width = 0.8 / max(len(bars), 1)
    title = "Speedup over plain decoding, prefill excluded; least to greatest repeat"
    with plot(path, title=title, ylabel="×") as axes:
        for number, (name, own) in enumerate(bars.items()):
            at = [tasks.index(task) + number * width for task in own]
            spreads = [row["speedup_decode"] for row in own.values()]
            axes.bar(
                at,
                [spread["median"] for spread in spreads],
                width,
                yerr=[
                    [spread["median"] - spread["min"] for spread in spreads],
                    [spread["max"] - spread["median"] for spread in spreads],
                ],
                label=name,
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        middle = (len(bars) - 1) * width / 2
        axes.set_xticks([place + middle for place in range(len(tasks))], tasks, rotation=20)


def offsets(path: Path, sources: Sequence[Source]) -> None:
    """Acceptance by offset."""
    found = {
        name: list(enumerate(row["acceptance_by_offset"], start=1))
        for name, row in _drafting(sources).items()
        if row["acceptance_by_offset"]
    }
    labels = {"xlabel": "drafts accepted, at least", "ylabel": "share of rounds"}
    lines(path, found, title="Acceptance by offset", ylim=(0, 1), **labels)


def positions(path: Path, sources: Sequence[Source]) -> None:
    """τ by position in the reply."""
    found = {
        name: [(one["from"], one["tau"]) for one in row["tau_by_position"]]
        for name, row in _drafting(sources).items()
        if row["tau_by_position"]
    }
    lines(path, found, title="τ by position in the reply", xlabel="from token", ylabel="τ")


def concurrency(path: Path, sources: Sequence[Source]) -> None:
    """Tokens/s end to end against requests at a time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for source in sources:
        for row in whole_rows(source):
            name = label(source, {**row, "concurrency": 1})
            speed = row["tokens_per_second_end_to_end"]["median"]
            found.setdefault(name, []).append((row["concurrency"], speed))
    lines(path, found, title="Throughput", xlabel="requests at a time", ylabel="tokens/s")


def timeline(path: Path, sources: Sequence[Source]) -> bool:
    """When the steps of a traced reply ran, a lane for either role of every run and mode.

    Returns:
      Whether there was a trace to draw.
    """
    traced = {
        f"{source.name}: {mode}": spans
        for source in sources
        for mode, spans in source.content.get("timelines", {}).items()
        if not isinstance(spans, str)
    }
    if not traced:
        return False
    # One lane below the other, the target's first.
    lanes = [f"{name}, {role}" for name in traced for role in ("target", "drafter")]
    with plot(path, title="Steps of a reply, traced", xlabel="ms") as axes:
        for number, step in enumerate(("verify", "prepare", "resolve", "draft")):
            for row, spans in enumerate(traced.values()):
                lane = 2 * row + (step != "verify")
                own = [(s["start"], s["end"] - s["start"]) for s in spans if s["step"] == step]
                axes.broken_barh(own, (lane - 0.4, 0.8), facecolors=f"C{number}")
            axes.bar(0, 0, color=f"C{number}", label=step)  # for the legend
        longest = max((s["end"] for spans in traced.values() for s in spans), default=1.0)
        axes.set_xlim(right=1.2 * longest)  # room for the legend
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
    return True


def depths(path: Path, sources: Sequence[Source]) -> None:
    """Measured speedups against the drafter's layers."""
    found = {
        f"{source.name}: {mode}": [
            (depth["layers"], depth["measured"][mode]) for depth in source.content["depths"]
        ]
        for source in sources
        for mode in ("sync", "async")
    }
    labels = {"xlabel": "layers of the drafter", "ylabel": "×"}
    lines(path, found, title="Speedup over plain decoding", **labels)


def sweep(path: Path, rows: Sequence[Row], axis: str) -> None:
    """Speedups along one axis, measured and planned."""
    found: dict[str, list[tuple[float, float]]] = {}
    planned: list[str] = []
    for row in rows:
        name = f"{row['series']}, {row['mode']}" if row["series"] else row["mode"]
        if row["speedup"]:
            found.setdefault(name, []).append((row["value"], row["speedup"]["median"]))
        if row["predicted"]:
            planned.append(f"{name}, planned")
            point = row["value"], row["predicted"]["speedup"]
            found.setdefault(planned[-1], []).append(point)
    lines(path, found, planned, title=f"Speedup against {axis}", xlabel=axis, ylabel="×")


def _drafting(sources: Sequence[Source]) -> dict[str, Row]:
    return {
        label(source, row): row
        for source in sources
        for row in whole_rows(source)
        if row["mode"] != "plain"
    }
