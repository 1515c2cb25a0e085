"""What the points of a benchmark come to: τ both ways, acceptance by offset, speeds, divergences.

Pure functions of `infer.benchmark.Point`, but for the logit gap of a divergence, which the target
is asked for. τ counts the token that the target adds (the correction or bonus). The round that ends
a reply is left out wherever acceptance is counted: a stop or the limit of tokens may have cut it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from d3d_jax import intervals
from d3d_jax.infer.benchmark import Answer, Point
from d3d_jax.infer.measure import Spread, logit_gap
from d3d_jax.infer.target import Target
from d3d_jax.memory import or_out_of_memory
from d3d_jax.sampling import SamplingParams

# Where the ranges of positions in a reply begin that τ is told apart by.
POSITIONS = (0, 50, 100, 200, 500, 1000, 2000, 4000, 8000)

DEFINITIONS = (
    "τ: tokens a round emits of one request, the target's own (correction or bonus) counted, the "
    "round that ends a reply left out (a stop or the limit may cut it); as the mean of the "
    "replies' own means, and pooled over all rounds.",
    "Plain decoding uses the same kernels, cache and loop. Warm-up and compilation are not in any "
    "time. Prefill is the time until reports of prompts, decode the rest; what the drafter still "
    "reads of a prompt after that, and its first draft, count as decode. End to end is both. At "
    "concurrency 1 the rounds dispatched past a reply's end are let run out off the clock.",
    "Figures are medians over the repeats, the modes taking turns (time to first token: over all "
    "replies). A speedup is the median of the ratios to plain decoding within each repeat. An "
    "interval is the 95 % one of the mean by Student's t over the repeats of one run: another run "
    "on this machine, left as it is, should find one that overlaps it. It says nothing of other "
    "prompts: the repeats decode the same ones with the same seeds, and say the same. The interval "
    "of τ is the 95 % one over replies (bootstrap).",
    "Peak memory is a device's since the process began: later rows hold what earlier ones did.",
)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a reply leaves that of plain decoding.

    Attributes:
      position: of the first token that differs, from 0.
      plain, other: the two tokens; None: that reply has ended.
      logit_gap: by how much the target prefers plain's token, the noise of sampling included. None
        where a reply has ended, or there was too little memory to ask the target.
      near_tie: whether the gap is so small that rounding in the target's type may have decided.
    """

    conversation: int
    turn: int
    position: int
    plain: int | None
    other: int | None
    logit_gap: float | None
    near_tie: bool


def merged(points: Sequence[Point]) -> Point:
    """Several points as one: of the tasks of one repeat."""
    total = Point()
    for point in points:
        total.answers += point.answers
        for name in ("prefill", "decode", "rounds", "dispatched", "left_out"):
            setattr(total, name, getattr(total, name) + getattr(point, name))
    for name in ("outside", "host", "compiled"):
        values = [getattr(point, name) for point in points]
        setattr(total, name, None if None in values else sum(values))
    total.peak_bytes = _highest([point.peak_bytes for point in points])
    return total


def summarise(points: Sequence[Point], plain: Sequence[Point] | None, devices: int) -> dict:
    """The figures of one mode, as JSON types.

    Args:
      points: of the repeats.
      plain: of plain decoding in the same repeats; None: it was not run.
      devices: pieces of hardware that the mode used.
    """
    # Every repeat says the same.
    answers = points[0].answers
    chances = sum(answer.chances for answer in answers)
    decode, whole = speeds(points)
    plain_decode, plain_whole = speeds(plain or [])
    return {
        "replies": len(answers),
        "tokens": _tokens(points[0]),
        "cut_by_limit": sum(a.finish_reason == "length" for a in answers),
        "left_out": points[0].left_out,
        **acceptance(answers),
        "hit_rate": round(sum(a.hits for a in answers) / chances, 4) if chances else None,
        "prefill_seconds": _repeated([p.prefill for p in points]),
        "decode_seconds": _repeated([p.decode for p in points]),
        "first_token_seconds": _spread([a.first_seconds for p in points for a in p.answers]),
        "tokens_per_second_decode": _repeated(decode),
        "tokens_per_second_end_to_end": _repeated(whole),
        "devices": devices,
        "tokens_per_second_decode_per_device": _repeated([speed / devices for speed in decode]),
        "speedup_decode": _ratios(decode, plain_decode),
        "speedup_end_to_end": _ratios(whole, plain_whole),
        "round_ms": _repeated([1e3 * p.decode / max(p.rounds, 1) for p in points]),
        **_own_work(points),
        "peak_bytes": _highest([p.peak_bytes for p in points]),
    }


