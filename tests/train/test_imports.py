"""Importing responses made elsewhere: every form, what is appended, and refusal of damage."""

from __future__ import annotations

import dataclasses
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
        # A token of the request's own stopped it, or it went on behind the target's.
        (
            VLLM | {"outputs": [{"token_ids": [7, 8], "finish_reason": "stop", "stop_reason": 8}]},
            [7, 8],
            "length",
        ),
        (
            VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "stop", "stop_reason": 0}]},
            [7, 0],
            "stop",
        ),
        (VLLM | {"outputs": [{"token_ids": [7, 2, 8], "finish_reason": "length"}]}, [7, 2], "stop"),
        (
            VLLM | {"outputs": [{"token_ids": [7, 0, 8, 2], "finish_reason": "stop"}]},
            [7, 0],
            "stop",
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
        {"prompt": text, "outputs": [{"text": "the 12<|im_end|>\n", "finish_reason": "stop"}]},
    )
    want = (tokenizer.chat([USER]), [*tokenizer.encode("the 12"), 2])
    assert [(r.prompt_ids, r.response_ids) for r in made] == [want, want, want]


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
    ("body", "greedy", "message"),
    [
        ({"temperature": 0, "tools": None, "chat_template_kwargs": {}}, True, None),
        ({"temperature": 1.0}, False, None),
        ({}, True, None),
        ({"temperature": 1.0}, True, "asked with temperature 1.0: give --sampled"),
        ({"temperature": 0}, False, "asked with temperature 0: give --greedy"),
        ({"continue_final_message": True}, True, "asked with continue_final_message"),
        ({"add_generation_prompt": False}, True, "without the header of a reply"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            True,
            "asked with enable_thinking True: give --thinking on",
        ),
    ],
)
def test_a_batch_says_how_it_was_asked(tmp_path, manifest, tokenizer, body, greedy, message):
    manifest = dataclasses.replace(manifest, sampling={"greedy": greedy})
    line = {"custom_id": "the", "body": {"messages": [USER]} | body}
    options = {"requests": jsonl(tmp_path / "requests.jsonl", [line])}
    if message is None:
        (made,) = imported(tmp_path, manifest, tokenizer, batch_line("the"), **options)
        assert made.prompt_ids == tokenizer.chat([USER])
        return
    with pytest.raises(D3DError, match=f"made.jsonl, line 1: .*{message}"):
        imported(tmp_path, manifest, tokenizer, batch_line("the"), **options)


@pytest.mark.parametrize("name", ["the", ["the"]])
def test_requests_that_cannot_be_told_apart_are_refused(tmp_path, manifest, tokenizer, name):
    lines = [{"custom_id": "the", "body": {}}, {"custom_id": name, "body": {}}]
    requests = jsonl(tmp_path / "requests.jsonl", lines)
    with pytest.raises(D3DError, match=r"requests.jsonl, line 2: .*custom_id"):
        imported(tmp_path, manifest, tokenizer, batch_line("the"), requests=requests)


def test_what_was_given_up_is_left_out_and_the_longest_response_is_the_limit(
    tmp_path, manifest, tokenizer
):
    lines = [
        VLLM | {"outputs": [{"token_ids": [], "text": "", "finish_reason": "abort"}]},
        VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "content_filter"}]},
        SGLANG | {"output_ids": [7], "meta_info": {"finish_reason": {"type": "abort"}}},
        VLLM | {"outputs": [{"token_ids": [7] * 20, "finish_reason": "length"}]},
        VLLM | {"outputs": [{"token_ids": [7], "finish_reason": "stop"}], "split": None},
    ]
    source = jsonl(tmp_path / "made.jsonl", lines)
    assert import_responses(source, tmp_path / "out", manifest, tokenizer=tokenizer) == (2, 3)
    assert [r.index for r in read_responses(tmp_path / "out")] == [3, 4]
    assert read_manifest(tmp_path / "out").max_new_tokens == 20


def test_a_text_to_which_servers_add_tokens_is_refused(tmp_path, manifest, tokenizer, monkeypatch):
    encode = tokenizer.encode

    def with_bos(text, *, add_special_tokens=True):
        return [1] * add_special_tokens + encode(text, add_special_tokens=False)

    monkeypatch.setattr(tokenizer, "encode", with_bos)
    record = {"prompt": "hello", "outputs": [{"token_ids": [7], "finish_reason": "stop"}]}
    with pytest.raises(D3DError, match="line 1: its prompt is a text, to which this tokenizer may"):
        imported(tmp_path, manifest, tokenizer, record)
    (made,) = imported(tmp_path, manifest, tokenizer, record | {"prompt_token_ids": [1, 5]})
    assert made.prompt_ids == [1, 5]


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
        # What other programs may have written there.
        (VLLM | {"outputs": ["the"]}, "its reply is not an object"),
        (VLLM | {"outputs": [{"message": "the"}]}, "its message is not an object"),
        (SGLANG | {"meta_info": [1]}, "its meta_info is not an object"),
        (SGLANG | {"meta_info": {}}, "does not say how its text ended"),
        ({"messages": None}, "no conversation and no output of vLLM"),
        ({"messages": "the"}, "messages is not a list"),
        (batch_line(["a"]), "is not in the file of its requests"),
        (VLLM | {"outputs": [{"text": "a", "finish_reason": "tool_calls"}]}, "not stop or length"),
        # What its messages do not say of a prompt.
        ({"messages": [USER, REPLY], "tools": [{}]}, "asked with tools; import the token ids"),
        ({"messages": [USER, REPLY], "chat_template_kwargs": {"x": 1}}, "asked with x; import"),
        ({"messages": [USER, REPLY], "chat_template_kwargs": "x"}, "kwargs is not an object"),
        ({"messages": [USER | {"name": "a"}, REPLY]}, "a message of its prompt has name"),
        ({"messages": [USER, REPLY | {"tool_calls": [{}]}]}, "without a tool parser"),
        ({"messages": [USER, REPLY, REPLY]}, "does not end with a message to be answered"),
        ({"messages": [USER, REPLY], "response_ids": [5]}, "does not end with a message to be"),
    ],
)
def test_what_cannot_be_imported_is_named_by_line(tmp_path, manifest, tokenizer, record, message):
    with pytest.raises(D3DError, match=f"made.jsonl, line 2: .*{message}"):
        imported(tmp_path, manifest, tokenizer, {"messages": [USER, REPLY]}, record)
    assert not (tmp_path / "out").exists()
