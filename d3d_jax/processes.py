"""What several processes of one run tell each other; with one process everything is as it was."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from d3d_jax.errors import D3DError

_DAYS = 30 * 24 * 3600


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def told_by_first(answer: bool) -> bool:
    """The first process's answer, in every process; all must ask."""
    if jax.process_count() == 1:
        return answer
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.int32(answer)))


def first_does(action: Callable[[], None], failure: str) -> None:
    """Lets the first process do something that the others wait for.

    Args:
      failure: the sentence of the others' error.

    Raises:
      D3DError: it failed, in every process.
    """
    error: D3DError | None = None
    if is_first():
        try:
            action()
        except D3DError as found:
            error = found
    if not told_by_first(error is None):
        raise error or D3DError(f"{failure}; the first process's own error says why")


def meet(name: str) -> None:
    """Waits until all processes are here, for days if need be; a name serves once.

    They wait at the coordinator, which ends them all where one has died. A collective of their
    devices would give up after minutes.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost

    everyone = set(range(jax.process_count()))
    multihost.sync_global_processes(name, timeout=_DAYS, processes=everyone)
