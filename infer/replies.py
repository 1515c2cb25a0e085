"""What decoding gives back, and which prompts it takes. No device is touched here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from d3d_jax.config import ModelConfig
from d3d_jax.errors import D3DError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass
class Reply:
    """What was generated for one prompt.

    Attributes:
      token_ids: of the reply, the stop token included when one ended it.
      rounds: verification rounds that emitted something (the first token is the prefill's).
      hits: rounds whose own block had been prepared ahead, among `chances` (asynchronous mode).
      finish_reason: None while it runs.
      stop: the stop string that ended it; the text ends before it, the last token may not.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    hits: int = 0
    chances: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None

    @property
    def tau(self) -> float | None:
        """Acceptance length: tokens per round, correction or bonus included."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else None

    @property
    def hit_rate(self) -> float | None:
        """Share of rounds whose block had been prepared ahead; 0 where nothing prepares."""
        return self.hits / self.chances if self.chances else None


@dataclasses.dataclass
class Timing:
    """Seconds, by the host's clock.

    While requests are under way, every moment belongs to the report that was read next.

    Attributes:
      prefill: of reports of pieces of prompts, the last of which say first tokens.
      decode: of reports of rounds.
      host: spent by the host on its own: dispatching rounds and handling what was reported, not
        waiting for a device and not dispatching the reading of prompts.
      rounds: dispatched.
    """

    prefill: float = 0.0
    decode: float = 0.0
    host: float = 0.0
    rounds: int = 0


def longest_sequence(config: ModelConfig, asked: int | None) -> int:
    """The longest prompt and reply together: what is asked for, else what the model is made for.

    Raises:
      D3DError: more than that is asked for.
    """
    most = config.max_length
    if asked is not None and asked > most:
        raise D3DError(f"max_length {asked} is above the model's limit of {most}")
    return asked or most


def check_prompts(
    prompts: list[list[int]], config: ModelConfig, limit: int, names: Sequence[str] = ()
) -> None:
    """Refuses prompts that a model cannot decode.

    Args:
      limit: of `longest_sequence`.
      names: of the prompts in errors; none: they are counted from 1.

    Raises:
      D3DError: no prompt, an empty one, one that leaves no room for a reply, or no token ids.
    """
    if not prompts:
        raise D3DError("there is no prompt to decode")
    most = config.vocab_size - 1
    names = names or [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    for name, prompt in zip(names, prompts, strict=True):
        if not prompt:
            raise D3DError(f"{name} is empty")
        if len(prompt) >= limit:
            raise D3DError(
                f"{name} has {len(prompt)} tokens, the model takes at most "
                f"{limit - 1} and room for a reply"
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise D3DError(f"{name} holds {token!r}, which is no token id")
            if not 0 <= token <= most:
                raise D3DError(f"{name} has token id {token}; ids are 0 to {most}")
