"""From the options of a command to a loaded target, drafter and decoder."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from d3d_jax.commands.options import Decoding, Placement
from d3d_jax.commands.runtime import note
from d3d_jax.config import Mode
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.loading import drafter_caveat, load_drafter, shipped_drafter
from d3d_jax.infer.model import Model, load_model
from d3d_jax.infer.placement import role_meshes


def meshes(mode: Mode, placement: Placement) -> tuple[Mesh, Mesh]:
    """The meshes of target and drafter that the placement options ask for."""
    return role_meshes(
        mode,
        target_devices=placement.target_devices,
        target_tp=placement.target_tp,
        drafter_devices=placement.drafter_devices,
    )


def load_decoder(
    target: str, decoding: Decoding, placement: Placement, max_new_tokens: int
) -> tuple[Decoder, Model]:
    """The decoder that the options of a command describe, and the model it decodes.

    Raises:
      D3DError: what cannot be loaded or does not fit together.
    """
    folder = decoding.drafter or shipped_drafter(target)
    if decoding.mode not in (None, "plain") and folder is None:
        raise D3DError(
            f"--mode {decoding.mode} needs a drafter and none ships for {target}: add --drafter"
        )
    drafts = folder is not None and decoding.mode != "plain"
    target_mesh, drafter_mesh = meshes("async" if drafts else "plain", placement)
    dtype = None if decoding.dtype is None else jnp.dtype(decoding.dtype)
    model = load_model(target, target_mesh, dtype=dtype)
    drafter = None
    if folder is not None and drafts:
        drafter = load_drafter(
            model,
            folder,
            drafter_mesh,
            block_size=decoding.block_size,
            rectangle=decoding.rectangle,
        )
        if caveat := drafter_caveat(drafter.drafter, model.tokenizer, target):
            note(caveat)
    decoder = model.decoder(
        drafter,
        mode=decoding.mode,
        max_new_tokens=max_new_tokens,
        max_length=decoding.max_length,
    )
    return decoder, model
