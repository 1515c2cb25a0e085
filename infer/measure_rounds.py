"""Measurements for a plan: times of steps at many sizes, and whole decoding to hold it against.

One step is timed in `infer.measure`; what follows from the times is reckoned in `infer.plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import d3d_jax
from d3d_jax.branches import BestFirst, Policy
from d3d_jax.config import DecodeConfig
from d3d_jax.drafter import Drafter
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.loading import DEFAULT_BRANCHES
from d3d_jax.infer.measure import Spread, measure_drafter, measure_prepare, measure_verify
from d3d_jax.infer.plan import Setting, Step, StepTime, Times
from d3d_jax.infer.replies import Reply
from d3d_jax.infer.target import Target


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
        runs += [functools.partial(_verify, target, w, *common) for w in (1, *policies)]
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
    target: Target, rows: int, prompt: list[int], batch: int, repeats: int
) -> list[StepTime]:
    spread = measure_verify(target, prompt, rows, batch, repeats)
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


@dataclasses.dataclass
class Decoded:
    """What decoding some prompts at one setting came to.

    Attributes:
      replies: of all prompts.
      seconds: of decoding, from the first tokens of a group to its last; prefills are not counted.
      rounds: of the whole batch: as many as the row took that ended last.
    """

    setting: Setting
    replies: list[Reply] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    rounds: int = 0

    @property
    def tokens(self) -> int:
        """Emitted by rounds: the first of each reply is its prefill's."""
        return sum(len(reply.token_ids) - 1 for reply in self.replies)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.tokens / self.seconds

    @property
    def round_seconds(self) -> float:
        """Of one round of the whole batch."""
        return self.seconds / max(self.rounds, 1)

    @property
    def tau(self) -> float:
        """Pooled acceptance length."""
        return self.tokens / max(sum(reply.rounds for reply in self.replies), 1)

    @property
    def hit_rate(self) -> float | None:
        """Pooled; None unless asynchronous."""
        chances = sum(reply.chances for reply in self.replies)
        if self.setting.mode != "async":
            return None
        return sum(reply.hits for reply in self.replies) / max(chances, 1)


def decode(
    target: Target,
    drafter: DrafterRole,
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Decoded]:
    """Decodes the same prompts greedily at several settings of one batch size.

    Groups of as many prompts as the batch holds are decoded one after another, each at every
    setting before the next, in turning order: what else the machine does then meets all settings.

    Args:
      prompts: a multiple of the batch size.
      progress: called with the number of groups done and in all.
    """
    batch = settings[0].batch
    decoders = [_decoder(target, drafter, setting, max_new_tokens) for setting in settings]
    for decoder in decoders:
        decoder.warm_up(list(prompts))
    found = [Decoded(setting) for setting in settings]
    groups = len(prompts) // batch
    for number in range(groups):
        progress(number, groups)
        group = list(prompts[number * batch : (number + 1) * batch])
        for turn in range(len(settings)):
            at = (number + turn) % len(settings)
            replies = decoders[at].generate(group)
            found[at].replies += replies
            found[at].seconds += decoders[at].timing.decode
            found[at].rounds += max(reply.rounds for reply in replies)
    progress(groups, groups)
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
    """The commit of the checkout this runs from, with "+" if tracked files differ; None in none."""
    root = Path(d3d_jax.__file__).resolve().parents[1]

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie inside the checkout of something else.
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
