"""Prompts, from a file, a dataset of the Hugging Face hub, or a TFDS dataset: `open_prompts`.

    prompts.jsonl, .jsonl.gz, .parquet       a file
    hub:org/name[@revision][:split]          parquet or JSONL files of a hub dataset
    tfds:name[/config][:split]               a TFDS dataset that is prepared here (or its folder)

A prompt is the first user turn of a conversation, with the system message before it if there is
one. What was said after that was said by another model; a drafter learns what its target says.

Files, and what a record means, are here; both kinds of datasets in `train/prompt_datasets.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d_jax.errors import D3DError
from d3d_jax.train.jsonl import json_lines
from d3d_jax.train.responses import SPLITS

# Where a record's prompt is looked for, unless a column is named; what says which task it is of.
COLUMNS = ("turns", "messages", "conversations", "prompt")
TASKS = ("topic", "task", "source")
# What is read of a record beside its prompt.
STATED = (*TASKS, "split")
# ShareGPT's names of the roles.
_ROLES = {"human": "user", "gpt": "assistant"}

# (where it is, for errors; its fields)
Records = Iterator[tuple[str, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The beginning of a conversation, up to the first reply.

    Attributes:
      system: the system message before the user's text, if there is one.
      split, task: where they are stated.
      turns: of the user in the whole conversation; only the first is the prompt.
      where: the line or row it was read from, for errors.
    """

    text: str
    system: str | None = None
    split: str | None = None
    task: str = ""
    turns: int = 1
    where: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Prompts by position, to be read from the first on as often as need be.

    Attributes:
      name: says which prompts these are, on any machine: with a hash, commit or version.
      label: short: what a folder is called after, and the task of prompts that state none.
      rows: how many records there are.
      records: begins to read them.
      column: field that holds the prompt; None: the first of `COLUMNS` that a record has.
      strict: a record without a prompt is an error, and so is a split that is neither train nor
        validation; else the record is passed over, and such a split says nothing.
    """

    name: str
    label: str
    rows: int
    records: Callable[[], Records]
    column: str | None = None
    strict: bool = False

    def read(
        self, wanted: Callable[[int], bool] = lambda index: True
    ) -> Iterator[tuple[int, Prompt]]:
        """Yields (index, prompt) of the wanted records, in order.

        Raises:
          D3DError: the source cannot be read, or is strict and a record holds no prompt.
        """
        for index, (where, record) in enumerate(self.records()):
            if not wanted(index):
                continue
            try:
                prompt = self.prompt_of(record)
            except ValueError as error:
                if self.strict:
                    raise D3DError(f"{where}: {error}") from error
                continue
            yield index, dataclasses.replace(prompt, where=where)

    def prompt_of(self, record: Mapping[str, Any]) -> Prompt:
        """The prompt of one of its records; raises ValueError as `prompts.prompt_of`."""
        if not self.strict and record.get("split") not in (None, *SPLITS):
            record = {**record, "split": None}
        return prompt_of(record, self.column)


def open_prompts(spec: str | Path, column: str | None = None) -> PromptSource:
    """Finds prompts; a dataset of the hub is downloaded if it is not in the hub client's cache.

    Args:
      spec: see the top of this module.
      column: field that holds the prompt; None: the first of `COLUMNS`.

    Raises:
      D3DError: there are none, the source cannot be reached or read, or it has no such split or
        column; of a file, any damaged line (named by its number).
    """
    kind, _, name = str(spec).partition(":")
    if kind in ("hub", "tfds") and name:
        # Their readers take time to import, and most prompts are in files.
        from d3d_jax.train import prompt_datasets

        source = {"hub": prompt_datasets.from_hub, "tfds": prompt_datasets.from_tfds}[kind](
            name, column
        )
        _refuse_without_prompts(source)
    else:
        source = _from_file(Path(spec), column)
    if not source.rows:
        raise D3DError(f"{spec} holds no prompts")
    return source


def _refuse_without_prompts(source: PromptSource) -> None:
    """Refuses a dataset none of whose first records holds a prompt: it is another column's."""
    wrong: D3DError | None = None
    for where, record in itertools.islice(source.records(), 100):
        try:
            source.prompt_of(record)
            return
        except ValueError as error:
            wrong = wrong or D3DError(f"{where}: {error}; another --column may hold prompts")
    if wrong is not None:
        raise wrong


