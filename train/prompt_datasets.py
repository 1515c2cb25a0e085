"""Prompts from datasets: the Hugging Face hub's (parquet, JSONL) and TFDS's, without TensorFlow.

What a record means is `train/prompts.py`; the hub's cache is `d3d_jax/models/hub.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.errors import D3DError
from d3d_jax.models.hub import hub_files, is_hub_id
from d3d_jax.train.prompts import (
    STATED,
    PromptSource,
    Records,
    jsonl_records,
    parquet_records,
    prompt_column,
)

# data/train-00000-of-00006.parquet, main/test-00000-of-00001-5de1.parquet, train.jsonl.gz, and
# default/train/0000.parquet, as the hub converts data sets to parquet.
_FILE = re.compile(
    r"(?:(?P<folder>.+)/)?(?P<name>[^/]+?)(?:-(?P<number>\d+)-of-(?P<count>\d+)(?:-\w+)?)?"
    r"\.(?P<form>parquet|jsonl|jsonl\.gz)"
)
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def from_hub(spec: str, column: str | None, also: Sequence[str] = ()) -> PromptSource:
    """Prompts of `org/name[@revision][:split]`; a split of one of several parts is `part/split`.

    Args:
      also: further fields that its records shall have, where the files have them.

    Raises:
      D3DError: no such dataset, revision, split or column, the hub cannot be reached and the files
        are not in its cache, or a file is damaged.
    """
    repository, _, split = spec.partition(":")
    hub_id, at, revision = repository.partition("@")
    if not is_hub_id(hub_id):
        raise D3DError(f"hub:{spec} is not of the form hub:org/name[@revision][:split]")
    chosen = ""

    def choose(names: list[str], all_known: bool) -> list[str]:
        nonlocal chosen
        splits = splits_of(names)
        if not splits:
            raise D3DError(
                f"{hub_id} holds no parquet or JSONL files; the hub may have made some: try "
                f"hub:{hub_id}@refs/convert/parquet"
            )
        chosen = _chosen_split(hub_id, list(splits), split)
        _refuse_incomplete(f"{chosen} of {hub_id}", splits[chosen], all_known)
        return splits[chosen]

    commit, paths = hub_files(hub_id, revision if at else None, choose)
    where = f"hub:{hub_id}@{commit}:{chosen}" + (f", column {column}" if column else "")
    if paths[0].suffix == ".parquet":
        rows, records = parquet_records(paths, column, also)
    else:
        rows, records = sum(1 for _ in jsonl_records(paths)), lambda: jsonl_records(paths)
    return PromptSource(where, hub_id.split("/")[1], rows, records, column)


def splits_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each split of a hub dataset, as their names tell; parquet where there is any."""
    splits: dict[str, list[str]] = {}
    found = [match for name in sorted(names) if (match := _FILE.fullmatch(name))]
    parquet = any(match["form"] == "parquet" for match in found)
    for match in found:
        if parquet and match["form"] != "parquet":
            continue
        path = [*(match["folder"] or "").split("/"), match["name"]]
        if match["name"].isdigit():
            path.pop()
        split = "/".join(part for part in path if part not in ("", "data", "default"))
        splits.setdefault(split or match["name"], []).append(match.string)
    return splits


def _refuse_incomplete(split: str, files: Sequence[str], all_known: bool) -> None:
    """Refuses files that are not one whole series (D3DError): prompts would be lost, or come twice.

    Args:
      all_known: there are no others than these in the dataset.
    """
    found = [match for name in files if (match := _FILE.fullmatch(name))]
    numbered = found[0]["name"].isdigit()
    kinds = {(m["folder"], m["name"].isdigit() or m["name"], m["count"], m["form"]) for m in found}
    count = int(found[0]["count"] or 0)
    numbers = {int(match["number"] or 0) for match in found}
    if len(kinds) > 1 or (len(numbers) < len(found) and not numbered):
        raise D3DError(
            f"the files of {split} are several sets: {files[0]} and {files[-1]}; download one and "
            "give the file itself"
        )
    if count and numbers != set(range(count)):
        raise D3DError(f"only {len(found)} of {count} files of {split} are there")
    if numbered and not all_known:
        raise D3DError(
            f"the hub does not answer, and the names of the cached files of {split} do not tell "
            "whether they are all; run this once where the hub can be reached"
        )


def _chosen_split(name: str, splits: Sequence[str], asked: str) -> str:
    """The split that is asked for; without one, train or the only one."""
    if not asked and ("train" in splits or len(splits) == 1):
        return "train" if "train" in splits else splits[0]
    if asked not in splits:
        what = f"no split {asked!r}" if asked else "several splits"
        raise D3DError(f"{name} has {what}; choose one of {', '.join(splits)}")
    return asked


def from_tfds(spec: str, column: str | None) -> PromptSource:
    """Prompts of `name[/config][:version][:split]`, or `FOLDER[:split]`, already prepared.

    Raises:
      D3DError: no such dataset, split or column, or it is not stored as ArrayRecord.
    """
    import tensorflow_datasets as tfds

    name, _, split = spec.rpartition(":")
    if not name or _VERSION.fullmatch(split):
        name, split = spec, ""
    try:
        folder = Path(name).expanduser()
        builder: Any = (
            tfds.builder_from_directory(folder) if folder.is_dir() else tfds.builder(name)
        )
        splits, columns = list(builder.info.splits or ()), list(builder.info.features or ())
    # TFDS and protobuf each have their own errors; what it has not found it answers with a list.
    except Exception as error:
        raise D3DError(f"TFDS has no dataset {name} here: {str(error).splitlines()[0]}") from error
    if not splits:
        raise D3DError(
            f"the TFDS dataset {name} is not prepared here; "
            f"`tfds build {name} --file_format=array_record` does that where TensorFlow is"
        )
    split = _chosen_split(f"the TFDS dataset {name}", splits, split)
    try:
        column = prompt_column(columns, column)
        source = builder.as_data_source(split=split)
    except ValueError as error:
        raise D3DError(f"the TFDS dataset {name}: {error}") from error
    except Exception as error:
        raise D3DError(
            f"the TFDS dataset {name} cannot be read without TensorFlow, which needs "
            f"file_format=array_record: {str(error).splitlines()[0]}"
        ) from error
    kept = dict.fromkeys((column, *(name for name in STATED if name in columns)))

    def records() -> Records:
        for index in range(len(source)):
            try:
                record = source[index]
            except RuntimeError as error:  # array_record's
                raise D3DError(f"the TFDS dataset {name} is damaged: {error}") from error
            yield f"{name}, record {index}", {key: _plain(record[key]) for key in kept}

    what = f"tfds:{builder.info.full_name}:{split}, column {column}"
    return PromptSource(what, name.split("/")[-1], len(source), records, column)


def _plain(value: Any) -> Any:
    """Text and lists of what TFDS gives: bytes, arrays, and of a sequence of objects columns."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        columns = {key: _plain(column) for key, column in value.items()}
        lengths = {len(c) if isinstance(c, list) else None for c in columns.values()}
        if len(lengths) == 1 and None not in lengths:
            rows = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in rows]
        return columns
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
