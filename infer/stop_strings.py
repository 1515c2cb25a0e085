"""Texts that end a reply: found token by token, so that every mode ends at the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from d3d_jax.models.tokenizer import Tokenizer


class StopStrings:
    """Watches one growing reply for any of some texts.

    Args:
      stops: at least one, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._stops, self._stream = tuple(stops), tokenizer.stream()
        # As much of the text as the beginning of a stop string could need.
        self._tail, self._keep = "", max(map(len, stops)) - 1

    def cut(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """The next tokens up to the one that completes a stop string, and that string if any."""
        for index, token in enumerate(tokens):
            if (stop := self._search(self._stream.feed([token]))) is not None:
                return tokens[: index + 1], stop
        return tokens, None

    def end(self) -> str | None:
        """The stop string, if any, in text that was held back for an unfinished character."""
        return self._search(self._stream.flush())

    def _search(self, piece: str) -> str | None:
        text = self._tail + piece
        self._tail = text[max(len(text) - self._keep, 0) :]
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found)[1] if found else None


class TextStream:
    """The text of one growing reply, without the stop string that may end it.

    What could be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._stops, self._stream = tuple(stops), tokenizer.stream()
        self._held, self._ended = "", False

    def feed(self, tokens: list[int]) -> str:
        """Takes the next tokens; returns the text that is settled, perhaps none."""
        return self._add(self._stream.feed(tokens), self._settled)

    def flush(self) -> str:
        """The rest of the reply."""
        return self._add(self._stream.flush(), len)

    def _add(self, piece: str, settled: Callable[[str], int]) -> str:
        text = "" if self._ended else self._held + piece
        if found := [at for at in map(text.find, self._stops) if at >= 0]:
            self._ended, self._held = True, ""
            return text[: min(found)]
        size = settled(text)
        self._held = text[size:]
        return text[:size]

    def _settled(self, text: str) -> int:
        """How many characters at the start cannot belong to a stop string still to come."""
        held = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop) - 1, len(text)) + 1)
            if text.endswith(stop[:length])
        )
        return len(text) - max(held, default=0)


def before_stop(text: str, stop: str | None) -> str:
    """The text of a reply without the stop string that ended it and what follows."""
    return text if stop is None else text.partition(stop)[0]
