"""The tensors of a folder by key, over one safetensors file or an index of shards.

Everything that can be wrong with the files is found from their headers, before any weight is read.
What the keys mean is `models.parameters`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from d3d_jax.errors import D3DError

_MIB = 2**20
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
_INTEGERS = {"I32": np.int32, "I64": np.int64}
_READABLE = {name: np.dtype(kind) for name, kind in {**_FLOATS, **_INTEGERS}.items()}


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor lies.

    Attributes:
      kind: its type by the format's name.
      offset: of its first byte in the file.
    """

    file: str
    kind: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """Opened files of one model.

    Raises:
      D3DError: a file is missing, truncated or damaged, or contradicts the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._tensors: dict[str, _Stored] = {}
        self._mapped: dict[str, np.ndarray] = {}
        index = self._index()
        for name in sorted(set(index.values())) or [WEIGHTS]:
            path = folder / name
            if not path.exists():
                missing = INDEX if any(folder.glob("*-of-*.safetensors")) else name
                why = f"{folder} has no weights: {missing} is missing"
                if index:
                    key = min(key for key, file in index.items() if file == name)
                    why = f"{folder / INDEX} names {name} (for {key}), and there is no such file"
                raise D3DError(why)
            found = _open(path, name)
            if twice := sorted(found.keys() & self._tensors.keys()):
                raise D3DError(f"{path} holds {twice[0]}, and so does {self.where(twice[0])}")
            self._tensors |= found
        for key, name in index.items():
            found = self._tensors.get(key)
            if found is None or found.file != name:
                where = f"is in {found.file}" if found else "is nowhere"
                raise D3DError(f"{folder / INDEX} says {name} holds {key}, which {where}")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        # transformers, too, takes a whole file before an index.
        if not path.exists() or (self.folder / WEIGHTS).exists():
            return {}
        try:
            index = json.loads(path.read_text())["weight_map"]
            if not index or not all(isinstance(name, str) for name in index.values()):
                raise ValueError("its weight_map names no files")
            return index
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise D3DError(f"{path} is damaged: {error}") from None

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def keys(self) -> set[str]:
        """All keys."""
        return set(self._tensors)

    def where(self, key: str) -> str:
        """`FILE: tensor KEY`, for sentences."""
        return f"{self.folder / self._tensors[key].file}: tensor {key}"

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._tensors[key].shape

    def dtype(self, key: str) -> np.dtype:
        """The type of a tensor that `check` has let pass."""
        return _READABLE[self._tensors[key].kind]

    def read(
        self, key: str, index: tuple[slice, ...] | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """A tensor or a part of it; only the pages that hold the part are read.

        Args:
          out: C-contiguous array of the part's shape that is filled, cast to its type; None makes
            one of the tensor's type.

        Raises:
          D3DError: the file cannot be read, or has become shorter.
        """
        tensor, kind = self._tensors[key], self.dtype(key)
        index = tuple(slice(n) for n in tensor.shape) if index is None else index
        ends = [s.indices(n)[:2] for s, n in zip(index, tensor.shape, strict=True)]
        if out is not None and out.dtype == kind:
            part = out
        else:
            part = np.empty([stop - start for start, stop in ends], kind)
        # As integers: NumPy copies strided bfloat16 some twenty times more slowly.
        numbers = part.view(f"u{kind.itemsize}")
        try:
            if ends[1:] == [(0, size) for size in tensor.shape[1:]]:
                first = ends[0][0] * math.prod(tensor.shape[1:])
                offset = tensor.offset + first * kind.itemsize
                _read_into(numbers, self.folder / tensor.file, offset)
            elif part.size:
                numbers[...] = self._map(key, numbers.dtype)[index]
        except (OSError, ValueError) as error:
            raise D3DError(f"{self.where(key)} cannot be read: {error}") from None
        if out is None or out is part:
            return part
        out[...] = part
        return out

    def _map(self, key: str, kind: np.dtype) -> np.ndarray:
        # Kept for the parts of other devices: each would wait for the same pages to be mapped.
        if key not in self._mapped:
            tensor = self._tensors[key]
            path = self.folder / tensor.file
            self._mapped[key] = np.memmap(path, kind, "r", tensor.offset, tensor.shape)
        return self._mapped[key]

    def release(self) -> None:
        """Lets go of the pages that columns were read from; more can be read after it."""
        self._mapped.clear()

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
            if (kind := self._tensors[key].kind) not in kinds:
                raise D3DError(
                    f"{self.where(key)} is stored as {kind}; expected is one of {', '.join(kinds)}"
                )
        if extra := sorted(self.keys() - shapes.keys()):
            raise D3DError(f"{self.where(extra[0])} has no place in the model of config.json")


def _read_into(numbers: np.ndarray, path: Path, offset: int) -> None:
    """Fills a C-contiguous array; a mapped file would hold each page a second time."""
    left = numbers.data.cast("B") if numbers.size else memoryview(b"")
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            # One call reads 2 GiB at most.
            if not (count := file.readinto(left)):
                raise ValueError("the file ends before it")
            left = left[count:]


def _open(path: Path, name: str) -> dict[str, _Stored]:
    """The tensors of a file by key, from its header, which is checked against its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        start, header = _header(path)
    except (SafetensorError, OSError, ValueError) as error:
        found, expected = path.stat().st_size, _expected_size(path)
        if expected is not None and found < expected:
            raise D3DError(
                f"{path} is truncated: it has {found} bytes, its header says {expected}"
            ) from None
        raise D3DError(f"{path} is damaged: {error}") from None
    return {
        key: _Stored(name, info["dtype"], tuple(info["shape"]), start + info["data_offsets"][0])
        for key, info in header.items()
    }


def weights_digest(folder: Path) -> str:
    """What tells a folder's weights from others, without reading all of them: 16 hex digits.

    Of each file the name, the size, and the first and the last MiB.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in (0, max(0, size - _MIB)):
                file.seek(start)
                digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and each one's type, shape and offsets from there."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    return 8 + size, header


def _expected_size(path: Path) -> int | None:
    """Bytes of the whole file by its own header, or None where that is damaged too."""
    try:
        start, header = _header(path)
        return start + max(info["data_offsets"][1] for info in header.values())
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
