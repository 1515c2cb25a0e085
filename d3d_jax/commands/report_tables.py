"""The tables of `d3d report`, as Markdown: what was measured, run beside run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from d3d_jax.commands.benchmark_options import OVERALL
from d3d_jax.commands.benchmark_report import STEPS, interval, number
from d3d_jax.commands.published import NOTE, PUBLISHED
from d3d_jax.commands.report_files import Source

Row = dict[str, Any]
# Of the tasks' own figures, as papers average them; "overall" is of all replies together.
_MEAN = "mean of tasks"
_THEIR_AVERAGE = "average as published"
# What a plan predicts, and how it is shown.
_PLANNED = {"tau": ".2f", "hit_rate": ".0%", "tokens_per_second": ".1f", "speedup": ".2f"}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are figures."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def whole_rows(source: Source) -> list[Row]:
    """The rows over all tasks of a benchmark; of its only task where it has one."""
    rows = [row for row in source.content["results"] if "failed" not in row]
    overall = [row for row in rows if row["task"] == OVERALL]
    return overall or rows


def way(row: Row) -> str:
    """How a row was decoded: its mode, and what differs from greedy and one request at a time."""
    parts = [row["mode"]]
    if row["temperature"]:
        parts.append(f"T {row['temperature']:g}")
    if row["concurrency"] > 1:
        parts.append(f"{row['concurrency']} at a time")
    return ", ".join(parts)


def label(source: Source, row: Row) -> str:
    """What tells a row of `whole_rows` from the others."""
    task = "" if row["task"] == OVERALL or len(_tasks(source)) == 1 else f", {row['task']}"
    return f"{source.name}: {way(row)}{task}"


def _tasks(source: Source) -> set[str]:
    return {row["task"] for row in source.content["results"]} - {OVERALL}


def ranged(spread: dict[str, Any] | None, form: str) -> str:
    """A median with the interval of one that was measured repeatedly; empty for None."""
    if spread is None:
        return ""
    bounds = interval(spread, form)
    return f"{spread['median']:{form}}" + (f" ({bounds})" if bounds else "")


def settings_table(sources: Sequence[Source]) -> str:
    """What each benchmark ran on and with."""
    names = ("target", "drafter", "block size", "policy", "dtype", "tokens", "devices", "jax")
    rows = []
    for source in sources:
        settings = source.content["settings"]
        machine = settings["machine"]
        figures = [settings["target"], settings["drafter"] or "shipped", settings["block_size"]]
        figures += [settings["policy"], settings["dtype"] or "default"]
        figures += [settings["max_new_tokens"], ", ".join(sorted(set(machine["devices"])))]
        commit, plus, changes = (machine.get("commit") or "").partition("+")
        commit = commit[:10] + plus + changes
        figures.append(f"{machine['jax']} {commit}".strip())
        rows.append([source.name, *("" if f is None else str(f) for f in figures)])
    return markdown(("run", *names), rows)


def speedup_tables(sources: Sequence[Source], published: bool) -> list[str]:
    """Speedup over plain decoding, prefill excluded, by task: tables with their headings."""
    rows = [(source.name, row) for source in sources for row in source.content["results"]]
    parts = []
    for place in sorted({(row["temperature"], row["concurrency"]) for _, row in rows}):
        own = [(n, row) for n, row in rows if (row["temperature"], row["concurrency"]) == place]
        parts.append(f"### Temperature {place[0]:g}, {place[1]} at a time")
        # What papers state is greedy and of one request.
        parts.append(_speedup_table(own, published and place == (0, 1)))
    return parts


def _speedup_table(rows: Sequence[tuple[str, Row]], published: bool) -> str:
    columns: dict[str, dict[str, str]] = {}
    for name, row in rows:
        if row["mode"] == "plain":
            continue
        column = columns.setdefault(f"{name}: {row['mode']}", {})
        if "failed" in row:
            column[row["task"]] = "failed"
        elif row["speedup_decode"] is not None:
            speedup, tau = ranged(row["speedup_decode"], ".2f"), number(row["tau_mean"], ".2f")
            column[row["task"]] = f"{speedup} × (τ {tau})"
            if "speedup_decode_of_tasks" in row:
                mean, tau = row["speedup_decode_of_tasks"], row["tau_mean_of_tasks"]
                column[_MEAN] = f"{mean:.2f} × (τ {number(tau, '.2f')})"
    order = list(dict.fromkeys(row["task"] for _, row in rows))
    order.sort(key=OVERALL.__eq__)
    if any(_MEAN in column for column in columns.values()):
        order.append(_MEAN)
    if published:
        # Of the papers' own tasks, not of those measured here.
        order.append(_THEIR_AVERAGE)
        for one in PUBLISHED:
            own = columns.setdefault(f"{one.name}; {NOTE}", {})
            for task, speedup in one.speedups.items():
                tau = f" (τ {one.taus[task]:.2f})" if task in one.taus else ""
                own[_THEIR_AVERAGE if task == OVERALL else task] = f"{speedup:.2f} ×{tau}"
    body = [[task, *(column.get(task, "") for column in columns.values())] for task in order]
    return markdown(("task", *columns), body)


def published_sources() -> str:
    """Where the papers' figures stand."""
    return "\n".join(f"- {one.name}: {one.source}; {NOTE}." for one in PUBLISHED)


