"""Continuous batching: requests join and leave a batch of slots that goes on decoding.

    engine = Engine(target, drafter, DecodeConfig(mode="sync"), slots=8)
    first = engine.submit([1, 2, 3])
    while engine.unfinished:
        for request, tokens in engine.step(): ...
    engine.results()[first].token_ids

The host dispatches ahead and reads late: a round's report is read when the next round is under way.
A row that has stopped is frozen on the device, so rounds dispatched past a stop emit nothing and
are dropped exactly.

A round is one program for all slots. It is compiled again where the caches grow, and where the
first request joins that samples, or that filters what it samples from (`Decoder.warm_up`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable

import jax
import numpy as np

from d3d_jax import acceptance
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.replies import Reply, Timing, check_prompts, longest_sequence
from d3d_jax.infer.role import Piece, pieces
from d3d_jax.infer.stop_strings import StopStrings
from d3d_jax.infer.target import Target
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.sampling import SamplingParams

# Rounds dispatched beyond the one being read: the device always has one waiting.
AHEAD = 1
# Prompt tokens read between two rounds while other requests are decoding.
PREFILL_TOKENS = 2048


def planned(prompt: int, emitted: int, limit: int, width: int) -> int:
    """Tokens that a slot must have room for before another round is dispatched.

    Args:
      prompt, emitted: tokens of the prompt, and of the reply as far as the host has read it.
      limit: of the reply.
      width: W, which each of the rounds in flight may add.
    """
    return prompt + min(emitted + width * (AHEAD + 2), limit)


@dataclasses.dataclass(eq=False)
class _Request:
    """A submitted prompt, from its queue to its reply.

    Attributes:
      limit: tokens it may emit.
      unread: pieces of the prompt not dispatched yet.
      stop_ids: every token that ends it.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    unread: collections.deque[Piece] = dataclasses.field(default_factory=collections.deque)
    reply: Reply = dataclasses.field(default_factory=Reply)

    @property
    def decoding(self) -> bool:
        """Whether rounds emit tokens of it, as far as the host knows."""
        return not self.unread and self.reply.finish_reason is None and self.limit > 1


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A report to come.

    Attributes:
      owners: the request in each slot it speaks of, at the time of dispatch.
    """

    report: jax.Array
    owners: tuple[_Request | None, ...]
    is_round: bool


class Engine:
    """Decodes requests in a fixed number of slots.

    The caches grow with the longest request there was and stay so. After a device failed, `step`
    raises and `results` still has what was read before.

    Args:
      drafter: needed unless the configuration's mode is plain; then it is not used.
      slots: B, requests decoded at a time. A mesh's data and fsdp axes split them where they divide
        them; else their devices repeat each other.
      tokenizer: needed for stop strings only.

    Raises:
      D3DError: a mode that needs a drafter and has none, no slots, or a mesh of several processes.
    """

    def __init__(
        self,
        target: Target,
        drafter: DrafterRole | None,
        config: DecodeConfig,
        slots: int,
        tokenizer: Tokenizer | None = None,
    ):
        if config.mode != "plain" and drafter is None:
            raise D3DError(f"mode {config.mode} needs a drafter")
        if type(slots) is not int or slots < 1:
            raise D3DError(f"slots must be a whole number of at least 1, found {slots!r}")
        self.target, self.config, self.slots = target, config, slots
        self.drafter = drafter if config.mode != "plain" else None
        for role in filter(None, (target, self.drafter)):
            if any(d.process_index != jax.process_index() for d in role.mesh.devices.flat):
                raise D3DError(
                    "decoding runs in one process: give it a mesh of this process's own devices "
                    "(jax.local_devices())"
                )
        self.width = self.drafter.width if self.drafter else 1
        self.limit = longest_sequence(target.config, config.max_length)
        self.timing = Timing()
        self._tokenizer = tokenizer
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()
        self._waiting: collections.deque[_Request] = collections.deque()
        self._slots: list[_Request | None] = [None] * slots
        self._flying: collections.deque[_Flight] = collections.deque()
        self._batch: Batch | None = None
        self._read_at = 0.0  # when the last report was read, or decoding began after a pause
        self._failure: str | None = None

    def submit(self, prompt: list[int], params: SamplingParams | None = None) -> int:
        """Queues a prompt; returns the request's number.

        Args:
          params: None: greedy, with the configuration's limit of tokens.

        Raises:
          D3DError: a prompt that cannot be decoded, stop strings without a tokenizer, or a device
            failed before.
        """
        if self._failure is not None:
            raise D3DError(self._failure)
        prompt = list(prompt)  # the caller's may change while it waits
        check_prompts([prompt], self.target.config, self.limit)
        params = params or SamplingParams(max_new_tokens=self.config.max_new_tokens)
        if not isinstance(params, SamplingParams):
            raise D3DError(f"a request takes SamplingParams, found {params!r}")
        stops = None
        if params.stop:
            if self._tokenizer is None:
                raise D3DError("stop strings need a tokenizer; give one, or stop_token_ids")
            stops = StopStrings(self._tokenizer, params.stop)
        request = _Request(
            next(self._numbers),
            prompt,
            params,
            min(params.max_new_tokens, self.limit - len(prompt)),
            self.target.stop_tokens | set(params.stop_token_ids),
            stops,
        )
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

    def cancel(self, request: int) -> None:
        """Ends a request where it is; the others are not touched.

        Raises:
          D3DError: there is no such request.
        """
        found = self._find(request)
        if found.reply.finish_reason is None:
            found.reply.finish_reason = "cancelled"
            found.unread.clear()
            if found in self._waiting:
                self._waiting.remove(found)
            self._release([found])

    def drain(self) -> None:
        """Waits until the devices have done all that was dispatched, for whoever keeps time."""
        if self._batch is not None:
            self._batch.wait()

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or decoding."""
        return any(self._live) or bool(self._waiting)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    def results(self) -> dict[int, Reply]:
        """The reply of every request so far, by its number, unless it was taken."""
        return {number: request.reply for number, request in self._requests.items()}

    def take(self, request: int) -> Reply:
        """The reply of a request that has ended, which the engine then forgets.

        Raises:
          D3DError: there is no such request, or it has not ended.
        """
        if self._find(request).reply.finish_reason is None:
            raise D3DError(f"request {request} has not ended")
        return self._requests.pop(request).reply

    def _find(self, request: int) -> _Request:
        if request not in self._requests:
            raise D3DError(f"there is no request {request!r}")
        return self._requests[request]

    def step(self) -> list[tuple[int, list[int]]]:
        """Dispatches ahead, then waits for the oldest report and books it.

        Returns:
          (request, new token ids) of those that said something, perhaps none.

        Raises:
          D3DError: a device failed.
        """
        if self._failure is not None:
            raise D3DError(self._failure)
        try:
            return self._step()
        except jax.errors.JaxRuntimeError as error:
            replies = [request.reply for request in self._requests.values()]
            ended = sum(reply.finish_reason in ("stop", "length") for reply in replies)
            self._failure = (
                f"a device failed while decoding: {str(error).splitlines()[0]:.300}; {ended} "
                f"replies are complete, the others end with what was read before"
            )
            raise D3DError(self._failure) from error

    def _step(self) -> list[tuple[int, list[int]]]:
        if not any(self._live):
            # What still flies belongs to requests that have ended, and the time until now to none.
            self._flying.clear()
            self._read_at = time.perf_counter()
        self._admit()
        while sum(flight.is_round for flight in self._flying) <= AHEAD and self._dispatch():
            pass
        if not self._flying:
            return []
        flight = self._flying.popleft()
        # The only wait: for a report whose successor is already under way.
        jax.block_until_ready(flight.report)
        now = time.perf_counter()
        if flight.is_round:
            self.timing.decode += now - self._read_at
        else:
            self.timing.prefill += now - self._read_at
        self._read_at = now
        new = self._book(flight)
        self.timing.host += time.perf_counter() - now
        return new

    @property
    def _live(self) -> Iterable[_Request]:
        """Requests that have a slot and have not ended, as far as the host knows."""
        return (r for r in self._slots if r is not None and r.reply.finish_reason is None)

    def _admit(self) -> None:
        """Gives free slots to waiting requests."""
        admitted = False
        for slot, holder in enumerate(self._slots):
            if holder is not None and holder.reply.finish_reason is None:
                continue
            if not self._waiting:
                break
            request = self._waiting.popleft()
            request.unread.extend(pieces(slot, request.prompt))
            self._slots[slot], admitted = request, True
        if admitted:
            self._make_room()
            self._configure()

    def _make_room(self) -> None:
        capacity = max(
            planned(len(r.prompt), len(r.reply.token_ids), r.limit, self.width) for r in self._live
        )
        if self._batch is None:
            self._batch = Batch(self.target, self.drafter, self.config, self.slots, capacity)
        self._batch.grow(capacity)

    def _configure(self) -> None:
        assert self._batch is not None
        nothing = SamplingParams()
        live = [r if r and r.reply.finish_reason is None else None for r in self._slots]
        params = [r.params if r else nothing for r in live]
        self._batch.configure(params, [r.limit if r else 0 for r in live])

    def _dispatch(self) -> bool:
        """Reads prompts, then one round; False where no request is decoding after that."""
        self._read_prompts()
        if not any(r.decoding for r in self._live):
            return False
        clock = time.perf_counter()
        assert self._batch is not None
        self._make_room()
        report = self._batch.round()
        owners = tuple(r if r and r.decoding else None for r in self._slots)
        self._flying.append(_Flight(report, owners, is_round=True))
        self.timing.rounds += 1
        self.timing.host += time.perf_counter() - clock
        return True

    def _read_prompts(self) -> None:
        """Dispatches pieces of prompts, not too many where other requests wait for their round."""
        tokens = 0
        while tokens < PREFILL_TOKENS or not any(r.decoding for r in self._live):
            if not (found := self._next_pieces()):
                return
            assert self._batch is not None
            report = self._batch.read(found)
            owners: list[_Request | None] = [None] * self.slots
            for piece in found:
                owners[piece.slot] = self._slots[piece.slot] if piece.last else None
            # Also where no prompt ends here: its time is a prompt's.
            self._flying.append(_Flight(report, tuple(owners), is_round=False))
            tokens += max(len(piece.tokens) for piece in found)

    def _next_pieces(self) -> list[Piece]:
        """The next piece of the oldest prompt in each part of the target's batch."""
        size = self.slots // self.target.parts(self.slots)
        found: dict[int, Piece] = {}
        for request in sorted(self._live, key=lambda request: request.id):
            if request.unread and (part := request.unread[0].slot // size) not in found:
                found[part] = request.unread.popleft()
        return list(found.values())

    def _book(self, flight: _Flight) -> list[tuple[int, list[int]]]:
        """Adds a report to the replies; returns what each request said."""
        report = np.asarray(flight.report).tolist()
        emitted, ended = [], []
        for slot, request in enumerate(flight.owners):
            count = report[slot][acceptance.COUNT]
            if request is None or not count or request.reply.finish_reason is not None:
                continue
            reply = request.reply
            new = report[slot][acceptance.TOKENS : acceptance.TOKENS + count]
            if flight.is_round:
                # The first block is always drafted synchronously: it had no chance to be a hit.
                reply.chances += reply.rounds > 0
                reply.hits += report[slot][acceptance.HIT]
                reply.rounds += 1
            if request.stop_strings is not None:
                new, reply.stop = request.stop_strings.cut(new)
            reply.token_ids += new
            if reply.stop is not None:
                reply.finish_reason = "stop"
                ended.append(request)
            elif not report[slot][acceptance.ACTIVE]:
                reply.stop = request.stop_strings and request.stop_strings.end()
                stopped = reply.stop is not None or new[-1] in request.stop_ids
                reply.finish_reason = "stop" if stopped else "length"
            emitted.append((request.id, new))
        self._release(ended)
        return emitted

    def _release(self, requests: list[_Request]) -> None:
        """Ends requests on the device that the device would not have ended itself."""
        rows = [slot for slot, request in enumerate(self._slots) if request in requests]
        if rows and self._batch is not None and self._failure is None:
            self._batch.stop(rows)
