"""Thinking and --system: what the template is told, what the manifest says, what is refused."""

import json
from pathlib import Path

import pytest

from d3d_jax import cli
from d3d_jax.commands import demo, from_scratch
from d3d_jax.errors import D3DError
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.dataset import open_dataset
from d3d_jax.train.responses import read_manifest, read_responses
from tests.models.tiny_gguf import CHAT_TEMPLATE
from tests.tiny_folders import write_drafter, write_target

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined %}{{ 'hm the hello' if enable_thinking else 'so' }}"
    "{% endif %}"
)
USER = [{"role": "user", "content": "hello"}]
SAID = {None: "", "on": "hm the hello", "off": "so"}


def rendered(prompt: str, thinking: str | None, system: str | None = None) -> str:
    before = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    end = f"<|im_end|>\n<|im_start|>assistant\n{SAID[thinking]}"
    return f"{before}<|im_start|>user\n{prompt}{end}"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with `target`, whose template switches thinking, its `drafter` and prompts."""
    folder = tmp_path_factory.mktemp("models")
    write_drafter(folder / "drafter", write_target(folder / "target", template=TEMPLATE))
    lines = [{"turns": [f"hello {i}"], "split": "validation", "topic": "a"} for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def flags(thinking: str | None, system: str | None = None) -> list[str]:
    chosen = {"--thinking": thinking, "--system": system}
    return [word for name, value in chosen.items() if value is not None for word in (name, value)]


def generate(models: Path, capsys, *args: str) -> list[int]:
    target = ["--target", str(models / "target"), "--max-new-tokens", "6", "--json"]
    assert cli.main(["generate", *target, *args]) == 0
    return json.loads(capsys.readouterr().out)["token_ids"]


def respond(models: Path, out: Path, *args: str) -> int:
    paths = ["--target", str(models / "target"), "--out", str(out), "--max-new-tokens", "6"]
    return cli.main(["respond", *paths, "--prompts", str(models / "prompts.jsonl"), *args])


def one_error(capsys, status: int) -> str:
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("template", "supports"),
    [
        (TEMPLATE, True),
        ("{% if enable_thinking is defined and enable_thinking is false %}so{% endif %}", True),
        ("{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}", True),
        ("{% macro m() %}{{ 1 if enable_thinking }}{% endmacro %}{{ m() }}", True),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", True),
        (CHAT_TEMPLATE, False),
        ("{# enable_thinking #}{{ 'enable_thinking' }}{{ messages[0].enable_thinking }}", False),
        ("{% set enable_thinking = true %}{{ enable_thinking }}", False),
        (None, False),
    ],
)
def test_whether_a_template_switches_thinking(models, template, supports):
    mine = Tokenizer.from_folder(models / "target")
    mine.chat_template = template
    assert mine.supports_thinking is supports


def test_thinking_reaches_a_template_that_switches_it(models):
    mine = Tokenizer.from_folder(models / "target")
    mine.chat_template = "{{ enable_thinking if enable_thinking is defined else 'unsaid' }}"
    for thinking, text in {None: "unsaid", True: "True", False: "False"}.items():
        assert mine.render_chat(USER, thinking=thinking) == text
        assert mine.chat(USER, thinking=thinking) == mine.encode(text)
    mine = Tokenizer.from_folder(models / "target")
    mine.chat_template = CHAT_TEMPLATE
    for thinking in (True, False):
        with pytest.raises(D3DError, match=r"cannot be switched .* has no enable_thinking$"):
            mine.chat(USER, thinking=thinking)


def test_a_broken_template_is_named_when_asked_about_thinking(models):
    mine = Tokenizer.from_folder(models / "target")
    mine.chat_template = "{% if %}"
    with pytest.raises(D3DError, match="the chat template is damaged: "):
        _ = mine.supports_thinking


@pytest.mark.parametrize("system", [None, "the"])
def test_generate_tells_the_template(models, capsys, system):
    replies = {}
    for thinking in SAID:
        told = generate(models, capsys, "--prompt", "hello 0", *flags(thinking, system))
        text = rendered("hello 0", thinking, system)
        assert told == generate(models, capsys, "--raw", "--prompt", text)
        replies[thinking] = tuple(told)
    assert len(set(replies.values())) == 3, "the replies must tell the prompts apart"


@pytest.mark.parametrize(("thinking", "system"), [(None, None), ("on", "the"), ("off", None)])
def test_respond_tells_the_template_and_records_it(models, tmp_path, capsys, thinking, system):
    out = tmp_path / "out"
    assert respond(models, out, *flags(thinking, system)) == 0
    tokenizer = Tokenizer.from_folder(models / "target")
    asked = {tokenizer.decode(r.prompt_ids, skip_special_tokens=False) for r in read_responses(out)}
    assert asked == {rendered(f"hello {i}", thinking, system) for i in range(2)}
    manifest = read_manifest(out)
    switch = {None: None, "on": True, "off": False}
    assert (manifest.thinking, manifest.system) == (switch[thinking], system)
    assert open_dataset(out / "dataset", "validation").manifest == manifest

    capsys.readouterr()
    for other in set(SAID) - {thinking}:
        said = one_error(capsys, respond(models, out, *flags(other, system)))
        assert f"made with thinking = {switch[thinking]}, not {switch[other]}" in said
    said = one_error(capsys, respond(models, out, *flags(thinking, "hello")))
    assert f"made with system = {system!r}, not 'hello'" in said
    assert respond(models, out, *flags(thinking, system)) == 0


def test_a_template_without_the_switch_is_refused_before_any_response(tmp_path, capsys):
    write_drafter(tmp_path / "drafter", write_target(tmp_path / "target"))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}')
    said = one_error(capsys, respond(tmp_path, tmp_path / "out", "--thinking", "off"))
    assert "thinking cannot be switched on or off for this model" in said
    assert not (tmp_path / "out").exists()
    roles = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    status = cli.main(["demo", *roles, "--thinking", "on", "--out", str(tmp_path / "demo")])
    assert "has no enable_thinking" in one_error(capsys, status)


def test_imported_responses_say_whether_the_target_thought(models, tmp_path, capsys):
    (tmp_path / "made.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hello"}, '
        '{"role": "assistant", "content": "the"}]}'
    )
    args = ["respond", "--import-from", str(tmp_path / "made.jsonl"), "--thinking", "on"]
    args += ["--greedy"]
    out = ["--target", str(models / "target"), "--out", str(tmp_path / "out")]
    assert cli.main([*args, *out]) == 0
    (response,) = read_responses(tmp_path / "out")
    tokenizer = Tokenizer.from_folder(models / "target")
    said = tokenizer.decode(response.prompt_ids, skip_special_tokens=False)
    assert said == rendered("hello", "on") and read_manifest(tmp_path / "out").thinking is True
    capsys.readouterr()
    assert "go with --prompts" in one_error(capsys, cli.main([*args, *out, "--system", "a"]))
    write_target(tmp_path / "target")
    status = cli.main([*args, "--target", str(tmp_path / "target"), "--out", str(tmp_path / "no")])
    assert "has no enable_thinking" in one_error(capsys, status)
    assert not (tmp_path / "no").exists()


def test_demo_tells_the_template(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", models / "prompts.jsonl")
    roles = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    size = ["--prompts", "1", "--max-new-tokens", "6", "--out", str(tmp_path)]
    assert cli.main(["demo", *roles, *size, "--thinking", "on"]) == 0
    capsys.readouterr()
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["settings"]["thinking"] is True
    prompt = record["prompts"][0]
    want = generate(models, capsys, "--prompt", prompt["prompt"], "--thinking", "on")
    assert want != generate(models, capsys, "--prompt", prompt["prompt"])
    assert all(mode["token_ids"] == want for mode in prompt["modes"].values())


def test_demo_from_scratch_asks_for_such_responses(models, tmp_path, capsys, monkeypatch):
    asked = []

    def make_responses(options):
        asked.append(options.thinking)
        raise D3DError("enough")

    monkeypatch.setattr(from_scratch.respond, "make_responses", make_responses)
    monkeypatch.setattr(demo, "PROMPTS", models / "prompts.jsonl")
    paths = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--prompts", "1"]
    target = ["--target", str(models / "target")]
    assert cli.main(["demo", "--from-scratch", *target, *paths, "--thinking", "off"]) == 2
    assert asked == ["off"]
