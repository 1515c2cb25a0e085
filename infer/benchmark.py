"""Decoding conversations under a clock: a *point* of a benchmark, at one mode and concurrency.

    decoder.warm_up(warm_up_prompts(...), params=...)
    point = measure(decoder, conversations, chat, params, concurrency=4)

So many conversations are under way at a time; where one ends the next takes its place, and a user's
second turn is asked after the model's own reply to the first. Plain decoding is the same engine in
the mode `plain`: same kernels, cache and loop. What the points come to is in
`infer.benchmark_summary`; which prompts there are, and the files, in `d3d_jax.commands`.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.measure import counted_compilations
from d3d_jax.infer.replies import Reply
from d3d_jax.infer.role import CHUNKS
from d3d_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a user says, each turn after the model's reply to the one before.

    Attributes:
      where: the line or row it was read from, for errors.
    """

    turns: tuple[str, ...]
    system: str | None = None
    where: str = ""


# (the conversation, the model's replies so far) → token ids of the prompt of the next turn.
Chat = Callable[[Conversation, Sequence[Sequence[int]]], list[int]]


@dataclasses.dataclass
class Answer:
    """One reply, as it was measured.

    Attributes:
      conversation, turn: which, from 0.
      rounds: tokens that each round emitted; before them came the prefill's (one token; of a peer
        that drafts beside it, more). The last round ended the reply, which may have cut it.
      hits: rounds whose own block had been prepared ahead, among `chances` (asynchronous mode).
      first_seconds: from its submission to its first token.
      seconds: from its submission to its last token.
    """

    conversation: int
    turn: int
    prompt_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)
    hits: int = 0
    chances: int = 0
    finish_reason: str | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass
class Point:
    """What decoding some conversations came to.

    Every moment is either prefill or decoding: it belongs to the report that was waited for next,
    one of a piece of a prompt or one of a round (`replies.Timing`).

    Attributes:
      prefill, decode: seconds of the host's clock; together the whole time.
      outside: seconds in which the benchmark itself worked, between the engine's steps; those
        between two requests that are alone are in no other time. None of a peer.
      host: seconds in which the engine dispatched rounds and handled reports; None of a peer.
      rounds: of the whole batch that emitted something.
      dispatched: rounds, those included that were dispatched past an end.
      compiled: programs that were compiled meanwhile; warmed up, none. None of a peer.
      left_out: turns whose prompt had become longer than the model reads.
      peak_bytes: the most that each device has held since the process began, whatever was measured
        before; None where it does not say.
      began: when, in UTC.
    """

    answers: list[Answer] = dataclasses.field(default_factory=list)
    prefill: float = 0.0
    decode: float = 0.0
    outside: float | None = 0.0
    host: float | None = 0.0
    rounds: int = 0
    dispatched: int = 0
    compiled: int | None = 0
    left_out: int = 0
    peak_bytes: list[int | None] = dataclasses.field(default_factory=list)
    began: str = ""

    @property
    def seconds(self) -> float:
        """Of prefill and decoding together."""
        return self.prefill + self.decode

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Point:
        """Reads what `dataclasses.asdict` made."""
        return cls(**{**raw, "answers": [Answer(**answer) for answer in raw["answers"]]})


def measure(
    decoder: Decoder,
    conversations: Sequence[Conversation],
    chat: Chat,
    params: Callable[[int], SamplingParams],
    concurrency: int,
) -> Point:
    """Decodes all conversations, so many at a time; compile beforehand (`warm_up_prompts`).

    Args:
      decoder: of as many slots.
      params: settings of a conversation, by its index.

    Raises:
      D3DError: a prompt that cannot be decoded, or a device failed.
    """
    run = _Run(decoder, conversations, chat, params, concurrency)
    with counted_compilations() as compiled:
        point = run.point()
    point.compiled = compiled()
    return point


