"""What all points of a benchmark come to, as one JSON object."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from d3d_jax.commands.benchmark_folder import BenchmarkFolder, Key
from d3d_jax.commands.benchmark_options import KIND, OVERALL
from d3d_jax.commands.benchmark_tasks import Task
from d3d_jax.infer.benchmark import Point
from d3d_jax.infer.benchmark_bench import Bench
from d3d_jax.infer.benchmark_summary import DEFINITIONS, divergences, merged, summarise

# By repeat, or why one of them failed.
Points = list[Point] | str


def make_result(
    settings: dict[str, Any], tasks: Sequence[Task], folder: BenchmarkFolder, bench: Bench
) -> dict[str, Any]:
    """Everything that was measured and with what; points that are missing are an error.

    The rows of `results` are one mode of one task, or of all of them (`OVERALL`), each.
    """
    prompts = [bench.chat(c, []) for task in tasks for c in task.conversations]
    prompt = sorted(prompts, key=len)[len(prompts) // 2]  # steps are timed after this one
    rows = []
    for temperature, concurrency in itertools.product(
        settings["temperature"], settings["concurrency"]
    ):
        points = {
            (task.name, mode): _repeats(
                folder,
                [
                    Key(task.name, temperature, concurrency, repeat, mode)
                    for repeat in range(settings["repeats"])
                ],
            )
            for task in tasks
            for mode in settings["modes"]
        }
        found = _group(bench, tasks, settings["modes"], points, temperature)
        rows += [{"temperature": temperature, "concurrency": concurrency, **row} for row in found]
    return {
        "kind": KIND,
        "definitions": list(DEFINITIONS),
        "settings": settings,
        "rows_of_tasks": {task.name: list(task.rows) for task in tasks},
        "roles": bench.roles(),
        "shared_hardware": bench.shared,
        "step_ms": {
            str(batch): folder.kept(f"steps-{batch}", lambda b=batch: bench.step_times(prompt, b))
            for batch in settings["concurrency"]
        },
        "results": rows,
    }


def _repeats(folder: BenchmarkFolder, keys: Sequence[Key]) -> Points:
    points = [folder.read(key) for key in keys]
    failed = next((point for point in points if isinstance(point, str)), None)
    return failed or [point for point in points if isinstance(point, Point)]


def _group(
    bench: Bench,
    tasks: Sequence[Task],
    modes: Sequence[str],
    points: dict[tuple[str, str], Points],
    temperature: float,
) -> list[dict[str, Any]]:
    """The rows of one temperature and concurrency."""
    rows = [
        {"task": task.name, "mode": mode}
        | _figures(bench, points[task.name, mode], points.get((task.name, "plain")), mode)
        | _comparison(bench, task, points[task.name, mode], points, mode, temperature)
        for task in tasks
        for mode in modes
    ]
    if len(tasks) == 1:
        return rows
    for mode in modes:
        together = _together([points[task.name, mode] for task in tasks])
        plain = None
        if "plain" in modes:
            plain = _together([points[task.name, "plain"] for task in tasks])
        own = [row for row in rows if row["mode"] == mode]
        figures = _figures(bench, together, plain, mode)
        rows.append({"task": OVERALL, "mode": mode, **figures, **_over_tasks(own)})
    return rows


def _figures(bench: Bench, points: Points, plain: Points | None, mode: str) -> dict[str, Any]:
    if isinstance(points, str):
        return {"failed": points}
    baseline = None if isinstance(plain, str) else plain
    return summarise(points, baseline, bench.devices(mode))


def _together(points: Sequence[Points]) -> Points:
    """The repeats of all tasks, each repeat as one point."""
    if failed := next((of_task for of_task in points if isinstance(of_task, str)), None):
        return failed
    return [merged(of_repeat) for of_repeat in zip(*points, strict=True)]  # type: ignore[arg-type]


def _comparison(
    bench: Bench,
    task: Task,
    points: Points,
    all_points: dict[tuple[str, str], Points],
    mode: str,
    temperature: float,
) -> dict[str, Any]:
    """Whether the tokens are plain decoding's, over all repeats."""
    plain = all_points.get((task.name, "plain"))
    if mode == "plain" or plain is None or isinstance(plain, str) or isinstance(points, str):
        return {}
    params = [bench.params(temperature, i) for i in range(len(task.conversations))]
    compared, found = 0, []
    for repeat, (ours, theirs) in enumerate(zip(plain, points, strict=True)):
        count, differing = divergences(bench.target, ours, theirs, params)
        compared += count
        found += [
            {"repeat": repeat, "row": task.rows[d.conversation], **dataclasses.asdict(d)}
            for d in differing
        ]
    return {
        "compared": compared,
        "identical": compared - len(found),
        "near_ties": sum(one["near_tie"] for one in found),
        "divergences": found,
    }


def _over_tasks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the tasks' figures, as papers give them, and the comparison of tokens in sum."""
    found: dict[str, Any] = {}
    for name in ("tau_mean", "speedup_decode", "speedup_end_to_end"):
        values = [row.get(name) for row in rows]
        if None not in values:
            medians = [v["median"] if isinstance(v, dict) else v for v in values]
            found[f"{name}_of_tasks"] = round(float(np.mean(np.array(medians))), 4)
    if all("compared" in row for row in rows):
        counted = ("compared", "identical", "near_ties")
        found |= {name: sum(row[name] for row in rows) for name in counted}
    return found
