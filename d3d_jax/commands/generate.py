"""`d3d generate`: decodes prompts, streams the text to stdout and the figures to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from d3d_jax.commands.loading import open_decoder, sampling_params
from d3d_jax.commands.option_groups import thinking_switch
from d3d_jax.commands.options import Generate
from d3d_jax.commands.runtime import (
    busy,
    note,
    prompt_ids,
    start_jax,
    warn_of_turns,
)
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.model import ModelFiles
from d3d_jax.infer.replies import Reply
from d3d_jax.infer.stop_strings import TextStream, before_stop
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.prompts import Prompt, read_prompts

# Rounds for longer replies are compiled when a reply gets there: few do, and it costs seconds.
_WARM_TOKENS = 512


def run(options: Generate) -> None:
    """Decodes all prompts, --batch of them at a time."""
    params = sampling_params(options.sampling, options.max_new_tokens)
    asked = _prompts(options)
    texts = [prompt.text for prompt in asked]
    start_jax(cpu_devices=options.placement.num_devices)
    files = open_decoder(options.target, options.decoding, options.placement)
    prompts = [_ids(options, files.target, prompt) for prompt in asked]
    files.check(prompts)
    with busy(f"loading {options.target}"):
        decoder = files.load(options.max_new_tokens, slots=options.decoding.batch)
    with busy("compiling"):
        decoder.warm_up(prompts, min(options.max_new_tokens, _WARM_TOKENS), params)
    show = _print_json if options.json else _print_texts
    show(decoder, files.target.tokenizer, texts, prompts, params)


def _prompts(options: Generate) -> list[Prompt]:
    if options.prompt is not None:
        return [Prompt(options.prompt)]
    if options.prompts_file is not None:
        prompts = read_prompts(options.prompts_file)
        warn_of_turns(sum(prompt.turns > 1 for prompt in prompts), options.prompts_file)
        return prompts
    if sys.stdin.isatty():
        note("Type the prompt and end it with Ctrl-D.")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise D3DError(f"standard input is not UTF-8 text: {error}") from None
    if not text:
        raise D3DError("standard input holds no prompt; give one there or with --prompt")
    return [Prompt(text)]


def _ids(options: Generate, files: ModelFiles, prompt: Prompt) -> list[int]:
    if options.raw and prompt.system is not None:
        raise D3DError("--raw has no place for system messages, and the prompts have some")
    if options.raw:
        return files.tokenizer.encode(prompt.text)
    return prompt_ids(files, prompt, options.system, thinking_switch(options.thinking))


def _replies(
    decoder: Decoder, prompts: list[list[int]], params: SamplingParams
) -> Iterator[tuple[int, list[int], Reply, float]]:
    """Yields (prompt's index, new ids, reply so far, seconds since its first token)."""
    began: dict[int, float] = {}
    for index, new in decoder.stream(prompts, [params] * len(prompts)):
        now = time.perf_counter()
        yield index, new, decoder.replies[index], now - began.setdefault(index, now)


def _print_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    texts: list[str],
    prompts: list[list[int]],
    params: SamplingParams,
) -> None:
    """Streams replies that are decoded alone as they grow; prints the others as they end."""
    live = decoder.slots == 1 or len(texts) == 1
    text, begun = TextStream(tokenizer, params.stop), False
    for index, new, reply, seconds in _replies(decoder, prompts, params):
        ended = reply.finish_reason is not None
        if len(texts) > 1 and (not begun if live else ended):
            note(f"prompt {index + 1} of {len(texts)}")
        begun = live and not ended
        if live:
            print(text.feed(new), end="", flush=True)
        if not ended:
            continue
        print(text.flush() if live else _text(tokenizer, reply), flush=True)
        text = TextStream(tokenizer, params.stop)
        note(_figures(decoder, reply, seconds))


def _text(tokenizer: Tokenizer, reply: Reply) -> str:
    return before_stop(tokenizer.decode(reply.token_ids), reply.stop)


def _print_json(
    decoder: Decoder,
    tokenizer: Tokenizer,
    texts: list[str],
    prompts: list[list[int]],
    params: SamplingParams,
) -> None:
    """One object a line in the order of the prompts, each as soon as those before it are out."""
    waiting: dict[int, str] = {}
    printed = 0
    for index, _, reply, seconds in _replies(decoder, prompts, params):
        if reply.finish_reason is None:
            continue
        waiting[index] = _json(decoder, tokenizer, texts[index], reply, seconds)
        while printed in waiting:
            print(waiting.pop(printed), flush=True)
            printed += 1


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
        "text": _text(tokenizer, reply),
        "token_ids": reply.token_ids,
        "mode": mode,
        "rounds": reply.rounds,
        "tau": rounded(reply.tau),
        "hit_rate": rounded(reply.hit_rate) if mode == "async" else None,
        "tokens_per_second": rounded(_tokens_per_second(reply, seconds)),
        "finish_reason": reply.finish_reason,
    }
    return json.dumps(fields, ensure_ascii=False)
