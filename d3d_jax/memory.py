"""What a device's want of memory is called: a sentence, and not the runtime's own error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from d3d_jax.errors import D3DError

_Made = TypeVar("_Made")


@contextlib.contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Gives up in one sentence where a device has too little memory; also a decorator.

    Args:
      advice: what to change.

    Raises:
      D3DError: too little memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise D3DError(
            f"a device has too little memory: {advice} ({_first_line(error)})"
        ) from error


def or_out_of_memory(work: Callable[[], _Made]) -> _Made | str:
    """What some work makes, or a sentence where a device had too little memory for it."""
    try:
        return work()
    except (jax.errors.JaxRuntimeError, D3DError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"out of memory: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{str(error).splitlines()[0]:.300}"
