"""Prompts of files, hub datasets and TFDS datasets: which they are, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from huggingface_hub import constants

from d3d_jax.errors import D3DError
from d3d_jax.train.prompt_datasets import _plain, splits_of
from d3d_jax.train.prompts import Prompt, open_prompts, prompt_of, read_prompts


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "é"]}\n\n{"turns": ["b"], "split": "validation", "id": 3}\n')
    assert read_prompts(path) == [Prompt("a", turns=2), Prompt("b", split="validation")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ["a"', "line 2: not valid JSON"),
        ('{"turns": []}', "line 1"),
        ('{"turns": [1]}', "line 1"),
        ('{"text": "a"}', "line 1: it has none of the fields turns, .*, but text; choose one with"),
        ('{"messages": [{"role": "user"}]}', "line 1: a message needs role and content"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "no turn of a user"),
        ('{"turns": ["a"], "split": "test"}', "line 1: split 'test'"),
        ("", "holds no prompts"),
    ],
)
def test_damaged_prompts_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(D3DError, match=message):
        read_prompts(path)


def test_prompts_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(D3DError, match="not UTF-8"):
        read_prompts(tmp_path / "prompts.jsonl")


SYSTEM, HUMAN = {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}
GPT, AGAIN = {"from": "gpt", "value": "So."}, {"from": "human", "value": "And?"}


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Why?"}, Prompt("Why?")),
        ({"turns": ["Why?", "And?"], "topic": "x"}, Prompt("Why?", task="x", turns=2)),
        ({"conversations": [HUMAN, GPT], "source": "x"}, Prompt("Why?", task="x")),
        ({"conversations": [SYSTEM, HUMAN, GPT, AGAIN]}, Prompt("Why?", "Be brief.", turns=2)),
        ({"conversations": [GPT, AGAIN]}, Prompt("And?")),
        ({"messages": [{"role": "user", "content": "Why?", "name": None}]}, Prompt("Why?")),
    ],
)
def test_a_prompt_is_the_first_turn_of_a_user(record, prompt):
    assert prompt_of(record) == prompt


def test_a_named_column_and_an_unknown_one(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "Why?", "prompt": "no"}\n')
    source = open_prompts(path, "question")
    assert list(source.read()) == [(0, Prompt("Why?"))]
    assert source.name != open_prompts(path).name
    with pytest.raises(D3DError, match="line 1: it has no field 'asked', but question, prompt"):
        open_prompts(path, "asked")


ROWS = [
    {"conversations": [SYSTEM, HUMAN, GPT], "source": "a", "id": 1},
    {"conversations": [], "source": "b", "id": 2},
    {"conversations": [HUMAN, GPT, AGAIN], "source": "b", "id": 3},
]
ASKED = [(0, Prompt("Why?", "Be brief.", task="a")), (2, Prompt("Why?", task="b", turns=2))]
COMMIT = "a" * 40


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The files of the dataset org/name in the hub client's cache, while the hub is off line."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "datasets--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    files = repository / "snapshots" / COMMIT
    parquet(files / "data/train-00000-of-00002.parquet", ROWS[:2])
    parquet(files / "data/train-00001-of-00002.parquet", ROWS[2:])
    parquet(files / "data/test-00000-of-00001.parquet", ROWS[2:])
    return files


def test_a_hub_dataset_is_read_from_its_cache(hub):
    source = open_prompts("hub:org/name")
    assert source.name == f"hub:org/name@{COMMIT}:train"
    assert (source.rows, source.label) == (3, "name")
    assert list(source.read()) == ASKED, "the row without a turn is passed over"
    assert list(source.read(lambda index: index == 2)) == ASKED[1:]
    assert open_prompts(f"hub:org/name@{COMMIT}:test").rows == 1


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        ("hub:org/name:dev", None, "org/name has no split 'dev'; choose one of test, train"),
        ("hub:org/name", "asked", "no field 'asked', but conversations, source, id"),
        ("hub:org/name", "source", None),
        ("hub:org/name", "id", 'row 1: "id" must be a text'),
        ("hub:org/name@v2", None, "the hub does not answer and no copy of org/name@v2 is cached"),
        ("hub:org/other", None, "the hub does not answer and no copy of org/other is cached"),
        ("hub:name", None, "not of the form hub:org/name"),
    ],
)
def test_a_hub_dataset_that_is_not_there_is_refused(hub, spec, column, message):
    if message is None:
        assert [prompt.text for _, prompt in open_prompts(spec, column).read()] == ["a", "b", "b"]
        return
    with pytest.raises(D3DError, match=message):
        open_prompts(spec, column)


def test_a_half_downloaded_or_damaged_split_is_refused(hub):
    (hub / "data/test-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(D3DError, match=r"cannot read .*test-00000-of-00001\.parquet"):
        open_prompts("hub:org/name:test")
    (hub / "data/train-00001-of-00002.parquet").unlink()
    with pytest.raises(D3DError, match="only 1 of 2 files of train of org/name are there"):
        open_prompts("hub:org/name")


def test_numbered_files_are_all_there_only_where_the_hub_says_so(hub):
    """A cache may hold some of them, under the same commit as all."""
    for number in (0, 2):
        parquet(hub / f"default/part/{number:04d}.parquet", ROWS)
    with pytest.raises(D3DError, match="do not tell whether they are all; run this once where"):
        open_prompts("hub:org/name:part")
    files = {f"default/part/{n:04d}.parquet": {"size": 1, "blob_id": "0"} for n in (0, 2)}
    trees = hub.parents[1] / "trees"
    trees.mkdir()
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert open_prompts("hub:org/name:part").rows == 6


@pytest.mark.parametrize(
    ("split", "more"),
    [
        ("train", "default/train/0000.parquet"),
        ("train", "train-00000-of-00001.parquet"),
        ("test", "data/test.parquet"),
        ("test", "data/test-00000-of-00001-5de1.parquet"),
    ],
)
def test_a_split_in_two_places_is_refused(hub, split, more):
    parquet(hub / more, ROWS)
    with pytest.raises(D3DError, match=f"the files of {split} of org/name are several sets"):
        open_prompts(f"hub:org/name:{split}")
    other = {"train": "test", "test": "train"}[split]
    assert open_prompts(f"hub:org/name:{other}").rows == len(ROWS) - 2 * (other == "test")


def test_the_split_of_a_record_is_read_from_every_form(hub, tmp_path):
    rows = [{"prompt": "a", "split": "validation"}, {"prompt": "b", "split": None}]
    parquet(tmp_path / "mine.parquet", rows)
    want = [Prompt("a", split="validation"), Prompt("b")]
    assert read_prompts(tmp_path / "mine.parquet") == want
    (hub / "data/lines.jsonl").write_text('{"prompt": "a", "split": "test"}\n')
    for path in hub.rglob("*.parquet"):
        path.unlink()
    assert list(open_prompts("hub:org/name:lines").read()) == [(0, Prompt("a"))]
    parquet(tmp_path / "mine.parquet", [{"prompt": "a", "split": "test"}])
    with pytest.raises(D3DError, match="row 1: split 'test' is not train or validation"):
        read_prompts(tmp_path / "mine.parquet")


def test_columns_of_unequal_lengths_are_no_rows():
    assert _plain({"a": [1, 2], "b": [1]}) == {"a": [1, 2], "b": [1]}
    assert _plain({"a": [1, 2], "b": [b"x", b"y"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_only_the_files_of_the_split_are_downloaded(hub, monkeypatch):
    asked = {}

    def download(hub_id, **options):
        asked.update(options)
        return str(hub)

    names = [str(path.relative_to(hub)) for path in hub.rglob("*.parquet")]
    siblings = [type("Sibling", (), {"rfilename": name}) for name in ["README.md", *names]]
    info = type("Info", (), {"siblings": siblings})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **options: info)
    assert list(open_prompts("hub:org/name").read()) == ASKED
    assert asked["allow_patterns"] == sorted(name for name in names if "train" in name)
    assert (asked["repo_type"], asked["local_files_only"]) == ("dataset", False)


def test_splits_by_the_names_of_files():
    names = ["README.md", "default/train/0000.parquet", "default/train/0001.parquet"]
    names += ["main/test-00000-of-00001-5de1.parquet", "data/train_sft-00000-of-00001.parquet"]
    assert splits_of([*names, "train.jsonl"]) == {
        "train": names[1:3],
        "main/test": names[3:4],
        "train_sft": names[4:],
    }
    assert splits_of(["README.md", "a.jsonl.gz"]) == {"a": ["a.jsonl.gz"]}


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory) -> Path:
    """A data folder of TFDS with the dataset `talk`, which no code describes."""

    class Talk(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = {}  # noqa: RUF012

        def _info(self):
            turns = tfds.features.Sequence(
                {"from": tfds.features.Text(), "value": tfds.features.Text()}
            )
            text = tfds.features.Text()
            features = {"conversations": turns, "source": text, "split": text}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for row in ROWS:
                held_out = {"split": "validation" if row["id"] == 3 else "test"}
                names = ("conversations", "source")
                yield row["id"], {name: row[name] for name in names} | held_out

    folder = tmp_path_factory.mktemp("tfds")
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    Talk(data_dir=folder, file_format="array_record").download_and_prepare(download_config=config)
    return folder


def test_a_tfds_dataset_is_read_by_name_or_folder(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tfds_folder))
    for spec in (
        "tfds:talk",
        "tfds:talk:1.0.0",
        "tfds:talk:train",
        f"tfds:{tfds_folder}/talk/1.0.0",
    ):
        source = open_prompts(spec)
        assert source.name == "tfds:talk/1.0.0:train, column conversations" and source.rows == 3
        found = [prompt for _, prompt in source.read()]
        (_, first), (_, second) = ASKED
        want = [first, dataclasses.replace(second, split="validation")]
        assert sorted(found, key=lambda p: p.task) == want


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        ("tfds:nonesuch", None, "TFDS has no dataset nonesuch here: Dataset nonesuch not found"),
        (
            "tfds:ai2_arc",
            None,
            "not prepared here; `tfds build ai2_arc --file_format=array_record`",
        ),
        ("tfds:talk:test", None, "talk has no split 'test'; choose one of train"),
        ("tfds:talk", "asked", "no field 'asked', but conversations, source, split"),
    ],
)
def test_a_tfds_dataset_that_is_not_there_is_refused(
    tfds_folder, monkeypatch, spec, column, message
):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tfds_folder))
    with pytest.raises(D3DError, match=message):
        open_prompts(spec, column)
