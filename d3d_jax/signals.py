"""Signals that ask work to end at a place of its own choosing."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@dataclasses.dataclass
class _Noted:
    """A signal under watch: what it did before, by how many it is watched, whether it came."""

    before: Any
    watched: int = 0
    came: bool = False


_noted: dict[signal.Signals, _Noted] = {}


@contextlib.contextmanager
def noted(*signals: signal.Signals) -> Iterator[Callable[[], int]]:
    """Notes the first of each of these signals; a second one acts as it did before.

    Raised at once a signal could leave a compilation at work, at which the end of the process
    crashes. Within another of the same signal it knows what came to that one, and the other way
    round.

    Yields:
      A function that returns the number of one that came, 0 before any.
    """
    watched: list[signal.Signals] = []
    try:
        for number in signals:
            if number not in _noted:
                _noted[number] = _Noted(signal.signal(number, _note))
            _noted[number].watched += 1
            watched.append(number)
        yield lambda: next((int(number) for number in watched if _noted[number].came), 0)
    finally:
        for number in watched:
            _noted[number].watched -= 1
            if not _noted[number].watched:
                signal.signal(number, _noted.pop(number).before)


def _note(number: int, frame: FrameType | None) -> None:
    found = _noted[signal.Signals(number)]
    found.came = True
    signal.signal(number, found.before)
