"""Times of single decoding steps, and by how much the target prefers one token to another.

The symbols are those of the speed model: T_v verify, T_p packed draft, T_d synchronous draft.
Comparisons of whole replies are in `infer.demo`; nothing is printed here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from d3d_jax import acceptance, layout
from d3d_jax.infer.roles import DrafterRole, Target, pad_prompts
from d3d_jax.models import decoder


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and interquartile range of repeated measurements, in their unit."""

    median: float
    iqr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, middle, high = np.percentile(values, [25, 50, 75])
        return cls(float(middle), float(high - low))


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of each step at batch 1, on a real state, each waited for.

    Attributes:
      plain: one step of plain decoding, a row of one token.
      verify: T_v, the target over a block of W rows.
      draft: T_d', a round's draft of synchronous decoding, which also encodes the last block.
      prepare: T_p, the packed draft of all branches.
      resolve: choosing a prepared branch after a hit.
      miss: resolving without a prepared branch: it drafts synchronously.
    """

    plain: Spread
    verify: Spread
    draft: Spread
    prepare: Spread
    resolve: Spread
    miss: Spread

    @property
    def redraft(self) -> float:
        """T_d: what a miss adds to resolving, in seconds."""
        return max(self.miss.median - self.resolve.median, 0.0)


def measure_steps(
    target: Target, drafter: DrafterRole, prompt_ids: list[int], repeats: int = 10
) -> StepTimes:
    """Times every step of both roles after prefilling a prompt, compilation excluded."""
    tokens, lengths = pad_prompts([prompt_ids])
    width = drafter.width
    steps = repeats + _WARM_UP
    capacity = len(prompt_ids) + steps * (width + 1)
    limits = np.full((1,), np.iinfo(np.int32).max, np.int32)
    report, state = target.prefill(tokens, lengths, limits, capacity)
    moved = drafter.put(report)
    handover, drafts = drafter.first_draft(drafter.prefill(tokens, lengths, capacity), moved)
    no_drafts, drafted = target.put(np.zeros((1, 1), np.int32)), target.put(handover)

    def verify(handover: jax.Array) -> Any:
        nonlocal state
        report, state = target.verify(state, handover)
        return report, state

    one_token = _report(drafter, 1, int(prompt_ids[-1]))

    def draft() -> Any:
        nonlocal drafts
        handover, drafts = drafter.draft(drafts, one_token)
        return handover, drafts

    def prepare() -> Any:
        nonlocal drafts
        drafts, hidden, prepared = drafter.prepare(drafts)
        return drafts, hidden, prepared

    measured = {
        "plain": timed(lambda: verify(no_drafts), repeats),
        "verify": timed(lambda: verify(drafted), repeats),
        "draft": timed(draft, repeats),
        "prepare": timed(prepare, repeats),
    }
    drafts, hidden, prepared = prepare()
    hit = _report(drafter, int(prepared.outcome[0, 0]), int(prepared.anchors[0, 0]))
    # The first draft itself is no rejection, so no branch was prepared for it.
    no_hit = _report(drafter, 1, int(drafts.block[0, 1]))
    return StepTimes(
        **measured,
        resolve=timed(lambda: drafter.resolve(drafts, hidden, prepared, hit), repeats),
        miss=timed(lambda: drafter.resolve(drafts, hidden, prepared, no_hit), repeats),
    )


# Runs of a step before it is timed: the first compiles, the second finds warm memory.
_WARM_UP = 2


def timed(step: Callable[[], Any], repeats: int) -> Spread:
    """Seconds of a step, waited for each time, its first runs left out."""
    seconds = []
    for _ in range(_WARM_UP + repeats):
        began = time.perf_counter()
        jax.block_until_ready(step())
        seconds.append(time.perf_counter() - began)
    return Spread.of(seconds[_WARM_UP:])


def _report(drafter: DrafterRole, count: int, last: int) -> jax.Array:
    """A report of `count` tokens that end with `last`, on the drafter's mesh."""
    report = np.full((1, acceptance.TOKENS + drafter.width), -1, np.int32)
    report[0, acceptance.COUNT], report[0, acceptance.ACTIVE] = count, 1
    report[0, acceptance.TOKENS : acceptance.TOKENS + count] = last
    return drafter.put(report)


def share_hardware(target: Target, drafter: DrafterRole) -> bool:
    """Whether the roles compete for one device; all CPU devices share the machine's cores."""
    ours, theirs = target.sharding.device_set, drafter.sharding.device_set
    return bool(ours & theirs) or all(d.platform == "cpu" for d in ours | theirs)


def logit_gap(target: Target, token_ids: list[int], choices: tuple[int, int]) -> float:
    """How much the target prefers the first of two tokens to the second after `token_ids`.

    Near zero the two are equally likely, and rounding decides which is said.
    """
    tokens, lengths = pad_prompts([token_ids])
    rows = layout.causal(target.put(np.zeros((1,), np.int32)), tokens.shape[1])
    hidden, _ = decoder.forward(target.config, target.params, target.put(tokens), rows)
    last = decoder.logits(target.params, hidden[:, int(lengths[0]) - 1])
    return float(last[0, choices[0]] - last[0, choices[1]])
