"""Responses on disk: round trip, resumption, atomic shards, refusal of damage, import, prompts."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from d3d_jax.errors import D3DError
from d3d_jax.train import responses
from d3d_jax.train.responses import (
    Manifest,
    Prompt,
    Response,
    ResponseWriter,
    default_split,
    import_responses,
    read_manifest,
    read_prompts,
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
    return sorted(path.name for path in (folder / "responses").iterdir())


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
        patch.setattr(responses.os, "fsync", full_disk)
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


RECORDS = [
    {"prompt_ids": [1, index], "response_ids": [5, 6, 2 if index % 2 else 7]} for index in range(20)
]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_import_fills_in_finish_reason_and_split(tmp_path: Path) -> None:
    count = import_responses(jsonl(tmp_path / "made.jsonl", RECORDS), tmp_path / "out", MANIFEST)
    stored = list(read_responses(tmp_path / "out"))
    assert count == 20
    assert [r.prompt_ids for r in stored] == [r["prompt_ids"] for r in RECORDS]
    assert [r.response_ids for r in stored] == [r["response_ids"] for r in RECORDS]
    assert [r.finish_reason for r in stored] == ["length", "stop"] * 10
    assert [r.index for r in stored if r.split == "validation"] == [9, 19]


def test_import_keeps_split_and_task_of_a_compressed_file(tmp_path: Path) -> None:
    record = {**RECORDS[0], "split": "validation", "task": "mbpp", "index": 555}
    path = tmp_path / "made.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n")
    import_responses(path, tmp_path / "out", MANIFEST)
    (stored,) = read_responses(tmp_path / "out")
    assert (stored.split, stored.task, stored.index) == ("validation", "mbpp", 0)


def test_import_resumes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "made.jsonl", RECORDS[:7])
    import_responses(source, tmp_path / "out", MANIFEST, shard_size=3)
    jsonl(source, RECORDS)
    assert import_responses(source, tmp_path / "out", MANIFEST, shard_size=3) == 20
    assert [r.index for r in read_responses(tmp_path / "out")] == list(range(20))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": [1]}, "'response_ids' is missing"),
        ({"prompt_ids": [1], "response_ids": [100]}, "not a token id below 100"),
        ({"prompt_ids": [1.0], "response_ids": [1]}, "prompt_ids holds 1.0"),
        ({"prompt_ids": "text", "response_ids": [1]}, "prompt_ids is not a list"),
        ({"prompt_ids": [1], "response_ids": [1], "split": "dev"}, "split 'dev'"),
        ({"prompt_ids": [1], "response_ids": [1], "task": 3}, "task 3"),
    ],
)
def test_a_damaged_import_makes_nothing(tmp_path: Path, bad: Any, message: str) -> None:
    source = jsonl(tmp_path / "made.jsonl", [*RECORDS, bad])
    with pytest.raises(D3DError, match=f"made.jsonl, line 21: .*{message}"):
        import_responses(source, tmp_path / "out", MANIFEST)
    assert not (tmp_path / "out").exists()


def test_a_truncated_or_absent_import_is_one_sentence(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt_ids": [1], "response_ids": [2]}\n' * 500)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "text.jsonl.gz").write_bytes(b"{}")
    for name, message in (("cut", "truncated"), ("text", "cannot read"), ("none", "No such file")):
        with pytest.raises(D3DError, match=message):
            import_responses(tmp_path / f"{name}.jsonl.gz", tmp_path / "out", MANIFEST)
    with pytest.raises(D3DError, match="holds no responses"):
        import_responses(jsonl(tmp_path / "empty.jsonl", []), tmp_path / "out", MANIFEST)


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "é"]}\n\n{"turns": ["b"], "split": "validation", "id": 3}\n')
    assert read_prompts(path) == [Prompt(("a", "é")), Prompt(("b",), "validation")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ["a"', "line 2: not valid JSON"),
        ('{"turns": []}', "line 1"),
        ('{"turns": "a"}', "line 1"),
        ('{"turns": [1]}', "line 1"),
        ('{"prompt": "a"}', "line 1"),
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
