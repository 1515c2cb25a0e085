"""Responses of the target to a list of prompts: greedy, batched, resumable to the response.

Decoding is `infer.decoding` in plain mode; the files are `train.responses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from d3d_jax.config import DecodeConfig
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.roles import Target
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

    Prompts of similar length share a batch, so that little prefill is padding.

    Args:
      prompts: (token ids, split or None for the default one, task) by index.
      writer: its manifest states the limit of new tokens.
      batch: B, rows decoded together.
    """
    missing = [i for i in range(len(prompts)) if i not in writer.done]
    missing.sort(key=lambda i: len(prompts[i][0]))
    config = DecodeConfig(mode="plain", max_new_tokens=writer.manifest.max_new_tokens)
    decoder = Decoder(target, None, config)
    progress(len(writer.done), len(prompts), 0)
    with writer:
        for start in range(0, len(missing), batch):
            rows = missing[start : start + batch]
            # A last, smaller batch is filled up with copies: another shape would compile again.
            filled = rows + [rows[-1]] * (batch - len(rows))
            for index, reply in zip(
                rows, decoder.generate([prompts[i][0] for i in filled]), strict=False
            ):
                ids, split, task = prompts[index]
                reason = reply.finish_reason or "length"
                split = split or default_split(index)
                writer.add(index, ids, reply.token_ids, reason, split, task)
            writer.flush()
            done = decoder.replies[: len(rows)]
            progress(len(writer.done), len(prompts), sum(len(r.token_ids) for r in done))
