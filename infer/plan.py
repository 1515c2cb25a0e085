"""How fast decoding would be: tokens/s from times of single steps and an acceptance profile.

A round emits τ tokens of each of b requests, so tokens/s = b · τ / (seconds of a round):

    plain   T_v(1), with τ = 1
    sync    T_v(W) + T_d'(W)
    async   max(T_v(W), T_p) + T_c + m · T_d     roles on devices of their own
            T_v(W) + T_p + T_c + m · T_d         roles that share their hardware

T_v verify, T_d' a draft that also encodes the block before it, T_p packed draft, T_c the choice of
a branch, T_d a draft after a miss. m is the share of rounds with one: 1 − h^b under `stall`, since
one shared pass serves all rows that missed, and 0 under `reuse`. It is the speed model of the
README; the two small arrays that cross between devices are not in it. What it needs is measured by
`infer.measure_rounds`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from d3d_jax.branches import Policy, parse_policy
from d3d_jax.config import Miss, Mode
from d3d_jax.errors import D3DError

Step = Literal["verify", "draft", "prepare", "resolve", "miss"]
# How far beyond the sizes measured a time is still reckoned.
REACH = 1.5


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step at one size.

    Attributes:
      step: verify (T_v), draft (T_d'), prepare (T_p), resolve (T_c) or miss (T_c + T_d).
      batch: b, requests decoded together.
      rows: of the pass, for one request: W to verify and to resolve, with a miss or without; 2 W to
        draft, which encodes a block and drafts one; W · (N + 1) to prepare.
      seconds: of the step, waited for.
      layers: of the drafter; None for the target's step, verify.
    """

    step: Step
    batch: int
    rows: int
    seconds: float
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.step not in get_args(Step):
            raise D3DError(f"a step is one of {', '.join(get_args(Step))}; found {self.step!r}")
        sizes = {"batch": self.batch, "rows": self.rows}
        if self.step != "verify":
            sizes["layers"] = self.layers
        elif self.layers is not None:
            raise D3DError("layers are the drafter's: leave them out for verify")
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise D3DError(f"{name} of {self.step} must be a whole number, found {value!r}")
        if not _is_number(self.seconds) or self.seconds <= 0:
            raise D3DError(f"seconds of {self.step} must be above 0, found {self.seconds!r}")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of every step of both roles, at several sizes.

    Attributes:
      steps: no two of the same size.
      about: where they come from, for whoever reads the file.
    """

    steps: tuple[StepTime, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [(t.step, t.batch, t.rows, t.layers) for t in self.steps]
        if repeated := [size for size in sizes if sizes.count(size) > 1]:
            step, batch, rows, _ = repeated[0]
            raise D3DError(f"there are two times of {step} at batch {batch} and {rows} rows")

    def seconds(self, step: Step, batch: int, rows: int, layers: int | None = None) -> float:
        """The time of a step: linear in rows and in the drafter's layers between those measured.

        Args:
          rows, layers: see `StepTime`.

        Raises:
          D3DError: another batch than was measured, or a size far outside those measured.
        """
        points: dict[int, dict[int, float]] = {}
        for time in self.steps:
            if (time.step, time.batch) == (step, batch):
                points.setdefault(time.layers or 0, {})[time.rows] = time.seconds
        if not points:
            known = sorted({time.batch for time in self.steps if time.step == step})
            raise D3DError(
                f"there is no time of {step} at batch {batch}, only at {known}: measure it"
            )
        depth, where = layers or 0, f"{step} at batch {batch}"
        if depth in points:
            return _interpolated(points[depth], rows, f"rows of {where}")
        by_depth = {
            known: _interpolated(of_depth, rows, f"rows of {where}")
            for known, of_depth in points.items()
        }
        return _interpolated(by_depth, depth, f"drafter layers of {where}")

    @classmethod
    def from_json(cls, raw: Any) -> Times:
        """Reads what `to_json` wrote.

        Raises:
          D3DError: naming an unknown, missing or impossible field.
        """
        fields = _fields(cls, raw, "times")
        if not isinstance(fields["steps"], list):
            raise D3DError("steps must be a list of times")
        steps = tuple(StepTime(**_fields(StepTime, step, "a time")) for step in fields["steps"])
        return cls(**fields | {"steps": steps})

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        steps = [dataclasses.asdict(step) for step in self.steps]
        for step in steps:
            step["seconds"] = round(step["seconds"], 7)
            if step["layers"] is None:
                del step["layers"]
        return {"about": dict(self.about), "steps": steps}


@dataclasses.dataclass(frozen=True)
class Profile:
    """How often one drafter is right.

    Attributes:
      layers: of that drafter.
      reached: by block size W, the probabilities that at least 1, 2, … W − 1 drafts are accepted.
      hit_rates: by block size, then policy (`best-first:8`): h, the share of blocks prepared ahead.
      reuse_tau: by block size, then policy: τ where a miss reuses the nearest block, if known.
      about: where it comes from, for whoever reads the file.
    """

    layers: int
    reached: Mapping[int, tuple[float, ...]]
    hit_rates: Mapping[int, Mapping[str, float]]
    reuse_tau: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.layers) is not int or self.layers < 1:
            raise D3DError(f"layers must be a whole number, found {self.layers!r}")
        if not self.reached:
            raise D3DError("reached names no block size")
        for width, shares in self.reached.items():
            if width < 2 or len(shares) != width - 1:
                raise D3DError(
                    f"reached at block size {width} must be {max(width - 1, 1)} probabilities"
                )
            for share in shares:
                _check_within(f"reached at block size {width}", share, 0, 1)
        for policy, rate in _by_policy(self.hit_rates):
            _check_within(f"hit rate of {policy} at block size {policy.block_size}", rate, 0, 1)
        for policy, tau in _by_policy(self.reuse_tau):
            width = policy.block_size
            _check_within(f"τ of {policy} at block size {width}", tau, 1, width)

    def tau(self, block_size: int) -> float:
        """Tokens a round of `sync`, and of `async` with `stall`, emits: 1 + Σ_{i<W} P(reached i).

        Of an endless reply: the last round of a real one is cut where the reply ends. A block size
        that was not measured takes the offsets it has of the next larger one.

        Raises:
          D3DError: none as large was measured.
        """
        larger = [width for width in self.reached if width >= block_size]
        if not larger:
            largest = max(self.reached)
            raise D3DError(f"block size {block_size} is above the {largest} of the profile")
        return 1 + sum(self.reached[min(larger)][: block_size - 1])

    @classmethod
    def from_json(cls, raw: Any) -> Profile:
        """Reads what `to_json` wrote.

        Raises:
          D3DError: naming an unknown, missing or impossible field.
        """
        fields = _fields(cls, raw, "an acceptance profile")
        for name in {"reached", "hit_rates", "reuse_tau"} & set(fields):
            fields[name] = _by_block_size(name, fields[name])
        reached = {width: tuple(shares) for width, shares in fields["reached"].items()}
        return cls(**fields | {"reached": reached})

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "about": dict(self.about),
            "layers": self.layers,
            "reached": {str(width): list(shares) for width, shares in self.reached.items()},
            "hit_rates": {str(width): dict(rates) for width, rates in self.hit_rates.items()},
            "reuse_tau": {str(width): dict(taus) for width, taus in self.reuse_tau.items()},
        }


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to decode.

    Attributes:
      block_size: W; 1 for plain.
      policy: which outcomes are prepared; None unless asynchronous.
    """

    mode: Mode
    batch: int
    block_size: int = 1
    policy: Policy | None = None
    miss: Miss = "stall"

    def __str__(self) -> str:
        """As options of `d3d generate`."""
        parts = [f"--mode {self.mode}"]
        if self.mode != "plain":
            parts.append(f"--block-size {self.block_size}")
        if self.policy is not None:
            parts.append(f"--policy {self.policy} --miss {self.miss}")
        return " ".join([*parts, f"--batch {self.batch}"])


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a setting is worth.

    Attributes:
      layers: of the drafter; None for plain.
      tau: τ, tokens a round emits of each request.
      hit_rate: h; None unless misses stall.
      round_seconds: of one round of the whole batch.
      tokens_per_second: of the whole batch.
      speedup: over plain decoding of the same batch.
    """

    setting: Setting
    layers: int | None
    tau: float
    hit_rate: float | None
    round_seconds: float
    tokens_per_second: float
    speedup: float


def predict(times: Times, profile: Profile, setting: Setting, *, separate: bool) -> Prediction:
    """The speed model at one setting; for the formulas see the head of this file.

    Args:
      profile: of the drafter that decodes.
      separate: whether the roles have devices of their own.

    Raises:
      D3DError: a size that the times do not reach, a policy without a hit rate, or `reuse` without
        a measured τ: it is below that of `stall`, by how much no profile of `stall` says.
    """
    mode, batch, width = setting.mode, setting.batch, setting.block_size
    plain = times.seconds("verify", batch, 1)

    def seconds(step: Step, rows: int) -> float:
        return times.seconds(step, batch, rows, profile.layers)

    tau, hit_rate = 1.0, None
    if mode == "plain":
        whole = plain
    elif mode == "sync":
        tau = profile.tau(width)
        whole = times.seconds("verify", batch, width) + seconds("draft", 2 * width)
    else:
        assert setting.policy is not None
        if setting.miss == "reuse":
            tau, missed = _of_policy(profile.reuse_tau, setting, "τ of reuse"), 0.0
        else:
            hit_rate = _of_policy(profile.hit_rates, setting, "hit rate")
            tau, missed = profile.tau(width), 1 - hit_rate**batch
        verify = times.seconds("verify", batch, width)
        prepare = seconds("prepare", setting.policy.budget)
        whole = max(verify, prepare) if separate else verify + prepare
        whole += (1 - missed) * seconds("resolve", width) + missed * seconds("miss", width)
    layers = None if mode == "plain" else profile.layers
    speed, speedup = batch * tau / whole, tau * plain / whole
    return Prediction(setting, layers, tau, hit_rate, whole, speed, speedup)


def drafting(profile: Profile, batch: int) -> list[Setting]:
    """Every way to decode with a drafter that its profile has figures for."""
    found = [Setting("sync", batch, width) for width in sorted(profile.reached)]
    figures: dict[Miss, Any] = {"stall": profile.hit_rates, "reuse": profile.reuse_tau}
    for miss, of_miss in figures.items():
        for policy, _ in _by_policy(of_miss):
            found.append(Setting("async", batch, policy.block_size, policy, miss))
    return found


def recommend(
    times: Times, profiles: Sequence[Profile], batches: Sequence[int], *, separate: bool
) -> list[Prediction]:
    """What plain decoding and every setting of the profiles are worth, most tokens/s first.

    Args:
      profiles: one for each depth of the drafter, at least one.
      batches: numbers of requests to decode together; more of them decode more tokens/s in all,
        so choose among the settings of one batch.
      separate: whether the roles have devices of their own.

    Raises:
      D3DError: as for `predict`.
    """
    asked = [(profiles[0], Setting("plain", batch)) for batch in batches]
    asked += [(p, setting) for p in profiles for batch in batches for setting in drafting(p, batch)]
    found = [predict(times, profile, setting, separate=separate) for profile, setting in asked]
    return sorted(found, key=lambda p: p.tokens_per_second, reverse=True)


def _of_policy(figures: Mapping[int, Mapping[str, float]], setting: Setting, what: str) -> float:
    try:
        return figures[setting.block_size][str(setting.policy)]
    except KeyError:
        raise D3DError(
            f"{what} of {setting.policy} at block size {setting.block_size} is not in the "
            "acceptance profile, so its speed is not predicted: measure it"
        ) from None


def _by_policy(figures: Mapping[int, Mapping[str, float]]) -> list[tuple[Policy, float]]:
    return [
        (parse_policy(text, width), value)
        for width, of_width in figures.items()
        for text, value in of_width.items()
    ]


def _interpolated(points: Mapping[int, float], at: int, what: str) -> float:
    """Linear between points, and a little beyond the largest with the slope before it.

    Below the smallest its own time is taken: less work never takes longer.
    """
    if at in points:
        return points[at]
    known = sorted(points)
    if len(known) == 1 or not known[0] / REACH <= at <= known[-1] * REACH:
        raise D3DError(
            f"{at} {what} are too far from what was measured, {known}: measure nearer to it"
        )
    if at > known[-1]:
        before, last = known[-2:]
        slope = max(points[last] - points[before], 0) / (last - before)
        return points[last] + slope * (at - last)
    return float(np.interp(at, known, [points[x] for x in known]))


def _fields(kind: type, raw: Any, what: str) -> dict[str, Any]:
    """A JSON object as the fields of a dataclass."""
    if not isinstance(raw, Mapping):
        raise D3DError(f"{what} must be a JSON object, found {raw!r:.80}")
    fields = dataclasses.fields(kind)
    if unknown := sorted(set(raw) - {field.name for field in fields}):
        raise D3DError(f"{what} has no field {unknown[0]!r}")
    missing = [
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in raw
    ]
    if missing:
        raise D3DError(f"{what} lacks the field {missing[0]!r}")
    if not isinstance(raw.get("about", {}), Mapping):
        raise D3DError(f"about in {what} must be a JSON object")
    return dict(raw)


def _by_block_size(name: str, raw: Any) -> dict[int, Any]:
    if not isinstance(raw, Mapping) or not all(str(key).isdecimal() for key in raw):
        raise D3DError(f"{name} must be a JSON object by block size")
    kind = list if name == "reached" else Mapping
    if not all(isinstance(value, kind) for value in raw.values()):
        raise D3DError(f"{name} holds a list of probabilities or figures by policy, and none else")
    return {int(key): value for key, value in raw.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_within(what: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise D3DError(f"{what} must be between {low} and {high}, found {value!r}")
