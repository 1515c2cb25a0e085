"""The Hugging Face hub: a snapshot of one revision of a model, or some files of a dataset.

They lie in the hub client's own cache. Here: what a hub id with a revision looks like, the
download, and whether a cached copy is complete. Not here: the other sources of a model, the short
names (registry.py), and which files of a dataset hold what (train/prompt_datasets.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from d3d_jax.errors import D3DError

Kind = Literal["model", "dataset"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_DESCRIPTION = ["*.json", "*.jinja"]
_PATTERNS = ["*.safetensors", *_DESCRIPTION]
_IGNORED = ["*/*", "consolidated*"]  # exports to other formats, second copies of the weights

_COMPLETE_IT = "run this once where the hub can be reached to complete it"

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# What git allows in the name of a branch or tag, nearly; it becomes a path inside the cache.
_REVISION = re.compile(r"(?!/)(?!.*\.\.)[^\s~^:?*\[\\]+")


class HubError(D3DError):
    """The hub did not give what was asked of it; another source may."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `org/name` (a relative path may have it too)."""
    return _HUB_ID.fullmatch(name) is not None


def hub_snapshot(hub_id: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The snapshot folder of a hub model in the hub's own cache, downloaded if it is not there.

    Args:
      revision: a branch, tag or commit; None: the main branch.
      weights: False: only what describes the model is fetched and needed.

    Raises:
      D3DError: `revision` cannot be the name of one.
      HubError: the hub cannot be reached and holds no complete cached copy of this revision,
        refuses, knows no such revision, or the model lacks safetensors or tokenizer.json.
    """
    patterns = _PATTERNS if weights else _DESCRIPTION
    snapshot, online = _snapshot(hub_id, revision, "model", lambda info: patterns, _IGNORED)
    missing = missing_file(snapshot, weights)
    if missing is None:
        return snapshot
    what = _named(hub_id, revision)
    if online:
        raise HubError(f"the hub model {what} holds no {missing}; choose one that does")
    raise HubError(
        f"the hub does not answer and the cached copy of {what} is incomplete: {missing} is "
        f"missing; {_COMPLETE_IT}"
    )


def hub_files(
    hub_id: str, revision: str | None, choose: Callable[[list[str], bool], list[str]]
) -> tuple[str, list[Path]]:
    """Files of a hub dataset in the hub's own cache, downloaded if they are not there.

    Args:
      revision: a branch, tag or commit; None: the main branch.
      choose: of the names of its files, those that are wanted; it is told whether these are all
        names, or only those of the files that are cached.

    Returns:
      The commit, and the files in the order of `choose`.

    Raises:
      D3DError: of `choose`, or `revision` cannot be the name of one.
      HubError: the hub cannot be reached and its cache lacks a file, it refuses, or it knows no
        such dataset or revision.
    """
    chosen: list[str] = []

    def patterns(info: Any) -> list[str]:
        if info is None:
            names, all_known = _cached_names(hub_id, revision)
        else:
            names, all_known = [file.rfilename for file in info.siblings], True
        chosen.extend(choose(names, all_known))
        return chosen

    snapshot, _ = _snapshot(hub_id, revision, "dataset", patterns)
    return snapshot.name, [snapshot / name for name in chosen]


def _cached_names(hub_id: str, revision: str | None) -> tuple[list[str], bool]:
    """The files of a dataset, and whether that is all: it is where the client kept their list."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    where: Any = {"repo_type": "dataset", "revision": revision}
    try:
        return [file.path for file in get_cached_repo_tree(hub_id, **where)], True
    except CachedRepoTreeNotFoundError:
        folder = snapshot_download(hub_id, **where, allow_patterns=[], local_files_only=True)
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        return [file.relative_to(folder).as_posix() for file in files], False


def _snapshot(
    hub_id: str,
    revision: str | None,
    kind: Kind,
    patterns: Callable[[Any], Sequence[str]],
    ignored: Sequence[str] = (),
) -> tuple[Path, bool]:
    """The snapshot folder with what was not cached downloaded, and whether the hub answers.

    Args:
      patterns: of the files wanted, given what the hub says of the repository (None: no answer).
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if revision is not None and not _REVISION.fullmatch(revision):
        raise D3DError(f"{revision!r} is no revision of {hub_id}; give a branch, tag or commit")
    what, info = _named(hub_id, revision), None
    nothing, here = {
        "model": ("neither a folder nor a hub model is", f"there is no folder {hub_id} here, "),
        "dataset": ("no dataset of the hub is", ""),
    }[kind]
    try:
        info = _info(hub_id, revision, kind)
        with _progress():
            snapshot = snapshot_download(
                hub_id,
                repo_type=kind,
                revision=revision,
                allow_patterns=list(patterns(info)),
                ignore_patterns=list(ignored),
                local_files_only=info is None,
            )
    except D3DError:
        raise  # of `patterns`
    except GatedRepoError as error:
        raise HubError(f"{hub_id} is gated; accept its terms and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{nothing} called {hub_id}") from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"the hub {kind} {hub_id} has no branch, tag or commit {revision}"
        ) from error
    except Exception as error:  # the client passes on whatever its HTTP library raises
        if info is not None:
            raise HubError(f"the download of {what} from the hub failed ({error})") from error
        # The client knows the files of a copy it began itself, and says which it lacks.
        if isinstance(error, LocalEntryNotFoundError) and hasattr(error, "snapshot_path"):
            known = str(error).split(". ")[0]
            raise HubError(f"the hub does not answer: {known}; {_COMPLETE_IT}") from error
        raise HubError(f"{here}the hub does not answer and no copy of {what} is cached") from error
    return Path(snapshot), info is not None


def _named(hub_id: str, revision: str | None) -> str:
    return hub_id if revision is None else f"{hub_id}@{revision}"


def missing_file(snapshot: Path, weights: bool = True) -> str | None:
    """The first file without which the snapshot is no model, or does not describe one; or None.

    An interrupted download leaves whole files only, but not all of them.
    """
    from d3d_jax.models.safetensors_folder import INDEX, WEIGHTS

    needed = ["config.json"]
    if weights and not _is_drafter(snapshot):  # a drafter uses its target's tokenizer
        needed.append("tokenizer.json")
    if not weights:
        pass
    elif (snapshot / INDEX).is_file():
        try:
            needed += sorted(set(json.loads((snapshot / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HubError(f"{snapshot / INDEX} is damaged: {error}") from error
    else:
        needed.append(INDEX if any(snapshot.glob("*-of-*.safetensors")) else WEIGHTS)
    return next((name for name in needed if not (snapshot / name).is_file()), None)


def _is_drafter(snapshot: Path) -> bool:
    try:
        return "d3d" in json.loads((snapshot / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False  # whoever reads it will say what is wrong with it


def _info(hub_id: str, revision: str | None, kind: Kind) -> Any:
    """What the hub says of a repository; None: it does not answer.

    One question with a short time-out: some calls inside a download wait for ever.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        return ask(hub_id, revision=revision, timeout=_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception as error:  # off line by setting, no route, a proxy that refuses: all the same
        _log.debug("the hub does not answer: %s", error)
        return None


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Keeps the hub client's bars out of logs and pipes."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()
