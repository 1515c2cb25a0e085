"""What `d3d benchmark` takes; as light as `commands.options`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

from d3d_jax.commands.option_groups import Placement, RunDType, Thinking, arg, at_least
from d3d_jax.config import Miss, Mode
from d3d_jax.errors import D3DError

# What the JSON says it is, and the task of its rows over all tasks.
KIND, OVERALL = "d3d benchmark", "overall"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Measure plain, synchronous and asynchronous decoding on benchmark prompts.

    Every repeat of a task whose modes are all measured is kept in --out: the same command continues
    an interrupted run. At the end everything is in --out/benchmark.json.

    Attributes:
      target: Model to decode: a name, hub id, folder or .gguf file.
      out: Folder of the points and of benchmark.json.
      drafter: Folder or hub id of the drafter.
      tasks: Which tasks: gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, mt-bench
        (from the hub, unless --prompts holds them), or names of --prompts.
      prompts: Prompts in files instead: JSONL of {"turns": [TEXT, ...]}, or folders of TASK.jsonl.
      samples: Prompts of each task, drawn with --seed; 0 for all.
      seed: Of the drawing, and of sampled replies.
      temperature: 0 takes the likeliest token; several are measured one after another.
      modes: Ways to decode; speedups and the comparison of tokens need plain among them.
      concurrency: Prompts decoded at a time; several are measured one after another.
      peer: Also decode with transformers + torch, if installed: plain and prompt-lookup generation
        of the same weights, taking turns with the modes.
      repeats: How often each point is measured, the modes taking turns.
      max_new_tokens: Longest reply, the stop token included.
      max_length: Longest prompt and reply together.
      thinking: Whether the target thinks before it answers; its chat template must be able to
        switch that.
      block_size: W of a round.
      policy: Outcomes prepared in async mode: best-first:N or rectangle:C,F.
      miss: Where the outcome was not prepared: draft while the target waits, or reuse the nearest
        prepared block.
      dtype: Type of weights, activations and caches.
      trace: Afterwards decode a short reply in each drafting mode under JAX's profiler, for the
        timeline of `d3d report`.
      retry: Try again what ran out of memory before.
      json: Print benchmark.json instead of tables.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    out: Annotated[Path, arg("DIR")]
    drafter: Annotated[str | None, arg("MODEL", "the one shipped for this target")] = None
    tasks: Annotated[
        tuple[str, ...], arg("TASK ...", "all of --prompts, or the paper's seven")
    ] = ()
    prompts: Annotated[tuple[str, ...], arg("NAME=FILE|DIR ...", "none")] = ()
    samples: int = 32
    seed: int = 0
    temperature: Annotated[tuple[float, ...], arg("T ...")] = (0.0,)
    modes: Annotated[tuple[Mode, ...], arg("{plain,sync,async} ...")] = ("plain", "sync", "async")
    concurrency: Annotated[tuple[int, ...], arg("N ...")] = (1,)
    peer: bool = False
    repeats: int = 3
    max_new_tokens: int = 2048
    max_length: Annotated[int | None, arg("N", "the model's own limit")] = None
    thinking: Thinking = None
    block_size: Annotated[int | None, arg("W", "the drafter's own; on CPU at most 4")] = None
    policy: Annotated[str | None, arg("NAME:SIZES", "best-first:4")] = None
    miss: Miss = "stall"
    dtype: RunDType = None
    trace: bool = False
    retry: bool = False
    json: bool = False
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        at_least(0, samples=self.samples, seed=self.seed)
        at_least(1, repeats=self.repeats)
        at_least(2, max_new_tokens=self.max_new_tokens, block_size=self.block_size)
        for several in ("tasks", "temperature", "modes", "concurrency"):
            values = getattr(self, several)
            if len(set(values)) < len(values):
                raise D3DError(f"--{several} names {_repeated(values)} twice")
            if not values and several != "tasks":
                raise D3DError(f"--{several} names none")
        for value in self.concurrency:
            at_least(1, concurrency=value)
        for value in self.temperature:
            if not math.isfinite(value) or value < 0:
                raise D3DError(f"--temperature must be a number from 0, found {value}")
        if self.peer and (self.temperature, self.concurrency) != ((0.0,), (1,)):
            raise D3DError(
                "--peer decodes greedily and one prompt at a time: leave out --temperature and "
                "--concurrency"
            )
        if self.samples and max(self.concurrency) > self.samples:
            raise D3DError(
                f"--concurrency {max(self.concurrency)} needs as many prompts of each task: give "
                f"--samples {max(self.concurrency)} or more"
            )


def _repeated(values: tuple) -> object:
    return next(value for value in values if values.count(value) > 1)
