"""From names and folders to the roles of decoding, with every check that can be made beforehand.

Nothing here prints or decodes; `infer.decoding` runs the roles that are made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import d3d_jax
from d3d_jax.branches import Rectangle
from d3d_jax.config import DrafterConfig, Mode
from d3d_jax.drafter import load_drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.roles import DrafterRole, Target, role_mesh
from d3d_jax.models import checkpoint
from d3d_jax.models.registry import KNOWN_MODELS, resolve_model
from d3d_jax.models.tokenizer import Tokenizer

# (C, F) of the branches where the caller names none; C never above the block size.
DEFAULT_RECTANGLE = (4, 1)
# W where the caller names none and the drafter is on a CPU: there the time of a verification grows
# with its rows, and what a small drafter gets right beyond three drafts does not pay for them.
CPU_BLOCK_SIZE = 4
# jax.Device objects; type checkers take that name for a variable.
Devices = list[Any]


def role_devices(mode: Mode) -> tuple[Devices, Devices]:
    """The devices of the target and of the drafter.

    Each has its own where there are two; the second is only needed to draft.
    """
    devices = jax.devices()
    target = devices[:1]
    return target, devices[1:2] if len(devices) > 1 and mode != "plain" else target


def shipped_drafter(target: str) -> Path | None:
    """The drafter that comes with this package for a known model's name, or None."""
    folder = Path(d3d_jax.__file__).parent / "assets" / f"{target}-drafter"
    return folder if target in KNOWN_MODELS and folder.is_dir() else None


def model_name(name_or_path: str) -> str:
    """What a model is called in manifests and drafters: its name or hub id, or its folder's name.

    No path, so that what is written on one machine is right on another.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists():
        return name_or_path
    return path.stem if path.is_file() else path.resolve().name


def load_target(
    name_or_path: str | Path, devices: Devices, dtype: Any = jnp.float32
) -> tuple[Target, Tokenizer]:
    """The target on its devices, and its tokenizer.

    Raises:
      D3DError: no such model, or a damaged or unsupported one.
    """
    folder = resolve_model(name_or_path)
    tokenizer = Tokenizer.from_folder(folder)
    config, _ = checkpoint.read_config(folder)
    params = checkpoint.load_params(folder, config, stacked=False, dtype=dtype)
    return Target(config, params, role_mesh(devices), tokenizer.stop_ids, dtype), tokenizer


def check_drafter(config: DrafterConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Refuses a drafter whose token ids mean something else than the target's.

    Raises:
      D3DError: the fingerprint of the tokenizer it learnt differs.
    """
    if config.tokenizer_fingerprint != tokenizer.fingerprint:
        raise D3DError(
            f"the drafter {folder} is one of another target or tokenizer (it was made for "
            f"{config.target}); choose a drafter of this target or make one with d3d init-drafter"
        )


def drafter_caveat(config: DrafterConfig, tokenizer: Tokenizer, target: str | Path) -> str | None:
    """What may cost acceptance though the text stays right: another model or template than learnt.

    The same weights go by several names (a hub id, a folder), so a name alone is no error.
    """
    if config.template_fingerprint != tokenizer.template_fingerprint:
        return f"the drafter learnt another chat template than {target} has; expect a lower τ"
    if config.target != model_name(str(target)):
        return f"the drafter was made for {config.target}; with {target} expect another τ"
    return None


def load_drafter_role(
    folder: Path,
    target_folder: Path,
    tokenizer: Tokenizer,
    devices: Devices,
    *,
    block_size: int | None = None,
    rectangle: tuple[int, int] | None = None,
    dtype: Any = jnp.float32,
) -> DrafterRole:
    """The drafter on its devices.

    Args:
      tokenizer: of the target.
      block_size: W of a round; None takes the drafter's own, on a CPU `CPU_BLOCK_SIZE` at most.
      rectangle: (C, F) of the branches of asynchronous decoding; None takes the default.

    Raises:
      D3DError: not a drafter, one of another target or tokenizer, a block size above the one it
        was trained for, or an impossible rectangle.
    """
    _, config = checkpoint.read_config(folder)
    if config is None:
        raise D3DError(f"{folder} is not a drafter: its config.json has no 'd3d' section")
    check_drafter(config, tokenizer, folder)
    on_cpu = devices[0].platform == "cpu"
    width = block_size or min(config.block_size, CPU_BLOCK_SIZE if on_cpu else config.block_size)
    if width > config.block_size:
        raise D3DError(
            f"block size {width} is above the {config.block_size} that the drafter {folder} was "
            "trained for"
        )
    outcomes, fan_out = rectangle or (min(DEFAULT_RECTANGLE[0], width), DEFAULT_RECTANGLE[1])
    policy = Rectangle(outcomes, fan_out, width)
    drafter, params = load_drafter(folder, target_folder, stacked=False, dtype=dtype)
    tokens = config.draft_vocab_size or drafter.model.vocab_size
    if policy.num_candidates > tokens:
        raise D3DError(f"rectangle F = {fan_out} is too many for a vocabulary of {tokens} tokens")
    return DrafterRole(drafter, params, role_mesh(devices), policy, dtype)
