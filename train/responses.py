"""Target responses on disk while they are being made: a manifest beside atomic JSONL shards.

Reading, writing and resuming live here. Making the responses (`train/respond.py`), those made
elsewhere (`train/imports.py`), prompts and the training dataset (`train/dataset.py`) do not.

    FOLDER/manifest.json                what was asked of which target (`Manifest`)
    FOLDER/responses/part-00000.jsonl   one `Response` a line; a shard appears whole or not at all
    FOLDER/.lock                        held while a run adds to the folder
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from d3d_jax.errors import D3DError
from d3d_jax.files import hold, write_text
from d3d_jax.train.jsonl import json_lines

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "validation")
FINISH_REASONS = ("stop", "length")

_VALIDATION_EVERY = 10
# The most that a process killed without a warning loses, beside what fills no shard.
_FLUSH_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a set of responses is: equal manifests mean responses that may be mixed.

    `max_new_tokens` counts response tokens, the stop token included; of imported responses it is
    the length of the longest. `sampling` is
    `{"greedy": True}`, or names the temperature, filters and seed. `prompts` names the source.
    `thinking` is what the chat template was told (None: nothing), `system` the system message
    that was put before each prompt.
    """

    target: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    max_new_tokens: int
    prompts: str
    thinking: bool | None = None
    system: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
        # As JSON will give it back, so that a manifest read from disk compares equal.
        object.__setattr__(self, "sampling", json.loads(json.dumps(dict(self.sampling))))
        if self.format_version != FORMAT_VERSION:
            raise D3DError(
                f"responses have format_version {self.format_version}, this program reads "
                f"{FORMAT_VERSION}; make them again with this version"
            )
        if self.vocab_size < 1 or self.max_new_tokens < 1:
            raise D3DError("a manifest needs vocab_size >= 1 and max_new_tokens >= 1")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], where: str) -> Manifest:
        """Rebuilds a manifest from parsed JSON; `where` names the file in errors (D3DError)."""
        try:
            _check_fields(cls, fields)
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise D3DError(f"{where} is damaged: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "stop_ids": list(self.stop_ids)}


@dataclasses.dataclass(frozen=True)
class Response:
    """One answer of the target. `response_ids` ends with the stop token iff finish is "stop"."""

    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    split: str
    task: str = ""

    def check(self, vocab_size: int) -> None:
        """Raises ValueError, one sentence, when a field is outside its meaning."""
        if type(self.index) is not int or self.index < 0:
            raise ValueError(f"index {self.index!r} is not a whole number >= 0")
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r} is not one of {', '.join(SPLITS)}")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"finish_reason {self.finish_reason!r} is not one of {', '.join(FINISH_REASONS)}"
            )
        if not isinstance(self.task, str):
            raise ValueError(f"task {self.task!r} is not text")
        for name, ids in (("prompt_ids", self.prompt_ids), ("response_ids", self.response_ids)):
            if not isinstance(ids, list) or not ids:
                raise ValueError(f"{name} is not a list of at least one token id")
            # Whole-list tests first: a token at a time would dominate reading a large set.
            if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= vocab_size:
                bad = next(i for i in ids if type(i) is not int or not 0 <= i < vocab_size)
                raise ValueError(
                    f"{name} holds {bad!r}, which is not a token id below {vocab_size}"
                )


class ResponseWriter:
    """Adds responses to a folder, `shard_size` a shard; what was flushed survives any crash.

    Opening a folder that already holds responses resumes it: `done` has the indices present.
    Leaving the context flushes, also on Ctrl-C, and lets go of the folder; a slow writer flushes
    every half minute.

    Several processes may write at once: each is a `part` of as many `parts`, and the first has
    opened the folder before the others do. The number may be another the next time.

    Raises:
        D3DError: the folder was made with another manifest, is damaged, cannot be written, or
            another run is adding to it.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: Manifest,
        shard_size: int = 256,
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        if shard_size < 1:
            raise D3DError(f"shard_size is {shard_size}, it must be at least 1")
        self.folder = Path(folder)
        self.manifest = manifest
        self.shard_size = shard_size
        self._pending: list[Response] = []
        self._flushed = time.monotonic()
        if part == 0:
            self._lock = _prepare_folder(self.folder, manifest)
        else:
            _refuse_other_manifest(self.folder, read_manifest(self.folder), manifest)
            self._lock = hold(self.folder)
        shards = _shards(self.folder)
        last = _shard_number(shards[-1]) if shards else -1
        # Numbers of its own, whatever the others have written or will: those that leave `part`.
        self._next_shard, self._parts = last + 1 + (part - last - 1) % parts, parts

    @functools.cached_property
    def done(self) -> set[int]:
        """Indices of the responses that are there; asked for first, it reads the folder."""
        return {response.index for response in read_responses(self.folder)}

    def add(
        self,
        index: int,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        finish_reason: str,
        split: str,
        task: str = "",
    ) -> None:
        """Queues one response and writes a shard when `shard_size` are waiting.

        Raises:
            D3DError: the index is there already, or a field is outside its range.
        """
        response = Response(
            int(index),
            [int(i) for i in prompt_ids],
            [int(i) for i in response_ids],
            finish_reason,
            split,
            task,
        )
        try:
            response.check(self.manifest.vocab_size)
        except ValueError as error:
            raise D3DError(f"response {index} cannot be stored: {error}") from error
        if response.index in self.done:
            raise D3DError(f"response {index} is already in {self.folder}")
        self.done.add(response.index)
        self._pending.append(response)
        waited = time.monotonic() - self._flushed
        if len(self._pending) >= self.shard_size or waited > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what is queued as one shard, smaller than `shard_size` if need be."""
        if not self._pending:
            return
        lines = [json.dumps(vars(response), separators=(",", ":")) for response in self._pending]
        text = "\n".join(lines) + "\n"
        while not _write_new(
            self.folder / "responses" / f"part-{self._next_shard:05d}.jsonl", text
        ):
            self._next_shard += self._parts
        # An interrupt before this line writes the same responses again, of which readers drop one.
        self._pending = []
        self._flushed = time.monotonic()

    def __enter__(self) -> ResponseWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.flush()
        finally:
            self._lock.close()


