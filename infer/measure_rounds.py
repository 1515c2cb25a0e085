"""Measurements for a plan: times of steps at many sizes, and whole decoding to hold it against.

One step is timed in `infer.measure`; what follows from the times is reckoned in `infer.plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import d3d_jax
from d3d_jax.branches import BestFirst, Policy
from d3d_jax.config import DecodeConfig
from d3d_jax.drafter import Drafter
from d3d_jax.infer.benchmark import Conversation, Point, measure
from d3d_jax.infer.benchmark_summary import acceptance, speeds
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import DEFAULT_BRANCHES
from d3d_jax.infer.measure import Spread, measure_drafter, measure_prepare, measure_verify
from d3d_jax.infer.plan import Setting, Step, StepTime, Times
from d3d_jax.infer.target import Target
from d3d_jax.sampling import SamplingParams


def variant(drafter: DrafterRole, policy: Policy, layers: int | None = None) -> DrafterRole:
    """The same drafter with another policy and block size, or with only its first layers.

    The arrays are shared. A drafter cut short drafts badly: it serves to be timed.
    """
    model, params = drafter.config, drafter.params
    if layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=layers)
        params = params | {"layers": params["layers"][:layers]}
    own = Drafter(model, drafter.drafter)
    return DrafterRole(own, params, drafter.mesh, policy, drafter.dtype)


def timed_policies(policies: Sequence[Policy]) -> list[Policy]:
    """Of the policies of one block size the largest, the smallest and one between, by their rows.

    Those are timed: the times of the others lie on the lines between them.
    """
    by_rows = {policy.budget: policy for policy in policies}
    rows = sorted(by_rows)
    return [by_rows[r] for r in dict.fromkeys((rows[-1], rows[0], rows[len(rows) // 2]))]


def measure_times(
    target: Target,
    drafter: DrafterRole,
    policies: Mapping[int, Sequence[Policy]],
    batches: Sequence[int],
    *,
    layers: Sequence[int],
    context: int,
    passes: int = 3,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Times:
    """Times every step at the sizes that the policies need; compilation excluded.

    Args:
      policies: by block size, at least one of each.
      batches: numbers of requests decoded together.
      layers: depths to time the drafter at, at most its own.
      context: tokens in every row's caches at the start.
      passes: over all sizes, one after another. A time is the median of what each pass found, so
        that whatever else the machine does for a while cannot favour a size.
      repeats: of a step in each pass, of which the median counts.
      progress: called with the number of measurements done and in all.
    """
    every, some = [], []
    for depth in layers:
        for of_size in policies.values():
            most, *others = (variant(drafter, p, depth) for p in timed_policies(of_size))
            every.append(most)
            some += others
    runs: list[Callable[[], list[StepTime]]] = []
    for batch in batches:
        # Which tokens they are changes no time.
        common = ([0] * context, batch, repeats)
        largest = max(policies)
        runs += [functools.partial(_verify, target, w, largest, *common) for w in (1, *policies)]
        runs += [functools.partial(_drafter, role, *common) for role in every]
        runs += [functools.partial(_prepare, role, *common) for role in some]
    found: dict[tuple[Step, int, int, int | None], list[float]] = {}
    for number in range(passes * len(runs)):
        progress(number, passes * len(runs))
        for time in runs[number % len(runs)]():
            size = time.step, time.batch, time.rows, time.layers
            found.setdefault(size, []).append(time.seconds)
    progress(passes * len(runs), passes * len(runs))
    about = {
        "context": context,
        "passes": passes,
        "repeats": repeats,
        "dtype": jnp.dtype(target.dtype).name,
    }
    steps = [
        StepTime(step, batch, rows, Spread.of(seconds).median, depth)
        for (step, batch, rows, depth), seconds in found.items()
    ]
    return Times(tuple(steps), about | machine())


def _verify(
    target: Target, rows: int, largest: int, prompt: list[int], batch: int, repeats: int
) -> list[StepTime]:
    spread = measure_verify(target, prompt, rows, batch, repeats, largest)
    return [StepTime("verify", batch, rows, spread.median)]


def _drafter(role: DrafterRole, prompt: list[int], batch: int, repeats: int) -> list[StepTime]:
    spreads = measure_drafter(role, prompt, batch, repeats)
    width, layers = role.width, role.config.num_hidden_layers
    sizes: dict[Step, int] = {
        "draft": 2 * width,
        "prepare": role.policy.budget,
        "resolve": width,
        "miss": width,
    }
    return [
        StepTime(step, batch, rows, spreads[step].median, layers) for step, rows in sizes.items()
    ]


def _prepare(role: DrafterRole, prompt: list[int], batch: int, repeats: int) -> list[StepTime]:
    spread = measure_prepare(role, prompt, batch, repeats)
    layers = role.config.num_hidden_layers
    return [StepTime("prepare", batch, role.policy.budget, spread.median, layers)]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What decoding some prompts at one setting came to; speeds are medians over the repeats.

    Attributes:
      points: of the repeats, all of which say the same.
    """

    setting: Setting
    points: list[Point]

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together, prefills not counted."""
        return float(np.median(speeds(self.points)[0]))

    @property
    def round_seconds(self) -> float:
        """Of one round of the whole batch."""
        return float(np.median([p.decode / max(p.rounds, 1) for p in self.points]))

    @property
    def tau(self) -> float | None:
        """Pooled acceptance length; None where no reply has a round that counts."""
        return acceptance(self.points[0].answers)["tau_pooled"]

    @property
    def hit_rate(self) -> float | None:
        """Pooled; None unless asynchronous."""
        answers = self.points[0].answers
        chances = sum(answer.chances for answer in answers)
        if self.setting.mode != "async":
            return None
        return sum(answer.hits for answer in answers) / max(chances, 1)


def decode(
    target: Target,
    drafter: DrafterRole,
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    repeats: int = 3,
) -> list[Decoded]:
    """Decodes the same prompts greedily at several settings of one batch size.

    It is `benchmark.measure`. In every repeat the settings take turns at being first: what else the
    machine does then meets all of them.

    Args:
      prompts: at least as many as the batch holds.
      progress: called with the number of passes over the prompts done and in all.
    """
    conversations = [Conversation((str(number),)) for number in range(len(prompts))]

    def chat(conversation: Conversation, replies: Sequence[Sequence[int]]) -> list[int]:
        return list(prompts[int(conversation.turns[0])])

    decoders = [_decoder(target, drafter, setting, max_new_tokens) for setting in settings]
    for decoder in decoders:
        decoder.warm_up(list(prompts))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    found = [Decoded(setting, []) for setting in settings]
    total = repeats * len(settings)
    for done in range(total):
        progress(done, total)
        repeat, turn = divmod(done, len(settings))
        at = (repeat + turn) % len(settings)
        point = measure(decoders[at], conversations, chat, lambda _: params, settings[at].batch)
        found[at].points.append(point)
    progress(total, total)
    return found


def _decoder(
    target: Target, drafter: DrafterRole, setting: Setting, max_new_tokens: int
) -> Decoder:
    config = DecodeConfig(setting.mode, max_new_tokens, miss=setting.miss)
    role = None
    if setting.mode != "plain":
        # Synchronous decoding takes only the block size from it.
        policy = setting.policy or BestFirst(DEFAULT_BRANCHES, setting.block_size)
        role = variant(drafter, policy)
    return Decoder(target, role, config, slots=setting.batch)


def machine() -> dict[str, Any]:
    """Versions and devices, for a record of what was measured."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("d3d_jax", "jax", "jaxlib", "flax")},
        "commit": _commit(),
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "cpu": _cpu(),
        "cores": _cores(),
    }


def _cores() -> int | None:
    """Those this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu() -> str | None:
    """The model of the processor, where the system says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return None


def _commit() -> str | None:
    """The commit of the checkout this runs from; None in none.

    Where tracked files differ from it a "+" and a hash of the difference follow.
    """
    root = Path(d3d_jax.__file__).resolve().parents[1]

    def git(*args: str) -> bytes:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, check=True).stdout.strip()

    try:
        # An installed package may lie inside the checkout of something else.
        if Path(os.fsdecode(git("rev-parse", "--show-toplevel"))) != root:
            return None
        changed = git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
        digest = hashlib.sha256(changed).hexdigest()
        return git("rev-parse", "HEAD").decode() + (f"+{digest[:8]}" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
