"""What the subcommands share: settings of JAX, progress on stderr, prompts as token ids.

Standard output belongs to results; everything said along the way goes to stderr.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from d3d_jax.commands.option_groups import Processes
from d3d_jax.compilation import keep_compiled
from d3d_jax.errors import D3DError, LostProcessError, StoppedError
from d3d_jax.infer.model import ModelFiles
from d3d_jax.signals import noted
from d3d_jax.train.prompts import Prompt

console = Console(stderr=True, highlight=False)
# A log file gets a line of progress no more often than this, in seconds.
_LINE_EVERY = 10.0
_MOST_CPU_DEVICES = 64
# How long a process that is done waits for the others to be.
_SHUTDOWN_SECONDS = 60


def start_jax(cpu_devices: int = 1) -> None:
    """Sets JAX up for a command; call it before anything touches a device.

    Compiled programs are kept between runs, since compiling takes longer than a short run itself.

    Args:
      cpu_devices: on CPU, how many to make: decoding with a drafter gives each role its own.
    """
    if cpu_devices > _MOST_CPU_DEVICES:
        raise D3DError(
            f"there is no device {cpu_devices - 1}; a CPU is divided into at most "
            f"{_MOST_CPU_DEVICES}"
        )
    config: Any = jax.config  # its settings are attributes that type checkers do not know
    if config.jax_num_cpu_devices < 0:
        config.update("jax_num_cpu_devices", cpu_devices)
    try:
        keep_compiled()
    except D3DError as error:
        note(f"{error}.")


def join_processes(processes: Processes) -> None:
    """Meets the other processes of this run; before anything touches a device.

    Raises:
      D3DError: the environment does not say where they meet; `LostProcessError`: they did not come.
    """
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise D3DError(
            "the processes of this run cannot meet; give --coordinator, --num-processes and "
            f"--process-id ({error})"
        ) from None
    except RuntimeError as error:
        raise LostProcessError(f"the processes of this run did not meet ({error})") from None


@contextlib.contextmanager
def sigterm_noted(saved: str) -> Iterator[Callable[[], None]]:
    """Notes a first SIGTERM, for work that looks now and then whether one came.

    Yields:
      A function that raises `StoppedError` once it came; `saved` says what is kept.
    """
    with noted(signal.SIGTERM) as came:

        def look() -> None:
            if came():
                raise StoppedError(f"stopped by SIGTERM; {saved}", signal.SIGTERM)

        yield look


def note(sentence: str) -> None:
    """One line on stderr."""
    console.print(sentence, markup=False, soft_wrap=True)


@contextlib.contextmanager
def busy(message: str) -> Iterator[None]:
    """A spinner on a terminal while something takes seconds; silent elsewhere."""
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


def duration(seconds: float) -> str:
    """As `45 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Bar:
    """Progress of one long stage with the time left; plain lines where stderr is no terminal.

    The time left is reckoned from the first update on, which leaves out compilation where that
    update comes after the first step.
    """

    def __init__(self, title: str, total: int):
        self.title, self.total = title, total
        self._began: tuple[float, int] | None = None
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, note="", left="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, total: int) -> None:
        """Starts another part of the stage, whose time left is its own."""
        self.total, self._began = total, None
        self._progress.update(self._task, total=total)

    def update_total(self, done: int, total: int, note_text: str = "") -> None:
        """`update`, where the total becomes known as one goes."""
        self.total = total
        self._progress.update(self._task, total=total)
        self.update(done, note_text)

    def update(self, done: int, note_text: str = "") -> None:
        """Shows that `done` of the total are done, with a few figures."""
        now = time.perf_counter()
        self._began = self._began or (now, done)
        since, first = self._began
        left = ""
        if first < done < self.total:
            left = duration((now - since) / (done - first) * (self.total - done)) + " left"
        self._progress.update(self._task, completed=done, note=note_text, left=left)
        if not console.is_terminal and (now - self._last_line > _LINE_EVERY or done == self.total):
            self._last_line = now
            parts = [f"{self.title} {done}/{self.total}", note_text, left]
            note(", ".join(part for part in parts if part))


def warn_of_turns(longer: int, file: str | Path) -> None:
    """Says so when a file holds conversations of which only the beginning is used.

    Args:
      longer: how many of them.
    """
    if longer:
        note(f"{longer} prompts of {file} have more than one turn; only the first is used")


def prompt_ids(
    files: ModelFiles, prompt: Prompt, system: str | None = None, thinking: bool | None = None
) -> list[int]:
    """Token ids of a prompt under the model's chat template (`ModelFiles.encode`).

    Args:
      system: message put before a prompt that has none of its own.

    Raises:
      D3DError: the model has no chat template, it refuses the message, or it cannot switch
        thinking.
    """
    if files.tokenizer.chat_template is None:
        raise D3DError("the target has no chat template: only d3d generate --raw can use it")
    system = system if prompt.system is None else prompt.system
    return files.encode(prompt.text, system=system, thinking=thinking)
