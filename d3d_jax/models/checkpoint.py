"""Reading Hugging Face folders: config.json, weights straight onto a mesh, and their companions.

The table of `models.parameters` names the tensors; writing is `models.checkpoint_writing`. Names of
models are resolved to folders in `registry`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.models import parameters
from d3d_jax.models.parameters import Parameter
from d3d_jax.models.safetensors_folder import SafetensorsFolder

# Files of a model that are neither its configuration nor its weights.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Rows of a stored head that are compared with the embedding it should equal.
_TIED_SAMPLES = 64
# Bytes; the CPU client of XLA copies host arrays that start elsewhere.
_ALIGNMENT = 64


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
    except (OSError, ValueError, RecursionError) as error:
        raise D3DError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise D3DError(f"{path} cannot be read: it is not a JSON object")
    section = raw.get("d3d")
    try:
        drafter = None if section is None else DrafterConfig.from_json(section)
        return ModelConfig.from_hf(raw), drafter
    except D3DError as error:
        raise D3DError(f"{folder}: {error}") from None


def open_weights(
    folder: Path, config: ModelConfig, drafter: DrafterConfig | None = None
) -> SafetensorsFolder:
    """The weights of a folder, opened and compared with its configuration; none is read yet.

    Raises:
      D3DError: a file is missing, truncated or damaged; a tensor is missing, too many, or of
        another shape or type; a head is stored that contradicts `tie_word_embeddings`.
    """
    files = SafetensorsFolder(folder)
    if config.num_hidden_layers > len(files.keys()):
        raise D3DError(
            f"{folder}: config.json says {config.num_hidden_layers} layers, the weights are only "
            f"{len(files.keys())} tensors"
        )
    shapes, integers = {}, set()
    for row in parameters.stored(config, drafter):
        layers = range(config.num_hidden_layers) if row.in_layer else (None,)
        for layer in layers:
            shapes[row.key.format(layer)] = parameters.shape(row, config, drafter)
        if row.axes == "r":
            integers.add(row.key)
    for key in files.keys():
        if key.endswith("rotary_emb.inv_freq"):  # older writers store what the config says
            shapes[key] = files.shape(key)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    if head in files and head not in shapes and config.tie_word_embeddings and embed in shapes:
        # Some writers store the tied head again; if it differs, the flag is wrong.
        shapes[head] = shapes[embed]
        files.check(shapes, integers)
        _check_tied(files, embed, head)
    elif head not in files and head in shapes and embed in files:
        raise D3DError(
            f"{folder}: tensor {head} is missing, and config.json says tie_word_embeddings = false"
        )
    files.check(shapes, integers)
    return files


def _check_tied(files: SafetensorsFolder, embed: str, head: str) -> None:
    rows = files.shape(embed)[0]
    for row in range(0, rows, max(rows // _TIED_SAMPLES, 1)):
        at = (slice(row, row + 1), slice(None))
        if not np.array_equal(files.read(embed, at), files.read(head, at)):
            raise D3DError(
                f"{files.where(head)} differs from {embed} in row {row}, but config.json says "
                "tie_word_embeddings = true"
            )


def load_params(
    folder: Path,
    config: ModelConfig,
    *,
    stacked: bool,
    mesh: Mesh | None = None,
    layers: tuple[int, ...] | None = None,
    dtype: Any = None,
    drafter: DrafterConfig | None = None,
) -> dict[str, Any]:
    """Reads the weights of a folder in the form `decoder.forward` takes.

    Args:
      stacked: one dict of [L, …] leaves, or a tuple of per-layer dicts.
      mesh: of `sharding.model_mesh`. Every leaf goes straight to its devices and each process
        reads only what its own devices hold; the host holds one device's part of a leaf, and the
        one before it until that has arrived. None gives whole NumPy arrays.
      layers: which layers to read, in order; None reads all.
      dtype: what weights are cast to; None keeps the file's.
      drafter: of a drafter's folder, which leaves out what it shares.

    Raises:
      D3DError: what `open_weights` refuses.
    """
    files = open_weights(folder, config, drafter)
    chosen = tuple(range(config.num_hidden_layers)) if layers is None else layers

    pending: list[jax.Array] = []

    def make(row: Parameter, at: tuple[int, ...] | None) -> Any:
        keys = [row.key] if at is None else [row.key.format(i) for i in at]
        shape = files.shape(keys[0])
        kind = files.dtype(keys[0]) if dtype is None or row.axes == "r" else np.dtype(dtype)
        if stacked and at is not None:
            shape = (len(keys), *shape)
            fill = functools.partial(_fill_stack, files, keys)
        else:
            fill = functools.partial(files.read, keys[0])
        if mesh is None:
            whole = np.empty(shape, kind)
            fill(tuple(slice(size) for size in shape), whole)
            return whole
        leaf = _place(shape, parameters.leaf_sharding(row, shape, mesh), kind, fill, pending)
        files.release()
        return leaf

    return parameters.build(parameters.stored(config, drafter), chosen, stacked, make)


def _place(
    shape: tuple[int, ...],
    sharding: jax.sharding.NamedSharding,
    kind: np.dtype,
    fill: Callable[[tuple[slice, ...], np.ndarray], Any],
    pending: list[jax.Array],
) -> jax.Array:
    """An array of which this process reads the parts of its own devices, each part once.

    Args:
      fill: reads a part into an array of its shape.
      pending: what was put on devices last; a part is read while the one before it is on its way.
    """
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        parts.setdefault(ends, []).append(device)
    arrays = []
    for ends, devices in parts.items():
        part = _aligned([stop - start for start, stop in ends], kind)
        fill(tuple(slice(*end) for end in ends), part)
        jax.block_until_ready(pending)
        pending[:] = [jax.device_put(part, device) for device in devices]
        arrays += pending
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=kind)


def _aligned(shape: list[int], kind: np.dtype) -> np.ndarray:
    """An empty array that a CPU device takes over without a copy."""
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def _fill_stack(
    files: SafetensorsFolder, keys: list[str], index: tuple[slice, ...], out: np.ndarray
) -> None:
    for key, layer in zip(keys[index[0]], out, strict=True):
        files.read(key, index[1:], layer)


def weight_type(folder: Path) -> np.dtype:
    """The type a folder's weights are stored in: that of the embedding, where they are several."""
    return SafetensorsFolder(folder).dtype("model.embed_tokens.weight")


def special_token_ids(folder: Path) -> dict[str, Any]:
    """The ids of special tokens in a folder's config.json, which a `ModelConfig` does not keep."""
    raw = json.loads((folder / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: raw[name] for name in names if raw.get(name) is not None}


def companion_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation settings of a model folder, by file name."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
