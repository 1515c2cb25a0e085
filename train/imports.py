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
from d3d_jax.train.import_lines import (
    Reply,
    conversation_of,
    form_of,
    prompt_messages,
    read_requests,
    reply_of,
)
from d3d_jax.train.jsonl import json_lines
from d3d_jax.train.responses import Manifest, Response, ResponseWriter, default_split

_PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids")


class Imported(NamedTuple):
    """How many responses a folder holds, and how many lines had failed and gave none."""

    responses: int
    failed: int


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
    task and is not kept). Without "split", `default_split` decides. A response ends at its first
    stop token; one without counts as cut by length. Calling again resumes: lines that are present
    are skipped.

    Args:
      manifest: its `max_new_tokens` becomes that of the longest response.
      tokenizer: of the target; None: lines must hold token ids.
      requests: the request file of a batch output.

    Raises:
      D3DError: a damaged line (named by file and line number), one whose text or prompt is not all
        there, one that was asked otherwise than the manifest says, or another manifest in `folder`.
    """
    reader = _Reader(Path(path), manifest, tokenizer, requests and Path(requests))
    # A first pass only checks, so that a damaged file leaves no folder of its good half.
    count = sum(1 for _ in reader.read())
    if not count:
        raise D3DError(f"{path} holds no responses")
    manifest = dataclasses.replace(manifest, max_new_tokens=reader.longest)
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
      encoded, failed: texts so far that were encoded, and lines that tell of a failure.
      longest: the most tokens of a response so far.
    """

    def __init__(
        self, path: Path, manifest: Manifest, tokenizer: Tokenizer | None, requests: Path | None
    ) -> None:
        self._path, self._manifest, self._tokenizer = path, manifest, tokenizer
        self._asked = {} if requests is None else read_requests(requests)
        self._end: int | None = None
        self.encoded = self.failed = self.longest = 0

    def read(self) -> Iterator[Response]:
        for number, record in json_lines(self._path):
            try:
                reply = reply_of(record)
                if reply is None:
                    self.failed += 1
                    continue
                response = self._response(number - 1, record, reply)
                response.check(self._manifest.vocab_size)
            except (ValueError, D3DError) as error:
                raise D3DError(f"{self._path}, line {number}: {error}") from error
            self.longest = max(self.longest, len(response.response_ids))
            yield response

    def _response(self, index: int, record: Mapping[str, Any], reply: Reply) -> Response:
        ids = self._encode(reply.text) if reply.ids is None else reply.ids
        if isinstance(ids, list):
            ids = self._ended(ids, reply)
        stopped = isinstance(ids, list) and ids[-1:] and ids[-1] in self._manifest.stop_ids
        split, task = record.get("split"), record.get("task")
        return Response(
            index=index,
            prompt_ids=self._prompt_ids(record),
            response_ids=ids,
            finish_reason="stop" if stopped else "length",
            split=default_split(index) if split is None else split,
            task="" if task is None else task,
        )

    def _ended(self, ids: list[Any], reply: Reply) -> list[Any]:
        """The tokens up to the first stop token, which is put there where the server left it out.

        vLLM leaves it out of the text, and some servers out of the ids. Behind it stands what was
        decoded with ignore_eos, or the rest of the template's end of turn.
        """
        stops = self._manifest.stop_ids
        if found := [ids.index(stop) for stop in stops if stop in ids]:
            return ids[: min(found) + 1]
        if reply.reason != "stop":
            return ids
        if reply.matched is None:
            return [*ids, self._end_of_turn()]
        # What else stopped it, a text or a token of the request, is as a limit to the target.
        by_token = type(reply.matched) is int and reply.matched in stops
        return [*ids, reply.matched] if by_token else ids

    def _prompt_ids(self, record: Mapping[str, Any]) -> Any:
        form = form_of(record)
        asked = self._request(record["custom_id"]) if form == "batch" else record
        for name in _PROMPT_IDS:
            if asked.get(name) is not None:
                return asked[name]
        conversation, prompt = conversation_of(asked), asked.get("prompt")
        if conversation is None and isinstance(prompt, str):
            return self._encode(prompt, prompt=True)
        if conversation is None:
            if not isinstance(prompt, list):
                raise ValueError(
                    "its prompt is missing: prompt_ids, messages, or the text of a prompt"
                )
            conversation = prompt
        elif form == "conversation":
            conversation = conversation[:-1]
        thinking = self._manifest.thinking
        messages = prompt_messages(asked, conversation, thinking)
        return self._codec().chat(messages, thinking=thinking)

    def _request(self, custom_id: Any) -> Mapping[str, Any]:
        body = self._asked.get(custom_id) if isinstance(custom_id, str) else None
        if body is None:
            raise ValueError(f"{custom_id!r} is not in the file of its requests: see --requests")
        temperature, greedy = body.get("temperature"), self._manifest.sampling.get("greedy")
        if temperature is not None and (temperature == 0) != greedy:
            raise ValueError(
                f"it was asked with temperature {temperature}: give "
                f"{'--greedy' if temperature == 0 else '--sampled'}"
            )
        return body

    def _encode(self, text: Any, prompt: bool = False) -> list[int]:
        if not isinstance(text, str):
            raise ValueError("it holds no reply, neither as token ids nor as text")
        self.encoded += 1
        codec = self._codec()
        ids = codec.encode(text, add_special_tokens=False)
        # Servers differ in whether they put these before a text, and a rendered one may have them.
        if prompt and ids != codec.encode(text):
            raise ValueError(
                "its prompt is a text, to which this tokenizer may add tokens; import the token "
                "ids of its prompt"
            )
        return ids

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
