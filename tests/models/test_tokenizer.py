"""Tokenizer and StreamDecoder: equal to transformers; streaming never splits a character."""

import json
import shutil
from itertools import chain

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from d3d_jax.errors import D3DError
from d3d_jax.models.gguf import convert_gguf
from d3d_jax.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import CHAT_TEMPLATE, METADATA, SPECIALS, TOKENS, write_tiny_gguf

# Written for these tests after the manner of Qwen3's: tools, thinking that only the last turn
# keeps, white space control, a namespace, slices, and a switch.
THINKING_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' }}{{ call.function.name }} {{ call.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
# What the other template leaves out: block trimming, marks, loop control, named tokens, the date.
ODDITIES_TEMPLATE = """\
{{ bos_token }}{{ strftime_now('%Y') }}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% generation %}
    {% set eos_token = 'shadowed' %}
{{ message.content }} {{ loop.index }} {{ 'tool_calls' in message }}
    {% endgeneration %}
{{ eos_token }}
    {% if message.role == 'last' %}{% break %}{% endif %}
{% endfor %}
{{ {'a': '<é>', 'b': [1, none]} | tojson(indent=2) }}{{ sep_token }}{{ documents is none }}
"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "thinking": THINKING_TEMPLATE, "oddities": ODDITIES_TEMPLATE}

USER = {"role": "user", "content": "The thé 123, <b>&</b>\n  \t世界 🦆"}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Then."}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, USER],
    [USER, {"role": "assistant", "content": "<think>hm</think>No<|im_end|>", "tool_calls": None}],
    [{"role": "skip", "content": ""}, {"role": "last", "content": "a"}, USER],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    write_tiny_gguf(root / "m.gguf")
    convert_gguf(root / "m.gguf", root / "model")
    return root / "model"


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of its own for a test that edits it, without the weights."""
    shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "m"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def edit(path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_equals_transformers(folder, oracle, name, messages, generate):
    options = {"add_generation_prompt": generate}
    if name == "thinking":
        tool = {"type": "function", "function": {"name": "f<1>", "parameters": {"é": [1.5, True]}}}
        options |= {"enable_thinking": len(messages) == 1, "tools": [tool] * (len(messages) - 1)}
    mine = Tokenizer.from_folder(folder)
    mine.chat_template = TEMPLATES[name]
    text = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, **options
    )
    assert mine.render_chat(messages, **options) == text
    ids = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], return_dict=False, **options
    )
    assert mine.chat(messages, **options) == list(ids)


def test_chat_has_a_known_answer(tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "12"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids[0] == 1 and ids.count(2) == 2
    assert ids[-15:-13] == [TOKENS.index("1"), TOKENS.index("2")]  # digits stay apart


def test_options_reach_the_template(copy):
    (copy / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    mine = Tokenizer.from_folder(copy)
    assert mine.render_chat([USER]).endswith("assistant\n")
    assert mine.render_chat([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert not mine.render_chat([USER], False).endswith("assistant\n")


@given(text=st.text())
def test_encode_and_decode_equal_transformers(tokenizer, oracle, text):
    ids = tokenizer.encode(text)
    assert ids == oracle(text).input_ids
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1)))
def test_decode_of_any_ids_equals_transformers(tokenizer, oracle, ids):
    for skip in (True, False):
        want = oracle.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == want


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("The<|im_end|>\n")
    assert ids == [TOKENS.index("T"), TOKENS.index("he"), 2, TOKENS.index("Ċ")]
    assert tokenizer.decode(ids) == "The\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "The<|im_end|>\n"
    assert tokenizer.special_ids == set(range(len(SPECIALS)))
    assert tokenizer.vocab_size == len(TOKENS)


def test_padding_and_truncation_of_the_file_are_ignored(copy):
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(copy / "tokenizer.json"))
    assert len(Tokenizer.from_folder(copy).encode("abcde")) == 5
    assert len(Tokenizer.from_folder(copy).encode("a")) == 1


def test_undecodable_text_is_refused(tokenizer):
    with pytest.raises(D3DError, match="not valid Unicode"):
        tokenizer.encode(b"caf\xe9".decode("utf-8", "surrogateescape"))


