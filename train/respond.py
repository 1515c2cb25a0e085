"""Responses of the target to a list of prompts: greedy, batched, resumable to the response.

Decoding is `infer.decoding` in plain mode; the files are `train.responses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.engine import Engine
from d3d_jax.infer.target import Target
from d3d_jax.train.responses import ResponseWriter, default_split

# (responses present, responses asked for, tokens just generated)
Progress = Callable[[int, int, int], None]


def respond(
    target: Target,
    prompts: Sequence[tuple[list[int], str | None, str]],
    writer: ResponseWriter,
    *,
    batch: int,
    progress: Progress = lambda done, total, tokens: None,
) -> None:
    """Adds the target's greedy response to every prompt that the writer does not have yet.

    A prompt takes the place of one that is answered, so `batch` rows are busy to the end.

    Args:
      prompts: (token ids, split or None for the default one, task) by index.
      writer: its manifest states the limit of new tokens.
      batch: B, rows decoded together.
    """
    missing = [i for i in range(len(prompts)) if i not in writer.done]
    # The longest first, from the end: caches grow once, and the last rows to end are short ones.
    missing.sort(key=lambda i: len(prompts[i][0]))
    progress(len(writer.done), len(prompts), 0)
    if not missing:
        return
    config = DecodeConfig(mode="plain", max_new_tokens=writer.manifest.max_new_tokens)
    engine = Engine(target, None, config, slots=batch)
    asked: dict[int, int] = {}
    tokens = 0
    with writer:
        while missing or engine.unfinished:
            # Not all at once: what waits is held in memory.
            while missing and engine.waiting < batch:
                index = missing.pop()
                asked[engine.submit(prompts[index][0])] = index
            for number, new in engine.step():
                tokens += len(new)
                if (reason := engine.results()[number].finish_reason) is None:
                    continue
                index, reply = asked.pop(number), engine.take(number)
                ids, split, task = prompts[index]
                split = split or default_split(index)
                writer.add(index, ids, reply.token_ids, reason, split, task)
                progress(len(writer.done), len(prompts), tokens)
                tokens = 0
