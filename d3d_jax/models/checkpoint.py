"""Reading and writing Hugging Face folders: config.json, weights and their companions, no torch.

The table of `models.parameters` drives both directions. Names of models are resolved to folders in
`registry`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
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
from d3d_jax.models.safetensors_folder import INDEX, WEIGHTS, SafetensorsFolder

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
# What the hub's tools keep to.
MAX_SHARD_BYTES = 5 * 10**9
# Rows of a stored head that are compared with the embedding it should equal.
_TIED_SAMPLES = 64


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


def open_weights(
    folder: Path, config: ModelConfig, drafter: DrafterConfig | None = None
) -> SafetensorsFolder:
    """The weights of a folder, opened and compared with its configuration; none is read yet.

    Raises:
      D3DError: a file is missing, truncated or damaged; a tensor is missing, too many, or of
        another shape or type; a head is stored that contradicts `tie_word_embeddings`.
    """
    files = SafetensorsFolder(folder)
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
    elif head not in files and head in shapes:
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
        reads only what its own devices hold; the host holds one device's part of one leaf at a
        time. None gives whole NumPy arrays.
      layers: which layers to read, in order; None reads all.
      dtype: what weights are cast to; None keeps the file's.
      drafter: of a drafter's folder, which leaves out what it shares.

    Raises:
      D3DError: what `open_weights` refuses.
    """
    files = open_weights(folder, config, drafter)
    chosen = tuple(range(config.num_hidden_layers)) if layers is None else layers

    def make(row: Parameter, at: tuple[int, ...] | None) -> Any:
        keys = [row.key] if at is None else [row.key.format(i) for i in at]
        shape = files.shape(keys[0])
        kind = files.dtype(keys[0]) if dtype is None or row.axes == "r" else np.dtype(dtype)
        if stacked and at is not None:
            shape = (len(keys), *shape)
            read = functools.partial(_read_stack, files, keys, kind)
        else:
            read = functools.partial(_read_one, files, keys[0], kind)
        if mesh is None:
            return read(tuple(slice(0, size) for size in shape))
        return _place(shape, parameters.leaf_sharding(row, shape, mesh), kind, read)

    return parameters.build(parameters.stored(config, drafter), chosen, stacked, make)


def _place(
    shape: tuple[int, ...],
    sharding: jax.sharding.NamedSharding,
    kind: np.dtype,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array of which this process reads the parts of its own devices, each part once."""
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        parts.setdefault(ends, []).append(device)
    arrays = []
    for ends, devices in parts.items():
        part = read(tuple(slice(*end) for end in ends))
        arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=kind)


def _read_one(
    files: SafetensorsFolder, key: str, kind: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    return files.read(key, index).astype(kind, copy=False)


def _read_stack(
    files: SafetensorsFolder, keys: list[str], kind: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    # Filled in place: stacking a list would hold every layer twice.
    rows = range(len(keys))[index[0]]
    out = np.empty((len(rows), *(s.stop - s.start for s in index[1:])), kind)
    for at, row in enumerate(rows):
        out[at] = files.read(keys[row], index[1:])
    return out


def companion_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation settings of a model folder, by file name."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary folder, then renames it: it appears whole or not at all.

    Raises:
      D3DError: the folder exists already, or cannot be written.
    """
    import shutil

    check_new(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        fill(partial)
        os.replace(partial, folder)
    except OSError as error:
        raise D3DError(f"cannot write {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Raises `D3DError` where the folder exists already."""
    if folder.exists():
        raise D3DError(f"{folder} exists already; remove it or choose another folder")


def save_model(
    folder: Path,
    config: ModelConfig,
    params: dict[str, Any],
    *,
    drafter: DrafterConfig | None = None,
    dtype: Any = None,
    extra_files: dict[str, str | bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes parameters, stacked or per layer, as a Hugging Face folder.

    Arrays may lie on any mesh, also one of several processes: then all must call this, and the
    first one writes. The host holds one file's tensors at a time.

    Args:
      drafter: written as the `d3d` section of config.json.
      dtype: what weights are cast to; None keeps them.
      extra_files: other files of the folder by name (`companion_files`, a card).
      max_shard_bytes: of one weight file; above it there are several and an index.
    """
    tensors = _tensors(params, dtype)
    raw = dataclasses.replace(config, num_hidden_layers=_num_layers(params)).to_hf()
    if drafter is not None:
        raw["d3d"] = dataclasses.asdict(drafter)
    raw["torch_dtype"] = next(t.dtype.name for t in tensors if t.key == "model.norm.weight")
    shards = _shards(tensors, max_shard_bytes)

    def fill(partial: Path) -> None:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        _write_weights(partial, shards)
        for name, content in (extra_files or {}).items():
            data = content.encode() if isinstance(content, str) else content
            (partial / name).write_bytes(data)

    if jax.process_index() == 0:
        write_folder(folder, fill)
    else:
        for tensor in tensors:
            tensor.to_host()


def _num_layers(params: dict[str, Any]) -> int:
    layers = params["layers"]
    return len(layers) if isinstance(layers, tuple) else jax.tree.leaves(layers)[0].shape[0]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to be written: a leaf, or one layer of a stacked leaf."""

    key: str
    leaf: Any
    row: int | None  # the layer's place in a stacked leaf
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        shape = self.leaf.shape if self.row is None else self.leaf.shape[1:]
        return int(np.prod(shape)) * self.dtype.itemsize

    def to_host(self) -> np.ndarray:
        """The whole tensor; with several processes every one of them must ask for it."""
        array = self.leaf if self.row is None else self.leaf[self.row]
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            from jax.experimental import multihost_utils

            array = multihost_utils.process_allgather(array, tiled=True)
        return np.ascontiguousarray(np.asarray(array).astype(self.dtype, copy=False))


def _tensors(params: dict[str, Any], dtype: Any) -> list[_Tensor]:
    """All tensors in the order of a checkpoint: embedding, layer by layer, the rest."""
    first: list[_Tensor] = []
    layers: dict[int, list[_Tensor]] = {}
    last: list[_Tensor] = []
    for row, layer, leaf in parameters.leaves(params):
        kind = np.dtype(leaf.dtype if dtype is None or row.axes == "r" else dtype)
        if not row.in_layer:
            into = first if row.path == ("embed",) else last
            into.append(_Tensor(row.key, leaf, None, kind))
        elif layer is not None:
            layers.setdefault(layer, []).append(_Tensor(row.key.format(layer), leaf, None, kind))
        else:
            for at in range(leaf.shape[0]):
                layers.setdefault(at, []).append(_Tensor(row.key.format(at), leaf, at, kind))
    return [*first, *(tensor for at in sorted(layers) for tensor in layers[at]), *last]


def _shards(tensors: list[_Tensor], limit: int) -> list[list[_Tensor]]:
    """Splits the tensors, in order, into files of at most `limit` bytes."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_weights(folder: Path, shards: list[list[_Tensor]]) -> None:
    from safetensors.numpy import save_file

    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file({t.key: t.to_host() for t in shard}, folder / name, metadata={"format": "pt"})
        # safetensors makes its files private; a model folder is as readable as the rest of it.
        (folder / name).chmod((folder / "config.json").stat().st_mode)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
            "weight_map": {
                t.key: name for name, shard in zip(names, shards, strict=True) for t in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
