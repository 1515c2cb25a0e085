"""The tensors of a folder by key, over one safetensors file or an index of shards.

Everything that can be wrong with the files is found from their headers, before any weight is read.
What the keys mean is `models.parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.errors import D3DError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64")


class SafetensorsFolder:
    """Opened files of one model.

    Raises:
      D3DError: a file is missing, truncated or damaged, or contradicts the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._slices: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        index = self._index()
        for name in sorted(set(index.values())) or [WEIGHTS]:
            path = folder / name
            if not path.exists():
                why = f"{folder} has no weights: {name} is missing"
                if index:
                    key = min(key for key, file in index.items() if file == name)
                    why = f"{folder / INDEX} names {name} (for {key}), and there is no such file"
                raise D3DError(why)
            handle = _open(path)
            for key in handle.keys():
                self._slices[key], self._files[key] = handle.get_slice(key), name
        for key, name in index.items():
            if (found := self._files.get(key)) != name:
                where = f"is in {found}" if found else "is nowhere"
                raise D3DError(f"{folder / INDEX} says {name} holds {key}, which {where}")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            index = json.loads(path.read_text())["weight_map"]
            if not index or not all(isinstance(name, str) for name in index.values()):
                raise ValueError("its weight_map names no files")
            return index
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise D3DError(f"{path} is damaged: {error}") from None

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def keys(self) -> set[str]:
        """All keys."""
        return set(self._files)

    def where(self, key: str) -> str:
        """`FILE: tensor KEY`, for sentences."""
        return f"{self.folder / self._files[key]}: tensor {key}"

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slices[key].get_shape())

    def dtype(self, key: str) -> np.dtype:
        """The type of a tensor."""
        return self.read(key, tuple(slice(0, 0) for _ in self.shape(key))).dtype

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor or a part of it; only the pages that hold the part are read."""
        whole = self._slices[key]
        return whole[index] if index else whole[:]

    def check(self, shapes: Mapping[str, tuple[int, ...]], integers: set[str]) -> None:
        """Compares the files with what they should hold.

        Args:
          shapes: key → shape, of every tensor there should be.
          integers: the keys that hold ids; all others are weights.

        Raises:
          D3DError: a tensor that is missing, of another shape or type, or too many.
        """
        for key, shape in shapes.items():
            if key not in self:
                raise D3DError(f"{self.folder}: tensor {key} is missing")
            if self.shape(key) != tuple(shape):
                raise D3DError(
                    f"{self.where(key)} has shape {self.shape(key)}, the config says {tuple(shape)}"
                )
            kinds = _INTEGERS if key in integers else _FLOATS
            if (kind := self._slices[key].get_dtype()) not in kinds:
                raise D3DError(
                    f"{self.where(key)} is stored as {kind}; expected is one of {', '.join(kinds)}"
                )
        if extra := sorted(self.keys() - shapes.keys()):
            raise D3DError(f"{self.where(extra[0])} has no place in the model of config.json")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        found, expected = path.stat().st_size, _expected_size(path)
        if expected is not None and found < expected:
            raise D3DError(
                f"{path} is truncated: it has {found} bytes, its header says {expected}"
            ) from None
        raise D3DError(f"{path} is damaged: {error}") from None


def _expected_size(path: Path) -> int | None:
    """Bytes of the whole file by its own header, or None where that is damaged too."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                return None
            header = json.loads(file.read(size))
        ends = [info["data_offsets"][1] for key, info in header.items() if key != "__metadata__"]
        return 8 + size + max(ends)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
