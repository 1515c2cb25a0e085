"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3d_jax.errors import D3DError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside a file's to write to, of its suffix; what was written then replaces it.

    Raises:
      D3DError: the file cannot be written.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            # Without this a power cut can leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise D3DError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file (`D3DError` where it cannot)."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, raw: Any, indent: int | None = 2) -> None:
    """Writes a JSON file (`D3DError` where it cannot)."""
    write_text(path, json.dumps(raw, indent=indent, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def picture(path: Path, size: tuple[float, float] = (8, 4.5)) -> Iterator[Figure]:
    """Yields a figure of so many inches, which is then saved (`D3DError` where it cannot be)."""
    # The object interface: pyplot would choose a window system and keep the figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120)
