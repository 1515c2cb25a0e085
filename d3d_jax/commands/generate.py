"""`d3d generate`: decodes prompts, streams the text to stdout and the figures to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from d3d_jax.commands.loading import open_decoder
from d3d_jax.commands.option_groups import thinking_switch
from d3d_jax.commands.options import Generate
from d3d_jax.commands.runtime import (
    busy,
    note,
    prompt_ids,
    prompt_text,
    start_jax,
    warn_of_turns,
)
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder, Reply
from d3d_jax.infer.model import ModelFiles
from d3d_jax.infer.roles import pad_prompts
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.responses import read_prompts

# Rounds for longer replies are compiled when a reply gets there: few do, and it costs seconds.
_WARM_TOKENS = 512


def run(options: Generate) -> None:
    """Decodes all prompts, a batch at a time."""
    texts = _texts(options)
    start_jax(cpu_devices=options.placement.num_devices)
    files = open_decoder(options.target, options.decoding, options.placement)
    tokenizer = files.target.tokenizer
    prompts = [_ids(options, files.target, text) for text in texts]
    files.check(prompts)
    with busy(f"loading {options.target}"):
        decoder = files.load(options.max_new_tokens)
    size = min(options.decoding.batch, len(texts))
    warm: set[tuple[int, ...]] = set()
    for first in range(0, len(texts), size):
        batch = prompts[first : first + size]
        count = len(batch)
        # A last, smaller batch is filled up with copies: another shape would compile again.
        batch += [batch[-1]] * (size - count)
        shape = pad_prompts(batch)[0].shape
        if shape not in warm:
            with busy("compiling"):
                decoder.warm_up(batch, min(options.max_new_tokens, _WARM_TOKENS))
            warm.add(shape)
        if options.json:
            ended = {row: (reply, s) for row, _, reply, s in _replies(decoder, batch, count)}
            for row in range(count):
                print(_json(decoder, tokenizer, texts[first + row], *ended[row]), flush=True)
        else:
            _print_texts(decoder, tokenizer, batch, count, (first, len(texts)))


def _texts(options: Generate) -> list[str]:
    if options.prompt is not None:
        return [options.prompt]
    if options.prompts_file is not None:
        prompts = read_prompts(options.prompts_file)
        warn_of_turns(prompts, options.prompts_file)
        return [prompt_text(prompt) for prompt in prompts]
    if sys.stdin.isatty():
        note("Type the prompt and end it with Ctrl-D.")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise D3DError(f"standard input is not UTF-8 text: {error}") from None
    if not text:
        raise D3DError("standard input holds no prompt; give one there or with --prompt")
    return [text]


def _ids(options: Generate, files: ModelFiles, text: str) -> list[int]:
    if options.raw:
        return files.tokenizer.encode(text)
    return prompt_ids(files, text, options.system, thinking_switch(options.thinking))


def _replies(
    decoder: Decoder, batch: list[list[int]], count: int
) -> Iterator[tuple[int, list[int], Reply, float]]:
    """Yields (row, new ids, reply so far, seconds since its first token) of the first rows."""
    began: dict[int, float] = {}
    for row, new in decoder.stream(batch):
        if row < count:
            now = time.perf_counter()
            yield row, new, decoder.replies[row], now - began.setdefault(row, now)


def _print_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    batch: list[list[int]],
    count: int,
    numbers: tuple[int, int],
) -> None:
    """Streams a single reply as it grows; prints those of a larger batch as they end."""
    first, total = numbers
    live, text = len(batch) == 1, tokenizer.stream()
    if live and total > 1:
        note(f"prompt {first + 1} of {total}")
    for row, new, reply, seconds in _replies(decoder, batch, count):
        if live:
            print(text.feed(new), end="", flush=True)
        if reply.finish_reason is None:
            continue
        if not live:
            note(f"prompt {first + row + 1} of {total}")
        print(text.flush() if live else tokenizer.decode(reply.token_ids), flush=True)
        note(_figures(decoder, reply, seconds))


def _tokens_per_second(reply: Reply, seconds: float) -> float | None:
    """Of decoding alone: the first token is the prefill's."""
    tokens = len(reply.token_ids) - 1
    return tokens / seconds if tokens and seconds else None


def _figures(decoder: Decoder, reply: Reply, seconds: float) -> str:
    parts = [f"{len(reply.token_ids)} tokens", f"{reply.rounds} rounds"]
    if reply.tau is not None:
        parts.append(f"τ {reply.tau:.2f}")
    if decoder.config.mode == "async" and reply.hit_rate is not None:
        parts.append(f"hit rate {reply.hit_rate:.0%}")
    if (speed := _tokens_per_second(reply, seconds)) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    return f"[{decoder.config.mode}: {', '.join(parts)}]"


def _json(decoder: Decoder, tokenizer: Tokenizer, text: str, reply: Reply, seconds: float) -> str:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    mode = decoder.config.mode
    fields: dict[str, Any] = {
        "prompt": text,
        "text": tokenizer.decode(reply.token_ids),
        "token_ids": reply.token_ids,
        "mode": mode,
        "rounds": reply.rounds,
        "tau": rounded(reply.tau),
        "hit_rate": rounded(reply.hit_rate) if mode == "async" else None,
        "tokens_per_second": rounded(_tokens_per_second(reply, seconds)),
        "finish_reason": reply.finish_reason,
    }
    return json.dumps(fields, ensure_ascii=False)
