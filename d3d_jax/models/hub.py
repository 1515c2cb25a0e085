"""Models of the Hugging Face hub: the snapshot of one revision, in the hub client's own cache.

Here: what a hub id with a revision looks like, the download, and whether a cached copy is complete.
Not here: the other sources of a model, and the short names (registry.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from d3d_jax.errors import D3DError

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
    """The hub did not give a model; another source may."""


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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if revision is not None and not _REVISION.fullmatch(revision):
        raise D3DError(f"{revision!r} is no revision of {hub_id}; give a branch, tag or commit")
    what = hub_id if revision is None else f"{hub_id}@{revision}"
    online = False
    try:
        online = _answers(hub_id, revision)
        with _progress():
            snapshot = snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=_PATTERNS if weights else _DESCRIPTION,
                ignore_patterns=_IGNORED,
                local_files_only=not online,
            )
    except GatedRepoError as error:
        raise HubError(f"{hub_id} is gated; accept its terms and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"neither a folder nor a hub model is called {hub_id}") from error
    except RevisionNotFoundError as error:
        raise HubError(f"the hub model {hub_id} has no branch, tag or commit {revision}") from error
    except Exception as error:  # the client passes on whatever its HTTP library raises
        if online:
            raise HubError(f"the download of {what} from the hub failed ({error})") from error
        # The client knows the files of a copy it began itself, and says which it lacks.
        if isinstance(error, LocalEntryNotFoundError) and hasattr(error, "snapshot_path"):
            known = str(error).split(". ")[0]
            raise HubError(f"the hub does not answer: {known}; {_COMPLETE_IT}") from error
        raise HubError(
            f"there is no folder {hub_id} here, the hub does not answer and no copy of {what} is "
            "cached"
        ) from error
    missing = missing_file(Path(snapshot), weights)
    if missing is not None:
        if online:
            raise HubError(f"the hub model {what} holds no {missing}; choose one that does")
        raise HubError(
            f"the hub does not answer and the cached copy of {what} is incomplete: {missing} is "
            f"missing; {_COMPLETE_IT}"
        )
    return Path(snapshot)


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


def _answers(hub_id: str, revision: str | None) -> bool:
    """One question with a short time-out: some calls inside a download wait for ever."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(hub_id, revision=revision, timeout=_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception as error:  # off line by setting, no route, a proxy that refuses: all the same
        _log.debug("the hub does not answer: %s", error)
        return False
    return True


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
