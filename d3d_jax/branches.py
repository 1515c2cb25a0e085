"""Outcomes of a verification, and which of them the drafter prepares for. Pure and static in shape.

An outcome (k, v): the first k − 1 drafts are accepted and the target then says v at offset k,
1 <= k <= W; k = W is full acceptance. A branch is a block drafted for one outcome ahead of time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from d3d_jax.config import DrafterConfig
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """The paper's policy: rejection at each of the first C − 1 offsets × the F likeliest other
    tokens, and full acceptance: N = (C − 1) · F + 1 branches.

    Attributes:
      outcomes: C, full acceptance included.
      fan_out: F.
      block_size: W of the block being verified.
    """

    outcomes: int
    fan_out: int
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.outcomes <= self.block_size:
            raise D3DError(
                f"rectangle C = {self.outcomes} must be between 1 and the block size "
                f"{self.block_size}"
            )
        if self.fan_out < 1:
            raise D3DError(f"rectangle F must be at least 1, found {self.fan_out}")

    @property
    def num_branches(self) -> int:
        """N."""
        return (self.outcomes - 1) * self.fan_out + 1

    @property
    def budget(self) -> int:
        """Rows of one packed pass: the spine and N branches of W rows."""
        return self.block_size * (self.num_branches + 1)

    @property
    def num_candidates(self) -> int:
        """M, candidates a slot must offer: F besides the drafted token itself."""
        return self.fan_out + 1

    def choose(self, config: DrafterConfig, block: jax.Array, candidate_ids: jax.Array) -> Branches:
        """The branches to prepare while `block` is verified.

        Args:
          block: [B, W], anchor and drafts.
          candidate_ids: [B, W − 1 + shift, M]; entry i holds the likeliest tokens at offset i + 1.
        """
        batch, width = block.shape
        rejections = self.outcomes - 1
        ids = candidate_ids[:, :rejections]
        # Stable: the drafted token goes last, the others keep their order.
        drafted = ids == block[:, 1 : 1 + rejections, None]
        order = jnp.argsort(drafted, axis=-1, stable=True)[..., : self.fan_out]
        others = jnp.take_along_axis(ids, order, axis=-1).reshape(batch, -1)
        offsets = jnp.repeat(jnp.arange(1, self.outcomes), self.fan_out)
        if config.label_shift == 1:
            full, full_offset = candidate_ids[:, -1, :1], width
        else:
            # Nothing predicts the bonus: anchor at the last draft, whose first mask will.
            full, full_offset = block[:, -1:], width - 1
        rows = (batch, self.num_branches)
        return Branches(
            jnp.concatenate([others, full], axis=1),
            jnp.broadcast_to(jnp.append(offsets, full_offset).astype(jnp.int32), rows),
            jnp.broadcast_to(jnp.append(offsets, width).astype(jnp.int32), rows),
        )


@dataclasses.dataclass(frozen=True)
class Branches:
    """Prepared outcomes.

    Attributes:
      anchors: [B, N] the token each branch's block starts with.
      offsets: [B, N] where that anchor stands, relative to the block's own anchor.
      outcome: [B, N] the k each branch is for.
    """

    anchors: jax.Array
    offsets: jax.Array
    outcome: jax.Array

    @property
    def early(self) -> jax.Array:
        """[B, N] branches anchored before the outcome's token, which their first draft must be."""
        return self.offsets < self.outcome

    def find(self, count: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which branch answers the outcome (count, token) of each row.

        Returns:
          The branch's index [B] and whether there is one [B]. An early branch does not say which
          token it is for, so it matches any.
        """
        same = (self.outcome == count[:, None]) & (self.early | (self.anchors == token[:, None]))
        return jnp.argmax(same, axis=1), jnp.any(same, axis=1)
