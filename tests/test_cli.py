"""The `d3d` command: instant help, whole runs on tiny models, and one clear line for bad input."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from d3d_jax import cli
from d3d_jax.commands import demo, export, from_scratch
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.prompts import read_prompts
from d3d_jax.train.responses import read_manifest, read_responses
from tests.models.test_processes import free_port
from tests.tiny_folders import BLOCK_SIZE, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("jax", "flax", "orbax", "optax", "transformers", "tensorflow_datasets", "matplotlib")
HEAVY += ("grain", "numpy", "tokenizers", "safetensors", "huggingface_hub")
CONFIG = """
steps: 6
batch_rows: 2
max_tokens: 96
max_blocks: 16
anchors_per_document: 4
learning_rate: 1.0e-3
gamma: 4.0
eval_every: 6
eval_documents: 2
checkpoint_every: 3
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with `target`, its `drafter`, a `deep` one, `prompts.jsonl` and `config.yaml`."""
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    write_drafter(folder / "drafter", target)
    write_drafter(folder / "deep", target, layers=(0, 1))
    prompts = [{"turns": [f"the hello {i}"], "topic": "ab"[i % 2]} for i in range(12)]
    lines = [
        json.dumps({**p, "split": "validation"} if i > 8 else p) for i, p in enumerate(prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def responses(models, tmp_path_factory) -> Path:
    """What `d3d respond` made of the prompts, its dataset included."""
    out = tmp_path_factory.mktemp("responses") / "out"
    prompts = ["--prompts", str(models / "prompts.jsonl"), "--max-new-tokens", "16", "--batch", "6"]
    assert (
        cli.main(["respond", "--target", str(models / "target"), *prompts, "--out", str(out)]) == 0
    )
    return out


def generate(models: Path, *args: str) -> int:
    common = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    return cli.main(["generate", *common, "--max-new-tokens", "12", *args])


def one_error(capsys, status: int) -> str:
    """The one line a failed command prints on stderr."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert status == 2 and captured.out == ""
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


