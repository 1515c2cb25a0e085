"""Signals that ask work to end at a place of its own choosing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def noted(*signals: signal.Signals) -> Iterator[Callable[[], int]]:
    """Notes the first of each of these signals; a second one acts as it did before.

    Raised at once a signal could leave a compilation at work, at which the end of the process
    crashes.

    Yields:
      A function that returns the number of the last one that came, 0 before any.
    """
    came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
