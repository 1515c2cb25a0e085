"""Times of single decoding steps, and by how much the target prefers one token to another.

The symbols are those of the speed model: T_v verify, T_p packed draft, T_d synchronous draft.
Comparisons of whole replies are in `infer.demo`; nothing is printed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax import acceptance
from d3d_jax.infer.drafter import DrafterRole, DraftState
from d3d_jax.infer.role import Chunk, Role, pieces
from d3d_jax.infer.target import Settings, Target, TargetState
from d3d_jax.sampling import SamplingParams, gumbel

# Roundings of a logit that two orders of the same sums may lie apart.
_TIE = 4


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
    """Seconds of each step of a batch, on a real state, each waited for.

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


def prompt_chunks(role: Role, prompt_ids: list[int], batch: int = 1) -> Iterator[Chunk]:
    """The passes that read one prompt into every slot of a batch."""
    for slot in range(batch):
        for piece in pieces(slot, prompt_ids):
            yield from role.chunks([piece], batch)


def prefilled(
    target: Target, settings: Settings, prompt_ids: list[int], capacity: int, batch: int = 1
) -> tuple[jax.Array, TargetState]:
    """The last report of a prefill, and a batch whose slots have all read the prompt.

    Args:
      settings: of the whole batch.
    """
    state, report = target.start(batch, capacity), None
    for chunk in prompt_chunks(target, prompt_ids, batch):
        report, state = target.prefill(state, settings, chunk)
    assert report is not None
    return report, state


def measure_verify(
    target: Target,
    prompt_ids: list[int],
    rows: int,
    batch: int = 1,
    repeats: int = 10,
    largest: int | None = None,
) -> Spread:
    """Times verifications of `rows` rows (1: plain steps) after a prompt, compilation excluded.

    Args:
      largest: of the numbers of rows that are compared: all are timed with caches for that one, for
        a step may take the longer the more its caches could hold. None: `rows`.
    """
    steps = repeats + _WARM_UP
    params, limits = [SamplingParams()] * batch, [np.iinfo(np.int32).max] * batch
    settings = target.settings(params, limits)
    capacity = len(prompt_ids) + steps * (largest or rows)
    _, state = prefilled(target, settings, prompt_ids, capacity, batch)
    handover = target.put(np.zeros((batch, rows), np.int32))

    def verify() -> Any:
        nonlocal state
        report, state = target.verify(state, settings, handover)
        return report, state

    return timed(verify, repeats)


def drafting(drafter: DrafterRole, prompt_ids: list[int], batch: int, steps: int) -> DraftState:
    """A batch whose slots have all read a prompt and drafted a block, with room for some rounds."""
    capacity = len(prompt_ids) + steps + 2 * drafter.width
    handover, drafts = drafter.start(batch, capacity)
    anchors = _report(drafter, batch, 1, int(prompt_ids[-1]))
    for chunk in prompt_chunks(drafter, prompt_ids, batch):
        drafts = drafter.prefill(drafts, chunk)
        handover, drafts = drafter.first_draft(drafts, handover, chunk.place, anchors)
    return drafts


def measure_prepare(
    drafter: DrafterRole, prompt_ids: list[int], batch: int = 1, repeats: int = 10
) -> Spread:
    """Times packed passes of the drafter's policy after a prompt, compilation excluded."""
    drafts = drafting(drafter, prompt_ids, batch, steps=0)

    def prepare() -> Any:
        nonlocal drafts
        drafts, hidden, prepared = drafter.prepare(drafts)
        return drafts, hidden, prepared

    return timed(prepare, repeats)


