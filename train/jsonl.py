"""Reading JSON lines, plain or gzipped, with every damage named by file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from d3d_jax.errors import D3DError


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, JSON object); blank lines are skipped.

    Raises:
      D3DError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise D3DError(f"{path}, line {number}: not valid JSON ({error})") from error
                if not isinstance(record, dict):
                    raise D3DError(f"{path}, line {number}: not a JSON object")
                yield number, record
    except UnicodeDecodeError as error:
        raise D3DError(f"{path} is not UTF-8 text: {error}") from error
    except (EOFError, zlib.error) as error:
        raise D3DError(f"{path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise D3DError(f"cannot read {path}: {error.strerror or error}") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")  # type: ignore[return-value]
    return path.open(encoding="utf-8")
