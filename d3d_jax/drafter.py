"""A drafter: its folder, how it is made from a model, and what it says of a block.

A drafter is a decoder with a mask vector of its own and, if wanted, a reduced output vocabulary.
Where it shares the target's embedding and head, those are joined at load time and never stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, checkpoint_writing, decoder, parameters, sharding

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter's two configurations; its parameters travel separately, as arrays."""

    model: ModelConfig
    drafter: DrafterConfig

    def frozen(self, params: Params) -> set[str]:
        """The top-level parameters that stay as they are: the target's, and ids."""
        return {*self.drafter.shares, "draft_vocab"} & set(params)


def read_drafter(
    folder: Path,
    target_folder: Path | None,
    *,
    stacked: bool,
    mesh: Mesh | None = None,
    dtype: Any = None,
    shared: Params | None = None,
) -> tuple[Drafter, Params]:
    """Reads a drafter and joins what it shares with its target.

    Args:
      target_folder: of its target; needed only where it shares something.
      shared: the target's parameters on the same mesh, so that none is held twice; None reads
        what is shared from `target_folder`.
      mesh: of `sharding.make_mesh`; None gives NumPy arrays.

    Raises:
      D3DError: not a drafter's folder, or the target differs in width or vocabulary.
    """
    model, config = check_drafter_files(folder, target_folder)
    if mesh is not None:
        mesh = sharding.model_mesh(mesh, model)
    params = checkpoint.load_params(
        folder, model, stacked=stacked, mesh=mesh, dtype=dtype, drafter=config
    )
    if config.shares and target_folder is not None:
        if shared is None:
            target, _ = checkpoint.read_config(target_folder)
            shared = checkpoint.load_params(
                target_folder, target, stacked=False, mesh=mesh, layers=(), dtype=dtype
            )
        # A tied target has no head of its own.
        params |= {name: shared[name] for name in config.shares if name in shared}
    if "draft_vocab" in params:
        _check_draft_vocab(folder, model, params["draft_vocab"])
        params["head"] = _rows(decoder.head_weight(params), params["draft_vocab"], "head", mesh)
    if config.mask_in_embedding:
        params["mask"] = _rows(params["embed"], config.mask_token_id, "mask", mesh)
        config = dataclasses.replace(config, mask_in_embedding=False)
    return Drafter(model, config), params


def check_drafter_files(
    folder: Path, target_folder: Path | None
) -> tuple[ModelConfig, DrafterConfig]:
    """Everything about a drafter that can be checked without reading weights.

    Raises:
      D3DError: not a drafter's folder, damaged files, a mask outside the vocabulary, or a target
        that differs in width or vocabulary from what the drafter shares with it.
    """
    model, config = checkpoint.read_config(folder)
    if config is None:
        raise D3DError(f"{folder} is not a drafter: its config.json has no 'd3d' section")
    checkpoint.open_weights(folder, model, config)
    if config.mask_token_id >= model.vocab_size:
        raise D3DError(
            f"{folder}: mask_token_id {config.mask_token_id} is outside 0..{model.vocab_size - 1}"
        )
    if not config.shares:
        return model, config
    if target_folder is None:
        raise D3DError(f"the drafter {folder} shares the {config.shares[0]} of its target: name it")
    target, _ = checkpoint.read_config(target_folder)
    if (target.vocab_size, target.hidden_size) != (model.vocab_size, model.hidden_size):
        raise D3DError(
            f"drafter {folder} shares the embedding of a target with vocabulary and width "
            f"({model.vocab_size}, {model.hidden_size}); the target given has "
            f"({target.vocab_size}, {target.hidden_size})"
        )
    return model, config


def _rows(table: Any, ids: Any, name: str, mesh: Mesh | None) -> Any:
    """Rows [..., D] of an embedding or head [V, D], placed as the parameter of that name."""
    ids = np.asarray(ids)
    if mesh is None:
        return table[ids].copy()
    rows = jax.ShapeDtypeStruct((*ids.shape, table.shape[1]), table.dtype)
    where = parameters.shardings({name: rows}, mesh)[name]
    return jax.jit(lambda table, ids: table[ids], out_shardings=where)(table, ids)


def _check_draft_vocab(folder: Path, model: ModelConfig, ids: Any) -> None:
    if not (0 <= ids.min() and ids.max() < model.vocab_size):
        raise D3DError(f"{folder}: the draft vocabulary has ids outside 0..{model.vocab_size - 1}")


def init_drafter(
    source_folder: Path,
    config: DrafterConfig,
    draft_vocab: np.ndarray | None = None,
    random_layers: int = 0,
) -> tuple[Drafter, Params]:
    """A new drafter from `config.source_layers` of a pretrained model, stacked NumPy arrays.

    The mask vector starts as the embedding row of the reserved id.

    Args:
      draft_vocab: [draft_vocab_size] int32 token ids, or None for the whole vocabulary.
      random_layers: how many layers of random weights to take where there are no source layers:
        what a start from pretrained ones is compared with.

    Raises:
      D3DError: layers or mask id out of the source's range.
    """
    model, _ = checkpoint.read_config(source_folder)
    bad = [i for i in config.source_layers if not 0 <= i < model.num_hidden_layers]
    if bad or bool(config.source_layers) == bool(random_layers):
        raise D3DError(
            f"layers {list(config.source_layers)} must be between 0 and "
            f"{model.num_hidden_layers - 1}, at least one"
        )
    if not 0 <= config.mask_token_id < model.vocab_size:
        raise D3DError(f"mask token id {config.mask_token_id} is outside 0..{model.vocab_size - 1}")
    layers = config.source_layers
    params = checkpoint.load_params(
        source_folder, model, stacked=bool(layers), layers=layers, dtype=np.float32
    )
    params["mask"] = params["embed"][config.mask_token_id].copy()
    if draft_vocab is not None:
        params["draft_vocab"] = draft_vocab.astype(np.int32)
        params["head"] = decoder.head_weight(params)[draft_vocab]
    model = dataclasses.replace(model, num_hidden_layers=len(layers) or random_layers)
    if not layers:
        drawn = decoder.init_params(model, jax.random.key(0))
        params["layers"] = jax.tree.map(np.asarray, drawn["layers"])
    return Drafter(model, config), params


