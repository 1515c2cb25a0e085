"""Outcomes that greedy decoding had, and what can be learnt from them about a drafter's policy.

`OfflineAcceptance.observe` (train/acceptance.py) records them; here they are counted: how often a
policy would have prepared the right block, and which temperatures make the drafter's probabilities
match how often its tokens come true.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.branches import Policy
from d3d_jax.config import DrafterConfig
from d3d_jax.errors import D3DError

# A grid for calibration: 1 is one of them, and neighbours differ by 9 %.
TEMPERATURES = np.round(2.0 ** (np.arange(-8, 13) / 8), 4)
# Fewer labels than this say too little about a temperature of their own.
ENOUGH = 50
_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Every round of greedy decoding: the block verified, and what the target said.

    R rounds in the order of decoding, P = W − 1 + shift offsets predicted, M candidates, G settings
    of the temperatures.

    Attributes:
      drafter: the drafter's configuration.
      temperatures: [G, P] a temperature for each offset, several times over.
      document: [R] number of the document measured.
      block: [R, W] anchor and drafts.
      labels: [R, P] the target's tokens at offsets 1, 2, …; −1 past the document's end.
      accepted: [R] drafts accepted.
      candidate_ids: [R, P, M] likeliest tokens of each offset.
      log_probs: [R, P, M] their log-probabilities, uncalibrated.
      label_log_probs: [R, P] those of the labels; −inf for one the drafter cannot say.
      log_normalisers: [R, P, G] log Σ_v q(v)^(1/T), which probabilities at temperature T miss.
    """

    drafter: DrafterConfig
    temperatures: np.ndarray
    document: np.ndarray
    block: np.ndarray
    labels: np.ndarray
    accepted: np.ndarray
    candidate_ids: np.ndarray
    log_probs: np.ndarray
    label_log_probs: np.ndarray
    log_normalisers: np.ndarray

    @property
    def chances(self) -> np.ndarray:
        """Rounds [chances] that another of the same document followed.

        What is prepared during a round answers its outcome, and so is the next one's hit or miss.
        """
        return np.flatnonzero(self.document[1:] == self.document[:-1])

    @classmethod
    def join(cls, parts: list[Rounds]) -> Rounds:
        """The rounds of several documents, one after the other."""
        fields = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_ROUND
        }
        return dataclasses.replace(parts[0], **fields)

    def of(self, documents: np.ndarray) -> Rounds:
        """The rounds of some of the documents: `documents` [documents] bool."""
        rows = documents[self.document]
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in _BY_ROUND})

    def calibrated(self, settings: np.ndarray) -> np.ndarray:
        """The candidates' log-probabilities [R, P, M] at other temperatures.

        Args:
          settings: [P] which row of `temperatures` each offset takes its own from.
        """
        offsets = np.arange(len(settings))
        temperature = self.temperatures[settings, offsets]
        missing = self.log_normalisers[:, offsets, settings]
        return self.log_probs / temperature[:, None] - missing[..., None]


_BY_ROUND = [field.name for field in dataclasses.fields(Rounds)[2:]]


def hit_rate(policy: Policy, rounds: Rounds, log_probs: np.ndarray | None = None) -> float:
    """Share of rounds whose block asynchronous decoding would have prepared ahead.

    At shift 1, with blocks of one size and misses that are drafted synchronously, this is exactly
    the hit rate of decoding.

    Args:
      policy: which decides by its own code, as in decoding.
      log_probs: [R, P, M] of the candidates; None: uncalibrated.

    Raises:
      D3DError: a policy for other blocks or for more candidates than were recorded, or a drafter
        of shift 0, of which only decoding can say whether a full acceptance hits: that depends on
        the first token that its early branch drafts.
    """
    check_offline(rounds.drafter)
    width, size = rounds.block.shape[1], rounds.candidate_ids.shape[-1]
    if policy.block_size != width or policy.num_candidates > size:
        raise D3DError(
            f"{policy} needs blocks of {policy.block_size} and {policy.num_candidates} candidates "
            f"a slot; recorded were blocks of {width} and {size} candidates"
        )
    log_probs = rounds.log_probs if log_probs is None else log_probs
    chances, hits = rounds.chances, 0
    for start in range(0, len(chances), _BATCH):
        rows = chances[start : start + _BATCH]
        accepted = rounds.accepted[rows]
        token = rounds.labels[rows, accepted]
        block = rounds.block[rows], rounds.candidate_ids[rows], log_probs[rows]
        hits += int(_hits(policy, rounds.drafter, *block, accepted + 1, token))
    return hits / max(len(chances), 1)


def check_offline(drafter: DrafterConfig) -> None:
    """Refuses a drafter whose hit rate only decoding can measure (`D3DError`)."""
    if drafter.label_shift == 0:
        raise D3DError(
            "a drafter of label shift 0 has no offline hit rate: measure it with `d3d generate "
            "--mode async`"
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hits(policy, drafter, block, ids, log_probs, count, token):
    branches = policy.choose(drafter, block, ids, log_probs)
    return jnp.sum(branches.find(count, token)[1])


def likelihood(rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """How well the drafter predicts the target where decoding got to.

    An offset counts in a round in which all drafts before it were accepted: only then does its
    probability decide what is prepared. A label that the draft vocabulary lacks counts nowhere.

    Returns:
      The mean negative log-likelihood of the labels, in nats, at every setting of the temperatures
      [G, P] (0 where none counts), and how many labels there are [P].
    """
    offsets = np.arange(rounds.labels.shape[1])
    counts = (offsets <= rounds.accepted[:, None]) & np.isfinite(rounds.label_log_probs)
    label = np.where(counts, rounds.label_log_probs, 0).astype(np.float64)
    missing = np.where(counts[..., None], rounds.log_normalisers, 0).astype(np.float64)
    number = counts.sum(axis=0)
    loss = missing.sum(axis=0).T - label.sum(axis=0) / rounds.temperatures
    return loss / np.maximum(number, 1), number


def fit_temperatures(rounds: Rounds) -> np.ndarray:
    """The row of `rounds.temperatures` [P] that gives each offset's labels the most likelihood.

    Temperature scaling (arXiv 1706.04599, section 4.2), one for each offset. An offset with too few
    labels takes the row of the one before.
    """
    loss, number = likelihood(rounds)
    best = np.argmin(loss, axis=0)
    for offset in range(1, len(best)):
        if number[offset] < ENOUGH:
            best[offset] = best[offset - 1]
    return best
