"""`d3d benchmark`: measures every point that is not in the folder yet, and sums them up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.commands.benchmark_folder import BenchmarkFolder, Key
from d3d_jax.commands.benchmark_options import Benchmark
from d3d_jax.commands.benchmark_report import print_result
from d3d_jax.commands.benchmark_result import make_result
from d3d_jax.commands.benchmark_tasks import Task, load_tasks
from d3d_jax.commands.loading import DecoderFiles, open_decoder
from d3d_jax.commands.option_groups import Decoding, thinking_switch
from d3d_jax.commands.runtime import Bar, busy, note, start_jax
from d3d_jax.config import Mode
from d3d_jax.errors import D3DError
from d3d_jax.infer.benchmark import Conversation
from d3d_jax.infer.benchmark_bench import Bench
from d3d_jax.infer.benchmark_peer import PEERS, TorchPeer, peer_machine
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.measure_rounds import machine
from d3d_jax.infer.model import ModelFiles
from d3d_jax.models.safetensors_folder import weights_digest


def run(options: Benchmark) -> None:
    """Checks everything, measures, and writes and prints the result."""
    most = max(options.concurrency)
    tasks = load_tasks(options.tasks, options.prompts, options.samples, options.seed, most)
    start_jax(cpu_devices=options.placement.num_devices)
    files = open_decoder(options.target, _decoding(options), options.placement)
    if files.target.tokenizer.chat_template is None:
        raise D3DError("the target has no chat template, which a benchmark's prompts go through")
    chat = functools.partial(_chat, files.target, thinking_switch(options.thinking))
    every = [c for task in tasks for c in task.conversations]
    files.check([chat(c, []) for c in every], [c.where for c in every])
    asked = settings(options, files, tasks)
    folder = BenchmarkFolder(options.out, asked)
    with busy(f"loading {options.target}"):
        decoder = files.load(options.max_new_tokens)
        peer = _peer(options, files, decoder)
    bench = Bench(
        decoder.target,
        decoder.drafter,
        chat,
        options.max_new_tokens,
        options.max_length,
        options.miss,
        options.seed,
    )
    try:
        _measure(options, tasks, folder, bench, peer)
        with busy("comparing replies and timing steps"):
            result = make_result(asked, tasks, folder, bench)
        result["timelines"] = _timelines(options, folder, bench, tasks[0].conversations[0])
    except KeyboardInterrupt:
        note(f"{options.out} keeps the points that ended; the same command continues")
        raise
    path = folder.finish(result)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print_result(result)
    note(f"figures in {path}")


def _measure(
    options: Benchmark,
    tasks: Sequence[Task],
    folder: BenchmarkFolder,
    bench: Bench,
    peer: TorchPeer | None,
) -> None:
    """Measures what is missing; a mode that runs out of memory is noted as failed there.

    The modes of one repeat are measured in one sitting: a ratio of two days would be none.
    """
    conversations = {task.name: task.conversations for task in tasks}
    every = list(itertools.chain.from_iterable(conversations.values()))
    groups = _groups(options, tasks)
    done = 0
    with Bar("benchmark", sum(map(len, groups))) as bar:
        for group in groups:
            missing: list[Key] = []
            for _, sitting in itertools.groupby(group, lambda key: (key.task, key.repeat)):
                own = list(sitting)
                found = [folder.read(key) for key in own]
                again = options.retry and any(isinstance(point, str) for point in found)
                if again or None in found:
                    folder.delete(own)
                    missing += own
            done += len(group) - len(missing)
            decoders, first = {}, group[0]
            for mode in options.modes:
                if all(key.mode != mode for key in missing):
                    continue
                bar.update(done, f"compiling {mode}, {first.concurrency} at a time")
                decoders[mode] = bench.warmed(mode, first.temperature, first.concurrency, every)
            for key in missing:
                bar.update(done, f"{key.task}, {key.mode}, {key.concurrency} at a time")
                own = conversations[key.task]
                if peer is not None and key.mode in PEERS:
                    point = peer.point(key.mode, own, bench.chat)
                else:
                    point = bench.point(decoders[key.mode], key.temperature, own)
                folder.write(key, point)
                done += 1
        bar.update(done)


def _timelines(
    options: Benchmark, folder: BenchmarkFolder, bench: Bench, conversation: Conversation
) -> dict[str, list[dict[str, Any]] | str]:
    """By drafting mode that is or was traced, when each step ran; or why memory was too small."""

    def traced(mode: Mode) -> list[dict[str, Any]] | str:
        with busy(f"tracing {mode}"):
            spans = bench.timeline(mode, options.temperature[0], conversation)
        return spans if isinstance(spans, str) else [dataclasses.asdict(span) for span in spans]

    return {
        mode: folder.kept(f"trace-{mode}", functools.partial(traced, mode))
        for mode in options.modes
        if mode != "plain" and (options.trace or folder.holds(f"trace-{mode}"))
    }


def _groups(options: Benchmark, tasks: Sequence[Task]) -> list[list[Key]]:
    """The points in the order they are measured, those of one temperature and concurrency together.

    The modes take turns at being first.
    """
    groups, modes = [], _modes(options)
    for temperature, concurrency in itertools.product(options.temperature, options.concurrency):
        found = []
        for (number, task), repeat in itertools.product(enumerate(tasks), range(options.repeats)):
            turn = (number + repeat) % len(modes)
            for mode in modes[turn:] + modes[:turn]:
                found.append(Key(task.name, temperature, concurrency, repeat, mode))
        groups.append(found)
    return groups


def settings(options: Benchmark, files: DecoderFiles, tasks: Sequence[Task]) -> dict[str, Any]:
    """All that decides what is measured, for the folder."""
    given = dataclasses.asdict(options)
    for name in ("out", "json", "trace", "retry", "tasks", "prompts"):
        del given[name]
    return {
        **given,
        "modes": _modes(options),
        "tasks": {task.name: task.source for task in tasks},
        "policy": files.drafter and str(files.drafter.policy),
        "block_size": files.drafter and files.drafter.policy.block_size,
        "target_config": dataclasses.asdict(files.target.config),
        "drafter_config": files.drafter and dataclasses.asdict(files.drafter.config),
        "target_weights": weights_digest(files.target.folder),
        "drafter_weights": files.drafter and weights_digest(files.drafter.folder),
        "tokenizer": files.target.tokenizer.fingerprint,
        "chat_template": files.target.tokenizer.template_fingerprint,
        "machine": machine() | (peer_machine(_platform()) if options.peer else {}),
    }


def _peer(options: Benchmark, files: DecoderFiles, decoder: Decoder) -> TorchPeer | None:
    if not options.peer:
        return None
    return TorchPeer(
        files.target.folder,
        jnp.dtype(decoder.target.dtype).name,
        files.target.tokenizer.stop_ids,
        options.max_new_tokens,
        decoder.limit,
        _platform(),
    )


def _platform() -> str:
    return jax.devices()[0].platform


def _modes(options: Benchmark) -> tuple[str, ...]:
    """What takes turns."""
    return (*options.modes, *(PEERS if options.peer else ()))


def _decoding(options: Benchmark) -> Decoding:
    """What the modes need of both models."""
    mode: Mode = "async" if "async" in options.modes else max(options.modes)
    return Decoding(
        options.drafter,
        mode,
        options.max_length,
        options.block_size,
        options.policy,
        options.miss,
        dtype=options.dtype,
    )


def _chat(
    files: ModelFiles,
    thinking: bool | None,
    conversation: Conversation,
    replies: Sequence[Sequence[int]],
) -> list[int]:
    """Token ids of the prompt of the turn after some replies."""
    messages = [{"role": "user", "content": conversation.turns[0]}]
    for reply, turn in zip(replies, conversation.turns[1:], strict=False):
        messages.append({"role": "assistant", "content": files.tokenizer.decode(list(reply))})
        messages.append({"role": "user", "content": turn})
    return files.encode(messages, system=conversation.system, thinking=thinking)
