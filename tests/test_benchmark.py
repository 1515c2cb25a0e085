"""`d3d benchmark` on tiny models: its JSON, going on after an interruption, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from d3d_jax import cli
from d3d_jax.commands import benchmark_tasks
from d3d_jax.commands.benchmark_tasks import PAPER_TASKS, TASKS, load_tasks
from d3d_jax.commands.evaluate import load_checked
from d3d_jax.errors import D3DError
from d3d_jax.infer import benchmark, benchmark_bench
from d3d_jax.infer.decoding import Decoder
from d3d_jax.models import checkpoint
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.test_cli import one_error
from tests.tiny_folders import write_drafter, write_target
from tests.tiny_models import Documents, greedy
from tests.train.test_prompts import COMMIT, parquet

TOKENS = 12
WHOLE = ["--temperature", "0", "1", "--concurrency", "2", "--repeats", "2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with `target`, its `drafter`, and prompts of one and of two turns."""
    folder = tmp_path_factory.mktemp("models")
    write_drafter(folder / "drafter", write_target(folder / "target"))
    (folder / "prompts").mkdir()
    for name, turns in (("one", ["the hello"]), ("two", ["hello", "the"])):
        lines = [json.dumps({"turns": [*turns[:-1], f"{turns[-1]} {i}"]}) for i in range(5)]
        (folder / f"prompts/{name}.jsonl").write_text("\n".join(lines))
    return folder


def run(models: Path, out: Path, *args: str) -> int:
    paths = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    prompts = [] if "--prompts" in args else ["--prompts", str(models / "prompts")]
    common = ["--out", str(out), *paths, *prompts, "--max-new-tokens", str(TOKENS)]
    usual = [] if "--samples" in args else ["--samples", "3"]
    return cli.main(["benchmark", *common, *usual, *args])


@pytest.fixture(scope="module")
def done(models, tmp_path_factory) -> Path:
    """The folder of a whole benchmark."""
    out = tmp_path_factory.mktemp("benchmark") / "out"
    assert run(models, out, *WHOLE, "--seed", "5") == 0
    return out


def test_promise_3_the_json_says_that_no_token_differs(done, models):
    result = json.loads((done / "benchmark.json").read_text())
    rows = [row for row in result["results"] if row["mode"] != "plain"]
    assert len(result["results"]) == 18 and len(rows) == 12
    for row in rows:
        replies = {"one": 3, "two": 6, "overall": 9}[row["task"]]
        assert row["replies"] == replies and row["compared"] == 2 * replies
        assert row["identical"] == row["compared"] and not row.get("divergences")
    config, params = checkpoint.read_config(models / "target")[0], None
    params = checkpoint.load_params(models / "target", config, stacked=True)
    stop_ids = Tokenizer.from_folder(models / "target").stop_ids
    point = json.loads((done / "points/two-T0-concurrency2-repeat1-async.json").read_text())
    for answer in point["answers"]:
        expected = greedy(config, params, answer["prompt_ids"], TOKENS, stop_ids)
        assert answer["token_ids"] == expected


def test_promise_5_the_jsons_acceptance_is_the_offline_one(done, models):
    """Of the same replies, read in packed passes without the target; both leave out last rounds."""
    results = json.loads((done / "benchmark.json").read_text())["results"]
    drafter, params = load_checked(models / "drafter", str(models / "target"))
    for task in ("one", "two"):
        point = json.loads((done / f"points/{task}-T0-concurrency2-repeat1-plain.json").read_text())
        said = [(answer["prompt_ids"], answer["token_ids"]) for answer in point["answers"]]
        found = OfflineAcceptance(drafter, Documents(said)).measure(params)
        counted = np.concatenate([accepted[:-1] for accepted in found.accepted])
        assert len(counted) >= 2 * len(said)
        rows = [r for r in results if r["task"] == task and not r["temperature"]]
        for row in (row for row in rows if row["mode"] != "plain"):
            assert row["tau_pooled"] == round(float(np.mean(counted + 1)), 4)
            shares = [round(float(np.mean(counted >= i)), 4) for i in range(1, counted.max() + 1)]
            assert row["acceptance_by_offset"] == shares


