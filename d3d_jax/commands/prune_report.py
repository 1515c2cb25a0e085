"""Depth against acceptance, step times and speed: what `d3d prune --speed` measures and draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from d3d_jax.commands.evaluate import load_checked
from d3d_jax.commands.plan import measure_profile, recorded_prompt
from d3d_jax.commands.runtime import Bar, busy
from d3d_jax.files import picture
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import load_drafter
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.measure_rounds import decode, measure_times
from d3d_jax.infer.model import Model, load_model
from d3d_jax.infer.plan import Profile, Setting, Times, predict
from d3d_jax.train.dataset import ResponseDataset

# Tokens in the caches while steps are timed, and the most that a prompt is answered with.
CONTEXT, MAX_NEW_TOKENS = 256, 128


@dataclasses.dataclass(frozen=True)
class Depth:
    """One drafter of a pruning, as it decodes.

    Attributes:
      layers: it has.
      tau: τ of blocks of the size decoded with, on the validation responses.
      hit_rate: h of the policy decoded with; None where it has none offline (label shift 0).
      draft_ms, prepare_ms: T_d' and T_p at batch 1.
      predicted: speedup over plain decoding by the speed model, of `sync` and `async` with roles on
        the hardware at hand, and of `separate`: `async` with devices of their own.
      measured: speedups of `sync` and `async` in decoding.
    """

    layers: int
    tau: float
    hit_rate: float | None
    draft_ms: float
    prepare_ms: float
    predicted: dict[str, float]
    measured: dict[str, float]


def measure(
    target: str,
    drafters: Mapping[int, str | Path],
    validation: ResponseDataset,
    prompts: int,
    documents: int = 0,
) -> list[Depth]:
    """Times, predicts and decodes with every drafter, at batch 1.

    Args:
      drafters: by number of layers.
      validation: greedy responses.
      prompts: of them to decode, evenly spread.
      documents: of them to measure acceptance on, evenly spread; 0 for all.
    """
    depths = sorted(drafters, reverse=True)
    with busy(f"loading {target} and {len(depths)} drafters"):
        model = load_model(target)
        roles = {depth: load_drafter(model, drafters[depth]) for depth in depths}
    policy = roles[depths[0]].policy
    with Bar("timing steps", 1) as bar:
        times = measure_times(
            model.target,
            roles[depths[0]],
            {policy.block_size: [policy]},
            [1],
            layers=sorted(depths),
            context=CONTEXT,
            progress=bar.update_total,
        )
    found = []
    for depth in depths:
        with busy(f"measuring the acceptance of {depth} layers"):
            drafter, params = load_checked(drafters[depth], target)
            widths = {policy.block_size: [policy]}
            profile = measure_profile(drafter, params, validation, documents, widths)
        measured = _decoded(model, roles[depth], validation, prompts)
        found.append(_depth(model, roles[depth], times, profile, measured))
    return found


def _settings(role: DrafterRole) -> dict[str, Setting]:
    width = role.policy.block_size
    return {
        "plain": Setting("plain", 1),
        "sync": Setting("sync", 1, width),
        "async": Setting("async", 1, width, role.policy),
    }


def _decoded(
    model: Model, role: DrafterRole, validation: ResponseDataset, prompts: int
) -> dict[str, float]:
    """Speedups over plain decoding of the same prompts in the same run."""
    indices = np.linspace(0, len(validation) - 1, prompts).round().astype(int)
    texts = [recorded_prompt(validation[int(index)]) for index in indices]
    settings = _settings(role)
    with Bar(f"decoding with {role.config.num_hidden_layers} layers", 1) as bar:
        found = decode(
            model.target, role, [*settings.values()], texts, MAX_NEW_TOKENS, bar.update_total
        )
    plain, *others = (decoded.tokens_per_second for decoded in found)
    return {name: speed / plain for name, speed in zip(("sync", "async"), others, strict=True)}


def _depth(
    model: Model, role: DrafterRole, times: Times, profile: Profile, measured: dict[str, float]
) -> Depth:
    width, shared = role.policy.block_size, share_hardware(model.target, role)
    settings, predicted = _settings(role), {}
    for name, mode, separate in (
        ("sync", "sync", False),
        ("async", "async", not shared),
        ("separate", "async", True),
    ):
        # At label shift 0 there is no offline hit rate, and nothing is said of async.
        if mode == "sync" or profile.hit_rates:
            prediction = predict(times, profile, settings[mode], separate=separate)
            predicted[name] = prediction.speedup
    return Depth(
        profile.layers,
        profile.tau(width),
        profile.hit_rates.get(width, {}).get(str(role.policy)),
        1e3 * times.seconds("draft", 1, 2 * width, profile.layers),
        1e3 * times.seconds("prepare", 1, role.policy.budget, profile.layers),
        predicted,
        measured,
    )


def table(depths: list[Depth]) -> Table:
    """Depth against acceptance and speed."""
    found = Table(
        "layers", "τ", "hits", "T_d ms", "T_p ms",
        "sync ×", "plan", "async ×", "plan", "apart, plan",
    )  # fmt: skip
    for depth in depths:
        hits = "" if depth.hit_rate is None else f"{depth.hit_rate:.0%}"
        speeds = [depth.measured["sync"], depth.predicted["sync"], depth.measured["async"]]
        speeds += [depth.predicted.get(name, np.nan) for name in ("async", "separate")]
        found.add_row(
            str(depth.layers),
            f"{depth.tau:.2f}",
            hits,
            f"{depth.draft_ms:.1f}",
            f"{depth.prepare_ms:.1f}",
            *(f"{speed:.2f}" for speed in speeds),
        )
    return found


def draw(depths: list[Depth], path: Path) -> None:
    """τ, draft times and speedups against depth."""
    with picture(path, (14, 4.2)) as figure:
        left, middle, right = figure.subplots(1, 3)
        layers = [depth.layers for depth in depths]
        left.plot(layers, [depth.tau for depth in depths], "o-")
        left.set(xlabel="layers of the drafter", ylabel="τ", title="Acceptance length")
        middle.plot(layers, [depth.draft_ms for depth in depths], "o-", label="T_d of sync")
        middle.plot(layers, [depth.prepare_ms for depth in depths], "o-", label="T_p, packed")
        middle.set(xlabel="layers of the drafter", ylabel="ms", title="Time of a draft")
        middle.set_ylim(bottom=0)
        middle.legend()
        for name in ("sync", "async"):
            right.plot(layers, [depth.measured[name] for depth in depths], "o-", label=name)
        if all("separate" in depth.predicted for depth in depths):
            separate = [depth.predicted["separate"] for depth in depths]
            right.plot(layers, separate, "o--", label="async on its own devices, predicted")
        right.set(xlabel="layers of the drafter", ylabel="×", title="Speedup over plain decoding")
        right.legend()
        for axes in (left, middle, right):
            axes.set_xticks(layers)
