"""`d3d inspect` and `d3d warmup`, and the placement options, through the command line."""

import json
import shutil
from unittest.mock import Mock

import huggingface_hub
import jax
import pytest
from huggingface_hub import constants

from d3d_jax import cli
from d3d_jax.infer.role import CHUNKS, pieces
from d3d_jax.models import checkpoint
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.presets import preset
from tests.tiny_folders import write_drafter, write_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_drafter(folder / "drafter", write_target(folder / "target"), target="target")
    return folder


def inspect(capsys, *args):
    assert cli.main(["inspect", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_describes_a_model_and_what_a_mesh_would_hold(models, capsys):
    target = models / "target"
    config, _ = checkpoint.read_config(target)
    params = checkpoint.load_params(target, config, stacked=True)
    leaves = jax.tree.leaves(params)
    count, size = sum(x.size for x in leaves), sum(x.nbytes for x in leaves)
    whole = inspect(capsys, target)
    assert whole["parameters"] == count and whole["stored_dtypes"] == {"float32": count}
    assert whole["bytes_per_device"] == size and whole["dtype"] == "float32"
    assert whole["cache_bytes_per_token_per_device"] == 2 * 2 * 2 * 16 * 4
    assert whole["config"] == config.to_hf() and whole["drafter"] is None
    tokenizer = Tokenizer.from_folder(target)
    assert whole["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert whole["stop_ids"] == list(tokenizer.stop_ids)
    # 269 rows of the vocabulary do not divide by two, nor do the vectors.
    split = inspect(capsys, target, "--tp", 2, "--dtype", "bfloat16")
    matrices = sum(x.size for x in jax.tree.leaves(params["layers"]) if x.ndim > 2)
    assert split["bytes_per_device"] == 2 * (count - matrices + matrices // 2)
    assert split["held_whole"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert split["mesh"] == {"data": 1, "fsdp": 1, "tensor": 2, "group": 1}
    assert cli.main(["inspect", str(target), "--tp", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"{count:,}" in printed and "tensor 2" in printed and "Qwen3ForCausalLM" in printed
    assert tokenizer.fingerprint[:20] in printed


def test_inspect_describes_a_drafter(models, capsys):
    drafter = inspect(capsys, models / "drafter")
    assert drafter["drafter"]["block_size"] == 4
    assert drafter["drafter"]["shares"] == ["embed", "head"]
    assert drafter["parameters"] == sum(drafter["stored_dtypes"].values())
    assert drafter["tokenizer_fingerprint"] == drafter["drafter"]["tokenizer_fingerprint"]
    assert cli.main(["inspect", str(models / "drafter")]) == 0
    assert "d3d.label_shift" in capsys.readouterr().out


def test_inspect_describes_what_is_not_here(capsys, monkeypatch):
    # The client reads its environment when it is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = inspect(capsys, "Qwen/Qwen3-32B", "--tp", 16, "--fsdp", 2)
    assert model["parameters"] == 32_762_123_264 and model["stored_dtypes"] == {}
    assert model["mesh"] == {"data": 1, "fsdp": 2, "tensor": 8, "group": 2}
    # Of 64 layers × 2 × 8 heads of 128 in bfloat16 a device holds one head in eight.
    assert model["cache_bytes_per_token_per_device"] == 64 * 2 * 1 * 128 * 2
    assert 32_762_123_264 * 2 / 32 < model["bytes_per_device"] < 32_762_123_264 * 2 / 30
    for args, message in [
        (["Qwen/Qwen9-1B"], "Qwen9-1B"),
        (["Qwen/Qwen3-14B", "--tp", "16"], "tensor axis of 16"),
        (["Qwen/Qwen3-14B", "--tp", "0"], "--tp must be at least 1"),
    ]:
        assert cli.main(["inspect", *args]) == 2
        assert message in capsys.readouterr().err


def test_inspect_downloads_no_weights(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(preset("Qwen/Qwen3-8B").to_hf()))
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock())
    model = inspect(capsys, "Qwen/Qwen3-8B@main")
    assert model["parameters"] == 8_190_735_360 and model["stored_dtypes"] == {}
    asked = download.call_args.kwargs
    assert asked["allow_patterns"] == ["*.json", "*.jinja"] and asked["revision"] == "main"


def test_inspect_says_how_far_yarn_reaches(capsys, tmp_path, models):
    shutil.copytree(models / "target", tmp_path / "yarn")
    raw = json.loads((tmp_path / "yarn/config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (tmp_path / "yarn/config.json").write_text(json.dumps(raw | {"rope_scaling": scaling}))
    assert inspect(capsys, tmp_path / "yarn")["longest_sequence"] == 2048


@pytest.mark.parametrize("length", [1, 64, 65, 511, 512, 513, 1300])
def test_prompts_are_read_in_chunks_of_few_sizes(length):
    read = list(pieces(3, list(range(length))))
    assert [token for piece in read for token in piece.tokens] == list(range(length))
    assert [piece.start for piece in read] == list(range(0, length, CHUNKS[-1]))
    assert [piece.last for piece in read] == [False] * (len(read) - 1) + [True]


def compilations(run):
    """How many programs jax compiled, or took from disk, while `run` ran."""
    counts = {"compiled": 0, "kept": 0}

    def event(name, **_):
        counts["compiled"] += name == "/jax/compilation_cache/cache_misses"
        counts["kept"] += name == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(event)
    run()
    jax.monitoring.unregister_event_listener(event)
    return counts


def test_after_warmup_nothing_is_compiled(models, tmp_path, capsys):
    roles = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    common = [*roles, "--mode", "async", "--max-length", "300", "--batch", "2"]

    def warmup():
        assert cli.main(["warmup", *common]) == 0

    assert compilations(warmup)["compiled"] > 10
    assert "up to 300 tokens" in " ".join(capsys.readouterr().err.split())
    # Short and long prompts; the long one's caches grow by two buckets.
    prompts = [{"turns": ["the "]}, {"turns": ["the hello " * 8]}, {"turns": ["hello"]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    file = ["--prompts-file", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "280"]

    def generate():
        assert cli.main(["generate", *common, *file, "--json"]) == 0

    counts = compilations(generate)
    assert counts["compiled"] == 0 and counts["kept"] > 10
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert max(len(reply["token_ids"]) for reply in replies) > 200


def test_placement_options_change_where_and_not_what(models, capsys):
    roles = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    args = ["generate", *roles, "--prompt", "the hello", "--max-new-tokens", "12", "--json"]
    replies = []
    for placement in (
        [],
        ["--target-devices", "0-3", "--drafter-devices", "5,6"],
        ["--target-devices", "4,3", "--target-tp", "1"],
    ):
        assert cli.main([*args, "--mode", "async", *placement]) == 0
        replies.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert replies[0] == replies[1] == replies[2]
    for placement, message in [
        (["--target-devices", "0,9"], "there is no device 9"),
        (["--target-devices", "0-2"], "do not divide over a tensor axis of 3"),
        (["--target-devices", "x"], "--target-devices takes indices"),
        (["--target-devices", "3-1"], "3-1 ends before it begins"),
        (["--target-devices", "0,200"], "at most 64"),
        (["--target-tp", "0"], "--target-tp must be at least 1"),
        (["--drafter-devices", "2,2"], "or one twice"),
    ]:
        assert cli.main([*args, *placement]) == 2
        assert message in capsys.readouterr().err