class _Run:
    """The loop of `measure`."""

    def __init__(
        self,
        decoder: Decoder,
        conversations: Sequence[Conversation],
        chat: Chat,
        params: Callable[[int], SamplingParams],
        concurrency: int,
    ):
        self.conversations, self.chat, self.params = conversations, chat, params
        self.decoder, self.concurrency = decoder, concurrency
        self.engine = decoder.engine(concurrency)
        self.waiting = collections.deque(
            Answer(i, 0, chat(conversation, [])) for i, conversation in enumerate(conversations)
        )
        # By the engine's number: an answer and when it was submitted.
        self.asked: dict[int, tuple[Answer, float]] = {}
        self.result = Point(began=utc_now())

    def point(self) -> Point:
        """Runs to the end.

        Rounds that were dispatched past a last reply's end are nobody's time: they are let run out.
        """
        result, engine = self.result, self.engine
        last = time.perf_counter()
        while self.waiting or engine.unfinished:
            if not engine.unfinished:
                result.outside += time.perf_counter() - last
                engine.drain()
                last = time.perf_counter()
            self._submit()
            began = time.perf_counter()
            said = engine.step()
            now = time.perf_counter()
            read_prompt = [self._book(number, new, now) for number, new in said]
            result.rounds += bool(said) and not any(read_prompt)
            result.outside += began - last
            last = now
        engine.drain()  # or what comes next would share the devices with it
        timing = engine.timing
        result.prefill, result.decode, result.host = timing.prefill, timing.decode, timing.host
        result.dispatched = timing.rounds
        result.answers.sort(key=lambda answer: (answer.conversation, answer.turn))
        result.peak_bytes = peak_bytes(self.decoder)
        return result

    def _submit(self) -> None:
        while self.waiting and len(self.asked) < self.concurrency:
            answer = self.waiting.popleft()
            number = self.engine.submit(answer.prompt_ids, self.params(answer.conversation))
            self.asked[number] = answer, time.perf_counter()

    def _book(self, number: int, new: list[int], now: float) -> bool:
        """Notes what a request said; returns whether it was the first token, the prefill's."""
        answer, submitted = self.asked[number]
        first = not answer.token_ids
        answer.token_ids += new
        answer.seconds = now - submitted
        if first:
            answer.first_seconds = answer.seconds
        else:
            answer.rounds.append(len(new))
        if self.engine.results()[number].finish_reason is not None:
            del self.asked[number]
            self._end(answer, self.engine.take(number))
        return first

    def _end(self, answer: Answer, reply: Reply) -> None:
        if self.decoder.config.mode == "async":
            answer.hits, answer.chances = reply.hits, reply.chances
        answer.finish_reason = reply.finish_reason
        self.result.answers.append(answer)
        conversation, turn = self.conversations[answer.conversation], answer.turn + 1
        if turn == len(conversation.turns):
            return
        before = [a for a in self.result.answers if a.conversation == answer.conversation]
        replies = [a.token_ids for a in sorted(before, key=lambda a: a.turn)]
        prompt = self.chat(conversation, replies)
        if len(prompt) < self.decoder.limit:
            self.waiting.appendleft(Answer(answer.conversation, turn, prompt))
        else:
            self.result.left_out += len(conversation.turns) - turn


def warm_up_prompts(
    decoder: Decoder, conversations: Sequence[Conversation], chat: Chat
) -> list[list[int]]:
    """Prompts as long as any that these conversations can come to, for `Decoder.warm_up`.

    How long a later turn's is depends on the replies: every size of pass is among them then.
    """
    found = [chat(conversation, []) for conversation in conversations]
    several = [c for c in conversations if len(c.turns) > 1]
    if several:
        # A reply may come back through its text as other tokens, and more of them.
        of_reply = 2 * decoder.config.max_new_tokens
        longest = max(
            len(chat(c, [[]] * (len(c.turns) - 1))) + of_reply * (len(c.turns) - 1) for c in several
        )
        longest = min(longest, decoder.limit - 1)
        found += [[0] * rows for rows in CHUNKS if rows < longest] + [[0] * longest]
    return found


def utc_now() -> str:
    """To the second, as ISO 8601 writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def peak_bytes(decoder: Decoder) -> list[int | None]:
    """The most bytes each device of the target, then of the drafter, has held so far."""
    devices: dict[jax.Device, None] = {}
    for role in filter(None, (decoder.target, decoder.drafter)):
        devices |= dict.fromkeys(role.mesh.devices.flat)
    stats = [device.memory_stats() or {} for device in devices]
    return [one.get("peak_bytes_in_use") for one in stats]