def measure_drafter(
    drafter: DrafterRole, prompt_ids: list[int], batch: int = 1, repeats: int = 10
) -> dict[str, Spread]:
    """Times every step of a drafter after a prompt, compilation excluded.

    Returns:
      draft, prepare, resolve and miss (see `StepTimes`).
    """
    drafts = drafting(drafter, prompt_ids, batch, repeats + _WARM_UP)
    one_token = _report(drafter, batch, 1, int(prompt_ids[-1]))

    def draft() -> Any:
        nonlocal drafts
        handover, drafts = drafter.draft(drafts, one_token)
        return handover, drafts

    of_draft = timed(draft, repeats)
    drafts, hidden, prepared = drafter.prepare(drafts)
    # Every slot has read the same, so what the first has prepared all have.
    hit = _report(drafter, batch, int(prepared.outcome[0, 0]), int(prepared.anchors[0, 0]))
    # The first draft itself is no rejection, so no branch was prepared for it.
    no_hit = _report(drafter, batch, 1, int(drafts.block.tokens[0, 1]))
    return {
        "draft": of_draft,
        "prepare": measure_prepare(drafter, prompt_ids, batch, repeats),
        "resolve": timed(lambda: drafter.resolve(drafts, hidden, prepared, hit), repeats),
        "miss": timed(lambda: drafter.resolve(drafts, hidden, prepared, no_hit), repeats),
    }


def measure_steps(
    target: Target,
    drafter: DrafterRole,
    prompt_ids: list[int],
    batch: int = 1,
    repeats: int = 10,
) -> StepTimes:
    """Times every step of both roles after a prompt, compilation excluded."""
    return StepTimes(
        plain=measure_verify(target, prompt_ids, 1, batch, repeats, drafter.width),
        verify=measure_verify(target, prompt_ids, drafter.width, batch, repeats),
        **measure_drafter(drafter, prompt_ids, batch, repeats),
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


def _report(drafter: DrafterRole, batch: int, count: int, last: int) -> jax.Array:
    """A report in which every row emits `count` tokens that end with `last`."""
    report = np.full((batch, acceptance.TOKENS + drafter.width), -1, np.int32)
    report[:, acceptance.COUNT], report[:, acceptance.ACTIVE] = count, 1
    report[:, acceptance.TOKENS : acceptance.TOKENS + count] = last
    return drafter.put(report)


def share_hardware(target: Target, drafter: DrafterRole) -> bool:
    """Whether the roles compete for one device; all CPU devices share the machine's cores."""
    ours, theirs = target.sharding.device_set, drafter.sharding.device_set
    return bool(ours & theirs) or all(d.platform == "cpu" for d in ours | theirs)


@dataclasses.dataclass(frozen=True)
class LogitGap:
    """Between two tokens.

    Attributes:
      gap: by how much the target prefers the first.
      near_tie: whether sums in another order could have turned it: it is within a few roundings
        (`_TIE`) of the greater logit in the target's type.
    """

    gap: float
    near_tie: bool


def logit_gap(
    target: Target,
    token_ids: list[int],
    choices: tuple[int, int],
    params: SamplingParams | None = None,
) -> LogitGap:
    """How much the target prefers the first of two tokens to the second after `token_ids`.

    Args:
      params: of a request that samples: the noise at that position, times the temperature, is part
        of what it prefers.
    """
    scores = target.logits_after(token_ids)
    gap = float(scores[choices[0]] - scores[choices[1]])
    if params is not None and not params.greedy:
        position = np.full((1, 1), len(token_ids), np.int32)
        seed = np.array([params.seed], np.uint32)
        noise = gumbel(seed, jnp.asarray(position), scores.shape[0])[0, 0]
        gap += params.temperature * float(noise[choices[0]] - noise[choices[1]])
    largest = max(abs(float(scores[choice])) for choice in choices)
    return LogitGap(gap, abs(gap) <= _TIE * float(jnp.finfo(target.dtype).eps) * max(largest, 1.0))


@contextlib.contextmanager
def counted_compilations() -> Iterator[Callable[[], int]]:
    """Yields a function that says how many programs were compiled since."""
    compiled = 0

    def count(event: str, seconds: float, **_: Any) -> None:
        nonlocal compiled
        compiled += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield lambda: compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
