"""The parameters of a model in one table: where each lives here and in Hugging Face checkpoints.

Sharding, reading, writing, planning and `d3d inspect` all follow this table. Axes are spelled with
the letters

    v vocabulary   d hidden size   q all query heads (N · H)   k all kv heads (K · H)
    f intermediate size            h one head (H)              r draft vocabulary

and a stacked leaf has the layers before them. Nothing here reads files or touches a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.models import sharding

MASK_KEY = "d3d.mask_embedding"
DRAFT_VOCAB_KEY = "d3d.draft_vocab"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table.

    Attributes:
      path: keys of the nested dict of parameters; those of a layer begin with `layers`.
      key: of Hugging Face; `{}` stands for the index of the layer.
      axes: letters of the dimensions, those of one layer.
    """

    path: tuple[str, ...]
    key: str
    axes: str

    @property
    def in_layer(self) -> bool:
        """Whether every layer has one."""
        return self.path[0] == "layers"


def _layer(path: str, key: str, axes: str) -> Parameter:
    return Parameter(
        ("layers", *path.split("."), "weight"), f"model.layers.{{}}.{key}.weight", axes
    )


TABLE = (
    Parameter(("embed",), "model.embed_tokens.weight", "vd"),
    _layer("attn_norm", "input_layernorm", "d"),
    _layer("attn.q", "self_attn.q_proj", "qd"),
    _layer("attn.k", "self_attn.k_proj", "kd"),
    _layer("attn.v", "self_attn.v_proj", "kd"),
    _layer("attn.o", "self_attn.o_proj", "dq"),
    _layer("attn.q_norm", "self_attn.q_norm", "h"),
    _layer("attn.k_norm", "self_attn.k_norm", "h"),
    _layer("mlp_norm", "post_attention_layernorm", "d"),
    _layer("mlp.gate", "mlp.gate_proj", "fd"),
    _layer("mlp.up", "mlp.up_proj", "fd"),
    _layer("mlp.down", "mlp.down_proj", "df"),
    Parameter(("norm",), "model.norm.weight", "d"),
    Parameter(("head",), "lm_head.weight", "vd"),
    Parameter(("mask",), MASK_KEY, "d"),
    Parameter(("draft_vocab",), DRAFT_VOCAB_KEY, "r"),
)
_BY_PATH = {parameter.path: parameter for parameter in TABLE}


def stored(config: ModelConfig, drafter: DrafterConfig | None = None) -> list[Parameter]:
    """The rows that a model's folder holds, in the order of the file.

    A drafter's folder leaves out what it shares with its target.
    """
    absent = set() if config.qk_norm else {"q_norm", "k_norm"}
    if config.tie_word_embeddings:
        absent.add("head")
    if drafter is None:
        absent |= {"mask", "draft_vocab"}
    else:
        absent |= set(drafter.shares)
        if drafter.draft_vocab_size is None:
            absent.add("draft_vocab")
        if drafter.mask_in_embedding:
            absent.add("mask")
    return [row for row in TABLE if absent.isdisjoint(row.path)]


def shape(parameter: Parameter, config: ModelConfig, drafter: DrafterConfig | None = None):
    """The shape of one leaf, of one layer where every layer has one."""
    sizes = {
        "v": config.vocab_size,
        "d": config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "k": config.num_key_value_heads * config.head_dim,
        "f": config.intermediate_size,
        "h": config.head_dim,
        "r": drafter.draft_vocab_size if drafter else None,
    }
    return tuple(sizes[letter] for letter in parameter.axes)


def count(config: ModelConfig, drafter: DrafterConfig | None = None) -> int:
    """Numbers in the weights of a folder, without the ids of a draft vocabulary."""
    return sum(
        math.prod(shape(row, config, drafter)) * (config.num_hidden_layers if row.in_layer else 1)
        for row in stored(config, drafter)
        if row.axes != "r"
    )


def build(
    rows: list[Parameter], layers: tuple[int, ...], stacked: bool, make: Callable[..., Any]
) -> dict[str, Any]:
    """The nested dict of parameters, with `make(row, layer indices or None)` for every leaf.

    Args:
      layers: which layers, in order.
      stacked: one dict whose leaves hold all layers, or a tuple of a dict a layer.
    """
    params: dict[str, Any] = {}
    per_layer: list[dict[str, Any]] = [{} for _ in ((0,) if stacked else layers)]
    for row in rows:
        if not row.in_layer:
            params[row.path[0]] = make(row, None)
        elif stacked:
            _set(per_layer[0], row.path[1:], make(row, layers))
        else:
            for tree, index in zip(per_layer, layers, strict=True):
                _set(tree, row.path[1:], make(row, (index,)))
    params["layers"] = per_layer[0] if stacked else tuple(per_layer)
    return params


def _set(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def leaves(params: dict[str, Any]) -> Iterator[tuple[Parameter, int | None, Any]]:
    """Every leaf of a parameter dict as (row, its layer, leaf), in the order of the table.

    The layer is None at the top and for stacked leaves, which hold all of them.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    found: dict[tuple[str, ...], list[tuple[int | None, Any]]] = {}
    for path, leaf in flat:
        keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        layers = [part.idx for part in path if isinstance(part, jax.tree_util.SequenceKey)]
        found.setdefault(tuple(keys), []).append((layers[0] if layers else None, leaf))
    for row in TABLE:
        for layer, leaf in found.get(row.path, ()):
            yield row, layer, leaf


def leaf_sharding(
    row: Parameter, shape: tuple[int, ...], mesh: sharding.AnyMesh
) -> jax.sharding.NamedSharding:
    """Where a leaf of this shape goes; a stacked leaf has an axis more than its row."""
    axes = row.axes
    if len(axes) == 1:
        # A vector split over devices would save nothing and cost a collective at each use.
        axes = "."
    axes = "." * (len(shape) - len(axes)) + axes
    return sharding.named(axes, shape, mesh, sharding.PARAMETER_RULES)


def shardings(params: dict[str, Any], mesh: sharding.AnyMesh) -> dict[str, Any]:
    """The tree of shardings of a parameter dict, stacked or per layer."""

    def one(path: tuple[Any, ...], leaf: Any) -> jax.sharding.NamedSharding:
        keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        return leaf_sharding(_BY_PATH[keys], leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(one, params)


def abstract(
    config: ModelConfig,
    mesh: sharding.AnyMesh | None = None,
    *,
    stacked: bool,
    dtype: Any = jnp.bfloat16,
    drafter: DrafterConfig | None = None,
) -> dict[str, Any]:
    """The parameters as `jax.ShapeDtypeStruct`s with shardings: for planning and compiling.

    Nothing is allocated, however large the model.
    """
    rows = stored(config, drafter)

    def make(row: Parameter, layers: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
        size = shape(row, config, drafter)
        if stacked and layers is not None:
            size = (len(layers), *size)
        where = None if mesh is None else leaf_sharding(row, size, mesh)
        kind = jnp.int32 if row.axes == "r" else dtype
        return jax.ShapeDtypeStruct(size, kind, sharding=where)

    return build(rows, tuple(range(config.num_hidden_layers)), stacked, make)
