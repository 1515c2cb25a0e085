"""The folder of a benchmark: its settings, and each finished point in a file of its own.

settings.json                                 what is measured; another benchmark is refused
points/gsm8k-T0-concurrency1-repeat1-sync.json
benchmark.json                                everything, at the end
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from d3d_jax.errors import D3DError
from d3d_jax.files import write_json
from d3d_jax.infer.benchmark import Point

SETTINGS_NAME, RESULT_NAME = "settings.json", "benchmark.json"


@dataclasses.dataclass(frozen=True)
class Key:
    """Which point: one task in one way, once."""

    task: str
    temperature: float
    concurrency: int
    repeat: int
    mode: str

    @property
    def file_name(self) -> str:
        """Of the point in the folder."""
        task = self.task.replace("/", "_")
        return (
            f"{task}-T{self.temperature:g}-concurrency{self.concurrency}"
            f"-repeat{self.repeat + 1}-{self.mode}.json"
        )


class BenchmarkFolder:
    """Points on disk, each whole or not there.

    Args:
      settings: JSON types; all that decides what is measured.

    Raises:
      D3DError: the folder cannot be written, or holds a benchmark with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        try:
            (path / "points").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise D3DError(f"cannot write to the folder {path}: {error.strerror}") from None
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        file = path / SETTINGS_NAME
        if not file.exists():
            write_json(file, settings, indent=1)
        elif (other := _difference(_read(file), settings)) is not None:
            name, theirs, ours = other
            raise D3DError(
                f"{path} holds a benchmark with {name} {_short(theirs)}, and this one has "
                f"{_short(ours)}: give another --out, or the same settings to continue it"
            )

    def read(self, key: Key) -> Point | str | None:
        """A point, why it failed, or None where it has not been measured."""
        file = self._file(key)
        if not file.exists():
            return None
        raw = _read(file)
        return raw["failed"] if "failed" in raw else Point.from_json(raw)

    def write(self, key: Key, point: Point | str) -> None:
        """Keeps a point, or why it failed."""
        raw = {"failed": point} if isinstance(point, str) else dataclasses.asdict(point)
        write_json(self._file(key), raw, indent=None)

    def finish(self, result: dict[str, Any]) -> Path:
        """Writes the result; returns its path."""
        write_json(self.path / RESULT_NAME, result, indent=1)
        return self.path / RESULT_NAME

    def _file(self, key: Key) -> Path:
        return self.path / "points" / key.file_name


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise D3DError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise D3DError(f"{file} is damaged; delete it to measure what it held again") from None


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting that differs, with both values."""
    for name in dict.fromkeys((*theirs, *ours)):
        if theirs.get(name) != ours.get(name):
            a, b = theirs.get(name), ours.get(name)
            if isinstance(a, dict) and isinstance(b, dict):
                inner = _difference(a, b)
                if inner is not None:
                    return f"{name} {inner[0]}", *inner[1:]
            return name.replace("_", " "), a, b
    return None


def _short(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.80}"
