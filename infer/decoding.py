"""The decoders: plain, synchronous and asynchronous, as one loop that dispatches ahead.

The host enqueues rounds without waiting for any, and reads a round's report only when the next is
under way: to stream tokens and to know when to stop. A row that has stopped is frozen on
the device, so rounds dispatched past a stop emit nothing and are dropped exactly.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import numpy as np

from d3d_jax import acceptance
from d3d_jax.config import DecodeConfig, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.roles import (
    DrafterRole,
    DraftState,
    Target,
    TargetState,
    pad_prompts,
    prompt_buckets,
)

# Rounds dispatched beyond the one being read: the device always has one waiting.
AHEAD = 1


@dataclasses.dataclass
class Reply:
    """What was generated for one prompt.

    Attributes:
      token_ids: of the reply, the stop token included when one ended it.
      rounds: verification rounds that emitted something (the first token is the prefill's).
      hits: rounds whose own block had been prepared ahead, among `chances` (asynchronous mode).
      finish_reason: `stop`, `length`, or None while it runs.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    hits: int = 0
    chances: int = 0
    finish_reason: Literal["stop", "length"] | None = None

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

    Attributes:
      prefill: from the first dispatch to the first tokens read.
      decode: from then until the last token was read.
      host: spent by the host on its own: dispatching rounds and handling what they reported, not
        waiting for a device.
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


def check_prompts(prompts: list[list[int]], config: ModelConfig, limit: int) -> None:
    """Refuses prompts that a model cannot decode.

    Args:
      limit: of `longest_sequence`.

    Raises:
      D3DError: no prompt, an empty one, one that leaves no room for a reply, or no token ids.
    """
    if not prompts:
        raise D3DError("there is no prompt to decode")
    most = config.vocab_size - 1
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise D3DError(f"prompt {number} is empty")
        if len(prompt) >= limit:
            raise D3DError(
                f"prompt {number} has {len(prompt)} tokens, the model takes at most "
                f"{limit - 1} and room for a reply"
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise D3DError(f"prompt {number} holds {token!r}, which is no token id")
            if not 0 <= token <= most:
                raise D3DError(f"prompt {number} has token id {token}; ids are 0 to {most}")


@dataclasses.dataclass(frozen=True)
class _Round:
    """A dispatched round: the report to come, and the handover that its block was made of."""

    report: jax.Array
    handover: jax.Array | None = None


class Decoder:
    """Decodes a batch of prompts with a target and, unless `mode` is plain, a drafter.

    After `stream` is exhausted, `replies` and `timing` hold the results.

    Raises:
      D3DError: no drafter where one is needed, an empty prompt, or one that leaves no room.
    """

    def __init__(self, target: Target, drafter: DrafterRole | None, config: DecodeConfig):
        if config.mode != "plain" and drafter is None:
            raise D3DError(f"mode {config.mode} needs a drafter")
        self.target, self.config = target, config
        self.drafter = drafter if config.mode != "plain" else None
        self.width = self.drafter.width if self.drafter else 1
        self.limit = longest_sequence(target.config, config.max_length)
        self.replies: list[Reply] = []
        self.timing = Timing()

    def stream(self, prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yields (row, new token ids) as reports arrive."""
        self.check(prompts)
        limits = np.array(
            [min(self.config.max_new_tokens, self.limit - len(p)) for p in prompts], np.int32
        )
        self.replies = [Reply() for _ in prompts]
        self.timing = Timing()
        return self._run(prompts, limits)

    def generate(self, prompts: list[list[int]]) -> list[Reply]:
        """Decodes to the end and returns the replies in order."""
        for _ in self.stream(prompts):
            pass
        return self.replies

    def check(self, prompts: list[list[int]]) -> None:
        """Raises `D3DError` for a prompt that cannot be decoded, or none at all."""
        check_prompts(prompts, self.target.config, self.limit)

    @property
    def _ahead(self) -> int:
        """Room kept for rounds in flight: growth is planned from lengths the host has read."""
        return self.width * (AHEAD + 2)

    def warm_up(self, prompts: list[list[int]], new_tokens: int | None = None) -> None:
        """Compiles what decoding these prompts needs, so that it can be timed.

        That is the prefill and a round at every capacity that the caches grow to.

        Args:
          new_tokens: how far to grow; None: to the limits of the configuration.
        """
        tokens, lengths = pad_prompts(prompts)
        limits = np.full_like(lengths, min(self.config.max_new_tokens, self.limit))
        done, handover, state, drafts = self._prefill(tokens, lengths, limits)
        longest = int(lengths.max()) + (new_tokens or self.config.max_new_tokens)
        final = min(longest, self.limit) + self._ahead
        while True:
            done, handover, state, drafts = self._dispatch(handover, state, drafts)
            if state.cache.capacity >= final:
                break
            state, drafts = self._grow(state, drafts, state.cache.capacity + 1)
        jax.block_until_ready((done.report, handover, state, drafts))

    def warm_up_all(
        self, batch: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Compiles every program that batches of this size can need, up to the longest sequence.

        Args:
          progress: called with the number of prompt lengths done and in all.
        """
        buckets = prompt_buckets(self.limit - 1)
        for done, rows in enumerate(buckets):
            progress(done, len(buckets))
            prompts = [[0] * min(rows, self.limit - 1)] * batch
            tokens, lengths = pad_prompts(prompts)
            jax.block_until_ready(self._prefill(tokens, lengths, np.ones_like(lengths)))
        self.warm_up([[0]] * batch, self.limit - 1)
        progress(len(buckets), len(buckets))

    def _prefill(
        self, tokens: np.ndarray, lengths: np.ndarray, limits: np.ndarray
    ) -> tuple[_Round, jax.Array, TargetState, DraftState | None]:
        """The round of the first tokens, the first handover and the states of both roles."""
        # By the padded length, so that prompts padded to one shape compile one set of steps.
        capacity = tokens.shape[1] + self._ahead
        report, state = self.target.prefill(tokens, lengths, limits, capacity)
        report.copy_to_host_async()
        if self.drafter is None:
            none = self.target.put(np.zeros((len(lengths), 1), np.int32))
            return _Round(report), none, state, None
        cache = self.drafter.prefill(tokens, lengths, capacity)
        handover, drafts = self.drafter.first_draft(cache, self.drafter.put(report))
        handover.copy_to_host_async()
        return _Round(report), handover, state, drafts

    def _run(self, prompts: list[list[int]], limits: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        began = time.perf_counter()
        tokens, lengths = pad_prompts(prompts)
        first, handover, state, drafts = self._prefill(tokens, lengths, limits)
        flying = collections.deque([first])
        while True:
            clock = time.perf_counter()
            while len(flying) <= AHEAD:
                sizes = zip(lengths, self.replies, strict=True)
                longest = max(int(length) + len(reply.token_ids) for length, reply in sizes)
                state, drafts = self._grow(state, drafts, longest + self._ahead)
                done, handover, state, drafts = self._dispatch(handover, state, drafts)
                flying.append(done)
                self.timing.rounds += 1
            oldest = flying.popleft()
            self.timing.host += time.perf_counter() - clock
            report = np.asarray(oldest.report)
            now = time.perf_counter()
            if oldest is first:
                self.timing.prefill = now - began
            self.timing.decode = now - began - self.timing.prefill
            new = self._read(report, oldest.handover)
            self.timing.host += time.perf_counter() - now
            yield from new
            if all(reply.finish_reason for reply in self.replies):
                return

    def _grow(
        self, state: TargetState, drafts: DraftState | None, capacity: int
    ) -> tuple[TargetState, DraftState | None]:
        state = dataclasses.replace(state, cache=self.target.grown(state.cache, capacity))
        if self.drafter and drafts:
            drafts = dataclasses.replace(drafts, cache=self.drafter.grown(drafts.cache, capacity))
        return state, drafts

    def _dispatch(
        self, handover: jax.Array, state: TargetState, drafts: DraftState | None
    ) -> tuple[_Round, jax.Array, TargetState, DraftState | None]:
        """One round. Nothing here waits: every call returns before its device has begun."""
        if self.drafter is None or drafts is None:
            report, state = self.target.verify(state, handover)
            report.copy_to_host_async()
            return _Round(report), handover, state, None
        block, used = self.target.put(handover), handover
        if self.config.mode == "async":
            # The packed pass goes first: it needs nothing from this round's verification.
            drafts, hidden, prepared = self.drafter.prepare(drafts)
            report, state = self.target.verify(state, block)
            moved = self.drafter.put(report)
            handover, drafts = self.drafter.resolve(drafts, hidden, prepared, moved)
        else:
            report, state = self.target.verify(state, block)
            handover, drafts = self.drafter.draft(drafts, self.drafter.put(report))
        report.copy_to_host_async()
        handover.copy_to_host_async()
        return _Round(report, used), handover, state, drafts

    def _read(self, report: np.ndarray, handover: jax.Array | None) -> list[tuple[int, list[int]]]:
        """Books a round's report; returns (row, new tokens) of the rows that emitted something.

        The round's own handover was an input of its verification, so it is ready by then.
        """
        hits = None if handover is None else np.asarray(handover)[:, 0]
        emitted = []
        for row, reply in enumerate(self.replies):
            count = int(report[row, acceptance.COUNT])
            if count == 0:
                continue
            new = report[row, acceptance.TOKENS : acceptance.TOKENS + count].tolist()
            if reply.token_ids:
                # The first block is always drafted synchronously: it had no chance to be a hit.
                reply.chances += reply.rounds > 0
                reply.hits += 0 if hits is None else int(hits[row])
                reply.rounds += 1
            reply.token_ids += new
            if not report[row, acceptance.ACTIVE]:
                stopped = new[-1] in self.target.stop_tokens
                reply.finish_reason = "stop" if stopped else "length"
            emitted.append((row, new))
        return emitted
