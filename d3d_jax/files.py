"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from d3d_jax.errors import D3DError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_file(path: Path) -> None:
    """Refuses a file that could not be written, before anything long is run (`D3DError`)."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise D3DError(f"cannot write the file {path}: its folder must exist and be writable")


def check_folder(path: Path) -> None:
    """Makes a folder and writes to it, before anything long is run (`D3DError` where it cannot)."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise D3DError(f"cannot write to the folder {path}: {error.strerror}") from None


def hold(folder: Path, alone: bool = False) -> IO[str]:
    """The lock of a folder, held together with others until it is closed or the process ends.

    Args:
      alone: nobody else may hold it at this moment.

    Raises:
      D3DError: somebody else does, or the folder cannot be written.
    """
    import fcntl  # Windows has none

    name = folder / ".lock"
    try:
        lock = name.open("a+")
    except OSError as error:
        raise D3DError(f"cannot write {name}: {error.strerror}") from error
    try:
        if alone:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise D3DError(
            f"another run is adding to {folder}; wait for its end or use another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    return lock


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
