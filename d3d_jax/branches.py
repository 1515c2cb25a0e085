"""Outcomes of a verification, and which of them the drafter prepares for. Pure and static in shape.

An outcome (k, v): the first k − 1 drafts are accepted and the target then says v at offset k,
1 <= k <= W; k = W is full acceptance. A branch is a block drafted for one outcome ahead of time.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import DrafterConfig
from d3d_jax.errors import D3DError

# Candidates a slot offers to `BestFirst` unless told otherwise: less likely ones are hardly ever
# among the N best, and XLA:GPU has a kernel for the 16 largest but sorts everything for more.
MOST_CANDIDATES = 16


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

    def __str__(self) -> str:
        """The form `parse_policy` reads."""
        return f"rectangle:{self.outcomes},{self.fan_out}"

    def choose(
        self,
        config: DrafterConfig,
        block: jax.Array,
        candidate_ids: jax.Array,
        candidate_log_probs: jax.Array,
    ) -> Branches:
        """The branches to prepare while `block` is verified.

        Args:
          block: [B, W], anchor and drafts.
          candidate_ids: [B, W − 1 + shift, M]; entry i holds the likeliest tokens at offset i + 1,
            likeliest first.
          candidate_log_probs: [B, W − 1 + shift, M] float32; not looked at.
        """
        del candidate_log_probs
        batch = block.shape[0]
        rejections = self.outcomes - 1
        ids = candidate_ids[:, :rejections]
        # Stable: the drafted token goes last, the others keep their order.
        drafted = ids == block[:, 1 : 1 + rejections, None]
        order = jnp.argsort(drafted, axis=-1, stable=True)[..., : self.fan_out]
        others = jnp.take_along_axis(ids, order, axis=-1).reshape(batch, -1)
        full, offset = _full_acceptance(config, block, candidate_ids[..., :1])
        rejected = np.repeat(np.arange(1, self.outcomes), self.fan_out)
        rows = (batch, self.num_branches)
        return Branches(
            jnp.concatenate([others, full], axis=1),
            jnp.broadcast_to(np.append(rejected, offset).astype(np.int32), rows),
            jnp.broadcast_to(np.append(rejected, block.shape[1]).astype(np.int32), rows),
        )


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """The N likeliest of all outcomes, by the drafter's own probabilities.

    Outcome (k, v) has probability ∏_{i<k} q_i(x_i) · q_k(v): the drafter predicts every offset
    without knowing the others, so the product is all it can say. The better q is calibrated
    (`DrafterConfig.calibration`), the closer this is to the best choice of N outcomes there is.

    Attributes:
      num_branches: N.
      block_size: W of the block being verified.
      num_candidates: M, candidates a slot must offer, the drafted token included; 0: N + 1, at
        most 16 unless N needs more.
    """

    num_branches: int
    block_size: int
    num_candidates: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise D3DError(f"block size must be at least 2, found {self.block_size}")
        if self.num_branches < 1:
            raise D3DError(f"best-first N must be at least 1, found {self.num_branches}")
        # Of M candidates one is the draft; full acceptance is one outcome at least.
        needed = -(-(self.num_branches - 1) // (self.block_size - 1)) + 1
        if self.num_candidates == 0:
            usual = min(self.num_branches + 1, MOST_CANDIDATES)
            object.__setattr__(self, "num_candidates", max(usual, needed))
        if self.num_candidates < needed:
            raise D3DError(
                f"best-first N = {self.num_branches} at block size {self.block_size} needs at "
                f"least {needed} candidates a slot, found {self.num_candidates}: raise "
                "num_candidates or lower N"
            )

    @property
    def budget(self) -> int:
        """Rows of one packed pass: the spine and N branches of W rows."""
        return self.block_size * (self.num_branches + 1)

    def __str__(self) -> str:
        """The form `parse_policy` reads."""
        return f"best-first:{self.num_branches}"

    def choose(
        self,
        config: DrafterConfig,
        block: jax.Array,
        candidate_ids: jax.Array,
        candidate_log_probs: jax.Array,
    ) -> Branches:
        """The branches to prepare while `block` is verified, likeliest first.

        Args:
          block: [B, W], anchor and drafts.
          candidate_ids: [B, W − 1 + shift, M or more]; entry i holds the likeliest tokens at
            offset i + 1, likeliest first.
          candidate_log_probs: [B, W − 1 + shift, M or more] float32, of those tokens.
        """
        batch, width = block.shape
        ids = candidate_ids[..., : self.num_candidates]
        log_probs = candidate_log_probs[..., : self.num_candidates]
        drafted = ids[:, : width - 1] == block[:, 1:, None]
        # A draft that is no candidate is at most as likely as the last of them.
        accepted = jnp.where(
            drafted.any(axis=-1),
            jnp.sum(jnp.where(drafted, log_probs[:, : width - 1], 0), axis=-1),
            log_probs[:, : width - 1, -1],
        )
        # [B, W]: entry k − 1 is the log-probability that the first k − 1 drafts are accepted.
        reached = jnp.pad(jnp.cumsum(accepted, axis=1), ((0, 0), (1, 0)))
        rejections = reached[:, :-1, None] + log_probs[:, : width - 1]
        rejections = jnp.where(drafted, -jnp.inf, rejections).reshape(batch, -1)
        full, offset = _full_acceptance(config, block, ids)
        # Which bonus an early branch is for shows only when it is drafted: it stands for all.
        bonus = log_probs[:, -1] if config.label_shift == 1 else 0
        scores = jnp.concatenate(
            [rejections, jnp.broadcast_to(reached[:, -1:] + bonus, full.shape)], axis=1
        )
        _, best = jax.lax.top_k(scores, self.num_branches)
        anchors = jnp.concatenate([ids[:, : width - 1].reshape(batch, -1), full], axis=1)
        rejected = np.repeat(np.arange(1, width, dtype=np.int32), ids.shape[-1])

        def of_best(last: int) -> jax.Array:
            return jnp.append(rejected, np.full(full.shape[1], last, np.int32))[best]

        return Branches(jnp.take_along_axis(anchors, best, axis=1), of_best(offset), of_best(width))


Policy = Rectangle | BestFirst


def parse_policy(text: str, block_size: int) -> Policy:
    """The policy that a text names: `rectangle:C,F` or `best-first:N`.

    Args:
      block_size: W it is for.

    Raises:
      D3DError: another text, or sizes that do not fit the block.
    """
    if sizes := re.fullmatch(r"rectangle:(\d{1,6}),(\d{1,6})", text):
        return Rectangle(int(sizes[1]), int(sizes[2]), block_size)
    if sizes := re.fullmatch(r"best-first:(\d{1,6})", text):
        return BestFirst(int(sizes[1]), block_size)
    raise D3DError(f"a policy is rectangle:C,F or best-first:N, found {text!r}")


def _full_acceptance(
    config: DrafterConfig, block: jax.Array, candidate_ids: jax.Array
) -> tuple[jax.Array, int]:
    """Anchors [B, M, or 1 at shift 0] of branches for k = W, and the offset they stand at."""
    if config.label_shift == 1:
        return candidate_ids[:, -1], block.shape[1]
    # Nothing predicts the bonus: anchor at the last draft, whose first mask will.
    return block[:, -1:], block.shape[1] - 1


@dataclasses.dataclass(frozen=True)
class Branches:
    """Prepared outcomes, all different; those of the same k are in the order of their likelihood.

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

    def nearest(self, count: jax.Array, token: jax.Array) -> jax.Array:
        """The prepared branch [B] to continue with, its anchor replaced, where `find` has none.

        Where `find` has one, it is that one. Else a branch of the same k, whose block starts at
        the right place after the wrong token; else of the nearest k. Of equals the first listed.
        An early branch starts one place off and is taken last, unless k = W is its own outcome.

        Args:
          count, token: [B], the outcome (k, v) of each row.
        """
        distance = jnp.abs(self.outcome - count[:, None])
        exact = (distance == 0) & (self.anchors == token[:, None])
        last = self.early & (distance > 0)
        # No distance between outcomes reaches the number of the largest.
        distance = distance + jnp.where(last, jnp.max(self.outcome), 0) - exact
        return jnp.argmin(distance, axis=1)
