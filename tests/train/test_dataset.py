"""The dataset: what goes in comes out, without TensorFlow, whole or not at all; damage is named."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from d3d_jax.errors import D3DError
from d3d_jax.train import dataset as dataset_module
from d3d_jax.train.dataset import build_dataset, open_dataset
from d3d_jax.train.responses import Manifest, Response, ResponseWriter, default_split

MANIFEST = Manifest(
    target="tiny",
    tokenizer_fingerprint="t" * 64,
    template_fingerprint="c" * 64,
    vocab_size=100,
    stop_ids=(2,),
    sampling={"greedy": True},
    max_new_tokens=16,
    prompts="made up",
)


def make_responses(count: int = 30) -> list[Response]:
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt, response = (generator.integers(3, 100, generator.integers(1, 12)) for _ in "pr")
        made.append(
            Response(
                index=index * 10,
                prompt_ids=prompt.tolist(),
                response_ids=[*response.tolist(), 2],
                finish_reason="stop",
                split=default_split(index),
                task=("math", "code", "")[index % 3],
            )
        )
    return made


def store(folder: Path, responses: list[Response]) -> Path:
    with ResponseWriter(folder, MANIFEST, shard_size=7) as writer:
        for response in responses:
            writer.add(**vars(response))
    return folder


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return store(tmp_path / "responses", make_responses())


@pytest.fixture
def built(tmp_path: Path, responses: Path) -> Path:
    return build_dataset(responses, tmp_path / "data" / "set")


def test_every_response_comes_back(built: Path) -> None:
    expected = {response.index: response for response in make_responses()}
    seen = set()
    for split in ("train", "validation"):
        opened = open_dataset(built, split)
        assert opened.manifest == MANIFEST
        for position in range(len(opened)):
            response = expected[int(opened.indices[position])]
            document = opened[position]
            assert set(document) == {"tokens", "prompt_length"}
            assert document["tokens"].dtype == np.int32
            assert document["tokens"].tolist() == response.prompt_ids + response.response_ids
            assert document["prompt_length"] == len(response.prompt_ids)
            assert opened.lengths.total[position] == len(document["tokens"])
            assert opened.lengths.prompt[position] == document["prompt_length"]
            assert (split, opened.tasks[position]) == (response.split, response.task)
            seen.add(response.index)
    assert seen == set(expected)


def test_lengths_are_int32_and_need_no_records(built: Path) -> None:
    lengths = open_dataset(built, "train").lengths
    assert lengths.total.dtype == lengths.prompt.dtype == np.int32
    assert len(lengths.total) == 27


def test_positions_outside_are_an_index_error(built: Path) -> None:
    opened = open_dataset(built, "validation")
    for position in (-1, 3):
        with pytest.raises(IndexError):
            opened[position]


def test_the_order_of_making_does_not_matter(tmp_path: Path, built: Path) -> None:
    shuffled = make_responses()
    np.random.default_rng(1).shuffle(shuffled)  # type: ignore[arg-type]
    other = build_dataset(store(tmp_path / "shuffled", shuffled), tmp_path / "other")
    for split in ("train", "validation"):
        first, second = open_dataset(built, split), open_dataset(other, split)
        np.testing.assert_array_equal(first.indices, second.indices)
        for position in range(len(first)):
            np.testing.assert_array_equal(first[position]["tokens"], second[position]["tokens"])
        assert first.digest == second.digest


def test_a_digest_tells_one_token_and_where_a_prompt_ends(tmp_path: Path, built: Path) -> None:
    def digest(index: int, **changes: list[int]) -> str:
        made = make_responses()
        made[index] = dataclasses.replace(made[index], **changes)
        folder = store(tmp_path / f"{len(list(tmp_path.iterdir()))}", made)
        return open_dataset(build_dataset(folder, folder / "set"), "train").digest

    first = next(r for r in make_responses() if r.split == "train")
    at, said = make_responses().index(first), first.response_ids
    other = digest(at, response_ids=[said[0] % 90 + 4, *said[1:]])
    moved = digest(at, prompt_ids=[*first.prompt_ids, said[0]], response_ids=said[1:])
    opened = open_dataset(built, "train")
    assert len({opened.digest, other, moved}) == 3
    documents = (opened[position] for position in range(len(opened)))
    held = (
        struct.pack(f"<{1 + len(d['tokens'])}i", d["prompt_length"], *d["tokens"])
        for d in documents
    )
    hashes = b"".join(hashlib.sha256(document).digest() for document in held)
    assert opened.digest == hashlib.sha256(hashes).hexdigest()


def test_the_folder_is_plain_tfds(built: Path) -> None:
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(built))
    assert builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD
    assert builder.info.splits["train"].num_examples == 27
    assert builder.info.metadata == {"manifest": MANIFEST.to_json()}


def test_no_tensorflow_no_network_no_home(tmp_path: Path, responses: Path) -> None:
    """In a process where opening a socket fails, with an empty home."""
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    program = f"""
import socket, sys
def refuse(*arguments, **named): raise AssertionError("network used")
socket.socket.connect = socket.getaddrinfo = refuse
from d3d_jax.train.dataset import build_dataset, open_dataset
build_dataset({str(responses)!r}, {str(tmp_path / "out")!r})
print(len(open_dataset({str(tmp_path / "out")!r}, "train")), "tensorflow" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch)}
    environment["PYTHONPATH"] = str(root)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    # Nothing but our own line: TFDS's announcements and progress bars are kept back.
    assert result.stdout == "27 False\n"
    assert "examples/s" not in result.stderr
    assert list(home.iterdir()) == list(scratch.iterdir()) == []


