"""The training dataset: token ids and prompt lengths as a TFDS dataset stored in ArrayRecord.

Building it from a folder of responses and opening it as a random-access source live here;
TensorFlow is never imported and no network is touched. Packing into rows is `train/packing.py`.

    DIR/dataset_info.json, features.json, *.array_record-*   what TFDS writes and reads
    DIR/metadata.json                                        {"manifest": ...} of the responses
    DIR/lengths.npz                                          per split: total, prompt, index, task,
                                                             and the split's digest
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from d3d_jax.config import DrafterConfig
from d3d_jax.errors import D3DError
from d3d_jax.train.responses import SPLITS, Manifest, read_manifest, read_responses

LENGTHS_NAME = "lengths.npz"
_INFO_NAME = "dataset_info.json"
_TABLES = {"total": np.int32, "prompt": np.int32, "index": np.int64, "task": np.str_}
_DIGEST = "digest"


class Lengths(NamedTuple):
    """Token counts of every document of a split, int32 [documents]."""

    total: np.ndarray
    prompt: np.ndarray


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Looks for no figures on TFDS's servers, for which it would leave a temporary folder."""


class D3dResponses(tfds.core.GeneratorBasedBuilder):
    """Prompt + response token ids of one target. Records are stored in hashed order of index."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. Left alone, TFDS looks for checksums beside this file, for which it
    # needs importlib_resources, a package it does not ask for.
    url_infos: ClassVar[dict[str, Any]] = {}

    def __init__(self, responses: Path, splits: list[str], **kwargs: Any) -> None:
        self._responses, self._splits = responses, splits
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        manifest = read_manifest(self._responses).to_json()
        # Built by hand: `dataset_info_from_configs` wants a package folder of metadata files.
        return _Info(
            builder=self,
            description="Responses of a target model, for training a drafter of it.",
            features=tfds.features.FeaturesDict(
                {
                    "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32),
                    "prompt_length": np.int32,
                    "index": np.int64,
                    "task": tfds.features.Text(),
                }
            ),
            metadata=tfds.core.MetadataDict(manifest=manifest),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict]]]:
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
        for response in read_responses(self._responses):
            if response.split == split:
                yield (
                    response.index,
                    {
                        "tokens": np.array(response.prompt_ids + response.response_ids, np.int32),
                        "prompt_length": len(response.prompt_ids),
                        "index": response.index,
                        "task": response.task,
                    },
                )


class ResponseDataset:
    """One split of a built dataset, by position; opened with `open_dataset`.

    `dataset[i]` is `{"tokens": int32 [T], "prompt_length": int}`. Without reading any record:
    `lengths` (see `Lengths`), `indices` (int64, the responses' own indices), `tasks` (text),
    `digest` (of the documents in their order, see `document_digest`).
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        manifest: Manifest,
        source: Sequence[dict[str, Any]],
        tables: dict[str, np.ndarray],
    ) -> None:
        self.folder, self.split, self.manifest = folder, split, manifest
        self.lengths = Lengths(tables["total"], tables["prompt"])
        self.indices = tables["index"]
        self.tasks = tables["task"]
        self.digest = str(tables[_DIGEST])
        self._source = source

    def __len__(self) -> int:
        return len(self.lengths.total)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"document {position} of {len(self)}")
        try:
            record = self._source[int(position)]
        except RuntimeError as error:  # array_record's, for a file that is damaged or gone
            raise _damaged(self.folder, error) from error
        tokens = record["tokens"]
        # array_record gives empty records, not an error, for a file cut at a block boundary.
        if tokens is None or len(tokens) != self.lengths.total[position]:
            raise _damaged(self.folder, f"document {position} is not as long as it was built")
        return {"tokens": tokens, "prompt_length": int(record["prompt_length"])}


def build_dataset(
    responses_folder: str | Path, out_dir: str | Path, *, overwrite: bool = False
) -> Path:
    """Converts a folder of responses into a dataset at `out_dir`, which appears whole or not.

    The result depends on the set of responses only, not on the order they were made in.

    Returns:
        `out_dir`.

    Raises:
        D3DError: no responses, a damaged one, two for one prompt, or `out_dir` exists and not
            `overwrite`.
    """
    responses, out = Path(responses_folder), Path(out_dir)
    if out.exists() and not overwrite:
        raise D3DError(f"{out} exists already; remove it or choose another place")
    if overwrite and out.exists() and not (out / _INFO_NAME).exists():
        raise D3DError(f"{out} exists and is not a dataset, so it is not overwritten")
    splits = _check_responses(responses)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            built = _run_builder(responses, splits, Path(scratch))
            _write_lengths(built)
            if out.exists():
                os.replace(out, Path(scratch) / "replaced")
            os.replace(built, out)
    except OSError as error:
        raise D3DError(f"cannot write the dataset {out}: {error.strerror or error}") from error
    return out


