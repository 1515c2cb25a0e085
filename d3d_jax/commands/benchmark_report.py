"""A benchmark on the terminal: its tables, and a sentence on every reply that is not plain's."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# The share of decoding that the benchmark may take for itself without a word.
MOST_OVERHEAD = 0.02
# Divergences that are told one by one; the JSON has all.
_MOST_TOLD = 10
# The steps that are timed alone, as they are called in tables.
STEPS = {
    "plain": "plain step",
    "verify": "T_v",
    "draft": "T_d of sync",
    "prepare": "T_p",
    "resolve": "choice",
    "miss": "choice, miss",
}


def print_result(result: dict[str, Any]) -> None:
    """Tables of all that was measured, on stdout."""
    console = Console(highlight=False)
    for sentence in result["definitions"]:
        console.print(sentence, markup=False)
    groups: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for row in result["results"]:
        groups.setdefault((row["temperature"], row["concurrency"]), []).append(row)
    for (temperature, concurrency), rows in groups.items():
        console.print(
            _table(
                f"temperature {temperature:g}, {concurrency} at a time; first: ms to first token",
                rows,
            )
        )
    console.print(_steps(result))
    for sentence in sentences(result):
        console.print(sentence, markup=False)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("task", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("τ", "pooled", "hits", "tok/s", "×", "95 %", "× all", "first", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "failed" in row:
            table.add_row(row["task"], row["mode"], "failed")
            continue
        table.add_row(
            row["task"],
            row["mode"],
            number(row["tau_mean"], ".2f"),
            number(row["tau_pooled"], ".2f"),
            number(row["hit_rate"], ".0%"),
            number(row["tokens_per_second_decode"], ".1f"),
            number(row["speedup_decode"], ".2f"),
            interval(row["speedup_decode"], ".2f"),
            number(row["speedup_end_to_end"], ".2f"),
            f"{1e3 * row['first_token_seconds']['median']:.0f}",
            f"{row['identical']}/{row['compared']}" if "compared" in row else "",
        )
    return table


def _steps(result: dict[str, Any]) -> Table:
    table = Table("at a time", title="ms of single steps", title_justify="left", box=box.SIMPLE)
    for name in STEPS.values():
        table.add_column(name, justify="right")
    for batch, steps in result["step_ms"].items():
        table.add_row(batch, *(number(steps.get(name), ".1f") for name in STEPS))
    return table


def sentences(result: dict[str, Any]) -> list[str]:
    """What failed, which replies differ, and what would make the times doubtful."""
    told, divergent = [], []
    for batch, steps in result["step_ms"].items():
        if "failed" in steps:
            told.append(f"single steps, {batch} at a time, failed: {steps['failed']}")
    for mode, spans in result["timelines"].items():
        if isinstance(spans, str):
            told.append(f"the trace of {mode} failed: {spans}")
    for row in result["results"]:
        where = (
            f"{row['task']}, {row['mode']}, temperature {row['temperature']:g}, "
            f"{row['concurrency']} at a time"
        )
        if "failed" in row:
            told.append(f"{where} failed: {row['failed']}")
            continue
        if row["compiled_while_timed"]:
            told.append(f"{where}: {row['compiled_while_timed']} programs compiled while timed")
        if (row["benchmark_overhead"] or 0) > MOST_OVERHEAD:
            told.append(f"{where}: {row['benchmark_overhead']:.1%} of decoding went into measuring")
        divergent += [_divergence(where, found) for found in row.get("divergences", ())]
    if len(divergent) > _MOST_TOLD:
        divergent[_MOST_TOLD:] = [f"and {len(divergent) - _MOST_TOLD} more, in the JSON"]
    return told + divergent


def _divergence(where: str, found: dict[str, Any]) -> str:
    gap = found["logit_gap"]
    what = "not compared there" if gap is None else f"{gap:.1e} apart in logits there"
    if found["near_tie"]:
        what += ", a near tie"
    return (
        f"{where}: the reply to row {found['row']}, turn {found['turn'] + 1}, leaves plain's at "
        f"token {found['position'] + 1}, {what}"
    )


def interval(spread: dict[str, Any] | None, form: str) -> str:
    """The interval of a spread; empty where it has none."""
    bounds = spread and spread.get("interval")
    return "–".join(format(bound, form) for bound in bounds) if bounds else ""


def number(value: Any, form: str) -> str:
    """A figure as text, of a spread its median; empty for None."""
    value = value["median"] if isinstance(value, dict) else value
    return "" if value is None else format(value, form)
