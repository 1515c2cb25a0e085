"""Reading and writing Hugging Face folders: config.json and safetensors, without torch.

One table of keys drives both directions. Names of models are resolved to folders in `registry`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import D3DError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# (our path below a layer, Hugging Face's suffix below model.layers.<l>.)
_LAYER_KEYS = (
    ("attn_norm", "input_layernorm"),
    ("attn.q", "self_attn.q_proj"),
    ("attn.k", "self_attn.k_proj"),
    ("attn.v", "self_attn.v_proj"),
    ("attn.o", "self_attn.o_proj"),
    ("attn.q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "self_attn.k_norm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)
MASK_KEY = "d3d.mask_embedding"
_TOP_KEYS = (
    ("embed", "model.embed_tokens.weight"),
    ("norm", "model.norm.weight"),
    ("head", "lm_head.weight"),
    ("mask", MASK_KEY),
    ("draft_vocab", "d3d.draft_vocab"),
)


def _layer_keys(config: ModelConfig) -> list[tuple[str, str]]:
    return [k for k in _LAYER_KEYS if config.qk_norm or k[0] not in ("attn.q_norm", "attn.k_norm")]


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * h, config.num_key_value_heads * h
    return {
        "attn_norm": (d,),
        "attn.q": (q, d),
        "attn.k": (kv, d),
        "attn.v": (kv, d),
        "attn.o": (d, q),
        "attn.q_norm": (h,),
        "attn.k_norm": (h,),
        "mlp_norm": (d,),
        "mlp.gate": (f, d),
        "mlp.up": (f, d),
        "mlp.down": (d, f),
    }


def read_config(folder: Path) -> tuple[ModelConfig, DrafterConfig | None]:
    """The model's configuration and, for a drafter's folder, its `d3d` section.

    Raises:
      D3DError: no readable config.json, or one this package does not support.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise D3DError(f"there is no folder {folder}") from None
        raise D3DError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise D3DError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise D3DError(f"{path} cannot be read: it is not a JSON object")
    section = raw.get("d3d")
    drafter = None if section is None else DrafterConfig.from_json(section)
    return ModelConfig.from_hf(raw), drafter


class _Tensors:
    """The tensors of a folder by key, over one file or an index of shards."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.files: dict[str, Any] = {}
        names = [WEIGHTS]
        if (folder / INDEX).exists():
            try:
                index = json.loads((folder / INDEX).read_text())
                names = sorted(set(index["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise D3DError(f"{folder / INDEX} is damaged: {error}") from None
        for name in names:
            path = folder / name
            if not path.exists():
                raise D3DError(f"{folder} has no weights: {name} is missing")
            try:
                handle = safe_open(path, framework="np")
            except (SafetensorError, OSError) as error:
                raise D3DError(f"{path} is damaged or truncated: {error}") from None
            self.files.update(dict.fromkeys(handle.keys(), handle))

    def __contains__(self, key: str) -> bool:
        return key in self.files

    def get(self, key: str, shape: tuple[int, ...] | None) -> np.ndarray:
        if key not in self.files:
            raise D3DError(f"{self.folder}: tensor {key} is missing")
        array = self.files[key].get_tensor(key)
        if shape is not None and array.shape != shape:
            raise D3DError(
                f"{self.folder}: tensor {key} has shape {array.shape}, the config says {shape}"
            )
        return array


def _nest(flat: dict[str, np.ndarray]) -> dict[str, Any]:
    """{"attn.q": w} → {"attn": {"q": {"weight": w}}}."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
        node["weight"] = leaf
    return tree


def _leaf(tree: dict[str, Any], path: str) -> np.ndarray:
    for part in path.split("."):
        tree = tree[part]
    return tree["weight"]


