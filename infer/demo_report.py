"""The demo afterwards: its table, its verdict in one sentence, figures as JSON and a picture."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from d3d_jax.config import Mode
from d3d_jax.files import picture, write_json
from d3d_jax.infer.demo import MODES, Comparison, Summary
from d3d_jax.infer.measure import StepTimes
from d3d_jax.infer.measure_rounds import machine

JSON_NAME, PICTURE_NAME = "demo.json", "demo.png"
_COLORS = {"T_v": "#4c72b0", "T_d": "#dd8452", "T_p": "#55a868", "choice": "#8c8c8c"}
Parts = dict[str, float]


def round_parts(mode: Mode, summary: Summary, times: StepTimes) -> Parts:
    """Seconds of each part of an average round: T_v, T_d, T_p, and the choice of a branch."""
    if mode == "plain":
        return {"T_v": times.plain.median}
    if mode == "sync":
        return {"T_v": times.verify.median, "T_d": times.draft.median}
    missed = 1.0 - (summary.hit_rate or 0.0)
    return {
        "T_v": times.verify.median,
        "T_p": times.prepare.median,
        "choice": times.resolve.median,
        "T_d": missed * times.redraft,
    }


def round_seconds(parts: Parts, shared: bool) -> float:
    """How long those parts take together; T_p hides behind T_v unless they share hardware."""
    hidden = 0.0 if shared else min(parts["T_v"], parts.get("T_p", 0.0))
    return sum(parts.values()) - hidden


def table(comparison: Comparison) -> Table:
    """The modes side by side; it fits in 80 columns."""
    notes = "Times in ms, T_d of async for a miss; ± half the interquartile range over prompts"
    out = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption=notes, caption_justify="left")
    for name in ("mode", "τ", "hit rate", "T_v", "T_d", "T_p"):
        out.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for name in ("tokens/s", "speedup", "identical"):
        out.add_column(name, justify="right", no_wrap=True)
    times = comparison.times
    verify = times.verify.median
    steps: dict[Mode, tuple[float | None, ...]] = {
        "plain": (times.plain.median, None, None),
        "sync": (verify, times.draft.median, None),
        "async": (verify, times.redraft, times.prepare.median),
    }
    for mode in MODES:
        summary = comparison.summaries[mode]
        speed = summary.tokens_per_second
        hit_rate = summary.hit_rate if mode == "async" else None
        out.add_row(
            mode,
            f"{summary.tau:.2f}",
            "" if hit_rate is None else f"{hit_rate:.0%}",
            *("" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in steps[mode]),
            f"{speed.median:.1f} ± {speed.iqr / 2:.1f}",
            f"{summary.speedup:.2f} ×",
            "" if mode == "plain" else "no" if summary.differences else "yes",
        )
    return out


def differences(comparison: Comparison) -> list[str]:
    """A sentence on every reply that left the plain one: where, and how near the tie was."""
    return [
        f"{mode} left the plain reply to prompt {d.prompt + 1} at token {d.position + 1}, where "
        f"the two choices are {d.logit_gap:.1e} apart in logits."
        for mode in MODES
        for d in comparison.summaries[mode].differences
    ]


def verdict(comparison: Comparison) -> str:
    """Which modes beat plain decoding and why the others do not, from the measured figures."""
    plain = comparison.times.plain.median
    clauses = []
    for mode in MODES[1:]:
        summary = comparison.summaries[mode]
        parts = round_parts(mode, summary, comparison.times)
        seconds = round_seconds(parts, comparison.shared)
        beats = "beats" if summary.speedup > 1 else "does not beat"
        why = f"its round of {_sum(mode, parts, comparison.shared)} = {_ms(seconds)}"
        if mode == "async" and comparison.shared:
            why = f"target and drafter share the same hardware here, so {why}"
        clauses.append(
            f"{mode} {beats} plain ({summary.speedup:.2f} ×): {why} gives τ = {summary.tau:.2f} "
            f"tokens, {_ms(seconds / summary.tau)} a token against {_ms(plain)}"
        )
    return "; ".join(clauses) + "."


def _sum(mode: Mode, parts: Parts, shared: bool) -> str:
    if mode == "sync":
        return f"T_v + T_d = {_ms(parts['T_v'])} + {_ms(parts['T_d'])}"
    rest = f"{_ms(parts['choice'])} to choose + {_ms(parts['T_d'])} for misses"
    both = f"{_ms(parts['T_v'])} + {_ms(parts['T_p'])}"
    return f"T_v + T_p = {both} + {rest}" if shared else f"max(T_v, T_p) of {both}, + {rest}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def save(
    out: Path, comparison: Comparison, settings: dict[str, Any], prompts: list[str]
) -> tuple[Path, Path]:
    """Writes the figures and their picture, each whole or not at all; returns their paths.

    Args:
      settings: what was run, as it should stand in the JSON.
      prompts: texts of the prompts in order.

    Raises:
      D3DError: the folder cannot be written.
    """
    record = {
        "settings": settings,
        "machine": {"platform": platform.platform(), **machine()},
        "shared_hardware": comparison.shared,
        "warm_up_seconds": round(comparison.warm_up, 2),
        "step_seconds": dataclasses.asdict(comparison.times),
        "modes": {m: dataclasses.asdict(s) for m, s in comparison.summaries.items()},
        "prompts": [_prompt_record(comparison, i, text) for i, text in enumerate(prompts)],
        "verdict": verdict(comparison),
    }
    write_json(out / JSON_NAME, record)
    _draw(comparison, out / PICTURE_NAME)
    return out / JSON_NAME, out / PICTURE_NAME


def _prompt_record(comparison: Comparison, number: int, text: str) -> dict[str, Any]:
    modes = {}
    for mode in MODES:
        run = comparison.runs[mode][number]
        modes[mode] = {
            "token_ids": run.reply.token_ids,
            "rounds": run.reply.rounds,
            "tau": run.reply.tau,
            "hit_rate": run.reply.hit_rate if mode == "async" else None,
            "seconds": round(run.seconds, 4),
            "tokens_per_second": round(run.tokens_per_second, 2),
            "finish_reason": run.reply.finish_reason,
        }
    return {"prompt": text, "modes": modes}


def _draw(comparison: Comparison, path: Path) -> None:
    """Left: tokens/s of each mode; right: what an average round consists of."""
    with picture(path, (10, 4.2)) as figure:
        left, right = figure.subplots(1, 2)
        speeds = [comparison.summaries[mode].tokens_per_second for mode in MODES]
        bars = left.bar(
            MODES,
            [s.median for s in speeds],
            yerr=[s.iqr / 2 for s in speeds],
            capsize=4,
            color="#4c72b0",
        )
        labels = [f"{comparison.summaries[mode].speedup:.2f} ×" for mode in MODES]
        left.bar_label(bars, labels, padding=3)
        left.margins(y=0.15)
        left.set(ylabel="tokens/s (median, interquartile range)", title="Speed")
        seen: set[str] = set()
        for at, mode in enumerate(MODES):
            summary, bottom = comparison.summaries[mode], 0.0
            for name, seconds in round_parts(mode, summary, comparison.times).items():
                # On hardware of its own the packed draft runs beside the verification.
                beside = name == "T_p" and not comparison.shared
                label = None if name in seen else name
                right.bar(
                    at + 0.45 * beside,
                    seconds * 1e3,
                    0.35 if beside else 0.6,
                    bottom=0.0 if beside else bottom,
                    color=_COLORS[name],
                    label=label,
                )
                seen.add(name)
                bottom += 0.0 if beside else seconds * 1e3
            right.annotate(f"τ {summary.tau:.2f}", (at, bottom), ha="center", va="bottom")
        right.margins(y=0.15)
        right.set(ylabel="ms", title="An average round")
        right.set_xticks(range(len(MODES)), MODES)
        right.legend()
