"""Prompts of `d3d respond`: all of a file or none, of a dataset those it can; those of imports."""

import json
import re

import pytest

from d3d_jax import cli
from d3d_jax.commands import respond
from d3d_jax.commands.runtime import Bar
from d3d_jax.infer.model import ModelFiles
from d3d_jax.train.prompts import PromptSource
from d3d_jax.train.responses import read_manifest, read_responses
from tests.models.tiny_gguf import CHAT_TEMPLATE
from tests.test_cli import one_error
from tests.tiny_folders import write_target

REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
SYSTEM = {"role": "system", "content": "the"}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """One whose chat template takes no system message."""
    folder = tmp_path_factory.mktemp("models") / "target"
    return write_target(folder, template=REFUSES + CHAT_TEMPLATE)


def answer(target, out, source, *more):
    options = ["--max-new-tokens", "4", "--batch", "2", "--out", str(out), *more]
    return cli.main(["respond", "--target", str(target), "--prompts", str(source), *options])


def write(folder, *records):
    path = folder / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def dataset(monkeypatch):
    """A function that makes `--prompts` a dataset of these records."""

    def make(*records):
        numbered = [(f"row {index}", record) for index, record in enumerate(records)]
        source = PromptSource("made", "made", len(records), lambda: iter(numbered))
        monkeypatch.setattr(respond, "open_prompts", lambda spec, column: source)
        return "hub:org/made"

    return make


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [SYSTEM, USER]}, "line 3: the chat template refuses .*no system role"),
        ({"prompt": "\ud800"}, "line 3: a text holds bytes or surrogates"),
        ({"prompt": "hello " * 400}, "line 3: the prompt has .* --max-prompt-tokens leaves longer"),
    ],
)
def test_a_prompt_of_a_file_that_cannot_be_asked_is_named_before_any_work(
    target, tmp_path, capsys, monkeypatch, record, message
):
    monkeypatch.setattr(ModelFiles, "load", lambda *args: pytest.fail("the target was loaded"))
    path = write(tmp_path, {"prompt": "the"}, {"prompt": "hello"}, record)
    said = one_error(capsys, answer(target, tmp_path / "out", path))
    assert re.search(message, said), said


def test_prompts_of_which_only_the_beginning_is_asked_are_counted(target, tmp_path, capsys):
    path = write(tmp_path, {"turns": ["the", "hello"]}, {"prompt": "hello"})
    assert answer(target, tmp_path / "out", path) == 0
    assert "1 prompts of mine have more than one turn" in capsys.readouterr().err


def test_a_dataset_is_asked_what_its_template_takes(target, tmp_path, capsys, monkeypatch, dataset):
    totals = []
    update = Bar.update_total
    monkeypatch.setattr(Bar, "update_total", lambda *args: (totals.append(args[2]), update(*args)))
    refused = {"messages": [SYSTEM, USER]}
    source = dataset(refused, {"prompt": "the"}, {"prompt": "hello"}, refused, {"prompt": "12"})
    assert answer(target, tmp_path / "out", source) == 0
    assert sorted(r.index for r in read_responses(tmp_path / "out")) == [1, 2, 4]
    said = " ".join(capsys.readouterr().err.split())
    assert "2 of 5 records of made hold no prompt that the chat template takes (row 0: the" in said
    assert totals[-1] == 3
    # What is left cannot be asked, for which nothing is loaded.
    monkeypatch.setattr(ModelFiles, "load", lambda *args: pytest.fail("the target was loaded"))
    assert answer(target, tmp_path / "out", source) == 0


def test_a_dataset_of_which_the_template_takes_nothing_is_refused(
    target, tmp_path, capsys, dataset
):
    source = dataset(*[{"messages": [SYSTEM, USER]}] * 3)
    said = one_error(capsys, answer(target, tmp_path / "out", source))
    assert "row 0: the chat template refuses" in said and not (tmp_path / "out").exists()


def test_imports_name_the_file_of_their_requests(target, tmp_path, capsys):
    reply = {"message": {"content": "the"}, "finish_reason": "stop"}
    made = write(tmp_path, {"custom_id": "a", "response": {"body": {"choices": [reply]}}})
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"custom_id": "a", "body": {"messages": [USER]}}))
    command = ["respond", "--target", str(target), "--import-from", str(made), "--sampled"]
    command += ["--requests", str(requests), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    manifest = read_manifest(tmp_path / "out")
    assert re.search("from mine.jsonl sha256:.*, asked by requests.jsonl sha256:", manifest.prompts)
    assert manifest.sampling == {"greedy": False}
    requests.write_text(json.dumps({"custom_id": "a", "body": {"messages": [SYSTEM | USER]}}) + " ")
    capsys.readouterr()
    assert "made with prompts" in one_error(capsys, cli.main(command))
