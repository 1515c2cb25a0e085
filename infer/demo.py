"""The demo's comparison: the same prompts decoded plain, synchronously and asynchronously.

Here everything is run and measured, one prompt at a time; `infer.demo_view` shows it while it
happens and `infer.demo_report` says afterwards what came of it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol, get_args

from d3d_jax.config import DecodeConfig, Mode
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.measure import (
    Spread,
    StepTimes,
    logit_gap,
    measure_steps,
    share_hardware,
)
from d3d_jax.infer.replies import Reply
from d3d_jax.infer.target import Target

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(frozen=True)
class Run:
    """One prompt decoded in one mode.

    Attributes:
      seconds: of decoding, from the first token to the last; the prefill is not counted.
    """

    reply: Reply
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first token belongs to the prefill."""
        return (len(self.reply.token_ids) - 1) / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token at which a reply leaves the plain one.

    Attributes:
      position: of that token in the reply.
      logit_gap: by how much the target prefers plain decoding's token there.
    """

    prompt: int
    position: int
    logit_gap: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """One mode over all prompts; τ and hit rate are pooled, `speedup` is the median of ratios."""

    tau: float
    hit_rate: float | None
    tokens_per_second: Spread
    speedup: float
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that was measured.

    Attributes:
      runs: by mode, one per prompt.
      shared: whether both roles ran on the same hardware.
      warm_up: seconds spent compiling before anything was timed.
    """

    runs: dict[Mode, list[Run]]
    summaries: dict[Mode, Summary]
    times: StepTimes
    shared: bool
    warm_up: float


class Watcher(Protocol):
    """Who is told what happens, while it happens."""

    def begin(self, prompt: int, mode: Mode) -> None: ...
    def feed(self, mode: Mode, token_ids: list[int]) -> None: ...
    def end(self, mode: Mode, run: Run) -> None: ...


def make_decoders(target: Target, drafter: DrafterRole, max_new_tokens: int) -> dict[Mode, Decoder]:
    """A decoder of each mode over the same two roles."""
    return {
        mode: Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=max_new_tokens))
        for mode in MODES
    }


def warm_up(decoders: dict[Mode, Decoder], prompts: Sequence[list[int]]) -> float:
    """Compiles what decoding each of the prompts alone needs; returns the seconds it took."""
    began = time.perf_counter()
    for decoder in decoders.values():
        # The longest of the prompts that start with the same programs grows its caches furthest.
        longest = {decoder.programs(ids): ids for ids in sorted(prompts, key=len)}
        for ids in longest.values():
            decoder.warm_up([ids])
    return time.perf_counter() - began


def compare(
    decoders: dict[Mode, Decoder],
    prompts: Sequence[list[int]],
    watcher: Watcher,
    warm_up_seconds: float,
) -> Comparison:
    """Decodes every prompt in every mode, alone and one after another.

    The modes share the machine, so running them at once would measure their contention. Their order
    turns from prompt to prompt, so that none always runs on the warmest or busiest machine.
    """
    target, drafter = decoders["sync"].target, decoders["sync"].drafter
    assert drafter is not None
    times = measure_steps(target, drafter, prompts[0], repeats=20)
    runs: dict[Mode, list[Run]] = {mode: [] for mode in MODES}
    for number, ids in enumerate(prompts):
        turn = number % len(MODES)
        for mode in MODES[turn:] + MODES[:turn]:
            watcher.begin(number, mode)
            for _, new in decoders[mode].stream([ids]):
                watcher.feed(mode, new)
            run = Run(decoders[mode].replies[0], decoders[mode].timing.decode)
            runs[mode].append(run)
            watcher.end(mode, run)
    summaries: dict[Mode, Summary] = {
        mode: _summary(target, prompts, runs["plain"], runs[mode]) for mode in MODES
    }
    return Comparison(runs, summaries, times, share_hardware(target, drafter), warm_up_seconds)


def _summary(
    target: Target, prompts: Sequence[list[int]], plain: list[Run], runs: list[Run]
) -> Summary:
    replies = [run.reply for run in runs]
    rounds = sum(reply.rounds for reply in replies)
    chances = sum(reply.chances for reply in replies)
    speeds = [run.tokens_per_second for run in runs]
    ratios = [s / p.tokens_per_second for s, p in zip(speeds, plain, strict=True)]
    return Summary(
        tau=sum(len(reply.token_ids) - 1 for reply in replies) / max(rounds, 1),
        hit_rate=sum(reply.hits for reply in replies) / chances if chances else None,
        tokens_per_second=Spread.of(speeds),
        speedup=Spread.of(ratios).median,
        differences=tuple(_differences(target, prompts, plain, runs)),
    )


def _differences(
    target: Target, prompts: Sequence[list[int]], plain: list[Run], runs: list[Run]
) -> list[Difference]:
    found = []
    for number, (ours, theirs) in enumerate(zip(plain, runs, strict=True)):
        pairs = list(zip(ours.reply.token_ids, theirs.reply.token_ids, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            gap = logit_gap(target, prompts[number] + ours.reply.token_ids[:at], pairs[at]).gap
            found.append(Difference(number, at, gap))
    return found
