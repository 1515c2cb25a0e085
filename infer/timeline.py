"""When the steps of decoding ran: read from a trace of JAX's profiler.

    spans = trace(lambda: decoder.generate([prompt]))

The profiler notes on the device when every program (TPU) or operation (GPU, CPU) began and ended;
here they are put together to runs of the decoders' steps, round by round.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

# Steps of a round, and those that take what it makes: one ends before the other begins, for it is
# data that passes between them. (`infer.batch`)
_FOLLOWERS = {
    "verify": ("resolve", "draft"),
    "prepare": ("resolve",),
    "resolve": ("verify", "prepare"),
    "draft": ("verify",),
}
# What jit makes of the steps' names: `jit__verify_step`, or with a number after it.
_MODULE = re.compile(rf"jit_+({'|'.join(_FOLLOWERS)})_step\b")


@dataclasses.dataclass(frozen=True)
class Span:
    """One run of a step, on whatever devices its role has.

    Attributes:
      step: verify (of the target), prepare, resolve or draft (of the drafter).
      start, end: milliseconds after the first step of the trace began.
    """

    step: str
    start: float
    end: float


def trace(decode: Callable[[], object]) -> list[Span]:
    """Runs some decoding under the profiler, and says when its steps ran.

    Anything that is to be compiled should have been before.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of a function, to no use here
        with jax.profiler.trace(folder, profiler_options=options):
            decode()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return spans(_events(jax.profiler.ProfileData.from_file(str(file))))


def spans(events: Iterable[tuple[str, float, float]]) -> list[Span]:
    """Puts events together to runs of steps, in the order in which they began.

    Args:
      events: (step, start, end) in nanoseconds, of programs or their operations, in any order.
    """
    found: list[list[float]] = []
    steps: list[str] = []
    running: dict[str, list[float]] = {}
    for step, start, end in sorted(events, key=lambda event: event[1]):
        for before in (other for other, after in _FOLLOWERS.items() if step in after):
            running.pop(before, None)
        if step not in running:
            running[step] = [start, end]
            found.append(running[step])
            steps.append(step)
        running[step][1] = max(running[step][1], end)
    first = found[0][0] if found else 0.0
    return [
        Span(step, round((start - first) / 1e6, 4), round((end - first) / 1e6, 4))
        for step, (start, end) in zip(steps, found, strict=True)
    ]


def _events(data: jax.profiler.ProfileData) -> Iterator[tuple[str, float, float]]:
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                # The TPU has a line of whole programs; elsewhere operations name their program.
                names = [event.name] if line.name == "XLA Modules" else _programs(event)
                for match in map(_MODULE.match, names):
                    if match:
                        yield match[1], event.start_ns, event.start_ns + event.duration_ns


def _programs(event: jax.profiler.ProfileEvent) -> list[str]:
    return [str(value) for name, value in event.stats if name == "hlo_module"]
