"""`d3d sweep`: measured speed along one axis after another, beside what `d3d plan` predicts.

What one drafter came to at one batch size, and its times, are kept in a file of their own in the
folder: an interrupted sweep continues.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from d3d_jax.branches import BestFirst, Policy, Rectangle
from d3d_jax.commands import report_plots
from d3d_jax.commands.benchmark_folder import MeasuredFolder
from d3d_jax.commands.evaluate import find_checked, load_checked
from d3d_jax.commands.loading import DecoderFiles, open_decoder
from d3d_jax.commands.option_groups import Decoding
from d3d_jax.commands.plan import Policies, measure_profile, recorded_prompt
from d3d_jax.commands.report_tables import sweep_table
from d3d_jax.commands.runtime import Bar, busy, note, start_jax
from d3d_jax.commands.sweep_options import KIND, Sweep
from d3d_jax.errors import D3DError
from d3d_jax.files import write_json
from d3d_jax.infer.benchmark_summary import summarise
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import model_name
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.measure_rounds import Decoded, decode, machine, measure_times
from d3d_jax.infer.plan import Prediction, Profile, Setting, Times, predict
from d3d_jax.infer.target import Target
from d3d_jax.memory import enough_memory, or_out_of_memory
from d3d_jax.models import checkpoint
from d3d_jax.models.safetensors_folder import weights_digest
from d3d_jax.train.dataset import ResponseDataset, check_data, open_dataset


@dataclasses.dataclass(frozen=True)
class Case:
    """A place on an axis.

    Attributes:
      series: what else tells its line in the plot from the others.
      drafter: index of it.
      drafter_name: where drafters are compared.
    """

    value: int
    setting: Setting
    series: str = ""
    drafter: int = 0
    drafter_name: str | None = None


Axes = dict[str, list[Case]]
DEFINITIONS = (
    "Measured: as d3d benchmark does, prefills not counted; tokens/s and speedup are medians over "
    "the repeats, in which the settings take turns, with the 95 % interval of the mean in brackets "
    "(Student's t). τ is pooled over the rounds of these prompts, a reply's last left out.",
    "Planned: by the speed model, from single steps timed alone and acceptance on --documents "
    "responses of the data, these prompts or others; all rows of a batch are taken to be busy.",
)


def run(options: Sweep) -> None:
    """Checks everything, measures and plans, and writes and prints tables."""
    dataset = open_dataset(options.data, options.split)
    if not dataset.manifest.sampling.get("greedy"):
        raise D3DError("a sweep decodes greedily, and the responses of --data were sampled")
    if options.samples > len(dataset):
        raise D3DError(f"--samples may be at most {len(dataset)}, the responses there are")
    start_jax(cpu_devices=options.placement.num_devices)
    files = [_open(options, name) for name in options.drafter or (None,)]
    axes = axes_of(options, files)
    indices = np.linspace(0, len(dataset) - 1, options.samples).round().astype(int)
    prompts = [recorded_prompt(dataset[int(index)]) for index in indices]
    files[0].check(prompts)
    settings = _settings(options, dataset, files)
    folder = MeasuredFolder(options.out, settings, "sweep")
    of_drafter = [
        {axis: [case for case in cases if case.drafter == number] for axis, cases in axes.items()}
        for number in range(len(files))
    ]
    for f in files:
        assert f.drafter is not None
        check_data(find_checked(f.drafter.folder, options.target)[2].drafter, dataset)
    profiles = []
    for number, (f, own) in enumerate(zip(files, of_drafter, strict=True)):
        make = functools.partial(_profile, options, dataset, f, _policies(own))
        profiles.append(Profile.from_json(folder.kept(f"profile-{number}", make)))
    with busy(f"loading {options.target} and {len(files)} drafters"):
        model = files[0].target.load(files[0].mesh, options.dtype and jnp.dtype(options.dtype))
        roles = [f.drafter.load(model) for f in files if f.drafter is not None]
    rows: dict[str, list[dict[str, Any]]] = {axis: [] for axis in axes}
    failed: list[str] = []
    try:
        for number, (role, profile, own) in enumerate(
            zip(roles, profiles, of_drafter, strict=True)
        ):
            measuring = Measuring(options, folder, number, model.target, role, prompts)
            for axis, found in measuring.rows(profile, own).items():
                rows[axis] += found
            failed += measuring.failed
    except KeyboardInterrupt:
        note(f"{options.out} keeps what was measured; the same command continues")
        raise
    _finish(options, settings, rows, failed)


def axes_of(options: Sweep, files: Sequence[DecoderFiles]) -> Axes:
    """What to decode along each axis that was asked for.

    Raises:
      D3DError: a block size, or a rectangle, that the drafter cannot take.
    """
    policy, config = _usual(files[0]), files[0].drafter and files[0].drafter.config
    width = policy.block_size
    largest = config.block_size if config else width
    if too_large := [w for w in options.block_size if w > largest]:
        raise D3DError(
            f"block size {too_large[0]} is above the {largest} that the drafter was trained for"
        )
    sync = Setting("sync", 1, width)

    def asynchronous(policy: Policy) -> Setting:
        return Setting("async", 1, policy.block_size, policy)

    axes: Axes = {}
    if options.block_size:
        count = policy.num_branches
        axes["block size"] = [
            Case(w, setting)
            for w in options.block_size
            for setting in (Setting("sync", 1, w), asynchronous(BestFirst(count, w)))
        ]
    if options.branches:
        axes["branches"] = [Case(n, asynchronous(BestFirst(n, width))) for n in options.branches]
    if options.c:
        sides = list(itertools.product(options.c, options.f))
        rectangles = {(c, f): asynchronous(Rectangle(c, f, width)) for c, f in sides}
        axes["C"] = [Case(c, rectangles[c, f], f"F {f}") for c, f in sides]
        axes["F"] = [Case(f, rectangles[c, f], f"C {c}") for c, f in sides]
    if options.concurrency:
        axes["concurrency"] = [
            Case(batch, dataclasses.replace(setting, batch=batch))
            for batch in options.concurrency
            for setting in (sync, asynchronous(policy))
        ]
    if len(files) > 1:
        axes["layers"] = [
            Case(_depth(f), setting, drafter=number, drafter_name=model_name(name))
            for number, (f, name) in enumerate(zip(files, options.drafter, strict=True))
            for own in (_usual(f),)
            for setting in (Setting("sync", 1, own.block_size), asynchronous(own))
        ]
    tokens = (config and config.draft_vocab_size) or files[0].target.config.vocab_size
    for of_size in _policies(axes).values():
        for one in of_size:
            if one.num_candidates > tokens:
                raise D3DError(f"{one} needs more candidates than the vocabulary has tokens")
    return axes


@dataclasses.dataclass
class Measuring:
    """Decoding and timing with one drafter.

    Attributes:
      number: of the drafter.
      failed: sentences of batch sizes for which memory was too small.
    """

    options: Sweep
    folder: MeasuredFolder
    number: int
    target: Target
    role: DrafterRole
    prompts: Sequence[list[int]]
    failed: list[str] = dataclasses.field(default_factory=list)

    def rows(self, profile: Profile, axes: Axes) -> dict[str, list[dict[str, Any]]]:
        """The rows of every axis, decoded and planned.

        Settings of one batch size take turns; one that is on several axes is decoded once.
        """
        settings = list(dict.fromkeys(case.setting for cases in axes.values() for case in cases))
        found: dict[Setting, dict[str, Any]] = {}
        times: dict[int, Times] = {}
        for batch in sorted({setting.batch for setting in settings}):
            own = [Setting("plain", batch), *(s for s in settings if s.batch == batch)]
            name = f"decoded-{self.number}-{batch}"
            decoded = self.folder.kept(name, functools.partial(self._decoded, own))
            if isinstance(decoded, str):
                self.failed.append(f"{batch} at a time is left out, {decoded}")
                continue
            found |= dict(zip(own, decoded, strict=True))
            timed = functools.partial(self._times, policies_of(own[1:]), batch)
            raw = self.folder.kept(f"times-{self.number}-{batch}", timed)
            if isinstance(raw, str):
                self.failed.append(f"{batch} at a time has no plan, {raw}")
            else:
                times[batch] = Times.from_json(raw)
        separate = not share_hardware(self.target, self.role)
        layers = self.role.config.num_hidden_layers

        def row(case: Case) -> dict[str, Any]:
            own = times.get(case.setting.batch)
            planned = None if own is None else _planned(own, profile, case, separate)
            return _row(case, found[case.setting], layers, planned)

        return {
            axis: [row(case) for case in cases if case.setting in found]
            for axis, cases in axes.items()
        }

    def _decoded(self, settings: Sequence[Setting]) -> list[dict[str, Any]] | str:
        """The figures of each setting of one batch size, plain decoding first."""
        batch = settings[0].batch
        with Bar(f"decoding, {batch} at a time", 1) as bar:
            decoded = or_out_of_memory(
                lambda: decode(
                    self.target,
                    self.role,
                    settings,
                    self.prompts,
                    self.options.max_new_tokens,
                    bar.update_total,
                    self.options.repeats,
                )
            )
        return decoded if isinstance(decoded, str) else [_figures(d, decoded[0]) for d in decoded]

    def _times(self, policies: Policies, batch: int) -> dict[str, Any] | str:
        with Bar(f"timing steps, {batch} at a time", 1) as bar:
            times = or_out_of_memory(
                lambda: measure_times(
                    self.target,
                    self.role,
                    policies,
                    [batch],
                    layers=[self.role.config.num_hidden_layers],
                    context=self.options.context,
                    progress=bar.update_total,
                )
            )
        return times if isinstance(times, str) else times.to_json()


def _planned(times: Times, profile: Profile, case: Case, separate: bool) -> Prediction | None:
    """What the speed model says; None where label shift 0 has no offline hit rate."""
    setting = case.setting
    if setting.mode == "async" and not profile.hit_rates:
        return None
    return predict(times, profile, setting, separate=separate)


def _figures(decoded: Decoded, plain: Decoded) -> dict[str, Any]:
    """As a benchmark gives them (`summarise`)."""
    found = summarise(decoded.points, plain.points, devices=1)
    same = [
        a.token_ids == b.token_ids
        for ours, theirs in zip(decoded.points, plain.points, strict=True)
        for a, b in zip(ours.answers, theirs.answers, strict=True)
    ]
    return {
        "tau": found["tau_pooled"],
        "hit_rate": found["hit_rate"],
        "tokens_per_second": found["tokens_per_second_decode"],
        "speedup": found["speedup_decode"],
        "compared": len(same),
        "identical": sum(same),
    }


def _row(
    case: Case, figures: dict[str, Any], layers: int, planned: Prediction | None
) -> dict[str, Any]:
    return {
        "value": case.value,
        "series": case.series,
        "mode": case.setting.mode,
        "setting": f"{case.setting.mode}, W {case.setting.block_size}",
        "policy": case.setting.policy and str(case.setting.policy),
        "layers": layers,
        "drafter": case.drafter_name,
        **figures,
        "predicted": planned
        and {
            "tau": round(planned.tau, 4),
            "hit_rate": planned.hit_rate,
            "tokens_per_second": round(planned.tokens_per_second, 3),
            "speedup": round(planned.speedup, 4),
        },
    }


def _open(options: Sweep, name: str | None) -> DecoderFiles:
    return open_decoder(
        options.target, Decoding(name, "async", dtype=options.dtype), options.placement
    )


def _usual(files: DecoderFiles) -> Policy:
    """What a drafter prepares where nothing else is asked for."""
    assert files.drafter is not None
    return files.drafter.policy


def _depth(files: DecoderFiles) -> int:
    """Layers of a drafter."""
    assert files.drafter is not None
    return checkpoint.read_config(files.drafter.folder)[0].num_hidden_layers


def policies_of(settings: Iterable[Setting]) -> Policies:
    """Their policies by block size."""
    found: Policies = {}
    for setting in settings:
        own = found.setdefault(setting.block_size, [])
        if setting.policy is not None and setting.policy not in own:
            own.append(setting.policy)
    return found


def _policies(axes: Axes) -> Policies:
    """The policies on all axes by block size."""
    return policies_of(case.setting for cases in axes.values() for case in cases)


def _profile(
    options: Sweep,
    dataset: ResponseDataset,
    files: DecoderFiles,
    policies: Policies,
) -> dict[str, Any]:
    """Acceptance on recorded responses, as JSON types."""
    assert files.drafter is not None
    drafter, params = load_checked(files.drafter.folder, options.target)
    advice = "the whole drafter must fit one device in float32"
    with enough_memory(advice), busy("measuring acceptance on recorded responses"):
        return measure_profile(drafter, params, dataset, options.documents, policies).to_json()


def _settings(
    options: Sweep, dataset: ResponseDataset, files: Sequence[DecoderFiles]
) -> dict[str, Any]:
    """All that decides what is measured."""
    settings = dataclasses.asdict(options)
    for name in ("out", "json"):
        del settings[name]
    data = {"digest": dataset.digest, **dataset.manifest.to_json()}
    weights = [weights_digest(f.drafter.folder) for f in files if f.drafter is not None]
    return settings | {
        "data": data,
        "target_weights": weights_digest(files[0].target.folder),
        "drafter_weights": weights,
        "machine": machine(),
    }


def _finish(
    options: Sweep,
    settings: dict[str, Any],
    rows: dict[str, list[dict[str, Any]]],
    failed: Sequence[str],
) -> None:
    """Writes JSON and plots, and prints the tables."""
    result = {
        "kind": KIND,
        "definitions": DEFINITIONS,
        "settings": settings,
        "failed": failed,
        "axes": rows,
    }
    write_json(options.out / "sweep.json", result, indent=1)
    for axis, own in rows.items():
        report_plots.sweep(options.out / f"sweep-{axis.replace(' ', '-')}.png", own, axis)
    for sentence in failed:
        note(sentence)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    for axis, own in rows.items():
        print(f"{sweep_table(own, axis)}\n")
    note(f"figures in {options.out}")
