"""Folders of measurements that take long: each finished part of one is kept in a file of its own.

A benchmark's:

settings.json                                 what is measured; anything else is refused
points/gsm8k-T0-concurrency1-repeat1-sync.json
steps-1.json, trace-async.json                what is measured once
benchmark.json                                everything, at the end
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from d3d_jax.errors import D3DError
from d3d_jax.files import write_json
from d3d_jax.infer.benchmark import Point
from d3d_jax.settings import difference

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
        return (
            f"{self.task}-T{self.temperature:g}-concurrency{self.concurrency}"
            f"-repeat{self.repeat + 1}-{self.mode}.json"
        )


class MeasuredFolder:
    """Parts of a measurement on disk, each whole or not there.

    Args:
      settings: JSON types; all that decides what is measured.
      what: is measured, as its error says it.

    Raises:
      D3DError: the folder cannot be written, or holds something measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], what: str):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise D3DError(f"cannot write to the folder {path}: {error.strerror}") from None
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        file = path / SETTINGS_NAME
        if not file.exists():
            write_json(file, settings, indent=1)
        elif other := difference(_read(file), settings):
            raise D3DError(
                f"{path} holds a {what} with {other}: give another --out, or the same settings to "
                "continue it"
            )

    def holds(self, name: str) -> bool:
        """Whether a part was measured."""
        return (self.path / f"{name}.json").exists()

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A part as JSON types: measured now, unless it was before."""
        file = self.path / f"{name}.json"
        if not self.holds(name):
            write_json(file, make(), indent=1)
        return _read(file)


class BenchmarkFolder(MeasuredFolder):
    """The folder of a benchmark; arguments and errors as of `MeasuredFolder`."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        super().__init__(path, settings, "benchmark")
        (path / "points").mkdir(exist_ok=True)

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

    def delete(self, keys: Iterable[Key]) -> None:
        """Forgets points."""
        for key in keys:
            self._file(key).unlink(missing_ok=True)

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
