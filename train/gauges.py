"""Where a run's time goes, and how hard its devices work.

Shares of the wall time count from the end of the run's first step, which leaves compiling out; what
the host waits for while devices work counts in full, so they are upper bounds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from d3d_jax.topologies import PEAK_FLOPS

Wait = Literal["input", "checkpoint"]


class Gauges:
    """Reads clocks and devices for the metrics of a run's steps.

    Args:
      devices: all that the run uses; memory is that of this process's own.
      compute: type of activations; the peak rates that are known are those of bfloat16.
    """

    def __init__(self, devices: Sequence[Any], compute: str) -> None:
        self.model_flops = 0
        self._local = [d for d in devices if d.process_index == d.client.process_index()]
        peak = PEAK_FLOPS.get(devices[0].device_kind) if compute == "bfloat16" else None
        self._peak = peak and peak * len(devices)
        self._waited: dict[Wait, float] = {"input": 0.0, "checkpoint": 0.0}
        self._began: float | None = None

    @contextlib.contextmanager
    def waiting(self, what: Wait) -> Iterator[None]:
        """Counts the time that the loop of steps stands still for something."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited[what] += time.perf_counter() - began

    def read(self, tokens: float, seconds: float) -> dict[str, Any]:
        """A step's figures.

        Args:
          tokens: real ones of its batch, of all processes.
          seconds: from the end of the step before to its own.

        Returns:
          `tokens_per_second`; `model_flops` of a step, attention by whole tiles, on GPUs without
          that of its forward kernel (`flops.count`); `input_wait` and `checkpoint_wait` as shares
          of the run so far; where they are known, `utilisation` of the devices' peak and
          `peak_bytes` of the fullest device.
        """
        figures: dict[str, Any] = {
            "tokens_per_second": round(tokens / seconds, 1),
            "model_flops": self.model_flops,
        }
        if self._began is None:
            self._began = time.perf_counter()
            self._waited = dict.fromkeys(self._waited, 0.0)
        so_far = max(time.perf_counter() - self._began, seconds)
        for what, waited in self._waited.items():
            figures[f"{what}_wait"] = round(waited / so_far, 5)
        if self._peak:
            figures["utilisation"] = round(self.model_flops / seconds / self._peak, 4)
        stats = [s for device in self._local if (s := device.memory_stats())]
        if held := [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]:
            figures["peak_bytes"] = max(held)
        return figures
