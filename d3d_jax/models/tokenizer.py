"""Text to token ids and back: `Tokenizer` reads a Hugging Face folder, `StreamDecoder` streams.

Built on `tokenizers` and `jinja2` alone: importing transformers would cost a second at every start.
Chat templates render as in transformers (same Jinja settings), which the tests compare.
Not here: building a tokenizer from a GGUF file (gguf.py), prompts and stop rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import tokenizers
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from d3d_jax.errors import D3DError

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_EOS_FILES = ("generation_config.json", "config.json")
_THINKING_SWITCH = "enable_thinking"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer and chat template of a model folder.

    Attributes:
      stop_ids: ids that end a reply: the eos of generation_config.json, config.json and
        tokenizer_config.json, without repeats, in this order.
      chat_template: the Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ):
        # A file may carry the padding and truncation of its training; an id list is never cut here.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._named_tokens = dict(named_tokens or {})
        self.stop_ids = tuple(stop_ids)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, the folder's configuration files.

        Raises:
          D3DError: the folder holds no tokenizer.json, or a file in it is damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise D3DError(f"{folder} holds no tokenizer.json; choose a folder with a tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the only type that tokenizers raises
            raise D3DError(f"{path} is damaged ({error}); fetch the model again") from error
        if not backend.get_vocab_size():
            raise D3DError(f"{path} is damaged (it holds no token); fetch the model again")
        config = _read_json(folder / "tokenizer_config.json")
        named = {}
        for kind in _NAMED_TOKENS:
            name = f"{kind}_token"
            token = config.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if token is not None:
                if not isinstance(token, str):
                    raise _damaged(folder / "tokenizer_config.json", name, config[name], "a token")
                named[name] = token
        stops = [i for file in _EOS_FILES for i in _eos_ids(folder / file, backend)]
        if (stop := backend.token_to_id(named.get("eos_token", ""))) is not None:
            stops.append(stop)
        return cls(
            backend,
            stop_ids=tuple(dict.fromkeys(stops)),
            chat_template=_chat_template(folder, config),
            named_tokens=named,
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id of a token (the model's embedding may have more rows)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sha256 (hex) of vocabulary and merges: what makes ids exchangeable."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        merges = json.loads(self._backend.to_str())["model"].get("merges") or []
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        by_id = sorted((i, token) for token, i in vocab.items())
        return _sha256(json.dumps([by_id, pairs]))

    @functools.cached_property
    def template_fingerprint(self) -> str:
        """Sha256 (hex) of the chat template, or "" without one."""
        return "" if self.chat_template is None else _sha256(self.chat_template)

    @functools.cached_property
    def supports_thinking(self) -> bool:
        """Whether the chat template reads `enable_thinking`, and so can switch thinking on and off.

        Raises:
          D3DError: the template is not valid Jinja.
        """
        if self.chat_template is None:
            return False
        try:
            tree = _environment().parse(self.chat_template)
            return _THINKING_SWITCH in meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as error:
            raise D3DError(f"the chat template is damaged: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; the names of special tokens in it become those tokens.

        With `add_special_tokens`, also what the model wants around a bare text (often nothing).

        Raises:
          D3DError: `text` is no string, or holds bytes that were not UTF-8.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # lone surrogates: how Python shows undecodable bytes
            raise D3DError("a text holds bytes or surrogates that are not valid Unicode") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_byte_token(self, index: int) -> bool:
        """Whether the id is one byte (`<0x0A>`), which only its neighbours make a character."""
        token = self._backend.id_to_token(index)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        thinking: bool | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation under the model's chat template.

        Args:
          messages: `{"role": ..., "content": ...}`, at least one; other keys reach the template.
          add_generation_prompt: end with the header of the reply to come.
          thinking: on or off; None: as the template has it.
          **options: other variables of the template, such as `tools=[...]`.

        Raises:
          D3DError: there is no template or no message, or the template refuses the messages or
            cannot switch thinking.
        """
        if self.chat_template is None:
            raise D3DError("this model has no chat template; give it plain text, not messages")
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise D3DError("a chat needs at least one message, each with a role and a content")
        if thinking is not None:
            # A template ignores variables it does not know: it would think, or not, regardless.
            if not self.supports_thinking:
                raise D3DError(
                    "thinking cannot be switched on or off for this model: its chat template has "
                    f"no {_THINKING_SWITCH}"
                )
            options[_THINKING_SWITCH] = thinking
        # As transformers does: clients write content=None or tool_calls=None for "not there".
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {"tools": None, "documents": None, **self._named_tokens, **options}
        try:
            return _compile(self.chat_template).render(
                messages=chat, add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateSyntaxError as error:
            raise D3DError(f"the chat template is damaged: {error}") from error
        except Exception as error:  # a template is a program: anything can go wrong in it
            raise D3DError(f"the chat template refuses these messages: {error}") from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        thinking: bool | None = None,
        **options: Any,
    ) -> list[int]:
        """Ids of `render_chat`, to which nothing is added."""
        text = self.render_chat(messages, add_generation_prompt, thinking=thinking, **options)
        return self.encode(text, add_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder of one growing reply."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Decodes ids that arrive a few at a time into text that never ends inside a character.

    The pieces `feed` returns and the one `flush` returns join to `tokenizer.decode(all ids)`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # ids of the last piece: some decoders look back one token
        self._pending: list[int] = []  # ids whose text has not been returned

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text they complete, perhaps ""."""
        hidden = self._tokenizer.special_ids if self._skip else frozenset()
        new = [i for i in ids if i not in hidden]
        self._pending += new
        if not new or self._tokenizer.is_byte_token(new[-1]):
            return ""
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._take(text)

    def flush(self) -> str:
        """Returns what was held back and starts afresh for another reply."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _take(self, text: str) -> str:
        if text:  # a piece without text is no context: a space after it may still be a leading one
            self._context, self._pending = self._pending, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise D3DError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise D3DError(f"{path} does not hold a JSON object; fetch the model again")
    return value


def _damaged(path: Path, key: str, value: Any, expected: str) -> D3DError:
    return D3DError(f"{path}: {key} is {value!r}, not {expected}")


def _eos_ids(path: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """The eos_token_id of a file, one or a list, checked to be ids of tokens."""
    value = _read_json(path).get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for index in ids:
        if type(index) is not int or index < 0 or backend.id_to_token(min(index, 2**31)) is None:
            raise _damaged(path, "eos_token_id", value, "the id of a token, or a list of them")
    return ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise D3DError(f"{file} is not UTF-8 text ({error}); fetch the model again") from error
    template = config.get("chat_template")
    try:
        if isinstance(template, list):  # several by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not isinstance(template, str | None):
            raise TypeError
        return template
    except (TypeError, KeyError):
        raise _damaged(
            folder / "tokenizer_config.json", "chat_template", template, "a template"
        ) from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words; here it is just its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> jinja2.Environment:
    # A template is code from a download, hence the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
