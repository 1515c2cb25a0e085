"""Decoding a list of prompts: the engine with everything submitted at once, and its warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.engine import Engine, planned
from d3d_jax.infer.replies import Reply, Timing, check_prompts, longest_sequence
from d3d_jax.infer.role import CHUNKS, Piece, pieces
from d3d_jax.infer.target import Target
from d3d_jax.models import cache as caches
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.sampling import SamplingParams


class Decoder:
    """Decodes prompts with a target and, unless `mode` is plain, a drafter.

    After `stream` is exhausted, `replies` and `timing` hold the results.

    Args:
      slots: prompts decoded at a time; None: all of them.
      tokenizer: needed for stop strings only.

    Raises:
      D3DError: no drafter where one is needed, or no slots.
    """

    def __init__(
        self,
        target: Target,
        drafter: DrafterRole | None,
        config: DecodeConfig,
        slots: int | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        if config.mode != "plain" and drafter is None:
            raise D3DError(f"mode {config.mode} needs a drafter")
        if slots is not None and (type(slots) is not int or slots < 1):
            raise D3DError(f"slots must be a whole number of at least 1, found {slots!r}")
        self.target, self.config, self.slots, self.tokenizer = target, config, slots, tokenizer
        self.drafter = drafter if config.mode != "plain" else None
        self.limit = longest_sequence(target.config, config.max_length)
        self.replies: list[Reply] = []
        self.timing = Timing()

    def stream(
        self, prompts: list[list[int]], params: Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yields (prompt's index, new token ids) as reports arrive.

        Args:
          params: of each prompt; None: greedy, with the configuration's limit of tokens.

        Raises:
          D3DError: at once, for a prompt that cannot be decoded.
        """
        self.check(prompts)
        if params is not None and len(params) != len(prompts):
            raise D3DError(f"{len(params)} sampling settings for {len(prompts)} prompts")
        engine = self.engine(len(prompts))
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, None if params is None else params[index])
        self.replies, self.timing = list(engine.results().values()), engine.timing

        def run() -> Iterator[tuple[int, list[int]]]:
            while engine.unfinished:
                yield from engine.step()

        return run()

    def generate(
        self, prompts: list[list[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Reply]:
        """Decodes to the end and returns the replies in order; arguments as for `stream`."""
        for _ in self.stream(prompts, params):
            pass
        return self.replies

    def engine(self, requests: int) -> Engine:
        """The engine that decodes so many requests."""
        slots = self._slots(requests)
        return Engine(self.target, self.drafter, self.config, slots, self.tokenizer)

    def _slots(self, requests: int) -> int:
        """No more than the requests need, but as many as can be split over both roles' devices."""
        slots = requests if self.slots is None else min(self.slots, requests)
        split = math.lcm(*(role.row_split for role in (self.target, self.drafter) if role))
        return -(-slots // split) * split

    def check(self, prompts: list[list[int]]) -> None:
        """Raises `D3DError` for a prompt that cannot be decoded, or none at all."""
        check_prompts(prompts, self.target.config, self.limit)

    def warm_up(
        self,
        prompts: list[list[int]],
        new_tokens: int | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        """Compiles what decoding these prompts needs, so that it can be timed.

        That is every chunk of their lengths, and a round at every capacity the caches grow to.

        Args:
          new_tokens: how far to grow; None: to the limits of the configuration.
          params: settings that need the same programs; None: greedy.
        """
        new = new_tokens or self.config.max_new_tokens
        slots = self._slots(len(prompts))
        found = [self.programs(prompt) for prompt in prompts]
        chunks = {rows for chunks, _ in found for rows in chunks}
        # A request that takes a freed slot is read at the capacity the caches have by then.
        later = slots < len(prompts)
        first = (min if later else max)(capacity for _, capacity in found)
        longest = max(map(len, prompts))
        last = caches.bucketed(min(longest + new, self.limit))
        self._compile(slots, sorted(chunks), (first, last), later, params)

    def warm_up_all(
        self,
        batch: int,
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Compiles every program that batches of this size can need, up to the longest sequence.

        Args:
          params: settings that need the same programs; None: greedy.
          progress: called with the number of capacities done and in all.
        """
        capacities = caches.bucketed(1), caches.bucketed(self.limit)
        self._compile(self._slots(batch), CHUNKS, capacities, True, params, progress)

    def programs(self, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        """What decoding of a prompt begins with: rows of the chunks it is read in, and capacity.

        Of a prompt whose limit of tokens is the configuration's.
        """
        rows = {next(r for r in CHUNKS if r >= len(p.tokens)) for p in pieces(0, prompt)}
        width = self.drafter.width if self.drafter else 1
        limit = min(self.config.max_new_tokens, self.limit - len(prompt))
        return tuple(sorted(rows)), caches.bucketed(planned(len(prompt), 0, limit, width))

    def _compile(
        self,
        slots: int,
        chunks: Sequence[int],
        capacities: tuple[int, int],
        read_at_all: bool,
        params: SamplingParams | None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Runs each program once: at every capacity a round, and passes that read prompts."""
        first, last = capacities
        batch = Batch(self.target, self.drafter, self.config, slots, first)
        one = params or SamplingParams()
        batch.configure([one] * slots, [1] * slots)
        total = (last // first).bit_length()
        for done in range(total):
            progress(done, total)
            for rows in chunks if read_at_all or done == 0 else ():
                batch.read([Piece(0, 0, [0] * min(rows, batch.capacity), last=True)])
            batch.round()
            batch.stop([0])
            batch.wait()
            if batch.capacity < last:
                batch.grow(batch.capacity + 1)
        progress(total, total)
