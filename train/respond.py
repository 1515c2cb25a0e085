"""Responses of the target to prompts: batched, greedy or sampled, resumable to the response.

Decoding is `infer.engine` in plain mode; the files are `train.responses`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.target import Target
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.responses import ResponseWriter, default_split

# Prompts held in memory as token ids, which are sorted among themselves.
WINDOW = 4096

# Called after every round with the tokens it gave; what it raises ends the work in good order.
Progress = Callable[[int], None]


class Asked(NamedTuple):
    """A prompt to answer; `split` None is the default one of its index."""

    index: int
    ids: list[int]
    split: str | None = None
    task: str = ""


def respond(
    target: Target,
    asked: Iterable[Asked],
    writer: ResponseWriter,
    *,
    batch: int,
    sampling: SamplingParams | None = None,
    progress: Progress = lambda tokens: None,
) -> None:
    """Adds the target's response to every prompt.

    A prompt takes the place of one that is answered, so `batch` rows are busy to the end. What a
    prompt is answered depends on its index and on the seed, not on its neighbours: in float32 any
    batch, order and number of processes gives the same tokens.

    Args:
      asked: prompts that the writer has no response to, read as they are needed.
      writer: its manifest states the limit of new tokens.
      batch: B, rows decoded together, or a few more where devices split them.
      sampling: None: greedy. Each prompt gets a seed of its own.
    """
    limit = writer.manifest.max_new_tokens
    params = dataclasses.replace(sampling or SamplingParams(), max_new_tokens=limit)
    config = DecodeConfig(mode="plain", max_new_tokens=limit)
    engine = Decoder(target, None, config, slots=batch).engine(batch)
    waiting, open_requests = _longest_first(asked), dict[int, Asked]()
    with writer:
        while True:
            # Not all at once: what waits is held in memory.
            for prompt in itertools.islice(waiting, max(batch - engine.waiting, 0)):
                own = dataclasses.replace(params, seed=prompt_seed(params.seed, prompt.index))
                open_requests[engine.submit(prompt.ids, own)] = prompt
            if not engine.unfinished:
                return
            said, replies = engine.step(), engine.results()
            for number, _ in said:
                if (reason := replies[number].finish_reason) is None:
                    continue
                (index, ids, split, task), reply = open_requests.pop(number), engine.take(number)
                split = split or default_split(index)
                writer.add(index, ids, reply.token_ids, reason, split, task)
            progress(sum(len(new) for _, new in said))


def prompt_seed(seed: int, index: int) -> int:
    """The seed of one prompt's noise, from 0 to 2**32 - 1, by a hash of both numbers."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])


def _longest_first(asked: Iterable[Asked]) -> Iterator[Asked]:
    """The prompts, each window of them sorted from the longest to the shortest.

    Caches then grow once, at the start, where running out of memory costs least; the rows of a
    batch are about as long, and attention in a batch takes as long as its longest row; and the last
    rows to end are short ones. A window is made ready while the device idles, a second or two for
    the minutes that it takes to answer.
    """
    asked = iter(asked)
    while window := list(itertools.islice(asked, WINDOW)):
        yield from sorted(window, key=lambda prompt: len(prompt.ids), reverse=True)