def test_help_of_every_command_imports_nothing_heavy():
    program = f"""
import sys
from d3d_jax.cli import COMMANDS, main
for command in ([], *([name] for name in COMMANDS)):
    try:
        main([*command, "--help"])
    except SystemExit as done:
        assert done.code == 0, command
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (command, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"d3d {name}" in done.stdout for name in cli.COMMANDS)


def test_modes_say_the_same_and_json_has_the_documented_fields(models, capsys):
    replies = {}
    for mode in ("plain", "sync", "async"):
        assert generate(models, "--mode", mode, "--prompt", "the hello", "--json") == 0
        (line,) = capsys.readouterr().out.splitlines()
        replies[mode] = json.loads(line)
        assert list(replies[mode]) == [
            "prompt",
            "text",
            "token_ids",
            "mode",
            "rounds",
            "tau",
            "hit_rate",
            "tokens_per_second",
            "finish_reason",
        ]
        assert replies[mode]["mode"] == mode
    assert replies["plain"]["token_ids"] == replies["sync"]["token_ids"]
    assert replies["plain"]["token_ids"] == replies["async"]["token_ids"]
    assert replies["plain"]["rounds"] == len(replies["plain"]["token_ids"]) - 1
    assert replies["plain"]["hit_rate"] is None is replies["sync"]["hit_rate"]


def test_too_little_memory_is_one_sentence(models, capsys, monkeypatch):
    def full(options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 bytes.\nat")

    monkeypatch.setattr(export, "run", full)
    folders = ["--target", str(models), "--drafter", str(models), "--out", str(models / "x")]
    assert cli.main(["export", *folders]) == 2
    said = "error: a device has too little memory (RESOURCE_EXHAUSTED: Out of memory: 9 bytes.)\n"
    assert capsys.readouterr().err == said


def test_text_is_streamed_to_stdout_and_figures_to_stderr(models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the héllo\n".encode())))
    assert generate(models, "--mode", "sync", "--raw") == 0
    streamed = capsys.readouterr()
    assert "tokens/s" in streamed.err and "tokens/s" not in streamed.out
    assert generate(models, "--mode", "sync", "--raw", "--prompt", "the héllo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] + "\n" == streamed.out


def test_a_batch_answers_every_prompt_in_order(models, capsys):
    file = ["--prompts-file", str(models / "prompts.jsonl")]
    assert generate(models, "--mode", "async", *file, "--batch", "5", "--json") == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [reply["prompt"] for reply in replies] == [f"the hello {i}" for i in range(12)]
    assert generate(models, "--mode", "plain", "--prompt", "the hello 11", "--json") == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == replies[11]["token_ids"]


def test_respond_init_train_evaluate(models, responses, tmp_path, capsys):
    target, data = ["--target", str(models / "target")], ["--data", str(responses / "dataset")]
    again = ["--prompts", str(models / "prompts.jsonl"), "--max-new-tokens", "16"]
    made = {p: p.stat().st_mtime_ns for p in responses.rglob("*")}
    assert cli.main(["respond", *target, *again, "--out", str(responses)]) == 0
    assert {p: p.stat().st_mtime_ns for p in responses.rglob("*")} == made, "it was all there"

    first, run = tmp_path / "first", tmp_path / "run"
    vocab = ["--draft-vocab-size", "40", "--vocab-from", str(responses / "dataset")]
    source = ["--from", str(models / "target"), "--block-size", "4", "--layers", "1"]
    assert cli.main(["init-drafter", *source, *target, *vocab, "--out", str(first)]) == 0
    config = json.loads((first / "config.json").read_text())["d3d"]
    assert config["draft_vocab_size"] == 40 and config["source_layers"] == [1]
    assert config["shares"] == ["embed", "head"]
    bare = ["--from", str(models / "target"), "--random-layers", "2"]
    assert cli.main(["init-drafter", *target, *bare, "--out", str(tmp_path / "raw")]) == 0
    raw = json.loads((tmp_path / "raw/config.json").read_text())
    assert raw["num_hidden_layers"] == 2 and raw["d3d"]["source_layers"] == []
    less = ["--config", str(models / "config.yaml"), "--drafter", str(models / "deep")]
    less += ["--keep", "0", "--by", "last", "--recovery", "none", "--out", str(tmp_path / "less")]
    assert cli.main(["prune", *target, *data, *less, "--drafter-devices", "0"]) == 0
    pruned = json.loads((tmp_path / "less/drafter/config.json").read_text())
    assert pruned["num_hidden_layers"] == 1 and pruned["d3d"]["pruned_layers"] == [1]

    # What is pruned already is not pruned again, and every step of it can be timed.
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "less").rglob("*.safetensors")}
    capsys.readouterr()
    timed = ["--drafter-devices", "0", "--speed", "2", "--json"]
    assert cli.main(["prune", *target, *data, *less, *timed]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "less/report.json").read_text()) == report
    assert [depth["layers"] for depth in report["depths"]] == [2, 1]
    # Replies are short, and the round that ends one is cut: an endless one's τ is higher.
    measured = [report["tau"], report["steps"][0]["tau"]]
    for depth, tau in zip(report["depths"], measured, strict=True):
        assert tau - 1e-3 <= depth["tau"] <= tau + 0.2
        assert min(depth["draft_ms"], depth["prepare_ms"], *depth["measured"].values()) > 0
        assert set(depth["measured"]) == {"sync", "async"} and "separate" in depth["predicted"]
    assert (tmp_path / "less/depth.png").read_bytes().startswith(b"\x89PNG")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "less").rglob("*.safetensors")} == made

    settings = ["--config", str(models / "config.yaml"), "--drafter", str(first)]
    settings += ["--drafter-devices", "0-1", "--tensor", "2", "steps=4"]
    assert cli.main(["train", *target, *data, *settings, "--out", str(run)]) == 0
    capsys.readouterr()
    drafter = ["--drafter", str(run / "drafter")]
    assert cli.main(["evaluate", *target, *data, *drafter, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["documents"] == 3 and set(figures["tasks"]) == {"a", "b"}
    assert 1.0 <= figures["tau"] <= BLOCK_SIZE and len(figures["reached"]) == BLOCK_SIZE - 1
    assert cli.main(["evaluate", *target, *data, *drafter]) == 0
    assert "pooled over 3 validation responses" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_train_with_one_command(models, responses, tmp_path):
    command = ["train", "--target", str(models / "target"), "--data", str(responses / "dataset")]
    command += ["--config", str(models / "config.yaml"), "--drafter", str(models / "drafter")]
    command += ["--out", str(tmp_path / "run"), "--fsdp", "2", "steps=4", "batch_rows=2"]
    meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "d3d_jax.cli", *command, *meet, str(index)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert "the trained drafter is in" in said[0] and "trained drafter" not in said[1]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4


def test_imported_responses_become_a_dataset(models, tmp_path, capsys):
    records = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 2]} for _ in range(10)]
    file = tmp_path / "made.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    args = ["--target", str(models / "target"), "--import-from", str(file), "--greedy"]
    assert cli.main(["respond", *args, "--out", str(tmp_path / "out")]) == 0
    assert "9 responses to train on, 1 held out" in " ".join(capsys.readouterr().err.split())


def test_some_prompts_of_a_conversation_file_are_answered_then_more(models, tmp_path, capsys):
    talk = [
        {"from": "system", "value": "the"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "no"},
    ]
    rows = [{"conversations": talk[i % 2 :], "source": "ab"[i % 2]} for i in range(8)]
    rows[5] = {"conversations": [{"from": "human", "value": "hello " * 40}]}
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["respond", "--target", str(models / "target"), "--out", str(tmp_path / "out")]
    command += ["--prompts", str(tmp_path / "talk.jsonl"), "--batch", "2", "--max-new-tokens", "4"]
    command += ["--system", "hello", "--temperature", "1.5", "--seed", "2"]
    assert cli.main([*command, "--limit", "3"]) == 0
    few = {r.index: r for r in read_responses(tmp_path / "out")}
    assert cli.main([*command, "--max-prompt-tokens", "150"]) == 0
    assert "1 of 8 records of talk have more than 150 tokens" in capsys.readouterr().err
    made = {r.index: r for r in read_responses(tmp_path / "out")}
    assert len(few) == 3 and set(made) == set(range(8)) - {5} and few.items() <= made.items()
    tokenizer = Tokenizer.from_folder(models / "target")
    for index, system in ((0, "the"), (1, "hello")):
        user = {"role": "user", "content": "hello"}
        asked = tokenizer.chat([{"role": "system", "content": system}, user])
        assert made[index].prompt_ids == asked and made[index].task == "ab"[index]
    sampling = read_manifest(tmp_path / "out").sampling
    assert sampling["greedy"] is False and (sampling["temperature"], sampling["seed"]) == (1.5, 2)
    status = cli.main([*command, "--seed", "3"])
    assert "made with sampling" in one_error(capsys, status)


BAD_RESPOND = {
    "no prompts": ([], "give either --prompts or --import-from"),
    "no such file": (["--prompts", "nonesuch.jsonl"], "cannot read nonesuch.jsonl"),
    "too hot": (["--prompts", "x", "--temperature", "101"], "temperature must be a number"),
    "no nucleus": (
        ["--prompts", "x", "--temperature", "1", "--top-p", "0"],
        "top_p must be a number above 0",
    ),
    "drawn without heat": (["--prompts", "x", "--seed", "7"], "give a --temperature above 0"),
    "none wanted": (["--prompts", "x", "--limit", "0"], "--limit must be at least 1"),
    "sampled prompts": (["--prompts", "x", "--sampled"], "describe imported responses"),
    "imports of either kind": (["--import-from", "x"], "--greedy, or --sampled"),
    "drawn imports": (["--import-from", "x", "--sampled", "--seed", "1"], "go with --prompts"),
    "batched imports": (["--import-from", "x", "--greedy", "--batch", "2"], "go with --prompts"),
    "placed imports": (
        ["--import-from", "x", "--greedy", "--target-devices", "1"],
        "go with --prompts",
    ),
    "half a meeting": (["--prompts", "x", "--process-id", "1"], "go together"),
}


@pytest.mark.parametrize("case", BAD_RESPOND)
def test_respond_refuses(case, models, tmp_path, capsys):
    args, said = BAD_RESPOND[case]
    command = ["respond", "--target", str(models / "target"), "--out", str(tmp_path / "out")]
    assert said in one_error(capsys, cli.main([*command, *args]))
    assert not (tmp_path / "out").exists()


def test_demo_compares_the_modes_and_saves_the_figures(models, tmp_path, capsys):
    roles = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    size = ["--prompts", "2", "--max-new-tokens", "8"]
    assert cli.main(["demo", *roles, *size, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "speedup" in printed and "a token against" in printed
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo.json", "demo.png"]
    record = json.loads((tmp_path / "out/demo.json").read_text())
    assert len(record["prompts"]) == 2 and record["modes"]["sync"]["differences"] == []


@pytest.mark.slow
def test_demo_from_scratch_makes_its_own_drafter_and_resumes(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", models / "prompts.jsonl")
    monkeypatch.setattr(from_scratch, "CONFIG", str(models / "config.yaml"))
    monkeypatch.setattr(from_scratch, "BLOCK_SIZE", BLOCK_SIZE)
    work, out = tmp_path / "work", tmp_path / "out"
    size = ["--prompts", "2", "--max-new-tokens", "8", "--out", str(out), "--work", str(work)]
    args = ["demo", "--from-scratch", "--target", str(models / "target"), *size]
    assert cli.main(args) == 0
    printed = capsys.readouterr()
    assert "pooled over 3 validation responses" in printed.out and "speedup" in printed.out
    assert "training 6/6" in printed.err
    made = {p: p.stat().st_mtime_ns for p in work.rglob("*.safetensors")}
    made |= {p: p.stat().st_mtime_ns for p in (work / "responses").rglob("*")}
    again = from_scratch.make_drafter(str(models / "target"), models / "prompts.jsonl", work)
    assert again == work / "run/drafter"
    assert {p: p.stat().st_mtime_ns for p in made} == made
    assert "training 6/6" not in capsys.readouterr().err


def test_demo_prompts_are_held_out_and_of_every_topic():
    chosen = demo.held_out(read_prompts(demo.PROMPTS), 6)
    assert {prompt.split for prompt in chosen} == {"validation"}
    assert sorted(prompt.task for prompt in chosen) == sorted(["code", "general", "math"] * 2)


BAD_GENERATE = {
    "unknown model": (["--target", "nonesuch"], "no model 'nonesuch'"),
    "missing prompt file": (["--prompts-file", "nonesuch.jsonl"], "nonesuch.jsonl"),
    "two prompts": (["--prompt", "a", "--prompts-file", "b"], "either"),
    "batch of none": (["--batch", "0"], "--batch must be at least 1"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    "block too large": (["--block-size", "5"], "block size 5 is above the 4"),
    "rectangle too large": (["--policy", "rectangle:5,1"], "C = 5"),
    "unknown policy": (["--policy", "widest"], "rectangle:C,F or best-first:N, found 'widest'"),
    "too cold": (["--temperature", "-1"], "temperature must be a number from 0"),
    "no nucleus": (["--top-p", "0"], "top_p must be a number above 0"),
    "empty stop": (["--stop", ""], "stop must be a tuple of strings, none of them empty"),
    "longer than the model": (["--max-length", "513"], "above the model's limit of 512"),
    "prompt too long": (["--max-length", "8"], "prompt 1 has"),
    "not a drafter": (["--drafter", "TARGET"], "is not a drafter"),
    "no such drafter": (["--drafter", "nonesuch"], "there is no model 'nonesuch'"),
    "system without template": (["--raw", "--system", "a"], "--system needs the chat template"),
    "thinking without template": (["--raw", "--thinking", "on"], "--thinking needs the chat"),
    "thinking is not switched": (["--thinking", "off"], "its chat template has no enable_thinking"),
}


@pytest.mark.parametrize("case", BAD_GENERATE)
def test_generate_refuses(case, models, capsys):
    args, said = BAD_GENERATE[case]
    args = [str(models / "target") if arg == "TARGET" else arg for arg in args]
    prompt = [] if "--prompts-file" in args else ["--prompt", "the hello"]
    assert said in one_error(capsys, generate(models, *prompt, *args))


def test_a_damaged_drafter_is_refused(models, tmp_path, capsys):
    shutil.copytree(models / "drafter", tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status = generate(models, "--prompt", "a", "--drafter", str(tmp_path / "cut"))
    assert "is truncated" in one_error(capsys, status)


def test_a_drafter_of_another_tokenizer_is_refused(models, responses, tmp_path, capsys):
    other = tmp_path / "other"
    write_drafter(other, models / "target", tokenizer_fingerprint="f" * 64)
    status = generate(models, "--prompt", "a", "--drafter", str(other))
    assert "another target or tokenizer" in one_error(capsys, status)
    data = ["--data", str(responses / "dataset"), "--target", str(models / "target")]
    status = cli.main(["evaluate", *data, "--drafter", str(other)])
    assert "another target or tokenizer" in one_error(capsys, status)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "another"}, "with target target, the drafter was made for another"),
        ({"template_fingerprint": "f" * 64}, f"the drafter was made for {'f' * 64}"),
    ],
)
def test_data_of_another_target_is_refused(models, responses, tmp_path, capsys, changes, said):
    other = tmp_path / "other"
    write_drafter(other, models / "target", **changes)
    data = ["--data", str(responses / "dataset"), "--target", str(models / "target")]
    settings = ["--config", str(models / "config.yaml"), "--out", str(tmp_path / "run")]
    status = cli.main(["train", *data, "--drafter", str(other), *settings])
    assert said in one_error(capsys, status)
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused(models, responses, tmp_path, capsys):
    shutil.copytree(responses / "dataset", tmp_path / "data")
    file = tmp_path / "data/metadata.json"
    metadata = json.loads(file.read_text())
    metadata["manifest"]["tokenizer_fingerprint"] = "f" * 64
    file.write_text(json.dumps(metadata))
    command = ["train", "--data", str(tmp_path / "data"), "--target", str(models / "target")]
    command += ["--config", str(models / "config.yaml"), "--drafter", str(models / "drafter")]
    said = one_error(capsys, cli.main([*command, "--out", str(tmp_path / "run")]))
    assert f"holds responses with tokenizer {'f' * 64}" in said


def test_a_folder_that_cannot_be_written_is_said_before_any_work(
    models, responses, tmp_path, capsys
):
    (tmp_path / "file").touch()
    out = ["--target", str(models / "target"), "--out", str(tmp_path / "file/out")]
    drafter, deep = ["--drafter", str(models / "drafter")], ["--drafter", str(models / "deep")]
    data = ["--data", str(responses / "dataset"), "--config", str(models / "config.yaml")]
    for command in (
        ["respond", "--prompts", str(models / "prompts.jsonl")],
        ["init-drafter", "--from", str(models / "target")],
        ["train", *data, *drafter, "--drafter-devices", "0"],
        ["prune", *data, *deep, "--drafter-devices", "0"],
        ["demo", *drafter],
    ):
        assert "file" in one_error(capsys, cli.main([*command, *out]))


def test_options_of_several_processes_go_together(capsys):
    names = ("--config", "--data", "--drafter", "--target", "--out")
    needed = [word for name in names for word in (name, "x")]
    for extra, message in (
        (["--num-processes", "2"], "go together"),
        (["--distributed", "--drafter-devices", "0"], "devices of one process"),
        (["--fsdp", "0"], "--fsdp must be at least 1"),
    ):
        assert message in one_error(capsys, cli.main(["train", *needed, *extra]))


def test_options_that_do_not_exist_exit_with_2_and_no_traceback(capsys):
    for args in (["generate", "--nonesuch"], ["nonesuch"], [], ["generate", "--mode", "best"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(args)
        assert stopped.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_and_a_closed_pipe_are_quiet():
    program = """
import signal, sys, types
# A shell starts what runs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from d3d_jax import cli
from d3d_jax.commands import demo, from_scratch
from d3d_jax.train.prompts import read_prompts
from d3d_jax.commands import options
stub = types.ModuleType("stub")
sys.modules["stub"] = stub
cli.COMMANDS["demo"] = (options.Demo, "stub")
def interrupted(options):
    raise KeyboardInterrupt
class Unlucky:
    def __del__(self):
        raise KeyboardInterrupt
def dropped(options):
    Unlucky()
    while True:
        pass
def endless(options):
    while True:
        print("text", flush=True)
stub.run = {"interrupt": interrupted, "dropped": dropped, "pipe": endless}[sys.argv[1]]
sys.exit(cli.main(["demo"]))
"""
    interrupted = (130, "interrupted\n")
    cases = {"interrupt": interrupted, "dropped": interrupted, "pipe": (141, "")}
    for how, (status, said) in cases.items():
        child = subprocess.Popen(
            [sys.executable, "-c", program, how],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        try:
            assert child.wait(timeout=60) == status
        finally:
            child.kill()
        assert child.stderr.read() == said
        child.stderr.close()