def test_the_json_holds_what_was_promised(done):
    result = json.loads((done / "benchmark.json").read_text())
    assert result["kind"] == "d3d benchmark" and len(result["rows_of_tasks"]["one"]) == 3
    settings = result["settings"]
    assert settings["tasks"]["one"].startswith("one.jsonl sha256:")
    assert {"jax", "python", "devices", "d3d_jax"} <= set(settings["machine"])
    assert settings["drafter_config"]["block_size"] == 4 and settings["seed"] == 5
    assert set(result["step_ms"]) == {"2"}
    by_mode = {row["mode"]: row for row in result["results"] if row["task"] == "overall"}
    assert by_mode["plain"]["tau_pooled"] == 1.0 == by_mode["plain"]["speedup_decode"]["median"]
    assert by_mode["plain"]["acceptance_by_offset"] == []
    assert by_mode["sync"]["hit_rate"] is None and by_mode["async"]["hit_rate"] is not None
    assert {"tau_mean_of_tasks", "speedup_decode_of_tasks"} <= set(by_mode["async"])
    assert all(row["compiled_while_timed"] == 0 for row in result["results"])


def test_a_trace_shows_the_steps_of_rounds_in_order(done, models, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_bench, "measure", None)  # a trace may be added to what is there
    assert run(models, done, *WHOLE, "--seed", "5", "--trace", "--json") == 0
    timelines = json.loads(capsys.readouterr().out)["timelines"]
    assert set(timelines) == {"sync", "async"}
    for mode, after in (("sync", "draft"), ("async", "resolve")):
        spans = timelines[mode]
        turns = [span for span in spans if span["step"] in ("verify", after)]
        assert [span["step"] for span in turns] == ["verify", after] * (len(turns) // 2)
        assert len(turns) >= 2 * 3  # a block of 4 leaves at least three rounds of 12 tokens
        ends = [span["end"] for span in turns]
        assert all(end <= span["start"] for end, span in zip(ends, turns[1:], strict=False))
    steps = json.loads((done / "benchmark.json").read_text())["step_ms"]
    assert run(models, done, *WHOLE, "--seed", "5", "--json") == 0  # what is there stays
    again = json.loads(capsys.readouterr().out)
    assert again["timelines"] == timelines and again["step_ms"] == steps
    prepared = [span for span in timelines["async"] if span["step"] == "prepare"]
    assert len(prepared) == sum(span["step"] == "resolve" for span in timelines["async"])


def test_a_finished_benchmark_is_not_measured_again_and_others_are_refused(
    done, models, monkeypatch, capsys
):
    monkeypatch.setattr(benchmark_bench, "measure", None)  # to call it would fail
    assert run(models, done, *WHOLE, "--seed", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["repeats"] == 2
    said = one_error(capsys, run(models, done, *WHOLE, "--seed", "6"))
    assert "holds a benchmark with seed 5, and this one has 6" in said
    weights = models / "drafter/model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-4] + bytes(4))  # trained on in place
    said = one_error(capsys, run(models, done, *WHOLE, "--seed", "5"))
    assert "with drafter weights" in said
    weights.write_bytes(before)
    (models / "other.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["b"]}')
    prompts = ["--prompts", f"one={models / 'other.jsonl'}", f"two={models / 'prompts/two.jsonl'}"]
    said = one_error(capsys, run(models, done, *WHOLE, "--seed", "5", *prompts))
    assert "with tasks one" in said and "continue it" in said


def test_an_interrupted_benchmark_goes_on_with_the_repeat_that_was_under_way(
    models, tmp_path, monkeypatch, capsys
):
    out, calls = tmp_path / "out", []

    def measure(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return benchmark.measure(*args)

    monkeypatch.setattr(benchmark_bench, "measure", measure)
    args = ["--tasks", "one", "--repeats", "2"]
    assert run(models, out, *args) == 130
    assert "keeps the points that ended" in capsys.readouterr().err
    assert len(list((out / "points").iterdir())) == 4 and not (out / "benchmark.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (out / "points").glob("*repeat1-*")}
    assert run(models, out, *args) == 0
    assert len(kept) == 3 and len(calls) == 5 + 3  # what is compared is of one sitting
    assert len(list((out / "points").iterdir())) == 6
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "× all" in capsys.readouterr().out


def test_too_little_memory_fails_its_own_points_alone(models, tmp_path, monkeypatch, capsys):
    warm_up = Decoder.warm_up

    def limited(self, *args, **kwargs):
        if self.slots == 2 and self.config.mode == "sync":
            raise D3DError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        warm_up(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "warm_up", limited)
    args = ["--concurrency", "1", "2", "--repeats", "1", "--modes", "plain", "sync"]
    assert run(models, tmp_path / "out", *args) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 at a time failed: out of memory: RESOURCE_EXHAUSTED: Out of memory" in printed
    rows = json.loads((tmp_path / "out/benchmark.json").read_text())["results"]
    failed = [(row["task"], row["concurrency"]) for row in rows if "failed" in row]
    assert failed == [("one", 2), ("two", 2), ("overall", 2)]
    assert len(rows) == 12 and all("tau_pooled" in row for row in rows if "failed" not in row)
    # It is tried again when asked for, with what it is compared with, and only that.
    monkeypatch.setattr(Decoder, "warm_up", warm_up)
    points = tmp_path / "out/points"
    every = {path: path.stat().st_mtime_ns for path in points.iterdir()}
    assert run(models, tmp_path / "out", *args) == 0
    assert {path: path.stat().st_mtime_ns for path in every} == every
    alone = {path: every[path] for path in points.glob("*concurrency1-*")}
    assert run(models, tmp_path / "out", *args, "--retry") == 0
    rows = json.loads((tmp_path / "out/benchmark.json").read_text())["results"]
    assert len(rows) == 12 and not any("failed" in row for row in rows)
    assert {path: path.stat().st_mtime_ns for path in alone} == alone


BAD = {
    "unknown task": (["--tasks", "gsm9k"], "no task 'gsm9k'; choose of one, two, gsm8k, math500"),
    "no such file": (["--prompts", "x=nonesuch.jsonl"], "cannot read nonesuch.jsonl"),
    "no such folder": (["--prompts", "nonesuch"], "takes NAME=FILE or a folder of TASK.jsonl"),
    "twice": (["--prompts", "PROMPTS", "PROMPTS"], "--prompts names one twice"),
    "no task": (["--prompts", "overall=BAD"], "--prompts names 'overall'"),
    "a folder in its name": (["--prompts", "a/b=BAD"], "--prompts names 'a/b'"),
    "bad line": (["--prompts", "bad=BAD"], "bad.jsonl, line 2: not valid JSON"),
    "few prompts": (["--samples", "9", "--concurrency", "6"], "one has 5 prompts, too few"),
    "few samples": (["--concurrency", "4"], "--concurrency 4 needs as many prompts"),
    "no mode": (["--modes"], "--modes names none"),
    "cold": (["--temperature", "-1"], "--temperature must be a number from 0"),
    "twice as hot": (["--temperature", "1", "1.0"], "--temperature names 1.0 twice"),
    "block too large": (["--block-size", "5"], "block size 5 is above the 4"),
    "another tokenizer": (["--drafter", "OTHER"], "another target or tokenizer"),
    "too long": (["--max-length", "8"], "line 3 has 46 tokens, the model takes at most 7"),
    "thinking is not switched": (["--thinking", "on"], "its chat template has no enable_thinking"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_before_anything_is_measured(case, models, tmp_path, capsys):
    other, bad = tmp_path / "other", tmp_path / "bad.jsonl"
    if case == "another tokenizer":
        write_drafter(other, models / "target", tokenizer_fingerprint="f" * 64)
    bad.write_text('{"turns": ["a"]}\n{"turns": ["a"')
    names = {"PROMPTS": str(models / "prompts"), "OTHER": str(other), "bad=BAD": f"bad={bad}"}
    args, said = BAD[case]
    status = run(models, tmp_path / "out", *(names.get(arg, arg) for arg in args))
    assert said in one_error(capsys, status)
    assert not (tmp_path / "out").exists()


RECORDS = {
    "gsm8k": ("main/test-00000-of-00001.parquet", {"question": "1 + {x}?", "answer": "2"}),
    "humaneval": (
        "openai_humaneval/test-00000-of-00001.parquet",
        {"prompt": "def f():\n", "task_id": "0"},
    ),
    "mbpp": ("sanitized/test-00000-of-00001.parquet", {"prompt": "Write f.", "code": ""}),
    "mt-bench": ("data/train-00000-of-00001.parquet", {"prompt": ["Write.", "Shorten."]}),
    "livecodebench": ("test6.jsonl", {"question_content": "Sum.", "starter_code": "class S:"}),
    "math500": ("test.jsonl", {"problem": "2 + 2?"}),
}
ASKED = {
    "gsm8k": ("1 + {x}?\nPlease reason step by step, and put your final answer within \\boxed{}.",),
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n\n```",
    ),
    "mbpp": ("Write f.",),
    "mt-bench": ("Write.", "Shorten."),
    "math500": ("2 + 2?\nPlease reason step by step, and put your final answer within \\boxed{}.",),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_task_of_the_hub_is_asked_as_the_papers_ask_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_id = TASKS[name].dataset.split(":")[0]
    repository = tmp_path / f"datasets--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    file, record = RECORDS[name]
    path = repository / "snapshots" / COMMIT / file
    if path.suffix == ".parquet":
        parquet(path, [record, record])
    else:
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    (task,) = load_tasks([name], [], samples=1, seed=0)
    assert len(task.conversations) == 1 and COMMIT in task.source
    (found,) = task.conversations
    if name == "livecodebench":
        assert found.turns[0].startswith("You are an expert Python programmer. You will be given")
        assert (
            "### Question:\nSum.\n\n### Format: Use the following code structure:"
            in (found.turns[0])
        )
        assert "```python\nclass S:\n```\n\n### Answer: (use the" in found.turns[0]
    else:
        assert found.turns == ASKED[name]


def test_a_hub_that_does_not_answer_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(D3DError, match="the hub does not answer and no copy of openai/gsm8k"):
        load_tasks([], [], samples=1, seed=0)
    assert len(PAPER_TASKS) == 7 and "aime24" not in PAPER_TASKS


def test_samples_are_drawn_by_the_seed_in_the_order_of_the_file(models):
    def rows(seed, samples=3):
        return load_tasks(["one"], [str(models / "prompts")], samples, seed)[0].rows

    assert rows(1) == rows(1) and len({rows(seed) for seed in range(9)}) > 1
    assert all(list(rows(seed)) == sorted(set(rows(seed))) for seed in range(9))
    assert rows(0, samples=0) == rows(0, samples=7) == (0, 1, 2, 3, 4)
    assert benchmark_tasks.prompt_files([]) == {}


def test_a_peer_says_the_same_tokens_and_stands_beside_the_modes(models, tmp_path, capsys):
    pytest.importorskip("torch")
    args = ["--peer", "--modes", "plain", "--repeats", "1", "--samples", "2"]
    assert run(models, tmp_path / "out", *args) == 0
    rows = json.loads((tmp_path / "out/benchmark.json").read_text())["results"]
    assert [row["mode"] for row in rows[:3]] == ["plain", "torch", "torch-lookup"]
    for row in rows:
        if row["mode"] != "plain":
            assert row["identical"] == row["compared"] > 0
            assert row["speedup_decode"]["median"] > 0 and row["devices"] == 1
    looked_up = [row["tau_pooled"] for row in rows if row["mode"] == "torch-lookup"]
    assert all(tau >= 1 for tau in looked_up)
    capsys.readouterr()
    said = one_error(capsys, run(models, tmp_path / "hot", *args, "--temperature", "1"))
    assert "--peer decodes greedily and one prompt at a time" in said