def read_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file.

    Raises:
      D3DError: as for `open_prompts`.
    """
    return [prompt for _, prompt in open_prompts(path).read()]


def prompt_of(record: Mapping[str, Any], column: str | None = None) -> Prompt:
    """The prompt that a record stands for.

    Its column holds the user's turns `[TEXT, ...]`, one text, or a conversation of messages with
    role and content or, as ShareGPT has them, from and value.

    Raises:
      ValueError: one sentence on what is missing.
    """
    split = record.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f"split {split!r} is not train or validation")
    task = next((record[key] for key in TASKS if isinstance(record.get(key), str)), "")
    turns, system = user_turns(record, column)
    return Prompt(turns[0], system, split, task, len(turns))


def user_turns(
    record: Mapping[str, Any], column: str | None = None
) -> tuple[list[str], str | None]:
    """What the user says in a record's conversation, and the system message before it.

    Raises:
      ValueError: one sentence on what is missing.
    """
    name = prompt_column(list(record), column)
    value, system = record[name], None
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, Sequence) or not turns:
        raise ValueError(f'"{name}" must be a text, or a list of at least one turn or message')
    if all(isinstance(turn, Mapping) for turn in turns):
        messages = messages_of(turns)
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            raise ValueError(f'"{name}" has no turn of a user')
        first = roles.index("user")
        system = next((m["content"] for m in messages[:first] if m["role"] == "system"), None)
        turns = [message["content"] for message in messages if message["role"] == "user"]
    if not all(isinstance(turn, str) for turn in turns) or not turns[0]:
        raise ValueError(f'"{name}" must begin with a text and hold nothing else')
    return list(turns), system


def messages_of(conversation: Sequence[Any]) -> list[dict[str, str]]:
    """A conversation as messages with role and content, whichever names it has for them.

    Raises:
      ValueError: a message is something else.
    """
    messages = []
    for message in conversation:
        if not isinstance(message, Mapping):
            raise ValueError("a message is not an object with role and content")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message needs role and content, or from and value, both texts")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def prompt_column(names: Sequence[str], column: str | None) -> str:
    """The field of a record that holds its prompt.

    Raises:
      ValueError: there is none of this name, or none of the usual ones.
    """
    if column is None:
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise ValueError(
                f"it has none of the fields {', '.join(COLUMNS)}, but {', '.join(names)}; choose "
                "one with --column"
            )
    if column not in names:
        raise ValueError(f"it has no field {column!r}, but {', '.join(names)}")
    return column


def parquet_records(
    paths: Sequence[Path], column: str | None, also: Sequence[str] = ()
) -> tuple[int, Callable[[], Records]]:
    """How many rows parquet files hold, and a reader of the columns that make up a prompt.

    Args:
      also: columns to read beside those, where a file has them.

    Raises:
      D3DError: a file cannot be read or lacks the column.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    rows, kept = 0, []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                rows += file.metadata.num_rows
                names = file.schema_arrow.names
            kept.append(
                [prompt_column(names, column), *(n for n in (*STATED, *also) if n in names)]
            )
        except (OSError, pyarrow.ArrowException) as error:
            raise D3DError(f"cannot read {path}: {error}") from error
        except ValueError as error:
            raise D3DError(f"{path.name}: {error}") from error

    def records() -> Records:
        for path, names in zip(paths, kept, strict=True):
            number = 0
            try:
                with parquet.ParquetFile(path) as file:
                    for batch in file.iter_batches(1024, columns=list(dict.fromkeys(names))):
                        for record in batch.to_pylist():
                            number += 1
                            yield f"{path.name}, row {number}", record
            except (OSError, pyarrow.ArrowException) as error:
                raise D3DError(f"{path} is damaged: {error}") from error

    return rows, records


def jsonl_records(paths: Sequence[Path]) -> Records:
    """The records of JSONL files, one after the other."""
    for path in paths:
        for number, record in json_lines(path):
            yield f"{path}, line {number}", record


def file_name(path: Path) -> str:
    """What a file is called in manifests: its hash keeps a run from going on with other lines.

    Raises:
      D3DError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise D3DError(f"cannot read {path}: {error.strerror}") from None
    return f"{path.name} sha256:{digest[:16]}"


def _from_file(path: Path, column: str | None) -> PromptSource:
    if path.suffix == ".parquet":
        rows, records = parquet_records([path], column)
    else:
        rows, records = 0, lambda: jsonl_records([path])
    name = file_name(path) + (f", column {column}" if column else "")
    source = PromptSource(name, path.name.split(".")[0], rows, records, column, strict=True)
    # All are looked at before any is answered, hours later.
    return dataclasses.replace(source, rows=sum(1 for _ in source.read()))