def test_stop_ids_come_from_all_three_files(copy):
    assert Tokenizer.from_folder(copy).stop_ids == (2,)
    edit(copy / "generation_config.json", eos_token_id=[2, 0])
    edit(copy / "config.json", eos_token_id=5)
    edit(copy / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert Tokenizer.from_folder(copy).stop_ids == (2, 0, 5, 1)
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert Tokenizer.from_folder(copy).stop_ids == ()


def test_where_the_template_may_lie(copy):
    config = copy / "tokenizer_config.json"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    edit(config, chat_template=named)
    assert Tokenizer.from_folder(copy).chat_template == "d"
    edit(config, chat_template=None)
    bare = Tokenizer.from_folder(copy)
    assert bare.chat_template is None and bare.template_fingerprint == ""
    with pytest.raises(D3DError, match="no chat template"):
        bare.chat([USER])
    (copy / "chat_template.jinja").write_text("j")
    assert Tokenizer.from_folder(copy).chat_template == "j"


@pytest.mark.parametrize(
    ("template", "messages", "match"),
    [
        (CHAT_TEMPLATE, [], "at least one message"),
        (CHAT_TEMPLATE, ["hello"], "at least one message"),
        (CHAT_TEMPLATE, [{"content": "no role"}], "at least one message"),
        (CHAT_TEMPLATE, [{"role": "user"}], "refuses these messages: .*content"),
        (CHAT_TEMPLATE, [{"role": "user", "content": 3}], "refuses these messages"),
        ("{{ raise_exception('no system turn') }}", [USER], "refuses .*: no system turn"),
        ("{% if %}", [USER], "template is damaged"),
        ("{{ messages.append(1) }}", [USER], "refuses"),
        ("{{ ''.__class__.__mro__ }}", [USER], "refuses"),
    ],
)
def test_messages_a_template_refuses(folder, template, messages, match):
    mine = Tokenizer.from_folder(folder)
    mine.chat_template = template
    with pytest.raises(D3DError, match=match) as error:
        mine.chat(messages)
    assert isinstance(error.value.__cause__, jinja2.TemplateError | TypeError | None)


def test_damaged_folders_are_refused(copy):
    (copy / "config.json").write_text("[]")
    with pytest.raises(D3DError, match=r"config\.json does not hold a JSON object"):
        Tokenizer.from_folder(copy)
    (copy / "config.json").write_text('{"half')
    with pytest.raises(D3DError, match=r"config\.json is not valid JSON"):
        Tokenizer.from_folder(copy)
    whole = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(D3DError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_folder(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(D3DError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_folder(copy)


def test_fingerprints_tell_what_ids_mean(copy, tmp_path):
    first = Tokenizer.from_folder(copy)
    assert len(first.fingerprint) == len(first.template_fingerprint) == 64
    path = copy / "tokenizer.json"
    tree = json.loads(path.read_text())

    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    path.write_text(json.dumps(tree))  # the older way to write the same merges
    (copy / "chat_template.jinja").write_text("other")
    same = Tokenizer.from_folder(copy)
    assert same.fingerprint == first.fingerprint
    assert same.template_fingerprint != first.template_fingerprint

    tree["model"]["merges"].reverse()
    path.write_text(json.dumps(tree))
    assert Tokenizer.from_folder(copy).fingerprint != first.fingerprint
    tree["model"]["merges"].reverse()
    vocab = tree["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(tree))
    assert Tokenizer.from_folder(copy).fingerprint != first.fingerprint

    edited = METADATA | {"tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3)}
    write_tiny_gguf(tmp_path / "m.gguf", metadata=edited)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "other")
    other = Tokenizer.from_folder(tmp_path / "other")
    assert other.encode("<|im_end|>") == [2] and other.decode([2]) == "<|im_end|>"
    # Which tokens are special is a matter of reading text, not of what ids mean.
    assert other.fingerprint == first.fingerprint


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer after the manner of Llama 2: spaces as ▁, one leading space stripped, bytes."""
    tokens = [
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁▁",
        "▁a",
        "a",
        "é",
        "\ufffd",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in tokens[:2]])
    return Tokenizer(backend)


def pieces(tokenizer, chunks, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.feed(chunk) for chunk in chunks), stream.flush()]


chunked = st.lists(st.lists(st.integers(0, 259), max_size=4), max_size=12)


@given(chunks=chunked, skip=st.booleans())
def test_streamed_pieces_join_to_the_whole(tokenizer, chunks, skip):
    whole = tokenizer.decode(list(chain(*chunks)), skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, chunks, skip_special_tokens=skip)) == whole


@given(data=st.data(), skip=st.booleans())
def test_streamed_pieces_join_with_byte_fallback_too(byte_fallback, data, skip):
    # The tokens that interact: specials, halves of é, spaces, letters, and an id without a token.
    token = st.one_of(st.sampled_from([0, 1, 0xC3 + 2, 0xA9 + 2, *range(258, 265)]))
    chunks = data.draw(st.lists(st.lists(token, max_size=3), max_size=10))
    whole = byte_fallback.decode(list(chain(*chunks)), skip_special_tokens=skip)
    assert "".join(pieces(byte_fallback, chunks, skip_special_tokens=skip)) == whole


@given(text=st.text())
def test_no_piece_ends_inside_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, [[i] for i in ids])
    for piece in streamed:
        assert piece.count("\ufffd") <= text.count("\ufffd")
        piece.encode("utf-8")
    assert "".join(streamed) == tokenizer.decode(ids)


def test_a_character_comes_when_its_last_byte_does(tokenizer, byte_fallback):
    ids = tokenizer.encode("a🦆b")
    assert len(ids) == 6
    assert pieces(tokenizer, [[i] for i in ids]) == ["a", "", "", "", "🦆", "b", ""]
    half = pieces(tokenizer, [ids[:3]])
    assert half == ["", "a\ufffd"]
    # A run of byte tokens is judged as a whole, so it waits for its end.
    assert pieces(byte_fallback, [[0xC3 + 2], [0xA9 + 2], [261]]) == ["", "", "éa", ""]
    # An id without a token has no text, and the space after it is not a leading one.
    assert pieces(byte_fallback, [[261], [9999], [260]]) == ["a", "", " a", ""]


def test_a_stream_can_be_used_again(tokenizer):
    stream = tokenizer.stream()
    assert stream.feed(tokenizer.encode("the")) == "the" and stream.flush() == ""
    assert stream.feed(tokenizer.encode(" the")) == " the" and stream.flush() == ""


@pytest.mark.slow
def test_the_real_tokenizer_equals_transformers():
    from d3d_jax.models.registry import resolve_model

    folder = resolve_model("smollm2-135m")
    mine = Tokenizer.from_folder(folder)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert mine.stop_ids == (2,) and mine.vocab_size == 49152
    for messages in CONVERSATIONS[:4]:
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert mine.chat(messages) == list(ids)
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    system += [411, 407, 19712, 8182, 2, 198, 1, 4093, 198]
    assert mine.chat([USER])[: len(system)] == system
    text = "def f(x):\n\treturn x ** 2  # 3.14, naïve 世界 🦆\r\n\n"
    assert mine.decode(mine.encode(text)) == text
    assert "".join(pieces(mine, [[i] for i in mine.encode(text)])) == text
