"""Importing responses made elsewhere: every form, what is appended, and refusal of damage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from d3d_jax.errors import D3DError
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.imports import Imported, import_responses
from d3d_jax.train.responses import Manifest, Response, read_manifest, read_responses
from tests.tiny_folders import write_tokenizer
from tests.train.test_responses import MANIFEST

RECORDS = [
    {"prompt_ids": [1, index], "response_ids": [5, 6, 2 if index % 2 else 7]} for index in range(20)
]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_import_fills_in_finish_reason_and_split(tmp_path: Path) -> None:
    count = import_responses(jsonl(tmp_path / "made.jsonl", RECORDS), tmp_path / "out", MANIFEST)
    stored = list(read_responses(tmp_path / "out"))
    assert count == Imported(20, 0)
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
    assert import_responses(source, tmp_path / "out", MANIFEST, shard_size=3) == (20, 0)
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


SYSTEM, USER = {"role": "system", "content": "the"}, {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "the 12"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One whose replies end with token 2, though 0 is the first that ends them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in write_tokenizer(folder / "scratch").items():
        (folder / name).write_bytes(content)
    made = Tokenizer.from_folder(folder)
    made.stop_ids = (0, 2)
    return made


@pytest.fixture
def manifest(tokenizer) -> Manifest:
    return Manifest(
        target="tiny",
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=tokenizer.template_fingerprint,
        vocab_size=tokenizer.vocab_size,
        stop_ids=tokenizer.stop_ids,
        sampling={"greedy": True},
        max_new_tokens=8,
        prompts="imported",
    )


def imported(folder: Path, manifest: Manifest, tokenizer: Tokenizer, *records, **options):
    source = jsonl(folder / "made.jsonl", list(records))
    import_responses(source, folder / "out", manifest, tokenizer=tokenizer, **options)
    return list(read_responses(folder / "out"))


def test_conversations_are_rendered_and_end_with_the_templates_own_stop(
    tmp_path, manifest, tokenizer
):
    sharegpt = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "the 12"}]
    made = imported(
        tmp_path,
        manifest,
        tokenizer,
        {"messages": [SYSTEM, USER, REPLY, USER, REPLY], "task": "x"},
        {"conversations": sharegpt},
        {"messages": [USER, REPLY], "finish_reason": "length"},
    )
    said = tokenizer.encode("the 12")
    assert [r.prompt_ids for r in made] == [
        tokenizer.chat([SYSTEM, USER, REPLY, USER]),
        tokenizer.chat([USER]),
        tokenizer.chat([USER]),
    ]
    assert [r.response_ids for r in made] == [[*said, 2], [*said, 2], said]
    assert [r.finish_reason for r in made] == ["stop", "stop", "length"]
    assert read_manifest(tmp_path / "out").prompts == "imported, encoded from text"


VLLM = {"prompt": "hello", "prompt_token_ids": [5, 6]}
SGLANG = {"input_ids": [5, 6], "text": "the"}


@pytest.mark.parametrize(
    ("record", "response", "finish"),
    [
        (VLLM | {"outputs": [{"token_ids": [7, 2], "finish_reason": "stop"}]}, [7, 2], "stop"),
        (VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "stop"}]}, [7, 2], "stop"),
        (VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "length"}]}, [7], "length"),
        (
            VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "stop", "stop_reason": "#"}]},
            [7],
            "length",
        ),
        (
            SGLANG
            | {
                "output_ids": [7],
                "meta_info": {"finish_reason": {"type": "stop", "matched": 2}},
            },
            [7, 2],
            "stop",
        ),
        (
            SGLANG | {"output_ids": [7, 8], "meta_info": {"finish_reason": {"type": "length"}}},
            [7, 8],
            "length",
        ),
    ],
)
def test_token_ids_of_servers_are_taken_as_they_are(
    tmp_path, manifest, tokenizer, record, response, finish
):
    (made,) = imported(tmp_path, manifest, tokenizer, record)
    assert made == Response(0, [5, 6], response, finish, "train")
    assert read_manifest(tmp_path / "out").prompts == "imported"


def test_text_of_servers_is_encoded_again(tmp_path, manifest, tokenizer):
    text = tokenizer.render_chat([USER])
    made = imported(
        tmp_path,
        manifest,
        tokenizer,
        {"prompt": text, "outputs": [{"text": "the 12", "finish_reason": "stop"}]},
        {"prompt": text, "text": "the 12", "meta_info": {"finish_reason": {"type": "stop"}}},
    )
    want = (tokenizer.chat([USER]), [*tokenizer.encode("the 12"), 2])
    assert [(r.prompt_ids, r.response_ids) for r in made] == [want, want]


def batch_line(name: str, **changes: Any) -> dict[str, Any]:
    body = {"choices": [{"message": REPLY, "finish_reason": "stop"}]}
    return {"custom_id": name, "response": {"status_code": 200, "body": body}} | changes


def test_a_batch_output_is_joined_with_its_requests(tmp_path, manifest, tokenizer):
    asked = [
        {"custom_id": name, "body": {"messages": [{"role": "user", "content": name}]}}
        for name in ("the", "hello", "12")
    ]
    requests = jsonl(tmp_path / "requests.jsonl", asked)
    lines = [batch_line("12"), batch_line("hello", error={"code": 1}), batch_line("the")]
    source = jsonl(tmp_path / "made.jsonl", lines)
    options: dict[str, Any] = {"tokenizer": tokenizer, "requests": requests}
    assert import_responses(source, tmp_path / "out", manifest, **options) == (2, 1)
    prompts = {r.index: r.prompt_ids for r in read_responses(tmp_path / "out")}
    assert prompts == {
        index: tokenizer.chat([{"role": "user", "content": name}])
        for index, name in ((0, "12"), (2, "the"))
    }


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (batch_line("the"), "'the' is not in the file of its requests: see --requests"),
        ({"messages": [USER]}, "not the assistant's reply"),
        ({"messages": [USER, REPLY | {"content": None}]}, "a message needs role and content"),
        ({"messages": [USER, REPLY | {"reasoning_content": "hm"}]}, "without a reasoning parser"),
        (VLLM | {"outputs": [{"token_ids": [7]}] * 2}, "one reply, not several"),
        (VLLM | {"outputs": [{"finish_reason": "stop"}]}, "neither as token ids nor as text"),
        ({"outputs": [{"token_ids": [7]}]}, "its prompt is missing"),
        ({"text": "the"}, "no conversation and no output of vLLM"),
    ],
)
def test_what_cannot_be_imported_is_named_by_line(tmp_path, manifest, tokenizer, record, message):
    with pytest.raises(D3DError, match=f"made.jsonl, line 2: .*{message}"):
        imported(tmp_path, manifest, tokenizer, {"messages": [USER, REPLY]}, record)
    assert not (tmp_path / "out").exists()
