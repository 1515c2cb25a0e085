"""A plan as tables and sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from d3d_jax.commands.options import Plan
from d3d_jax.infer.loading import model_name
from d3d_jax.infer.measure_rounds import Decoded
from d3d_jax.infer.plan import Prediction, Profile, Setting, Times

_SETTING = ("batch", "mode", "W", "layers", "policy")
_FIGURES = ("τ", "hits", "round ms", "tokens/s", "×")
# Of the figures in that order.
_FORMATS = {
    "tau": ".2f",
    "hit_rate": ".0%",
    "round_ms": ".1f",
    "tokens_per_second": ".1f",
    "speedup": ".2f",
}
# The predictions, best first, by whether the roles have devices of their own.
Plans = Mapping[bool, Sequence[Prediction]]
# What was predicted beside what was measured; plain decoding of every batch size is among them.
Checked = list[tuple[Prediction, Decoded]]


def best_of(
    plan: Sequence[Prediction], batch: int, kind: Callable[[Prediction], Any]
) -> list[Prediction]:
    """Of a sorted plan the best of each kind at one batch size, in the plan's order."""
    found: dict[Any, Prediction] = {}
    for prediction in plan:
        if prediction.setting.batch == batch:
            found.setdefault(kind(prediction), prediction)
    return list(found.values())


def command(options: Plan, prediction: Prediction) -> str:
    """The `d3d generate` that decodes at a setting."""
    drafter = "" if options.drafter is None else f" --drafter {options.drafter}"
    if prediction.setting.mode == "plain":
        drafter = ""
    return f"d3d generate --target {options.target}{drafter} {prediction.setting}"


def print_plans(options: Plan, plans: Plans) -> None:
    """A table for each arrangement of the roles, and what to do in one sentence a batch size."""
    console = Console(highlight=False)
    batches = list(dict.fromkeys(options.batch))
    for separate, plan in plans.items():
        where = "Each role on devices of its own" if separate else "Both roles on this hardware"
        table = _table(where, (*_SETTING, *_FIGURES))
        for batch in batches:
            for best in best_of(plan, batch, _row_kind):
                table.add_row(*_setting(best), *_formatted(figures(best)))
        console.print(table)
        for batch in batches:
            best = best_of(plan, batch, lambda p: p.setting.batch)[0]
            console.print(
                f"{command(options, best)}  # {best.tokens_per_second:.1f} tokens/s, "
                f"{best.speedup:.2f} × plain",
                markup=False,
                soft_wrap=True,
            )


def _table(title: str, names: Sequence[str]) -> Table:
    # Fits in 80 columns.
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)
    for name in names:
        justify = "left" if name in ("mode", "policy", "") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _row_kind(prediction: Prediction) -> tuple[Any, ...]:
    """What gets a row of its own; of the policies only the best is shown."""
    setting = prediction.setting
    return setting.mode, setting.block_size, setting.miss, prediction.layers


def _setting(prediction: Prediction) -> list[str]:
    setting = prediction.setting
    policy = "" if setting.policy is None else str(setting.policy)
    return [
        str(setting.batch),
        setting.mode,
        str(setting.block_size),
        "" if prediction.layers is None else str(prediction.layers),
        policy + (", reuse" if setting.miss == "reuse" else ""),
    ]


def _formatted(shown: dict[str, Any]) -> list[str]:
    return ["" if shown[name] is None else f"{shown[name]:{f}}" for name, f in _FORMATS.items()]


def print_check(checked: Checked) -> None:
    """What was predicted, and below it what was measured."""
    table = _table("Predicted and measured", ("batch", "mode", "W", "policy", "", *_FIGURES))
    for prediction, decoded in checked:
        batch, mode, width, _, policy = _setting(prediction)
        predicted, measured = figures(prediction), measured_figures(decoded, checked)
        table.add_row(batch, mode, width, policy, "predicted", *_formatted(predicted))
        table.add_row("", "", "", "", "measured", *_formatted(measured))
    Console(highlight=False).print(table)


def record(
    options: Plan, profiles: Sequence[Profile], times: Times, plans: Plans, checked: Checked
) -> dict[str, Any]:
    """All figures as JSON types; it names no path."""

    def listed(plan: Sequence[Prediction]) -> list[dict[str, Any]]:
        return [{"setting": str(p.setting), "layers": p.layers, **figures(p)} for p in plan]

    return {
        "target": model_name(options.target),
        "drafter": None if options.drafter is None else model_name(options.drafter),
        "profiles": [profile.to_json() for profile in profiles],
        "times": times.to_json(),
        "shared_hardware": listed(plans[False]),
        "separate_devices": listed(plans[True]),
        "check": [
            {
                "setting": str(prediction.setting),
                "prompts": len(decoded.points[0].answers),
                "max_new_tokens": options.max_new_tokens,
                "predicted": figures(prediction),
                "measured": measured_figures(decoded, checked),
                "measured_over_predicted": round(
                    decoded.tokens_per_second / prediction.tokens_per_second, 3
                ),
            }
            for prediction, decoded in checked
        ],
    }


def figures(prediction: Prediction) -> dict[str, Any]:
    """A prediction's figures, rounded."""
    return _rounded(prediction, prediction.speedup)


def measured_figures(decoded: Decoded, checked: Checked) -> dict[str, Any]:
    """The same figures as measured; the speedup is over plain decoding of the same prompts."""
    plain = next(
        other.tokens_per_second
        for _, other in checked
        if other.setting == Setting("plain", decoded.setting.batch)
    )
    return _rounded(decoded, decoded.tokens_per_second / plain)


def _rounded(of: Prediction | Decoded, speedup: float) -> dict[str, Any]:
    return {
        "tau": None if of.tau is None else round(of.tau, 4),
        "hit_rate": None if of.hit_rate is None else round(of.hit_rate, 4),
        "round_ms": round(1e3 * of.round_seconds, 4),
        "tokens_per_second": round(of.tokens_per_second, 2),
        "speedup": round(speedup, 4),
    }