def open_dataset(folder: str | Path, split: str) -> ResponseDataset:
    """Opens one split of a dataset for random access; reads only its tables of lengths.

    Raises:
        D3DError: not a dataset of this format, damaged, or without that split.
    """
    folder = Path(folder)
    if not (folder / _INFO_NAME).is_file():
        raise D3DError(f"{folder} is not a dataset: it has no {_INFO_NAME}")
    try:
        # Any: TFDS's decorators hide the signature of as_data_source.
        builder: Any = tfds.builder_from_directory(str(folder))
        splits = builder.info.splits
        manifest = (builder.info.metadata or {})["manifest"]
        if split in splits:
            source, tables = builder.as_data_source(split=split), _read_lengths(folder, split)
            if len(source) != len(tables["total"]):
                raise ValueError(f"{len(source)} records, {len(tables['total'])} lengths")
    # TFDS, protobuf and NumPy each have their own errors for a damaged file.
    except Exception as error:
        raise _damaged(folder, error) from error
    if split not in splits:
        raise D3DError(f"{folder} has no split {split!r}; it has {', '.join(sorted(splits))}")
    dataset = ResponseDataset(
        folder, split, Manifest.from_json(manifest, str(folder / "metadata.json")), source, tables
    )
    # The last record of every file: a lost or cut file is found now, not hours into a run.
    for end in np.cumsum(splits[split].shard_lengths):
        dataset[int(end) - 1]
    return dataset


def check_data(drafter: DrafterConfig, dataset: ResponseDataset) -> None:
    """Refuses responses of another target, tokenizer or chat template than the drafter's.

    Raises:
      D3DError: naming what differs.
    """
    manifest = dataset.manifest
    for what, ours, theirs in (
        ("target", drafter.target, manifest.target),
        ("tokenizer", drafter.tokenizer_fingerprint, manifest.tokenizer_fingerprint),
        ("chat template", drafter.template_fingerprint, manifest.template_fingerprint),
    ):
        if ours != theirs:
            raise D3DError(
                f"{dataset.folder} holds responses with {what} {theirs:.80}, the drafter was made "
                f"for {ours:.80}"
            )


def _damaged(folder: Path, what: object) -> D3DError:
    return D3DError(f"the dataset {folder} is damaged, build it again: {what}")


def _check_responses(responses: Path) -> list[str]:
    """Reads all responses and returns the splits that occur."""
    splits = {response.split for response in read_responses(responses)}
    if not splits:
        raise D3DError(f"{responses} holds no responses yet")
    return [split for split in SPLITS if split in splits]


def _run_builder(responses: Path, splits: list[str], scratch: Path) -> Path:
    """Runs TFDS in `scratch` and returns the folder it wrote."""
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    # TFDS announces a download that does not take place.
    with contextlib.redirect_stdout(io.StringIO()), _no_progress_bars():
        builder = D3dResponses(responses, splits, data_dir=scratch)
        builder.download_and_prepare(download_config=config)
    return Path(builder.data_path)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    tfds.disable_progress_bar()
    try:
        yield
    finally:
        tfds.enable_progress_bar()


def _write_lengths(folder: Path) -> None:
    """Reads the new dataset once and writes its tables, in stored order."""
    builder: Any = tfds.builder_from_directory(str(folder))
    tables: dict[str, np.ndarray] = {}
    for split in builder.info.splits:
        rows, digest = [], hashlib.sha256()
        for record in builder.as_data_source(split=split):
            tokens, prompt = record["tokens"], int(record["prompt_length"])
            rows.append((len(tokens), prompt, int(record["index"]), record["task"].decode()))
            digest.update(document_digest(tokens, prompt))
        columns = zip(*rows, strict=True)
        for (name, dtype), column in zip(_TABLES.items(), columns, strict=True):
            tables[f"{split}/{name}"] = np.array(column, dtype)
        tables[f"{split}/{_DIGEST}"] = np.array(digest.hexdigest())
    np.savez_compressed(folder / LENGTHS_NAME, allow_pickle=False, **tables)


def document_digest(tokens: Sequence[int] | np.ndarray, prompt_length: int) -> bytes:
    """What one document is; a split's digest is the sha256 of its documents', in their order."""
    held = np.concatenate([[prompt_length], tokens]).astype("<i4")
    return hashlib.sha256(held.tobytes()).digest()


def _read_lengths(folder: Path, split: str) -> dict[str, np.ndarray]:
    with np.load(folder / LENGTHS_NAME, allow_pickle=False) as file:
        return {name: file[f"{split}/{name}"] for name in (*_TABLES, _DIGEST)}
