"""`d3d inspect`: what a model or drafter is, without reading its weights."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

from d3d_jax.commands.options import Inspect
from d3d_jax.commands.runtime import note
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, parameters, sharding
from d3d_jax.models.registry import describe_model
from d3d_jax.models.safetensors_folder import SafetensorsFolder
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.presets import PRESETS


def run(options: Inspect) -> None:
    """Prints a table or one JSON object."""
    figures = describe(options)
    if options.json:
        print(json.dumps(figures, ensure_ascii=False))
    else:
        _print(figures)


def describe(options: Inspect) -> dict[str, Any]:
    """All that is shown.

    Raises:
      D3DError: no such model, damaged files, or a mesh that its heads do not divide over.
    """
    try:
        folder, has_weights = describe_model(options.model)
    except D3DError as error:
        if options.model not in PRESETS:
            raise
        note(f"{error}; described from its published architecture")
        return _figures(options, PRESETS[options.model], None, None)
    config, drafter = checkpoint.read_config(folder)
    files = checkpoint.open_weights(folder, config, drafter) if has_weights else None
    return _figures(options, config, drafter, files) | _tokenizer(folder, drafter)


def _figures(
    options: Inspect,
    config: ModelConfig,
    drafter: DrafterConfig | None,
    files: SafetensorsFolder | None,
) -> dict[str, Any]:
    stored = {}
    if files is not None:
        for key in files.keys():
            kind = files.dtype(key).name
            stored[kind] = stored.get(kind, 0) + math.prod(files.shape(key))
    kind = options.dtype or max(stored, key=lambda k: stored[k], default="bfloat16")
    mesh = sharding.abstract_mesh(config, fsdp=options.fsdp, tensor=options.tp)
    return {
        "model": options.model,
        "config": config.to_hf(),
        "parameters": parameters.count(config, drafter),
        "stored_dtypes": stored,
        "dtype": kind,
        "longest_sequence": config.max_length,
        "mesh": dict(mesh.shape),
        "bytes_per_device": _bytes_per_device(config, drafter, mesh, kind),
        "cache_bytes_per_token_per_device": _cache_bytes(config, mesh, kind),
        "held_whole": _held_whole(config, drafter, mesh),
        "drafter": None if drafter is None else dataclasses.asdict(drafter),
    }


def _bytes_per_device(
    config: ModelConfig, drafter: DrafterConfig | None, mesh: AbstractMesh, kind: str
) -> int:
    leaves = parameters.abstract(config, mesh, stacked=True, dtype=jnp.dtype(kind), drafter=drafter)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for _, _, leaf in parameters.leaves(leaves)
    )


def _cache_bytes(config: ModelConfig, mesh: AbstractMesh, kind: str) -> int:
    shape = (1, config.num_key_value_heads, 1, config.head_dim)
    held = sharding.named("bk..", shape, mesh, sharding.ACTIVATION_RULES).shard_shape(shape)
    return 2 * config.num_hidden_layers * math.prod(held) * jnp.dtype(kind).itemsize


def _held_whole(
    config: ModelConfig, drafter: DrafterConfig | None, mesh: AbstractMesh
) -> list[str]:
    """Matrices that the mesh does not divide, and so every device holds."""
    if mesh.size == 1:
        return []
    leaves = parameters.abstract(config, mesh, stacked=True, drafter=drafter)
    return [
        row.key
        for row, _, leaf in parameters.leaves(leaves)
        if len(row.axes) > 1 and leaf.sharding.is_fully_replicated
    ]


def _tokenizer(folder: Path, drafter: DrafterConfig | None) -> dict[str, Any]:
    if not (folder / "tokenizer.json").is_file():
        return {"tokenizer_fingerprint": drafter and drafter.tokenizer_fingerprint}
    tokenizer = Tokenizer.from_folder(folder)
    return {
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "template_fingerprint": tokenizer.template_fingerprint,
        "tokens": tokenizer.vocab_size,
        "stop_ids": list(tokenizer.stop_ids),
        "switches_thinking": tokenizer.supports_thinking,
    }


def _print(figures: dict[str, Any]) -> None:
    config = figures["config"]
    heads = f"{config['num_attention_heads']} query, {config['num_key_value_heads']} kv"
    mesh = " × ".join(f"{name} {size}" for name, size in figures["mesh"].items() if size > 1)
    weights = "own weights" if figures["drafter"] else "weights"
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    rows = {
        "model": figures["model"],
        "architecture": config["architectures"][0],
        "parameters": f"{figures['parameters']:,}",
        "layers": config["num_hidden_layers"],
        "hidden, intermediate size": f"{config['hidden_size']}, {config['intermediate_size']}",
        "heads": f"{heads} of {config['head_dim']}",
        "vocabulary": f"{config['vocab_size']:,} rows"
        + (", tied" if config["tie_word_embeddings"] else ""),
        "rope": f"theta {config['rope_theta']:g}" + _yarn(config),
        "longest sequence": f"{figures['longest_sequence']:,}",
        "stored as": ", ".join(f"{n:,} {kind}" for kind, n in figures["stored_dtypes"].items())
        or "not here",
        "mesh": mesh or "one device",
        f"{figures['dtype']} {weights} per device": _size(figures["bytes_per_device"]),
        "cache per token and device": _size(figures["cache_bytes_per_token_per_device"]),
        "held whole by every device": ", ".join(figures["held_whole"]),
        "tokenizer": figures.get("tokenizer_fingerprint"),
        "tokens": figures.get("tokens"),
        "stop ids": ", ".join(map(str, figures.get("stop_ids", []))),
        "switches thinking": "yes" if figures.get("switches_thinking") else "",
    }
    for name, value in rows.items():
        if value not in (None, ""):
            table.add_row(name, str(value))
    for name, value in (figures["drafter"] or {}).items():
        table.add_row(f"d3d.{name}", json.dumps(value))
    Console(highlight=False).print(table)


def _yarn(config: dict[str, Any]) -> str:
    scaling = config.get("rope_scaling")
    return "" if scaling is None else f", YaRN × {scaling['factor']:g}"


def _size(count: int) -> str:
    """As 1.53 GB, 122.9 kB."""
    exponent = min(int(math.log10(max(count, 1))) // 3, 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[exponent]
    return f"{count / 1000**exponent:.4g} {unit}"
