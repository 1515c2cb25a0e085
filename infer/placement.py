"""Which devices of this process hold the target and which the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from d3d_jax.config import Mode
from d3d_jax.errors import D3DError
from d3d_jax.models.sharding import make_mesh


def role_meshes(
    mode: Mode,
    *,
    target_devices: Sequence[int] | None = None,
    target_tp: int | None = None,
    drafter_devices: Sequence[int] | None = None,
) -> tuple[Mesh, Mesh]:
    """The meshes of the target and of the drafter.

    Args:
      target_devices: indices of `jax.local_devices()`; None takes the first `target_tp`, or the
        first.
      target_tp: over how many of them heads, intermediate size and vocabulary are split, batch
        rows being split over the rest; None splits over all.
      drafter_devices: split over all of them; None takes the first device that the target leaves
        free, where there is one and the mode drafts, else one of the target's.

    Raises:
      D3DError: an index that does not exist or comes twice, or a target_tp that does not divide.
    """
    devices = jax.local_devices()
    if target_devices is None:
        target_devices = range(target_tp or 1)
    target = chosen_devices("target devices", target_devices) or []
    drafter = chosen_devices("drafter devices", drafter_devices)
    tensor = target_tp or len(target)
    if len(target) % tensor:
        raise D3DError(
            f"target tp {tensor} does not divide the {len(target)} target devices; give a multiple "
            "of it"
        )
    if drafter is None:
        free = [device for device in devices if device not in target]
        drafter = free[:1] if free and mode != "plain" else target[:1]
    return make_mesh(target, tensor=tensor), make_mesh(drafter, tensor=len(drafter))


def chosen_devices(what: str, indices: Sequence[int] | None) -> list[Any] | None:
    """The devices of some indices of `jax.local_devices()`; None for None.

    Raises:
      D3DError: an index that does not exist or comes twice; `what` names the option.
    """
    if indices is None:
        return None
    devices = jax.local_devices()
    for index in indices:
        if not 0 <= index < len(devices):
            raise D3DError(f"{what}: there is no device {index}, only 0 to {len(devices) - 1}")
    if len(set(indices)) != len(indices):
        raise D3DError(f"{what}: {', '.join(map(str, indices))} names a device twice")
    return [devices[index] for index in indices]
