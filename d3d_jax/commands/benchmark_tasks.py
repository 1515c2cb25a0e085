"""The tasks of `d3d benchmark`: data sets of the hub, how a prompt is made of a record, and files.

The wording is that of the benchmark of DFlash, which the D3D paper compares itself with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.commands.benchmark_options import OVERALL
from d3d_jax.errors import D3DError
from d3d_jax.infer.benchmark import Conversation
from d3d_jax.train.prompts import PromptSource, open_prompts, user_turns

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class HubTask:
    """Where a task's records are, and the user's turns that one stands for.

    Attributes:
      dataset: `org/name[@revision][:split]`, as in `hub:` prompts.
      column: the field without which a record is none.
      template: makes the prompt of that field; None: it holds the turns themselves.
      also: further fields that `render` reads.
      render: makes the prompt where one template does not do.
    """

    dataset: str
    column: str
    template: str | None = None
    also: tuple[str, ...] = ()
    render: Callable[[Record], str] | None = None

    def turns(self, record: Record) -> tuple[list[str], str | None]:
        """The user's turns and the system message; raises ValueError as `user_turns`."""
        turns, system = user_turns(record, self.column)
        if self.render is not None:
            return [self.render(record)], system
        return [(self.template or "{}").format(turn) for turn in turns], system


def _livecodebench(record: Record) -> str:
    code, how = "# YOUR CODE HERE", "Write your code in the following format:"
    if record.get("starter_code"):
        code, how = record["starter_code"], "Use the following code structure:"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program\n\n"
        f"### Question:\n{record['question_content']}\n\n"
        f"### Format: {how}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


_MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
TASKS = {
    "gsm8k": HubTask("openai/gsm8k:main/test", "question", _MATH),
    "math500": HubTask("HuggingFaceH4/MATH-500", "problem", _MATH),
    "aime24": HubTask("HuggingFaceH4/aime_2024", "problem", _MATH),
    "aime25": HubTask("MathArena/aime_2025", "problem", _MATH),
    "humaneval": HubTask("openai/openai_humaneval", "prompt", _CODE),
    "mbpp": HubTask("google-research-datasets/mbpp:sanitized/test", "prompt"),
    "livecodebench": HubTask(
        "livecodebench/code_generation_lite:test6",
        "question_content",
        also=("starter_code",),
        render=_livecodebench,
    ),
    "mt-bench": HubTask("HuggingFaceH4/mt_bench_prompts", "prompt"),
}
# The seventh is inferred from the paper's averages; its text names six and "seven benchmarks".
PAPER_TASKS = tuple(name for name in TASKS if name != "aime24")


@dataclasses.dataclass(frozen=True)
class Task:
    """Conversations of one task.

    Attributes:
      source: says which prompts these are, on any machine: with a hash or commit.
      rows: of the conversations in that source, from 0.
    """

    name: str
    source: str
    rows: tuple[int, ...]
    conversations: tuple[Conversation, ...]


def load_tasks(
    names: Sequence[str], prompts: Sequence[str], samples: int, seed: int, at_least: int = 1
) -> list[Task]:
    """Reads the prompts of every task.

    Args:
      names: none: all that `prompts` holds, or else the paper's.
      prompts: NAME=FILE, or folders of TASK.jsonl.
      samples: of each task, drawn with the seed, in the order of the source; 0 for all.
      at_least: prompts that each task must have.

    Raises:
      D3DError: an unknown task, too few prompts, or what `open_prompts` refuses.
    """
    files = prompt_files(prompts)
    names = names or tuple(files) or PAPER_TASKS
    if unknown := [name for name in names if name not in files and name not in TASKS]:
        known = ", ".join(dict.fromkeys((*files, *TASKS)))
        raise D3DError(f"there is no task {unknown[0]!r}; choose of {known}, or give --prompts")
    tasks = [_load(name, files.get(name), samples, seed) for name in names]
    for task in tasks:
        if len(task.rows) < at_least:
            raise D3DError(
                f"{task.name} has {len(task.rows)} prompts, too few for --concurrency {at_least}"
            )
    return tasks


def prompt_files(prompts: Sequence[str]) -> dict[str, Path]:
    """The files that --prompts names, by task.

    Raises:
      D3DError: neither NAME=FILE nor a folder with JSONL files in it, or a name that is there
        twice, holds a slash or means all tasks.
    """
    found: dict[str, Path] = {}
    for text in prompts:
        name, equals, file = text.partition("=")
        if Path(text).is_dir():
            own = {path.stem: path for path in sorted(Path(text).glob("*.jsonl"))}
        else:
            own = {name: Path(file)} if name and equals and file else {}
        if not own:
            raise D3DError(f"--prompts takes NAME=FILE or a folder of TASK.jsonl, found {text!r}")
        if again := set(own) & set(found):
            raise D3DError(f"--prompts names {min(again)} twice")
        if OVERALL in own or any("/" in name for name in own):
            raise D3DError(f"--prompts names {min(own)!r}: not {OVERALL}, and without a slash")
        found |= own
    return found


def _load(name: str, file: Path | None, samples: int, seed: int) -> Task:
    if file is not None:
        source, turns = open_prompts(file), user_turns
    else:
        # Its readers take time to import.
        from d3d_jax.train.prompt_datasets import from_hub

        hub = TASKS[name]
        source, turns = from_hub(hub.dataset, hub.column, hub.also), hub.turns
    rows = range(source.rows)
    if samples and samples < source.rows:
        drawn = np.random.default_rng(seed).choice(source.rows, samples, replace=False)
        rows = sorted(drawn.tolist())
    return Task(name, source.name, tuple(rows), _conversations(source, set(rows), turns))


def _conversations(
    source: PromptSource, wanted: set[int], turns: Callable[[Record], tuple[list[str], str | None]]
) -> tuple[Conversation, ...]:
    found = []
    for row, (where, record) in enumerate(source.records()):
        if row in wanted:
            try:
                own, system = turns(record)
            except ValueError as error:
                raise D3DError(f"{where}: {error}") from error
            found.append(Conversation(tuple(own), system, where))
    return tuple(found)