def figures_table(source: Source) -> str:
    """Everything of one benchmark that is one number."""
    header = (
        "task", "way", "τ mean", "τ pooled", "hits", "tokens/s decode", "per device",
        "tokens/s all", "× decode", "× all", "first token ms", "round ms", "host ms",
        "overhead", "peak GB so far", "same",
    )  # fmt: skip
    rows = []
    for row in source.content["results"]:
        if "failed" in row:
            rows.append(
                [row["task"], way(row), f"failed: {row['failed']}", *[""] * (len(header) - 3)]
            )
            continue
        speed, whole = row["tokens_per_second_decode"], row["tokens_per_second_end_to_end"]
        rows.append(
            [
                row["task"],
                way(row),
                number(row["tau_mean"], ".3f"),
                number(row["tau_pooled"], ".3f"),
                number(row["hit_rate"], ".1%"),
                ranged(speed, ".1f"),
                number(row["tokens_per_second_decode_per_device"], ".1f"),
                ranged(whole, ".1f"),
                ranged(row["speedup_decode"], ".2f"),
                ranged(row["speedup_end_to_end"], ".2f"),
                f"{1e3 * row['first_token_seconds']['median']:.1f}",
                number(row["round_ms"], ".2f"),
                number(row["host_ms_per_round"], ".2f"),
                number(row["benchmark_overhead"], ".2%"),
                ", ".join(f"{size / 1e9:.2f}" for size in row["peak_bytes"] if size is not None),
                f"{row['identical']}/{row['compared']}" if "compared" in row else "",
            ]
        )
    return markdown(header, rows)


def steps_table(source: Source) -> str:
    """Milliseconds of single steps, each alone, by requests at a time."""
    rows = [
        [batch, *(number(steps.get(name), ".2f") for name in STEPS)]
        for batch, steps in source.content["step_ms"].items()
    ]
    return markdown(("ms at a time", *STEPS.values()), rows)


def offsets_table(sources: Sequence[Source]) -> str:
    """The share of rounds in which at least so many drafts were accepted."""
    shares = {
        label(source, row): row["acceptance_by_offset"]
        for source in sources
        for row in whole_rows(source)
        if row["mode"] != "plain"
    }
    most = max(map(len, shares.values()), default=0)
    rows = [
        [name, *(f"{share:.1%}" for share in own), *[""] * (most - len(own))]
        for name, own in shares.items()
    ]
    return markdown(("drafts accepted", *(f"≥ {n}" for n in range(1, most + 1))), rows)


def positions_table(sources: Sequence[Source]) -> str:
    """τ by where in the reply a round begins."""
    found = {
        label(source, row): {one["from"]: one for one in row["tau_by_position"]}
        for source in sources
        for row in whole_rows(source)
        if row["mode"] != "plain"
    }
    starts = sorted({start for own in found.values() for start in own})
    rows = [
        [
            name,
            *(
                f"{own[start]['tau']:.2f} ({own[start]['rounds']})" if start in own else ""
                for start in starts
            ),
        ]
        for name, own in found.items()
    ]
    return markdown(("τ (rounds) from token", *map(str, starts)), rows)


def concurrency_table(sources: Sequence[Source]) -> str:
    """Tokens/s end to end, prefills included, by requests at a time."""
    found: dict[str, dict[int, Row]] = {}
    for source in sources:
        for row in whole_rows(source):
            name = label(source, {**row, "concurrency": 1})
            found.setdefault(name, {})[row["concurrency"]] = row
    sizes = sorted({size for own in found.values() for size in own})
    rows = [
        [
            name,
            *(
                number(own[size]["tokens_per_second_end_to_end"], ".1f") if size in own else ""
                for size in sizes
            ),
        ]
        for name, own in found.items()
    ]
    return markdown(("tokens/s at a time", *map(str, sizes)), rows)


def training_table(sources: Sequence[Source]) -> str:
    """The best and the last τ of each training run."""
    rows = []
    for source in sources:
        points = source.content["points"]
        best = max(points, key=lambda point: point[1])
        last = points[-1]
        rows.append([source.name, f"{best[1]:.3f}", str(best[0]), f"{last[1]:.3f}", str(last[0])])
    return markdown(("run", "best τ", "at step", "last τ", "at step"), rows)


def depth_table(source: Source) -> str:
    """Depth against acceptance and measured speed of one pruning."""
    rows = [
        [
            str(depth["layers"]),
            f"{depth['tau']:.3f}",
            f"{depth['draft_ms']:.2f}",
            *(number(depth["measured"].get(mode), ".2f") for mode in ("sync", "async")),
            *(number(depth["predicted"].get(mode), ".2f") for mode in ("sync", "async")),
        ]
        for depth in source.content["depths"]
    ]
    header = ("layers", "τ", "T_d ms", "sync ×", "async ×", "sync × planned", "async × planned")
    return markdown(header, rows)


def sweep_table(rows: Sequence[Row], axis: str) -> str:
    """Measured beside planned, along one axis of a sweep."""
    header = [axis, "setting"]
    for name in ("τ", "hits", "tokens/s", "×"):
        header += [name, f"{name} planned"]
    found = []
    for row in rows:
        planned = row["predicted"] or {}
        found.append(
            [
                str(row["value"]),
                ", ".join(filter(None, map(row.get, ("setting", "policy", "drafter")))),
            ]
        )
        for name, form in _PLANNED.items():
            measured = row[name]
            text = ranged(measured, form) if isinstance(measured, dict) else number(measured, form)
            found[-1] += [text, number(planned.get(name), form)]
        found[-1].append(f"{row['identical']}/{row['compared']}")
    return markdown([*header, "same"], found)
