"""Responses on disk: round trip, resumption, atomic shards, parts of several, refusal of damage."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from d3d_jax import files
from d3d_jax.errors import D3DError
from d3d_jax.train import responses
from d3d_jax.train.responses import (
    Manifest,
    Response,
    ResponseWriter,
    default_split,
    read_manifest,
    read_responses,
)

MANIFEST = Manifest(
    target="tiny",
    tokenizer_fingerprint="t" * 64,
    template_fingerprint="c" * 64,
    vocab_size=100,
    stop_ids=(2, 3),
    sampling={"greedy": True},
    max_new_tokens=8,
    prompts="made up",
)


def fill(folder: Path, indices: range, shard_size: int = 4, manifest: Manifest = MANIFEST) -> None:
    with ResponseWriter(folder, manifest, shard_size) as writer:
        for index in indices:
            if index not in writer.done:
                writer.add(index, [1, index % 100], [5, 6, 2], "stop", default_split(index))


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "responses").glob("[!.]*"))


def test_round_trip(tmp_path: Path) -> None:
    with ResponseWriter(tmp_path, MANIFEST, shard_size=2) as writer:
        writer.add(7, [1, 4], [9, 2], "stop", "train", task="gsm8k")
        writer.add(3, (1,), (9,), "length", "validation")
    assert list(read_responses(tmp_path)) == [
        Response(7, [1, 4], [9, 2], "stop", "train", "gsm8k"),
        Response(3, [1], [9], "length", "validation", ""),
    ]
    assert read_manifest(tmp_path) == MANIFEST


def test_sampling_settings_survive_json(tmp_path: Path) -> None:
    manifest = dataclasses.replace(MANIFEST, sampling={"temperature": 0.6, "filters": (20, 0.95)})
    ResponseWriter(tmp_path, manifest)
    ResponseWriter(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_shards_are_full_but_the_last(tmp_path: Path) -> None:
    fill(tmp_path, range(10))
    assert shards(tmp_path) == [f"part-{n:05d}.jsonl" for n in range(3)]
    lines = [
        len((tmp_path / "responses" / name).read_text().splitlines()) for name in shards(tmp_path)
    ]
    assert lines == [4, 4, 2]


def test_resuming_adds_only_what_is_missing(tmp_path: Path) -> None:
    fill(tmp_path, range(6))
    before = {name: (tmp_path / "responses" / name).read_bytes() for name in shards(tmp_path)}
    assert ResponseWriter(tmp_path, MANIFEST).done == set(range(6))
    fill(tmp_path, range(11))
    assert [response.index for response in read_responses(tmp_path)] == list(range(11))
    for name, data in before.items():
        assert (tmp_path / "responses" / name).read_bytes() == data


def test_an_interrupt_loses_nothing_added(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ResponseWriter(tmp_path, MANIFEST, 100) as writer:
        writer.add(0, [1], [2], "stop", "train")
        raise KeyboardInterrupt
    assert ResponseWriter(tmp_path, MANIFEST).done == {0}


def test_a_failed_write_leaves_no_shard_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ResponseWriter(tmp_path, MANIFEST)
    writer.add(0, [1], [2], "stop", "train")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full_disk)
        with pytest.raises(D3DError, match="No space left on device"):
            writer.flush()
    assert shards(tmp_path) == []
    writer.flush()
    assert [response.index for response in read_responses(tmp_path)] == [0]


def test_leftover_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    (tmp_path / "responses" / ".part-00001.jsonl.tmp").write_text('{"index": 4, "prom')
    fill(tmp_path, range(6))
    assert [response.index for response in read_responses(tmp_path)] == list(range(6))


def test_shards_are_read_in_numeric_order(tmp_path: Path) -> None:
    fill(tmp_path, range(2), shard_size=1)
    folder = tmp_path / "responses"
    (folder / "part-00000.jsonl").rename(folder / "part-99999.jsonl")
    (folder / "part-00001.jsonl").rename(folder / "part-100000.jsonl")
    fill(tmp_path, range(3), shard_size=1)
    assert [response.index for response in read_responses(tmp_path)] == [0, 1, 2]
    assert (folder / "part-100001.jsonl").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "other"),
        ("tokenizer_fingerprint", "x"),
        ("template_fingerprint", "x"),
        ("vocab_size", 101),
        ("stop_ids", (2,)),
        ("sampling", {"greedy": False}),
        ("max_new_tokens", 9),
        ("prompts", "others"),
        ("thinking", True),
        ("thinking", False),
        ("system", "Be brief."),
    ],
)
def test_another_manifest_is_refused_by_field(tmp_path: Path, field: str, value: Any) -> None:
    fill(tmp_path, range(2))
    with pytest.raises(D3DError, match=field):
        ResponseWriter(tmp_path, dataclasses.replace(MANIFEST, **{field: value}))


def test_a_folder_without_responses_takes_another_manifest(tmp_path: Path) -> None:
    """It is what a run left that failed before its first response."""
    ResponseWriter(tmp_path, MANIFEST)
    other = dataclasses.replace(MANIFEST, thinking=False, system="s")
    fill(tmp_path, range(2), manifest=other)
    assert read_manifest(tmp_path) == other
    with pytest.raises(D3DError, match="thinking = False, not None"):
        ResponseWriter(tmp_path, MANIFEST)


def test_an_index_is_added_once(tmp_path: Path) -> None:
    fill(tmp_path, range(2))
    writer = ResponseWriter(tmp_path, MANIFEST)
    with pytest.raises(D3DError, match="response 1 is already"):
        writer.add(1, [1], [2], "stop", "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"response_ids": []}, "response_ids"),
        ({"response_ids": [5, 100]}, "100, which is not a token id below 100"),
        ({"response_ids": [-1]}, "-1"),
        ({"finish_reason": "eos"}, "finish_reason 'eos'"),
        ({"split": "test"}, "split 'test'"),
        ({"index": -1}, "index"),
    ],
)
def test_fields_out_of_range_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = {"index": 0, "prompt_ids": [1], "response_ids": [2], "finish_reason": "stop"}
    writer = ResponseWriter(tmp_path, MANIFEST)
    with pytest.raises(D3DError, match=message):
        writer.add(**{**good, "split": "train", **change})
    writer.flush()
    assert shards(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"index": 1, "prompt', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: not a JSON object"),
        ('{"index": 1}', "line 2: the field 'prompt_ids' is missing"),
        (
            '{"index":1,"prompt_ids":[1],"response_ids":[true],"finish_reason":"stop","split":"train"}',
            "line 2: response_ids holds True",
        ),
        (
            '{"index":1,"prompt_ids":[1],"response_ids":[1],"finish_reason":"stop","split":"train","x":0}',
            "line 2: the field 'x' is unknown",
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    fill(tmp_path, range(1))
    with (tmp_path / "responses" / "part-00000.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(D3DError, match=f"part-00000.jsonl, {message}"):
        list(read_responses(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "not a JSON object"),
        ("{}", "'target' is missing"),
        (json.dumps({**MANIFEST.to_json(), "format_version": 2}), "format_version 2"),
        (json.dumps({**MANIFEST.to_json(), "stop_ids": 2}), "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(D3DError, match=message):
        read_manifest(tmp_path)


def test_a_folder_without_responses_is_named(tmp_path: Path) -> None:
    with pytest.raises(D3DError, match="not a folder of responses"):
        list(read_responses(tmp_path / "absent"))


def test_a_file_in_place_of_the_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(D3DError, match="cannot create"):
        ResponseWriter(tmp_path / "file" / "below", MANIFEST)


def test_a_slow_writer_writes_before_a_shard_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_FLUSH_SECONDS", -1.0)
    writer = ResponseWriter(tmp_path, MANIFEST)
    writer.add(0, [1], [2], "stop", "train")
    assert shards(tmp_path) == ["part-00000.jsonl"]


def test_parts_write_at_once_and_another_number_of_them_continues(tmp_path: Path) -> None:
    written: list[str] = []
    for parts in (2, 3, 1, 2):
        # All are open before any has written.
        writers = [
            ResponseWriter(tmp_path, MANIFEST, part=part, parts=parts) for part in range(parts)
        ]
        for _ in range(2):
            for part in reversed(range(parts)):
                writers[part].add(len(written), [1], [2], "stop", "train")
                writers[part].flush()
                written.append(str(len(written)))
                assert len(shards(tmp_path)) == len(written), "no shard was written over"
        for writer in writers:
            writer.__exit__()
    found = [response.index for response in read_responses(tmp_path)]
    assert sorted(found) == list(range(len(written)))


def test_a_part_is_refused_another_manifest_though_nothing_is_written_yet(tmp_path: Path) -> None:
    other = dataclasses.replace(MANIFEST, max_new_tokens=9)
    with pytest.raises(D3DError, match="not a folder of responses"):
        ResponseWriter(tmp_path, MANIFEST, part=1, parts=2)
    ResponseWriter(tmp_path, MANIFEST, part=0, parts=2)
    with pytest.raises(D3DError, match="max_new_tokens = 8, not 9"):
        ResponseWriter(tmp_path, other, part=1, parts=2)
    assert read_manifest(tmp_path) == MANIFEST


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    with ResponseWriter(tmp_path, MANIFEST, parts=2):
        with pytest.raises(D3DError, match=r"another run is adding to .*; wait for its end"):
            ResponseWriter(tmp_path, MANIFEST)
        second = ResponseWriter(tmp_path, MANIFEST, part=1, parts=2)
    # The first is gone, and the rest of its run still adds.
    with pytest.raises(D3DError, match="another run is adding to"):
        ResponseWriter(tmp_path, MANIFEST)
    second.__exit__()
    fill(tmp_path, range(2))


def test_no_shard_is_written_over_even_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: Any, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first, second = (ResponseWriter(tmp_path, MANIFEST) for _ in range(2))
    for index, writer in enumerate((first, second, second, first)):
        writer.add(index, [1], [2], "stop", "train")
        writer.flush()
    assert [response.index for response in read_responses(tmp_path)] == [0, 1, 2, 3]
    # A shard that is still being written has its number already.
    (tmp_path / "responses/.part-00004.jsonl.tmp").touch()
    fill(tmp_path, range(5))
    assert shards(tmp_path)[-1] == "part-00005.jsonl"


def test_a_copy_of_a_response_is_dropped(tmp_path: Path) -> None:
    """An interrupt at the end of a flush leaves one."""
    fill(tmp_path, range(4))
    shard = tmp_path / "responses/part-00000.jsonl"
    shard.with_name("part-00001.jsonl").write_bytes(shard.read_bytes())
    assert [response.index for response in read_responses(tmp_path)] == list(range(4))
