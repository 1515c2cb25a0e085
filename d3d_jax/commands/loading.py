"""From the options of a command to target, drafter and decoder: looked at first, then loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from d3d_jax.commands.option_groups import (
    Decoding,
    DrafterMesh,
    Placement,
    SamplingOptions,
    TargetPlacement,
    TokenChoice,
)
from d3d_jax.commands.runtime import note
from d3d_jax.config import Mode
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.loading import DrafterFiles, drafter_caveat, open_drafter, shipped_drafter
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.model import ModelFiles, open_model
from d3d_jax.infer.placement import chosen_devices, role_meshes
from d3d_jax.infer.replies import check_prompts, longest_sequence
from d3d_jax.models.sharding import make_mesh, model_mesh
from d3d_jax.sampling import SamplingParams


def target_mesh(files: ModelFiles, placement: TargetPlacement) -> Mesh:
    """The mesh that the placement options ask for, checked against the model's heads."""
    mesh, _ = role_meshes(
        "plain",
        target_devices=placement.target_indices,
        target_tp=placement.target_tp,
    )
    return model_mesh(mesh, files.config)


def drafter_mesh(mode: Mode, placement: Placement) -> Mesh:
    """The drafter's mesh that the placement options ask for."""
    return role_meshes(
        mode,
        target_devices=placement.target_indices,
        target_tp=placement.target_tp,
        drafter_devices=placement.drafter_indices,
    )[1]


def split_mesh(options: DrafterMesh) -> Mesh:
    """The mesh for work on a drafter alone."""
    devices = chosen_devices("--drafter-devices", options.indices)
    return make_mesh(devices, fsdp=options.fsdp, tensor=options.tensor)


@dataclasses.dataclass(frozen=True)
class DecoderFiles:
    """What the options of a command describe, checked as far as goes without reading weights."""

    target: ModelFiles
    drafter: DrafterFiles | None
    mesh: Mesh
    options: Decoding

    def check(self, prompts: list[list[int]], names: Sequence[str] = ()) -> None:
        """Refuses prompts that cannot be decoded (`D3DError`); `names` as of `check_prompts`."""
        config = self.target.config
        check_prompts(prompts, config, longest_sequence(config, self.options.max_length), names)

    def load(self, max_new_tokens: int, slots: int | None = None) -> Decoder:
        """Reads the weights; for the arguments see `Model.decoder`."""
        dtype = None if self.options.dtype is None else jnp.dtype(self.options.dtype)
        model = self.target.load(self.mesh, dtype)
        drafter = self.drafter and self.drafter.load(model)
        if drafter and self.options.mode == "async" and share_hardware(model.target, drafter):
            note("target and drafter share hardware: sync is expected to be faster than async here")
        return model.decoder(
            drafter,
            mode=self.options.mode,
            max_new_tokens=max_new_tokens,
            max_length=self.options.max_length,
            miss=self.options.miss,
            slots=slots,
        )


def open_decoder(target: str, decoding: Decoding, placement: Placement) -> DecoderFiles:
    """Finds and checks everything that the options of a command name.

    Raises:
      D3DError: what cannot be found or does not fit together.
    """
    files = open_model(target)
    longest_sequence(files.config, decoding.max_length)
    mesh = target_mesh(files, placement)
    name = decoding.drafter or shipped_drafter(target)
    miss = None if decoding.miss == "stall" else decoding.miss
    if decoding.mode == "plain" or (decoding.mode is None and name is None):
        unused = {
            "--block-size": decoding.block_size,
            "--policy": decoding.policy,
            "--miss": miss,
            "--drafter": decoding.drafter,
            "--drafter-devices": placement.drafter_devices,
        }
        _note_unused("no drafter decodes here", unused)
        return DecoderFiles(files, None, mesh, decoding)
    if name is None:
        raise D3DError(
            f"--mode {decoding.mode} needs a drafter and none ships for {target}: add --drafter"
        )
    if decoding.mode == "sync":
        unused = {"--policy": decoding.policy, "--miss": miss}
        _note_unused("nothing is prepared in sync mode", unused)
    drafter = open_drafter(
        files,
        name,
        drafter_mesh("async", placement),
        block_size=decoding.block_size,
        policy=decoding.policy,
    )
    if caveat := drafter_caveat(drafter.config, files.tokenizer, target):
        note(caveat)
    return DecoderFiles(files, drafter, mesh, decoding)


def _note_unused(why: str, options: Mapping[str, object]) -> None:
    """Names the options that were given, those that are not None, for nothing."""
    if given := [option for option, value in options.items() if value is not None]:
        note(f"{why}: {', '.join(given)} changes nothing")


def sampling_params(options: TokenChoice, max_new_tokens: int) -> SamplingParams:
    """What sampling options ask of a request (`D3DError` for values out of range)."""
    return SamplingParams(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.seed,
        max_new_tokens,
        options.stop if isinstance(options, SamplingOptions) else (),
    )