def load_params(
    folder: Path,
    config: ModelConfig,
    *,
    stacked: bool,
    layers: tuple[int, ...] | None = None,
    dtype: Any = None,
    shares: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Reads the weights of a folder as NumPy arrays in the form `decoder.forward` takes.

    Args:
      stacked: one dict of [L, …] leaves, or a tuple of per-layer dicts.
      layers: which layers to read, in order; None reads all.
      dtype: what to cast to; None keeps the file's.
      shares: parameters that are not stored here because another model owns them.

    Raises:
      D3DError: a missing, damaged or truncated file, a missing tensor or one of another shape.
    """
    tensors = _Tensors(folder)

    def read(key: str, shape: tuple[int, ...]) -> np.ndarray:
        array = tensors.get(key, shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    shapes = _layer_shapes(config)
    rows = tuple(range(config.num_hidden_layers)) if layers is None else layers
    keys = _layer_keys(config)

    def read_layer(ours: str, hf: str, index: int) -> np.ndarray:
        return read(f"model.layers.{index}.{hf}.weight", shapes[ours])

    def read_stack(ours: str, hf: str) -> np.ndarray:
        # Filled in place: stacking a list would hold every layer twice.
        first = read_layer(ours, hf, rows[0])
        stack = np.empty((len(rows), *first.shape), first.dtype)
        stack[0] = first
        for at, index in enumerate(rows[1:], start=1):
            stack[at] = read_layer(ours, hf, index)
        return stack

    params: dict[str, Any] = {}
    for ours, hf in _TOP_KEYS:
        if ours == "draft_vocab":
            if hf in tensors:
                params[ours] = tensors.get(hf, None)
        elif _is_stored(ours, hf, config, shares, tensors):
            params[ours] = read(hf, _top_shape(ours, config))
    if stacked:
        params["layers"] = _nest({ours: read_stack(ours, hf) for ours, hf in keys})
    else:
        params["layers"] = tuple(
            _nest({ours: read_layer(ours, hf, index) for ours, hf in keys}) for index in rows
        )
    return params


def _is_stored(
    ours: str, hf: str, config: ModelConfig, shares: tuple[str, ...], tensors: _Tensors
) -> bool:
    """Whether a top-level parameter must be in the folder (or, for the mask, is)."""
    if ours == "head":
        return not config.tie_word_embeddings and "head" not in shares
    return hf in tensors if ours == "mask" else ours not in shares


def _top_shape(ours: str, config: ModelConfig) -> tuple[int, ...]:
    width = (config.hidden_size,)
    return width if ours in ("norm", "mask") else (config.vocab_size, *width)


def _flat_tensors(config: ModelConfig, params: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face key, array) of stacked parameters."""
    for ours, hf in _TOP_KEYS:
        if ours in params:
            yield hf, np.asarray(params[ours])
    for ours, hf in _layer_keys(config):
        leaf = np.asarray(_leaf(params["layers"], ours))
        for i in range(leaf.shape[0]):
            yield f"model.layers.{i}.{hf}.weight", leaf[i]


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary folder, then renames it: it appears whole or not at all.

    Raises:
      D3DError: the folder exists already, or cannot be written.
    """
    import shutil

    if folder.exists():
        raise D3DError(f"{folder} exists already; remove it or choose another folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        fill(partial)
        os.replace(partial, folder)
    except OSError as error:
        raise D3DError(f"cannot write {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_model(
    folder: Path,
    config: ModelConfig,
    params: dict[str, Any],
    *,
    drafter: DrafterConfig | None = None,
    dtype: Any = None,
    extra_files: dict[str, str | bytes] | None = None,
) -> None:
    """Writes stacked parameters as a Hugging Face folder.

    Args:
      drafter: written as the `d3d` section of config.json.
      dtype: what float weights are cast to; None keeps them.
      extra_files: other files of the folder by name (tokenizer, card).
    """
    import dataclasses

    from safetensors.numpy import save_file

    num_layers = _leaf(params["layers"], "attn_norm").shape[0]
    raw = dataclasses.replace(config, num_hidden_layers=num_layers).to_hf()
    if drafter is not None:
        raw["d3d"] = dataclasses.asdict(drafter)

    def cast(array: np.ndarray) -> np.ndarray:
        if dtype is not None and not np.issubdtype(array.dtype, np.integer):
            array = array.astype(dtype)
        return np.ascontiguousarray(array)

    tensors = {key: cast(array) for key, array in _flat_tensors(config, params)}
    raw["torch_dtype"] = str(tensors["model.norm.weight"].dtype)

    def fill(partial: Path) -> None:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        # safetensors makes its files private; a model folder is as readable as the rest of it.
        (partial / WEIGHTS).chmod((partial / "config.json").stat().st_mode)
        for name, content in (extra_files or {}).items():
            data = content.encode() if isinstance(content, str) else content
            (partial / name).write_bytes(data)

    write_folder(folder, fill)
