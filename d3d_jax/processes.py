"""What several processes of one run tell each other; with one process everything is as it was.

What need not be told at once, they leave with the coordinator: a process that looks there now and
then still notices signals, which it would not within one of JAX's barriers.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from d3d_jax.errors import D3DError, LostProcessError

Result = TypeVar("Result")

_LOOK_EVERY = 0.2
# How long the first process, which holds the coordinator, waits for the others to end before it.
_LEAVE_SECONDS = 60.0
# How long a process takes to end once it has said so.
_END_SECONDS = 1.0


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def told_by_first(answer: bool) -> bool:
    """The first process's answer, in every process; all must ask."""
    if jax.process_count() == 1:
        return answer
    from jax.experimental import multihost_utils

    with others_reached():
        return bool(multihost_utils.broadcast_one_to_all(np.int32(answer)))


def first_does(action: Callable[[], Result], failure: str) -> Result | None:
    """Lets the first process do something that the others wait for.

    Args:
      failure: the sentence of the others' error.

    Returns:
      What the action gave, in the first process.

    Raises:
      D3DError: it failed, in every process.
    """
    error: D3DError | None = None
    result = None
    if is_first():
        try:
            result = action()
        except D3DError as found:
            error = found
    if not told_by_first(error is None):
        raise error or D3DError(f"{failure}; the first process's own error says why")
    return result


def refuse_different(asked: str) -> None:
    """Refuses processes that were not asked the same, in all of them (D3DError)."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(asked.encode()).digest(), np.uint8)
    with others_reached():
        digests = multihost_utils.process_allgather(digest)
    if (digests != digest).any():
        raise D3DError("the processes of this run have different options, prompts or targets")


def meet(name: str, look: Callable[[], None] = lambda: None) -> None:
    """Waits until all processes are here, for days if need be; a name serves once.

    Args:
      look: called all the while; what it raises ends the wait.

    Raises:
      LostProcessError: another has ended early.
    """
    if jax.process_count() == 1:
        return
    _tell(name)
    while len(_told(name)) < jax.process_count():
        look()
        refuse_lost()
        time.sleep(_LOOK_EVERY)


def refuse_lost() -> None:
    """Raises `LostProcessError` if another process has ended early."""
    if jax.process_count() > 1 and _told("left"):
        raise LostProcessError(
            "another process of this run has ended early; its own error says why, and the same "
            "command in all of them continues"
        )


def leave() -> None:
    """Tells the others that this process ends early; the first of them waits for theirs."""
    from jax._src import distributed

    state, end = distributed.global_state, time.monotonic() + _LEAVE_SECONDS
    with contextlib.suppress(LostProcessError):
        _tell("left")
        while state.process_id == 0 and time.monotonic() < end:
            if len(_told("left")) == state.num_processes:
                time.sleep(_END_SECONDS)
                return
            time.sleep(_LOOK_EVERY)


def _tell(what: str) -> None:
    client, process = _coordinator()
    with others_reached():
        client.key_value_set(f"d3d/{what}/{process}", "", allow_overwrite=True)


def _told(what: str) -> list[Any]:
    """Who has told so."""
    client, _ = _coordinator()
    with others_reached():
        return client.key_value_dir_get(f"d3d/{what}/")


def _coordinator() -> tuple[Any, int]:
    """JAX's client of the coordinator, for which it has no public name, and this process's number.

    Both are known without touching a device, which may be what has failed.
    """
    from jax._src import distributed

    return distributed.global_state.client, distributed.global_state.process_id


@contextlib.contextmanager
def others_reached() -> Iterator[None]:
    """Says what it means when work fails because another process takes no part in it any more."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _coordinator()[0] is None or "RESOURCE_EXHAUSTED" in str(error):
            raise  # this process is alone, or has itself too little memory
        raise LostProcessError(
            "another process of this run is gone or cannot be reached; the same command in all of "
            f"them continues ({error})"
        ) from error
