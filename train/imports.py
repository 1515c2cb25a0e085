"""Responses that the target wrote elsewhere, brought into a folder of responses.

A line of the file (JSONL, optionally .gz) is one of

    {"prompt_ids", "response_ids"}                     our own form
    {"messages" or "conversations": [..., the reply]}  a conversation, its last message the reply
    {"prompt" or "prompt_token_ids", "outputs"}        vLLM's offline output
    {"prompt" or "input_ids", "text" or "output_ids", "meta_info"}        SGLang's
    {"custom_id", "response": {"body"}}                a batch output of an OpenAI server, which
                                                       needs the file of its requests

and may have a "split" and a "task". Token ids are taken where there are any. Texts are encoded
again: conversations under the target's chat template, a "prompt" as the rendered text that it is,
replies with the end of turn behind them unless they were cut. The target may have chosen other
tokens for the same text, so ids are better where they can be had. Whether it was this target that
wrote them nobody can tell; the manifest says that they were imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from d3d_jax.errors import D3DError
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.jsonl import json_lines
from d3d_jax.train.prompts import messages_of
from d3d_jax.train.responses import Manifest, Response, ResponseWriter, default_split

_PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids")
_CONVERSATIONS = ("messages", "conversations")


class Imported(NamedTuple):
    """How many responses a folder holds, and how many lines had failed and gave none."""

    responses: int
    failed: int


class _Reply(NamedTuple):
    """A reply as token ids or text; `stopped` None: its last token tells."""

    ids: Any = None
    text: Any = None
    stopped: bool | None = None


def import_responses(
    path: str | Path,
    folder: str | Path,
    manifest: Manifest,
    shard_size: int = 256,
    *,
    tokenizer: Tokenizer | None = None,
    requests: str | Path | None = None,
) -> Imported:
    """Copies responses made elsewhere into a responses folder.

    The index of a response is its line, counted from 0 (an "index" in the file counts within its
    task and is not kept). Without "split", `default_split` decides. A response that does not end
    with a stop token counts as cut by length. Calling again resumes: lines that are present are
    skipped.

    Args:
      tokenizer: of the target; None: lines must hold token ids.
      requests: the request file of a batch output.

    Raises:
      D3DError: a damaged line (named by file and line number), one whose reasoning was taken out of
        its text, or another manifest in `folder`.
    """
    reader = _Reader(Path(path), manifest, tokenizer, requests and Path(requests))
    # A first pass only checks, so that a damaged file leaves no folder of its good half.
    count = sum(1 for _ in reader.read())
    if not count:
        raise D3DError(f"{path} holds no responses")
    if reader.encoded:
        manifest = dataclasses.replace(manifest, prompts=f"{manifest.prompts}, encoded from text")
    failed = reader.failed
    with ResponseWriter(folder, manifest, shard_size) as writer:
        for response in reader.read():
            if response.index not in writer.done:
                writer.add(**vars(response))
    return Imported(len(writer.done), failed)


class _Reader:
    """Reads one file.

    Attributes:
      encoded, failed: lines so far that were encoded from text, and that tell of a failure.
    """

    def __init__(
        self, path: Path, manifest: Manifest, tokenizer: Tokenizer | None, requests: Path | None
    ) -> None:
        self._path, self._manifest, self._tokenizer = path, manifest, tokenizer
        self._asked = {} if requests is None else _requests(requests)
        self._end: int | None = None
        self.encoded = self.failed = 0

    def read(self) -> Iterator[Response]:
        for number, record in json_lines(self._path):
            try:
                if _has_failed(record):
                    self.failed += 1
                    continue
                response = self._response(number - 1, record)
                response.check(self._manifest.vocab_size)
            except (ValueError, D3DError) as error:
                raise D3DError(f"{self._path}, line {number}: {error}") from error
            stopped = response.response_ids[-1] in self._manifest.stop_ids
            yield dataclasses.replace(response, finish_reason="stop") if stopped else response

    def _response(self, index: int, record: Mapping[str, Any]) -> Response:
        reply = _reply(record)
        ids = self._encode(reply.text) if reply.ids is None else reply.ids
        stops = self._manifest.stop_ids
        # vLLM leaves the stop token out of the text, and some servers out of the ids.
        if reply.stopped and isinstance(ids, list) and (not ids or ids[-1] not in stops):
            ids = [*ids, self._end_of_turn()]
        return Response(
            index=index,
            prompt_ids=self._prompt_ids(record),
            response_ids=ids,
            finish_reason="length",
            split=record.get("split", default_split(index)),
            task=record.get("task", ""),
        )

    def _prompt_ids(self, record: Mapping[str, Any]) -> Any:
        conversation = next((record[k] for k in _CONVERSATIONS if k in record), None)
        if "custom_id" in record:
            record = self._request(record["custom_id"])
            conversation = record.get("messages")
        elif conversation is not None and _form(record) == "conversation":
            conversation = conversation[:-1]
        for name in _PROMPT_IDS:
            if record.get(name) is not None:
                return record[name]
        prompt = record.get("prompt")
        if conversation is None and isinstance(prompt, str):
            return self._encode(prompt)
        if conversation is None and not isinstance(prompt, list):
            raise ValueError("its prompt is missing: prompt_ids, messages, or the text of a prompt")
        messages = messages_of(prompt if conversation is None else conversation)
        return self._codec().chat(messages, thinking=self._manifest.thinking)

    def _request(self, custom_id: Any) -> Mapping[str, Any]:
        if custom_id not in self._asked:
            raise ValueError(f"{custom_id!r} is not in the file of its requests: see --requests")
        body = self._asked[custom_id]
        options = body.get("chat_template_kwargs") or {}
        thinking = options.get("enable_thinking", self._manifest.thinking)
        if thinking != self._manifest.thinking:
            raise ValueError(
                f"it was asked with enable_thinking {thinking}: give --thinking "
                f"{'on' if thinking else 'off'}"
            )
        return body

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise ValueError("it holds no reply, neither as token ids nor as text")
        self.encoded += 1
        return self._codec().encode(text, add_special_tokens=False)

    def _codec(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("it holds text, and there is no tokenizer to encode it with")
        return self._tokenizer

    def _end_of_turn(self) -> int:
        """The stop token that the chat template puts behind a reply, or else the first there is."""
        if self._end is None:
            stops = self._manifest.stop_ids
            if not stops:
                raise ValueError("it ended by itself, but the target has no stop token")
            said: list[int] = []
            if self._tokenizer is not None and self._tokenizer.chat_template is not None:
                turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                said = self._tokenizer.chat(turns, add_generation_prompt=False)
            self._end = next((i for i in reversed(said) if i in stops), stops[0])
        return self._end


def _form(record: Mapping[str, Any]) -> str:
    """Which of the forms a line has.

    Raises:
      ValueError: none of them.
    """
    if "response_ids" in record:
        return "ids"
    if "custom_id" in record:
        return "batch"
    if "outputs" in record:
        return "vllm"
    if "meta_info" in record or "output_ids" in record:
        return "sglang"
    if any(name in record for name in _CONVERSATIONS):
        return "conversation"
    raise ValueError(
        "the field 'response_ids' is missing, and it is no conversation and no output of vLLM, "
        "SGLang or a batch either"
    )


def _reply(record: Mapping[str, Any]) -> _Reply:
    """The reply of a line.

    Raises:
      ValueError: it has none of the known forms, several replies, or reasoning beside its text.
    """
    form = _form(record)
    if form == "ids":
        return _Reply(record["response_ids"])
    if form == "sglang":
        reason = (record.get("meta_info") or {}).get("finish_reason")
        found = reason if isinstance(reason, Mapping) else {"type": reason}
        stopped = _stopped(found.get("type"), found.get("matched"))
        return _Reply(record.get("output_ids"), record.get("text"), stopped)
    if form == "conversation":
        messages = next(record[name] for name in _CONVERSATIONS if name in record)
        roles = [message["role"] for message in messages_of(messages)]
        if len(roles) < 2 or roles[-1] != "assistant":
            raise ValueError("its last message is not the assistant's reply to another")
        _refuse_reasoning(messages[-1])
        text = messages_of(messages)[-1]["content"]
        return _Reply(None, text, _stopped(record.get("finish_reason", "stop"), None))
    several = record["outputs"] if form == "vllm" else record["response"]["body"].get("choices")
    if not isinstance(several, list) or len(several) != 1:
        raise ValueError("a line must hold one reply, not several or none")
    one = several[0]
    stopped = _stopped(one.get("finish_reason"), one.get("stop_reason"))
    message = one.get("message") or {}
    _refuse_reasoning(message)
    return _Reply(one.get("token_ids"), message.get("content", one.get("text")), stopped)


def _stopped(reason: Any, matched: Any) -> bool:
    """Whether a stop token ended a reply, rather than a limit, an abort or a stop string."""
    return reason == "stop" and not isinstance(matched, str)


def _refuse_reasoning(message: Mapping[str, Any]) -> None:
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            raise ValueError(
                f"its {name} was taken out of the text that the target wrote; serve without a "
                "reasoning parser"
            )


def _has_failed(record: Mapping[str, Any]) -> bool:
    """Whether a line of a batch output tells of a request that failed."""
    if "custom_id" not in record:
        return False
    response = record.get("response")
    if record.get("error") or not isinstance(response, Mapping):
        return True
    return response.get("status_code", 200) != 200 or not isinstance(response.get("body"), Mapping)


def _requests(path: Path) -> dict[Any, Mapping[str, Any]]:
    """The bodies of a file of batch requests, by custom_id."""
    bodies = {}
    for number, record in json_lines(path):
        body = record.get("body")
        if "custom_id" not in record or not isinstance(body, Mapping):
            raise D3DError(f"{path}, line {number}: not a request with custom_id and body")
        bodies[record["custom_id"]] = body
    return bodies
