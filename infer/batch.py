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
from d3d_jax.sampling import SamplingParams


class Batch:
    """B slots on both roles' devices.

    Args:
      drafter: None decodes plainly.
      capacity: tokens a slot can hold at first.

    Attributes:
      state, drafts: of the target and of the drafter, if there is one.
      handover: [B, W] of the next round.
      settings: on the target's mesh, from `configure` on.
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
        self.state: TargetState = target.start(slots, capacity)
        self.drafts: DraftState | None = None
        # Without drafts a block is its anchor alone.
        self.handover: jax.Array = target.put(np.zeros((slots, 1), np.int32))
        if drafter is not None:
            self.handover, self.drafts = drafter.start(slots, capacity)
        self.settings: Settings | None = None

    @property
    def capacity(self) -> int:
        """Tokens a slot can hold now."""
        return self.state.cache.capacity

    def configure(self, params: Sequence[SamplingParams], limits: Sequence[int]) -> None:
        """What the requests in the slots ask for, from the next dispatch on."""
        self.settings = self.target.settings(params, limits)

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens in every slot."""
        if capacity <= self.capacity:
            return  # as before nearly every round
        cache = self.target.grown(self.state.cache, capacity)
        self.state = dataclasses.replace(self.state, cache=cache)
        if self.drafter is not None and self.drafts is not None:
            cache = self.drafter.grown(self.drafts.cache, capacity)
            self.drafts = dataclasses.replace(self.drafts, cache=cache)

    def read(self, pieces: Sequence[Piece]) -> jax.Array:
        """Reads pieces of prompts, at most one a part of the target's batch, on both roles.

        Returns:
          The report [B, 4] of the first tokens of the prompts that ended.
        """
        assert self.settings is not None
        (chunk,) = self.target.chunks(pieces, self.slots)
        report, self.state = self.target.prefill(self.state, self.settings, chunk)
        report.copy_to_host_async()
        if self.drafter is None or self.drafts is None:
            return report
        chunks = list(self.drafter.chunks(pieces, self.slots))
        for chunk in chunks:
            self.drafts = self.drafter.prefill(self.drafts, chunk)
        if any(piece.last for piece in pieces):
            moved = self.drafter.put(report)
            for chunk in chunks:
                self.handover, self.drafts = self.drafter.first_draft(
                    self.drafts, self.handover, chunk.place, moved
                )
        return report

    def round(self) -> jax.Array:
        """One round of every slot; what its report says goes into the next by itself.

        Returns:
          The report [B, W + 3].
        """
        assert self.settings is not None
        block = self.target.put(self.handover)
        drafter, drafts, prepared = self.drafter, self.drafts, None
        if drafter is not None and drafts is not None and self.config.mode == "async":
            # The packed pass goes first: it needs nothing from this round's verification.
            drafts, *prepared = drafter.prepare(drafts)
        report, self.state = self.target.verify(self.state, self.settings, block)
        report.copy_to_host_async()
        if drafter is not None and drafts is not None:
            outcome = drafter.put(report)
            if prepared is None:
                self.handover, self.drafts = drafter.draft(drafts, outcome)
            else:
                self.handover, self.drafts = drafter.resolve(
                    drafts, *prepared, outcome, self.config.miss
                )
        return report

    def stop(self, rows: Sequence[int]) -> None:
        """Ends the requests in some slots."""
        mask = np.zeros((self.slots,), bool)
        mask[list(rows)] = True
        self.state = self.target.stop(self.state, mask)

    def wait(self) -> None:
        """Until everything enqueued is done."""
        jax.block_until_ready((self.state, self.drafts, self.handover))
