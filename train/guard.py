"""When a run has gone wrong: a loss that is no number, or that has left its own past behind."""

from __future__ import annotations

import collections
import math
import statistics

# Losses whose median is the yardstick, and how few of them are none yet.
WINDOW, ENOUGH = 100, 20


class LossGuard:
    """Judges each step's loss by the steps before it.

    Its state is a function of the losses alone: a resumed run gives it those again.

    Args:
      factor: a loss above this multiple of the running median is a spike; 0: none is.
      patience: spikes in a row that are too many.
    """

    def __init__(self, factor: float, patience: int) -> None:
        self.factor, self.patience = factor, patience
        self._usual: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._spikes = 0

    @property
    def spiking(self) -> bool:
        """Whether the last step's loss was a spike."""
        return self._spikes > 0

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong after this step, as the beginning of a sentence; None: nothing."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss is {loss} and the gradient's norm {grad_norm}"
        if self.factor and len(self._usual) >= ENOUGH:
            median = statistics.median(self._usual)
            if loss > self.factor * median:
                self._spikes += 1
                if self._spikes < self.patience:
                    return None
                return (
                    f"loss {loss:.3g} is above {self.factor:g} times its median {median:.3g} for "
                    f"{self._spikes} steps"
                )
        self._spikes = 0
        self._usual.append(loss)
        return None
