"""Drafters for a loaded model: the one that ships with it, and every check made beforehand.

Nothing here prints or decodes; models themselves are loaded in `infer.model`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

import d3d_jax
from d3d_jax.branches import BestFirst, Policy, parse_policy
from d3d_jax.config import DrafterConfig
from d3d_jax.drafter import check_drafter_files, read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.model import Model, ModelFiles
from d3d_jax.models.registry import KNOWN_MODELS, resolve_model
from d3d_jax.models.sharding import make_mesh, model_mesh
from d3d_jax.models.tokenizer import Tokenizer

# Branches that are prepared where the caller names no policy.
DEFAULT_BRANCHES = 4
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


@dataclasses.dataclass(frozen=True)
class DrafterFiles:
    """A drafter that was looked at but not loaded: all that can be checked beforehand.

    Attributes:
      config: what it adds to its model's architecture.
      policy: the outcomes it will prepare, and its block size.
    """

    folder: Path
    config: DrafterConfig
    policy: Policy
    mesh: Mesh

    def load(self, model: Model) -> DrafterRole:
        """Reads the weights, and what it shares with its target.

        Raises:
          D3DError: damaged files, or a target of other width or vocabulary.
        """
        drafter, params = read_drafter(
            self.folder,
            model.folder,
            stacked=False,
            mesh=self.mesh,
            dtype=model.dtype,
            shared=model.target.params if model.mesh == self.mesh else None,
        )
        return DrafterRole(drafter, params, self.mesh, self.policy, model.dtype)


def open_drafter(
    target: ModelFiles,
    name_or_path: str | Path | None,
    mesh: Mesh,
    *,
    block_size: int | None = None,
    policy: str | Policy | None = None,
) -> DrafterFiles:
    """Finds a drafter and checks it against its target; for the rest see `load_drafter`."""
    name_or_path = name_or_path or shipped_drafter(target.name)
    if name_or_path is None:
        raise D3DError(f"no drafter ships for {target.name}: name the folder or hub id of one")
    folder = resolve_model(name_or_path)
    model, config = check_drafter_files(folder, target.folder)
    check_drafter(config, target.tokenizer, folder)
    if not isinstance(mesh, Mesh):
        raise D3DError(f"mesh must be a jax.sharding.Mesh, found {type(mesh).__name__}")
    mesh = model_mesh(mesh, model)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if block_size is None and isinstance(policy, Policy):
        block_size = policy.block_size
    elif block_size is None:
        block_size = min(config.block_size, CPU_BLOCK_SIZE) if on_cpu else config.block_size
    if type(block_size) is not int or block_size < 2:
        raise D3DError(f"block size must be a whole number of at least 2, found {block_size!r}")
    if block_size > config.block_size:
        raise D3DError(
            f"block size {block_size} is above the {config.block_size} that the drafter {folder} "
            "was trained for"
        )
    if isinstance(policy, str):
        policy = parse_policy(policy, block_size)
    elif policy is None:
        policy = BestFirst(DEFAULT_BRANCHES, block_size)
    if not isinstance(policy, Policy):
        raise D3DError(f"a policy is text such as best-first:4, or one of branches; got {policy!r}")
    if policy.block_size != block_size:
        raise D3DError(f"the policy is for blocks of {policy.block_size}, not of {block_size}")
    tokens = config.draft_vocab_size or model.vocab_size
    if policy.num_candidates > tokens:
        raise D3DError(
            f"{policy} needs {policy.num_candidates} candidates of a vocabulary of {tokens} tokens"
        )
    return DrafterFiles(folder, config, policy, mesh)


def load_drafter(
    model: Model,
    name_or_path: str | Path | None = None,
    mesh: Mesh | None = None,
    *,
    block_size: int | None = None,
    policy: str | Policy | None = None,
) -> DrafterRole:
    """A drafter of `model`, on its own mesh, ready to decode with (`Model.generate`).

    Args:
      name_or_path: the drafter's folder or hub id; None takes the one that ships for the model.
      mesh: of `sharding.make_mesh`; None takes a device that the model leaves free, if there is
        one, so that drafting can overlap verification, else one of the model's.
      block_size: W of a round; None takes the drafter's own, on a CPU `CPU_BLOCK_SIZE` at most.
      policy: which outcomes asynchronous decoding prepares: `best-first:N`, `rectangle:C,F`, or one
        of `d3d_jax.branches`; None takes best-first with a few.

    Raises:
      D3DError: none ships, not a drafter, one of another target or tokenizer, a block size above
        the one it was trained for, or an impossible policy.
    """
    mesh = _free_mesh(model) if mesh is None else mesh
    files = open_drafter(model.files, name_or_path, mesh, block_size=block_size, policy=policy)
    return files.load(model)


def _free_mesh(model: Model) -> Mesh:
    """One device, not one of the model's where there is another."""
    taken = list(model.mesh.devices.flat)
    free = [device for device in jax.local_devices() if device not in taken]
    return make_mesh((free or taken)[:1])
