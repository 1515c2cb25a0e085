"""What a line of imported responses says: the forms it may have, its reply, what shaped its prompt.

The forms are listed in `train/imports.py`, where texts become token ids. Whatever is read here was
written by other programs: each function raises ValueError, one sentence, for what it cannot take,
and the caller names the file and the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d3d_jax.errors import D3DError
from d3d_jax.train.jsonl import json_lines
from d3d_jax.train.prompts import messages_of

CONVERSATIONS = ("messages", "conversations")
# How a reply ends that is none: the request was given up, or its text taken away.
_FAILED = ("abort", "error", "content_filter")
# What changes how a chat template renders messages, of a request and of a message.
_SHAPES = ("tools", "functions", "documents", "chat_template", "continue_final_message")
_SHAPES += ("add_special_tokens",)
_MESSAGE_SHAPES = ("tool_calls", "tool_call_id", "function_call", "name")


class Reply(NamedTuple):
    """A reply as token ids or text, and how it ended.

    Attributes:
      reason: stop or length; None where its last token has to tell.
      matched: what stopped it, a token id or a text, where the server says so.
    """

    ids: Any = None
    text: Any = None
    reason: str | None = None
    matched: Any = None


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is not an object")
    return value


def form_of(record: Mapping[str, Any]) -> str:
    """Which of the forms a line has."""
    if "response_ids" in record:
        return "ids"
    if "custom_id" in record:
        return "batch"
    if "outputs" in record:
        return "vllm"
    if "meta_info" in record or "output_ids" in record:
        return "sglang"
    if conversation_of(record) is not None:
        return "conversation"
    raise ValueError(
        "the field 'response_ids' is missing, and it is no conversation and no output of vLLM, "
        "SGLang or a batch either"
    )


def conversation_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The messages of a line or request, if it has any."""
    for name in CONVERSATIONS:
        if record.get(name) is not None:
            if not isinstance(record[name], list):
                raise ValueError(f"{name} is not a list of messages")
            return record[name]
    return None


def reply_of(record: Mapping[str, Any]) -> Reply | None:
    """The reply of a line; None where it tells of a request that failed."""
    form = form_of(record)
    if form == "ids":
        return Reply(record["response_ids"])
    if form == "batch" and _request_failed(record):
        return None
    reply = {"sglang": _sglang, "conversation": _conversation}.get(form, _choice)(record)
    if reply.reason in _FAILED:
        return None
    if reply.reason not in ("stop", "length", None):
        raise ValueError(f"its finish_reason is {reply.reason!r}, not stop or length")
    if reply.ids is None and reply.reason is None:
        raise ValueError("it does not say how its text ended: the finish_reason is missing")
    return reply


def _request_failed(record: Mapping[str, Any]) -> bool:
    response = record.get("response")
    if record.get("error") or not isinstance(response, Mapping):
        return True
    return response.get("status_code", 200) != 200 or not isinstance(response.get("body"), Mapping)


def _sglang(record: Mapping[str, Any]) -> Reply:
    about = record.get("meta_info")
    reason = mapping({} if about is None else about, "its meta_info").get("finish_reason")
    found = reason if isinstance(reason, Mapping) else {"type": reason}
    return Reply(
        record.get("output_ids"), record.get("text"), found.get("type"), found.get("matched")
    )


def _conversation(record: Mapping[str, Any]) -> Reply:
    raw = conversation_of(record) or []
    messages = messages_of(raw)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("its last message is not the assistant's reply to another")
    _refuse_other_than_text(raw[-1])
    return Reply(None, messages[-1]["content"], record.get("finish_reason", "stop"))


def _choice(record: Mapping[str, Any]) -> Reply:
    """Of vLLM's output or a batch's."""
    batch = form_of(record) == "batch"
    several = record["response"]["body"].get("choices") if batch else record["outputs"]
    if not isinstance(several, list) or len(several) != 1:
        raise ValueError("a line must hold one reply, not several or none")
    one = mapping(several[0], "its reply")
    message = mapping({} if one.get("message") is None else one["message"], "its message")
    _refuse_other_than_text(message)
    text = message.get("content", one.get("text"))
    return Reply(one.get("token_ids"), text, one.get("finish_reason"), one.get("stop_reason"))


def _refuse_other_than_text(message: Mapping[str, Any]) -> None:
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            raise ValueError(
                f"its {name} was taken out of the text that the target wrote; serve without a "
                "reasoning parser"
            )
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise ValueError(
                f"its {name} were taken out of the text that the target wrote; serve without a "
                "tool parser"
            )


def prompt_messages(
    asked: Mapping[str, Any], messages: Sequence[Any], thinking: bool | None
) -> list[dict[str, str]]:
    """The messages of a prompt, if they alone, and `thinking`, say how it was rendered.

    Args:
      asked: the line or request that holds them.
    """
    for name in _SHAPES:
        if asked.get(name):
            raise ValueError(f"it was asked with {name}; import the token ids of its prompt")
    if asked.get("add_generation_prompt") is False:
        raise ValueError("it was asked without the header of a reply: add_generation_prompt")
    options = asked.get("chat_template_kwargs")
    for name, value in mapping(options or {}, "its chat_template_kwargs").items():
        if name != "enable_thinking" and value is not None:
            raise ValueError(f"it was asked with {name}; import the token ids of its prompt")
        if name == "enable_thinking" and value != thinking:
            raise ValueError(
                f"it was asked with enable_thinking {value}: give --thinking "
                f"{'on' if value else 'off'}"
            )
    found = messages_of(messages)
    for message in messages:
        for name in _MESSAGE_SHAPES:
            if message.get(name):
                raise ValueError(
                    f"a message of its prompt has {name}; import the token ids of its prompt"
                )
    if not found or found[-1]["role"] == "assistant":
        raise ValueError("its prompt does not end with a message to be answered")
    return found


def read_requests(path: Path) -> dict[str, Mapping[str, Any]]:
    """The bodies of a file of batch requests, by custom_id.

    Raises:
      D3DError: a line is no request, or repeats another's custom_id.
    """
    bodies: dict[str, Mapping[str, Any]] = {}
    for number, record in json_lines(path):
        name, body = record.get("custom_id"), record.get("body")
        if not isinstance(name, str) or not isinstance(body, Mapping):
            raise D3DError(f"{path}, line {number}: not a request with custom_id and body")
        if name in bodies:
            raise D3DError(f"{path}, line {number}: the custom_id {name!r} is there already")
        bodies[name] = body
    return bodies