def save_drafter(
    folder: Path,
    drafter: Drafter,
    params: Params,
    *,
    dtype: Any = None,
    extra_files: dict[str, str | bytes] | None = None,
) -> None:
    """Writes a drafter's folder (stacked parameters), without what it shares with its target."""
    own = {name: leaf for name, leaf in params.items() if name not in drafter.drafter.shares}
    checkpoint_writing.save_model(
        folder, drafter.model, own, drafter=drafter.drafter, dtype=dtype, extra_files=extra_files
    )


def export_drafter(
    folder: Path, drafter_folder: Path, target_folder: Path, *, dtype: Any = None
) -> None:
    """Writes a drafter as an ordinary Hugging Face folder, which needs no target to be loaded.

    It has the target's embedding and head where they were shared, all of the head where a draft
    vocabulary took a part, the mask vector in the reserved row of the embedding, and the target's
    tokenizer. Its `d3d` section says how the model drafts, so that it is read as a drafter, too:
    one that predicts the whole vocabulary. Where embedding and head are one table, the reserved
    id's score is that of the mask vector.

    Args:
      dtype: of the weights; None: the drafter's own.

    Raises:
      D3DError: not a drafter's folder, not its target, or the folder exists or cannot be written.
    """
    model, config = check_drafter_files(drafter_folder, target_folder)
    params = checkpoint.load_params(drafter_folder, model, stacked=True, drafter=config)
    if config.shares:
        target, _ = checkpoint.read_config(target_folder)
        shared = checkpoint.load_params(target_folder, target, stacked=False, layers=())
        params |= {name: shared[name] for name in config.shares if name in shared}
    params.pop("draft_vocab", None)
    dtype = dtype or params["norm"].dtype
    if not config.mask_in_embedding:
        embed = np.array(params["embed"], dtype)
        embed[config.mask_token_id] = params.pop("mask")
        params["embed"] = embed
    section = dataclasses.replace(
        config,
        shares=(),
        draft_vocab_size=None,
        # Temperatures are of the scores of one vocabulary.
        calibration=config.calibration if config.draft_vocab_size is None else None,
        mask_in_embedding=True,
    )
    checkpoint_writing.save_model(
        folder,
        model,
        params,
        drafter=section,
        dtype=dtype,
        source=target_folder,
    )


def candidates(
    params: Params,
    hidden: jax.Array,
    count: int,
    temperatures: Sequence[float] | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens of each slot.

    Args:
      hidden: [B, W, D] of a block's rows.
      count: M.
      temperatures: [W] that the scores of each slot are divided by (`DrafterConfig.temperatures`);
        None: 1. They change the probabilities and not the order of the tokens.

    Returns:
      Token ids [B, W, M] int32, likeliest first, and their log-probabilities [B, W, M] float32.
    """
    scores = decoder.logits(params, hidden)
    # Flat, because XLA:CPU sorts the whole vocabulary when top_k has more than one batch axis.
    flat = scores.reshape(-1, scores.shape[-1])
    top, ids = (x.reshape(*scores.shape[:-1], count) for x in _top_k(flat, count))
    if temperatures is not None:
        slots = jnp.asarray(temperatures, scores.dtype)[:, None]
        top, scores = top / slots, scores / slots
    log_probs = top - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    if "draft_vocab" in params:
        ids = params["draft_vocab"][ids]
    return ids.astype(jnp.int32), log_probs


def _top_k(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """top_k of [B · W, V] in which each device of a split vocabulary ranks its own part.

    Otherwise every device would be sent all the scores to sort them.
    """
    axes = sharding.mesh_axes("v", scores.shape[-1])

    def own(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        top, ids = jax.lax.top_k(scores, min(count, scores.shape[-1]))
        return top, ids + (jax.lax.axis_index(axes) * scores.shape[-1] if axes else 0)

    top, ids = sharding.locally(own, ("bv",), ("bv", "bv"))(scores)
    if not axes:
        return top, ids
    # Parts are in the order of their ids, so of equal scores the lowest id still wins.
    top, at = jax.lax.top_k(sharding.constrain(top, "b."), count)
    return top, jnp.take_along_axis(sharding.constrain(ids, "b."), at, axis=1)


def predictions(drafter: DrafterConfig, per_slot: jax.Array) -> jax.Array:
    """Drops the anchor's slot where it predicts nothing: [B, W, …] → [B, W − 1 + shift, …].

    Entry i of the result predicts the token at offset i + 1 from the anchor, at either shift.
    """
    return per_slot if drafter.label_shift == 1 else per_slot[:, 1:]
