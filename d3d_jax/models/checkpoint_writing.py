"""Writing Hugging Face folders: config.json, weights in shards and their companions.

The table of `models.parameters` names the tensors; reading is `models.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.models import parameters
from d3d_jax.models.checkpoint import companion_files, special_token_ids
from d3d_jax.models.safetensors_folder import INDEX, WEIGHTS
from d3d_jax.processes import is_first, told_by_first

# What the hub's tools keep to.
MAX_SHARD_BYTES = 5 * 10**9


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary folder, then renames it: it appears whole or not at all.

    Raises:
      D3DError: the folder exists already, or cannot be written.
    """
    from safetensors import SafetensorError

    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if folder.exists():
            raise D3DError(f"{folder} exists already; remove it or choose another folder")
        partial.mkdir(parents=True)
        fill(partial)
        os.replace(partial, folder)
    except (OSError, ValueError, SafetensorError) as error:  # the last: a full disk
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
    source: Path | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes parameters, stacked or per layer, as a Hugging Face folder.

    Arrays may lie on any mesh, also one of several processes: then all must call this, and the
    first one writes. The host holds one file's tensors at a time.

    Args:
      drafter: written as the `d3d` section of config.json.
      dtype: what weights are cast to; None keeps them.
      source: folder of the model this was, whose tokenizer, generation settings and ids of special
        tokens are copied.
      extra_files: other files of the folder by name (a card).
      max_shard_bytes: of one weight file; above it there are several and an index.

    Raises:
      D3DError: the folder exists already, or cannot be written; in every process.
    """
    tensors = _tensors(params, dtype)
    raw = dataclasses.replace(config, num_hidden_layers=_num_layers(params)).to_hf()
    files: dict[str, str | bytes] = dict(extra_files or {})
    if source is not None:
        files = {**companion_files(source), **files}
        raw |= special_token_ids(source)
    if drafter is not None:
        raw["d3d"] = dataclasses.asdict(drafter)
    raw["torch_dtype"] = next(t.dtype.name for t in tensors if t.key == "model.norm.weight")
    shards = _shards(tensors, max_shard_bytes)

    def fill(partial: Path) -> None:
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        _write_weights(partial, shards)
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (partial / name).write_bytes(data)

    if jax.process_count() == 1:
        write_folder(folder, fill)
    else:
        _write_together(folder, fill, shards)


def _write_together(
    folder: Path, fill: Callable[[Path], None], shards: list[list[_Tensor]]
) -> None:
    """The first process writes, the others give it their parts, and all learn how it ended.

    None waits for one that has failed: the first says so before and after the parts are gathered.
    """
    if not is_first():
        if told_by_first(False):
            _write_weights(None, shards)
        if not told_by_first(False):
            raise D3DError(f"the first process cannot write {folder}; its own error says why")
        return
    began = False

    def fill_together(partial: Path) -> None:
        nonlocal began
        began = told_by_first(True)
        fill(partial)

    try:
        write_folder(folder, fill_together)
    except D3DError:
        if not began:
            told_by_first(False)
        told_by_first(False)
        raise
    told_by_first(True)


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


def _write_weights(folder: Path | None, shards: list[list[_Tensor]]) -> None:
    """Writes every shard and the index; without a folder only gives this process's parts."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    failure: Exception | None = None
    for name, shard in zip(names, shards, strict=True):
        arrays = {t.key: t.to_host() for t in shard}
        if folder is None or failure is not None:
            continue  # other processes gather on
        try:
            save_file(arrays, folder / name, metadata={"format": "pt"})
            # safetensors makes its files private; a folder is as readable as the rest of it.
            (folder / name).chmod((folder / "config.json").stat().st_mode)
        except (OSError, SafetensorError) as error:
            failure = error
    if failure is not None:
        raise failure
    if folder is not None and len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
            "weight_map": {
                t.key: name for name, shard in zip(names, shards, strict=True) for t in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
