"""Drafters for a loaded model: the one that ships with it, and every check made beforehand.

Nothing here prints or decodes; models themselves are loaded in `infer.model`.
"""

from __future__ import annotations

from pathlib import Path

import jax
from jax.sharding import Mesh

import d3d_jax
from d3d_jax.branches import Rectangle
from d3d_jax.config import DrafterConfig
from d3d_jax.drafter import read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.model import Model
from d3d_jax.infer.roles import DrafterRole
from d3d_jax.models import checkpoint
from d3d_jax.models.registry import KNOWN_MODELS
from d3d_jax.models.sharding import make_mesh
from d3d_jax.models.tokenizer import Tokenizer

# (C, F) of the branches where the caller names none; C never above the block size.
DEFAULT_RECTANGLE = (4, 1)
# W where the caller names none and the drafter is on a CPU: there the time of a verification grows
# with its rows, and what a small drafter gets right beyond three drafts does not pay for them.
CPU_BLOCK_SIZE = 4


def shipped_drafter(target: str) -> Path | None:
    """The drafter that comes with this package for a known model's name, or None."""
    folder = Path(d3d_jax.__file__).parent / "assets" / f"{target}-drafter"
    return folder if target in KNOWN_MODELS and folder.is_dir() else None


def model_name(name_or_path: str) -> str:
    """What a model is called in manifests and drafters: its name or hub id, or its folder's name.

    No path, so that what is written on one machine is right on another. A revision stays part of a
    hub id (org/name@revision): its weights are its own.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists():
        return name_or_path
    return path.stem if path.is_file() else path.resolve().name


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


def load_drafter(
    model: Model,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
    *,
    block_size: int | None = None,
    rectangle: tuple[int, int] | None = None,
) -> DrafterRole:
    """A drafter of `model`, on its own mesh, ready to decode with (`Model.generate`).

    Args:
      folder: of the drafter; None takes the one that ships for the model's name.
      mesh: of `sharding.make_mesh`; None takes a device that the model leaves free, if there is
        one, so that drafting can overlap verification, else one of the model's.
      block_size: W of a round; None takes the drafter's own, on a CPU `CPU_BLOCK_SIZE` at most.
      rectangle: (C, F) of the branches of asynchronous decoding; None takes the default.

    Raises:
      D3DError: none ships, not a drafter, one of another target or tokenizer, a block size above
        the one it was trained for, or an impossible rectangle.
    """
    folder = shipped_drafter(model.name) if folder is None else Path(folder).expanduser()
    if folder is None:
        raise D3DError(f"no drafter ships for {model.name}: name the folder of one")
    _, config = checkpoint.read_config(folder)
    if config is None:
        raise D3DError(f"{folder} is not a drafter: its config.json has no 'd3d' section")
    check_drafter(config, model.tokenizer, folder)
    mesh = _free_mesh(model) if mesh is None else mesh
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    width = block_size or min(config.block_size, CPU_BLOCK_SIZE if on_cpu else config.block_size)
    if width > config.block_size:
        raise D3DError(
            f"block size {width} is above the {config.block_size} that the drafter {folder} was "
            "trained for"
        )
    outcomes, fan_out = rectangle or (min(DEFAULT_RECTANGLE[0], width), DEFAULT_RECTANGLE[1])
    policy = Rectangle(outcomes, fan_out, width)
    drafter, params = read_drafter(
        folder, model.folder, stacked=False, mesh=mesh, dtype=model.dtype
    )
    tokens = config.draft_vocab_size or drafter.model.vocab_size
    if policy.num_candidates > tokens:
        raise D3DError(f"rectangle F = {fan_out} is too many for a vocabulary of {tokens} tokens")
    return DrafterRole(drafter, params, mesh, policy, model.dtype)


def _free_mesh(model: Model) -> Mesh:
    """One device, not one of the model's where there is another."""
    taken = list(model.mesh.devices.flat)
    free = [device for device in jax.devices() if device not in taken]
    return make_mesh((free or taken)[:1])
