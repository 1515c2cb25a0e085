"""`d3d report`: Markdown tables and plots of what other commands measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d3d_jax.commands import report_plots as plots
from d3d_jax.commands import report_tables as tables
from d3d_jax.commands.benchmark_report import sentences
from d3d_jax.commands.report_files import Kind, Source, read_sources
from d3d_jax.commands.report_options import Report
from d3d_jax.errors import D3DError
from d3d_jax.files import write_text

NAME = "report.md"


def run(options: Report) -> None:
    """Reads all files before anything is written; prints the path of the report."""
    sources = read_sources(options.files)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise D3DError(f"cannot write to the folder {options.out}: {error.strerror}") from None

    def of(kind: Kind) -> list[Source]:
        return [source for source in sources if source.kind == kind]

    parts = ["# Measured with d3d_jax"]
    if benchmarks := of("benchmark"):
        parts += _benchmarks(benchmarks, options)
    if sweeps := of("sweep"):
        parts += _sweeps(sweeps, options.out)
    if trainings := of("training"):
        curves = {source.name: source.content["points"] for source in trainings}
        labels = {"title": "τ in training", "xlabel": "step", "ylabel": "τ"}
        plots.lines(options.out / "training.png", curves, **labels)
        parts += ["## τ in training", tables.training_table(trainings), _picture("training.png")]
    if prunings := of("pruning"):
        plots.depths(options.out / "depth.png", prunings)
        parts += ["## Depth of the drafter", _picture("depth.png")]
        for source in prunings:
            parts += [f"### {source.name}", tables.depth_table(source)]
    write_text(options.out / NAME, "\n\n".join(parts) + "\n")
    print(options.out / NAME)


def _benchmarks(sources: Sequence[Source], options: Report) -> list[str]:
    out = options.out
    definitions = dict.fromkeys(text for s in sources for text in s.content["definitions"])
    plots.speedups(out / "speedup.png", sources)
    plots.offsets(out / "acceptance.png", sources)
    plots.positions(out / "position.png", sources)
    parts = [
        "## Runs",
        tables.settings_table(sources),
        "\n".join(f"- {text}" for text in definitions),
        "## Speedup by task",
        *tables.speedup_tables(sources, options.published),
        *([tables.published_sources()] if options.published else []),
        _picture("speedup.png"),
        "## Acceptance by offset",
        tables.offsets_table(sources),
        _picture("acceptance.png"),
        "## τ by position in the reply",
        tables.positions_table(sources),
        _picture("position.png"),
    ]
    if any(len(source.content["settings"]["concurrency"]) > 1 for source in sources):
        plots.concurrency(out / "concurrency.png", sources)
        parts += ["## Throughput", tables.concurrency_table(sources), _picture("concurrency.png")]
    if plots.timeline(out / "timeline.png", sources):
        parts += ["## When the steps of a reply ran", _picture("timeline.png")]
    for source in sources:
        parts += [f"## All figures of {source.name}", tables.figures_table(source)]
        parts += [tables.steps_table(source)]
        if told := sentences(source.content):
            parts.append("\n".join(f"- {sentence}" for sentence in told))
    return parts


def _sweeps(sources: Sequence[Source], out: Path) -> list[str]:
    parts = []
    for number, source in enumerate(sources, start=1):
        for axis, rows in source.content["axes"].items():
            picture = f"sweep-{number}-{axis.replace(' ', '-')}.png"
            plots.sweep(out / picture, rows, axis)
            parts += [f"## {source.name}: {axis}", tables.sweep_table(rows, axis)]
            parts.append(_picture(picture))
    return parts


def _picture(name: str) -> str:
    return f"![{Path(name).stem}]({name})"
