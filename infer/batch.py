"""The device side of a batch of slots: the states of both roles, and a round as dataflow.

    verify → report → resolve on the drafter's device → handover → verify → …

Only those two small int32 arrays cross between the meshes, by `device_put`. Nothing here waits for
a device: every method enqueues work and returns. What the reports say, and which request has which
slot, is `infer.engine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.drafter import DrafterRole, DraftState
from d3d_jax.infer.role import Piece
from d3d_jax.infer.target import Settings, Target, TargetState


@dataclasses.dataclass(frozen=True)
class Round:
    """A dispatched round: the report to come, and the handover that its block was made of."""

    report: jax.Array
    handover: jax.Array | None


class Batch:
    """B slots on both roles' devices.

    Args:
      drafter: None decodes plainly.
      capacity: tokens a slot can hold at first.
    """

    def __init__(
        self,
        target: Target,
        drafter: DrafterRole | None,
        config: DecodeConfig,
        slots: int,
        capacity: int,
    ):
        self.target, self.drafter, self.config, self.slots = target, drafter, config, slots
        self._state: TargetState = target.start(slots, capacity)
        self._drafts: DraftState | None = None
        # Without drafts a block is its anchor alone.
        self._handover: jax.Array = target.put(np.zeros((slots, 1), np.int32))
        if drafter is not None:
            self._handover, self._drafts = drafter.start(slots, capacity)
        self._settings: Settings | None = None

    @property
    def capacity(self) -> int:
        """Tokens a slot can hold now."""
        return self._state.cache.capacity

    def configure(self, settings: Settings) -> None:
        """What the requests in the slots ask for, from the next dispatch on."""
        self._settings = self.target.put(settings)

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens in every slot."""
        cache = self.target.grown(self._state.cache, capacity)
        self._state = dataclasses.replace(self._state, cache=cache)
        if self.drafter is not None and self._drafts is not None:
            cache = self.drafter.grown(self._drafts.cache, capacity)
            self._drafts = dataclasses.replace(self._drafts, cache=cache)

    def read(self, pieces: Sequence[Piece]) -> jax.Array:
        """Reads pieces of prompts, at most one a part of the target's batch, on both roles.

        Returns:
          The report [B, 3] of the first tokens of the prompts that ended.
        """
        assert self._settings is not None
        (chunk,) = self.target.chunks(pieces, self.slots)
        report, self._state = self.target.prefill(self._state, self._settings, chunk)
        report.copy_to_host_async()
        if self.drafter is None or self._drafts is None:
            return report
        for chunk in self.drafter.chunks(pieces, self.slots):
            self._drafts = self.drafter.prefill(self._drafts, chunk)
        if ended := [piece for piece in pieces if piece.last]:
            moved = self.drafter.put(report)
            for chunk in self.drafter.chunks(ended, self.slots):
                self._handover, self._drafts = self.drafter.first_draft(
                    self._drafts, self._handover, chunk, moved
                )
            self._handover.copy_to_host_async()
        return report

    def round(self) -> Round:
        """One round of every slot; what its report says goes into the next by itself."""
        assert self._settings is not None
        used, block = self._handover, self.target.put(self._handover)
        if self.drafter is None or self._drafts is None:
            report, self._state = self.target.verify(self._state, self._settings, block)
            report.copy_to_host_async()
            return Round(report, None)
        if self.config.mode == "async":
            # The packed pass goes first: it needs nothing from this round's verification.
            drafts, hidden, prepared = self.drafter.prepare(self._drafts)
            report, self._state = self.target.verify(self._state, self._settings, block)
            self._handover, self._drafts = self.drafter.resolve(
                drafts, hidden, prepared, self.drafter.put(report), self.config.miss
            )
        else:
            report, self._state = self.target.verify(self._state, self._settings, block)
            self._handover, self._drafts = self.drafter.draft(
                self._drafts, self.drafter.put(report)
            )
        report.copy_to_host_async()
        self._handover.copy_to_host_async()
        return Round(report, used)

    def stop(self, rows: Sequence[int]) -> None:
        """Ends the requests in some slots."""
        mask = np.zeros((self.slots,), bool)
        mask[list(rows)] = True
        self._state = self.target.stop(self._state, mask)

    def wait(self) -> None:
        """Until everything enqueued is done."""
        jax.block_until_ready((self._state, self._drafts, self._handover))