def _prepare_folder(folder: Path, manifest: Manifest) -> IO[str]:
    """Makes a folder that responses of this manifest can be added to; returns its lock, held."""
    try:
        (folder / "responses").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise D3DError(f"cannot create {folder}: {error.strerror}") from error
    # Nobody else may hold it now, and the other parts of this run may from here on. On a file
    # system without locks, too, no shard is written over another.
    lock = hold(folder, alone=True)
    # A manifest without responses is what a run left that failed before its first.
    if (folder / MANIFEST_NAME).exists() and _shards(folder):
        _refuse_other_manifest(folder, read_manifest(folder), manifest)
    else:
        text = json.dumps(manifest.to_json(), indent=2, sort_keys=True) + "\n"
        write_text(folder / MANIFEST_NAME, text)
    return lock


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a responses folder. Raises D3DError when it is absent or damaged."""
    path = Path(folder) / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise D3DError(f"{folder} is not a folder of responses: no readable {path.name}") from error
    except ValueError as error:
        raise D3DError(f"{path} is damaged: {error}") from error
    return Manifest.from_json(fields, str(path))


def read_responses(folder: str | Path) -> Iterator[Response]:
    """Yields the responses of a folder, in the order they were written; a copy of one is dropped.

    Raises:
        D3DError: no manifest, a damaged line (named by file and line number), or a second answer
            to one prompt.
    """
    vocab_size = read_manifest(folder).vocab_size
    seen: dict[int, tuple[int, Path]] = {}
    for shard in _shards(Path(folder)):
        for number, record in json_lines(shard):
            try:
                _check_fields(Response, record)
                response = Response(**record)
                response.check(vocab_size)
            except ValueError as error:
                raise D3DError(f"{shard}, line {number}: {error}") from error
            # Not the response itself, which would hold the whole set in memory.
            tokens = map(tuple, (response.prompt_ids, response.response_ids))
            content = hash((*tokens, response.finish_reason, response.split))
            if response.index not in seen:
                seen[response.index] = content, shard
                yield response
            elif seen[response.index][0] != content:
                raise D3DError(
                    f"{shard}, line {number}: response {response.index} is another one in "
                    f"{seen[response.index][1].name}; delete one of the two files and give the "
                    "command again"
                )


def default_split(index: int) -> str:
    """The split of a response whose source states none: the last of each ten is held out."""
    held_out = index % _VALIDATION_EVERY == _VALIDATION_EVERY - 1
    return "validation" if held_out else "train"


def _write_new(path: Path, text: str) -> bool:
    """Writes a file unless its name is taken or being written by another: then False."""
    claim = path.with_name(f".{path.name}.tmp")
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise D3DError(f"cannot write {path}: {error.strerror}") from error
    try:
        if path.exists():
            return False
        write_text(path, text)
        return True
    finally:
        claim.unlink()


def _check_fields(cls: type, record: object) -> None:
    """Raises ValueError unless `record` has the fields of a dataclass and no others."""
    if not isinstance(record, Mapping):
        raise ValueError("it is not a JSON object")
    fields = dataclasses.fields(cls)
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in record:
            raise ValueError(f"the field {field.name!r} is missing")
    if unknown := sorted(set(record) - {field.name for field in fields}):
        raise ValueError(f"the field {unknown[0]!r} is unknown")


def _refuse_other_manifest(folder: Path, present: Manifest, asked: Manifest) -> None:
    for field in dataclasses.fields(Manifest):
        old, new = getattr(present, field.name), getattr(asked, field.name)
        if old != new:
            raise D3DError(
                f"{folder} holds responses made with {field.name} = {old!r}, not {new!r}; "
                "use another folder or the settings it was made with"
            )


def _shards(folder: Path) -> list[Path]:
    # By number, not by name: after part-99999 names grow a digit.
    return sorted((folder / "responses").glob("part-*.jsonl"), key=_shard_number)


def _shard_number(shard: Path) -> int:
    digits = shard.stem.removeprefix("part-")
    if not digits.isdigit():
        raise D3DError(f"{shard} is not named part-NUMBER.jsonl; move it out of the folder")
    return int(digits)
