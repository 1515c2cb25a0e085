"""The demo while it runs: three panes side by side on a terminal, plain lines elsewhere.

Nothing is measured here. Panes are redrawn between rounds, a few times a second, while the device
is busy with the rounds in flight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from d3d_jax.config import Mode
from d3d_jax.infer.demo import MODES, Run
from d3d_jax.models.tokenizer import StreamDecoder, Tokenizer

# Narrower than this, a third of a line holds too few words.
MIN_WIDTH = 96
_PANE_LINES = 14
_REDRAW_EVERY = 0.1
_STYLES: dict[Mode, str] = {"plain": "cyan", "sync": "green", "async": "magenta"}


def figures(run: Run) -> str:
    """The figures of one reply as text."""
    reply = run.reply
    parts = [f"{len(reply.token_ids)} tokens", f"{run.tokens_per_second:.1f} tokens/s"]
    if reply.tau is not None:
        parts.append(f"τ {reply.tau:.2f}")
    return ", ".join(parts)


class Lines:
    """One line a reply, and the text of the plain one: for logs and narrow terminals."""

    def __init__(self, console: Console, tokenizer: Tokenizer, texts: Sequence[str]):
        self._console, self._tokenizer, self._texts = console, tokenizer, texts
        self._prompt = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def begin(self, prompt: int, mode: Mode) -> None:
        if prompt != self._prompt:
            self._prompt = prompt
            title = f"\nprompt {prompt + 1} of {len(self._texts)}: {self._texts[prompt]}"
            self._console.print(title, markup=False)

    def feed(self, mode: Mode, token_ids: list[int]) -> None:
        pass

    def end(self, mode: Mode, run: Run) -> None:
        if mode == "plain":
            text = self._tokenizer.decode(run.reply.token_ids)
            self._console.print(text, markup=False, style="dim")
        self._console.print(f"{mode:>6}: {figures(run)}", markup=False)


class Panes:
    """The three modes side by side, the text appearing as it is decoded."""

    def __init__(self, console: Console, tokenizer: Tokenizer, texts: Sequence[str]):
        self._console, self._tokenizer, self._texts = console, tokenizer, texts
        self._live = Live(console=console, auto_refresh=False)
        self._prompt = -1
        self._drawn = 0.0
        self._text: dict[Mode, str] = {}
        self._note: dict[Mode, str] = {}
        self._stream: StreamDecoder | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def begin(self, prompt: int, mode: Mode) -> None:
        if prompt != self._prompt:
            self._prompt = prompt
            self._text = dict.fromkeys(MODES, "")
            self._note = dict.fromkeys(MODES, "waiting")
        self._stream = self._tokenizer.stream()
        self._note[mode] = "decoding"
        self._draw()

    def feed(self, mode: Mode, token_ids: list[int]) -> None:
        assert self._stream is not None
        self._text[mode] += self._stream.feed(token_ids)
        if time.perf_counter() - self._drawn > _REDRAW_EVERY:
            self._draw()

    def end(self, mode: Mode, run: Run) -> None:
        assert self._stream is not None
        self._text[mode] += self._stream.flush()
        self._note[mode] = figures(run)
        self._draw()

    def _draw(self) -> None:
        panes = Table.grid(expand=True)
        for _ in MODES:
            panes.add_column(ratio=1)
        panes.add_row(*(self._pane(mode) for mode in MODES))
        number = f"prompt {self._prompt + 1} of {len(self._texts)}"
        line = " ".join(self._texts[self._prompt].split())
        prompt = Text(line, overflow="ellipsis", no_wrap=True)
        self._live.update(Group(Panel(prompt, title=number, title_align="left"), panes))
        self._live.refresh()
        self._drawn = time.perf_counter()

    def _pane(self, mode: Mode) -> Panel:
        width = self._console.width // len(MODES) - 4
        lines = Text(self._text[mode]).wrap(self._console, width)[-_PANE_LINES:]
        return Panel(
            Text("\n").join(lines),
            title=mode,
            subtitle=self._note[mode],
            border_style=_STYLES[mode],
            height=_PANE_LINES + 2,
        )


def make_view(console: Console, tokenizer: Tokenizer, texts: Sequence[str]) -> Panes | Lines:
    """Panes where the terminal is wide enough, else lines."""
    wide = console.is_terminal and console.width >= MIN_WIDTH
    return (Panes if wide else Lines)(console, tokenizer, texts)