def test_an_existing_place_is_kept_unless_told(tmp_path: Path, built: Path) -> None:
    fewer = store(tmp_path / "fewer", make_responses(5))
    with pytest.raises(D3DError, match="exists already"):
        build_dataset(fewer, built)
    assert len(open_dataset(built, "train")) == 27
    build_dataset(fewer, built, overwrite=True)
    assert len(open_dataset(built, "train")) == 5
    with pytest.raises(D3DError, match="has no split 'validation'; it has train"):
        open_dataset(built, "validation")


def test_overwriting_spares_what_is_not_a_dataset(tmp_path: Path, responses: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("words")
    with pytest.raises(D3DError, match="is not a dataset"):
        build_dataset(responses, tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "words"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(
    tmp_path: Path, responses: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(folder: Path) -> None:
        raise failure

    monkeypatch.setattr(dataset_module, "_write_lengths", fail)
    with pytest.raises((D3DError, KeyboardInterrupt)) as caught:
        build_dataset(responses, tmp_path / "data" / "set")
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []


def test_empty_and_repeated_responses_are_refused(tmp_path: Path, responses: Path) -> None:
    ResponseWriter(tmp_path / "empty", MANIFEST)
    with pytest.raises(D3DError, match="holds no responses yet"):
        build_dataset(tmp_path / "empty", tmp_path / "out")
    shard = responses / "responses" / "part-00000.jsonl"
    other = shard.with_name("part-00099.jsonl")
    other.write_text(
        shard.read_text().replace('"finish_reason":"stop"', '"finish_reason":"length"')
    )
    said = "part-00099.jsonl, line 1: response 0 is another one in part-00000.jsonl; delete one"
    with pytest.raises(D3DError, match=said):
        build_dataset(responses, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path, responses: Path) -> None:
    for folder in (tmp_path / "absent", responses):
        with pytest.raises(D3DError, match="is not a dataset"):
            open_dataset(folder, "train")


@pytest.mark.parametrize(
    "damage",
    [
        "cut records",
        "shorter records",
        "no records",
        "no features",
        "cut info",
        "bad lengths",
        "no lengths",
    ],
)
def test_damage_is_found_on_opening(built: Path, damage: str) -> None:
    (records,) = built.glob("*train.array_record*")
    what, name = damage.split()
    path = {
        "records": records,
        "features": built / "features.json",
        "info": built / "dataset_info.json",
        "lengths": built / "lengths.npz",
    }[name]
    if what == "no":
        path.unlink()
    else:
        # Half of a small record file ends on a block boundary, its worst place to be cut.
        keep = path.stat().st_size // 2 if what in ("cut", "bad") else path.stat().st_size - 1
        path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(D3DError, match="is damaged, build it again"):
        open_dataset(built, "train")


def test_damage_after_opening_is_one_sentence(built: Path) -> None:
    opened = open_dataset(built, "train")
    (records,) = built.glob("*train.array_record*")
    data = bytearray(records.read_bytes())
    data[200:260] = bytes(60)
    records.write_bytes(data)
    with pytest.raises(D3DError, match="is damaged, build it again"):
        for position in range(len(opened)):
            opened[position]


def test_a_damaged_manifest_is_found_on_opening(built: Path) -> None:
    (built / "metadata.json").write_text('{"manifest": {"target": "tiny"}}')
    with pytest.raises(D3DError, match="'tokenizer_fingerprint' is missing"):
        open_dataset(built, "train")