def _own_work(points: Sequence[Point]) -> dict[str, Any]:
    """What the host did meanwhile; of a peer nobody knows."""
    names = ("host_ms_per_round", "benchmark_overhead", "compiled_while_timed")
    host, outside, compiled = (
        [value for p in points if (value := getattr(p, name)) is not None]
        for name in ("host", "outside", "compiled")
    )
    if not host:
        return dict.fromkeys(names)
    per_round = [1e3 * h / max(p.dispatched, 1) for h, p in zip(host, points, strict=True)]
    share = sum(outside) / max(sum(p.decode for p in points), 1e-9)
    return dict(zip(names, (_repeated(per_round), round(share, 5), sum(compiled)), strict=True))


def _highest(peaks: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Of each device; None where one was not told."""
    found = []
    for device in zip(*peaks, strict=True):
        told = [peak for peak in device if peak is not None]
        found.append(max(told) if len(told) == len(device) else None)
    return found


def acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    """τ both ways, the share of rounds by drafts accepted, and τ by position in the reply.

    Returns:
      tau_mean, tau_pooled: None where no reply has a round that counts.
      tau_interval: of the pooled τ, over replies (`intervals.pooled`).
      rounds: that count.
      acceptance_by_offset: the share of rounds in which at least 1, 2, … drafts were accepted.
      tau_by_position: from, to, tau and rounds of each range in which any round began; what
        `POSITIONS` says, the last without an end.
    """
    counted = [answer.rounds[:-1] for answer in answers]
    rounds = np.array([count for own in counted for count in own], int)
    began = [1 + np.cumsum([0, *own])[:-1] for own in counted]
    place = np.digitize(np.concatenate([[], *began]), POSITIONS) - 1
    by_position = []
    for at, start in enumerate(POSITIONS):
        own = rounds[place == at]
        if len(own):
            end = POSITIONS[at + 1] if at + 1 < len(POSITIONS) else None
            figures = {"tau": round(float(own.mean()), 4), "rounds": len(own)}
            by_position.append({"from": start, "to": end, **figures})
    means = [float(np.mean(own)) for own in counted if own]
    sizes = np.array([(sum(own), len(own)) for own in counted if own]).reshape(-1, 2)
    interval = intervals.pooled(*sizes.T) if len(sizes) > 1 else None
    most = int(rounds.max(initial=1))
    return {
        "tau_mean": round(float(np.mean(means)), 4) if means else None,
        "tau_pooled": round(float(rounds.mean()), 4) if len(rounds) else None,
        "tau_interval": interval and [round(bound, 4) for bound in interval],
        "rounds": len(rounds),
        "acceptance_by_offset": [
            round(float(np.mean(rounds > accepted)), 4) for accepted in range(1, most)
        ],
        "tau_by_position": by_position,
    }


def divergences(
    target: Target, plain: Point, other: Point, params: Sequence[SamplingParams]
) -> tuple[int, list[Divergence]]:
    """How many replies were compared, and those that differ; a conversation ends at its first.

    Args:
      params: settings of each conversation.
    """
    theirs = {(a.conversation, a.turn): a for a in other.answers}
    compared, found, parted = 0, [], set()
    for ours in plain.answers:
        key = ours.conversation, ours.turn
        if ours.conversation in parted or key not in theirs:
            continue
        compared += 1
        if difference := _divergence(target, ours, theirs[key], params[ours.conversation]):
            found.append(difference)
            parted.add(ours.conversation)
    return compared, found


def _divergence(
    target: Target, ours: Answer, theirs: Answer, params: SamplingParams
) -> Divergence | None:
    a, b = ours.token_ids, theirs.token_ids
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        at = min(len(a), len(b))
    left, right = (ids[at] if at < len(ids) else None for ids in (a, b))
    gap, tie = None, False
    if left is not None and right is not None:
        prompt, choices = ours.prompt_ids + a[:at], (left, right)
        asked = or_out_of_memory(lambda: logit_gap(target, prompt, choices, params))
        if not isinstance(asked, str):
            gap, tie = asked.gap, asked.near_tie
    return Divergence(ours.conversation, ours.turn, at, left, right, gap, tie)


def _tokens(point: Point) -> int:
    return sum(len(answer.token_ids) for answer in point.answers)


def speeds(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Tokens/s of decoding alone and end to end; what came before the rounds is the prefill's."""
    decode = [sum(sum(a.rounds) for a in p.answers) / max(p.decode, 1e-9) for p in points]
    return decode, [_tokens(p) / max(p.seconds, 1e-9) for p in points]


def _ratios(ours: Sequence[float], plain: Sequence[float]) -> dict[str, Any] | None:
    """Spread of ratios; None without plain figures."""
    if not plain or not all(plain):
        return None
    return _repeated([a / b for a, b in zip(ours, plain, strict=True)])


def _repeated(values: Sequence[float]) -> dict[str, Any]:
    """Spread of what was measured once in each repeat, with the interval of its mean."""
    interval = intervals.student(values)
    return _spread(values) | {"interval": interval and [*map(_rounded, interval)]}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    found = dataclasses.asdict(Spread.of(values)) | {"min": min(values), "max": max(values)}
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
