"""`import d3d_jax`: what it exposes, the README's example, and that importing costs nothing."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import d3d_jax
from d3d_jax.models import checkpoint, checkpoint_writing
from tests.models.test_checkpoint import assert_same
from tests.tiny_folders import write_drafter, write_target
from tests.tiny_models import greedy

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "smollm2-135m"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_drafter(root / "drafter", write_target(root / "target"))
    return root


@pytest.fixture(scope="module")
def model(folders):
    return d3d_jax.load_model(folders / "target")


def readme_example() -> str:
    """Every Python block of the README, one program."""
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "load_model" in first and len(first.strip().splitlines()) <= 10
    return "".join([first, *others])


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_readme_runs_on_a_tiny_model(folders):
    example = readme_example()
    assert f'"{SHIPPED}"' in example and "Engine(" in example
    example = example.replace(f'"{SHIPPED}"', repr(str(folders / "target")))
    drafter = f"load_drafter(model, {str(folders / 'drafter')!r})  #"
    example = example.replace("load_drafter(model)  #", drafter)
    printed = run("import jax; jax.config.update('jax_num_cpu_devices', 2)\n" + example)
    vocab = checkpoint.read_config(folders / "target")[0].vocab_size
    # The reply of the engine's request is printed last; what a random model says may be empty.
    assert re.search(rf" (length|stop)\n\(1, \d+, {vocab}\)\n.*\n$", printed, re.DOTALL), printed


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_the_example_of_the_readme_runs_as_it_is():
    printed = run(readme_example())
    expected = r"blue.* \d\.\d+ (stop|length)\n\(1, \d+, 49152\)\n.*\w+.*\n$"
    assert re.search(expected, printed, re.DOTALL)


def test_everything_public_is_there_and_documented():
    for name in d3d_jax.__all__:
        member = getattr(d3d_jax, name)
        assert member.__doc__ and len(member.__doc__.split()) > 5, name
    assert set(d3d_jax.__all__) <= set(dir(d3d_jax))
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = d3d_jax.nonesuch


def test_import_is_quick_and_touches_no_device():
    program = """
import sys, jax
from jax._src import xla_bridge
import d3d_jax
quick = sorted(name for name in sys.modules if name.startswith("d3d_jax."))
from d3d_jax import *
assert not xla_bridge.backends_are_initialized()
print(quick)
"""
    assert run(program) == "[]\n"


def test_generation_is_what_the_model_says(folders, model):
    config, _ = checkpoint.read_config(folders / "target")
    params = jax.device_put(checkpoint.load_params(folders / "target", config, stacked=True))
    prompts = [[5, 6, 7], [9, 10]]
    expected = [greedy(config, params, p, 12, model.tokenizer.stop_ids) for p in prompts]
    drafter = d3d_jax.load_drafter(model, folders / "drafter")
    for helper, mode in [(None, None), (drafter, None), (drafter, "async"), (drafter, "plain")]:
        made = model.generate(prompts, helper, mode=mode, max_new_tokens=12)
        assert [generation.reply.token_ids for generation in made] == expected
        assert [g.text for g in made] == [model.tokenizer.decode(ids) for ids in expected]
        assert [g.prompt_ids for g in made] == prompts
    assert model.default_mode(None) == "plain" and model.default_mode(drafter) == "sync"
    streamed = "".join(model.stream(prompts[0], drafter, max_new_tokens=12))
    assert streamed == model.tokenizer.decode(expected[0])


def test_what_is_shared_on_one_mesh_is_held_once(folders, model):
    drafter = d3d_jax.load_drafter(model, folders / "drafter", model.mesh)
    for name in ("embed", "head"):
        mine, theirs = drafter.params[name], model.target.params[name]
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


def test_a_prompt_is_text_messages_or_token_ids(model):
    messages = [{"role": "user", "content": "the hello"}]
    ids = model.tokenizer.chat(messages)
    assert model.encode("the hello") == model.encode(messages) == model.encode(ids) == ids
    system = [{"role": "system", "content": "the"}, *messages]
    assert model.encode("the hello", system="the") == model.tokenizer.chat(system)
    assert model.encode("the hello", system="the") != ids


def test_logits_are_those_of_a_whole_pass_on_any_mesh(folders, model):
    tokens = np.arange(14).reshape(2, 7)
    expected = np.asarray(model.logits(tokens))
    assert expected.shape == (2, 7, model.config.vocab_size) and expected.dtype == np.float32
    # The first continuation of a prompt is the likeliest token of its last row.
    first = model.generate([tokens[0].tolist()], max_new_tokens=1)[0].reply.token_ids[0]
    assert expected[0, -1].argmax() == first
    mesh = d3d_jax.make_mesh(jax.devices()[:4], tensor=4)
    split = d3d_jax.load_model(folders / "target", mesh)
    np.testing.assert_allclose(split.logits(tokens), expected, rtol=1e-4, atol=1e-4)
    narrow = d3d_jax.load_model(folders / "target", dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(narrow.target.params)} == {"bfloat16"}
    assert narrow.logits(tokens).dtype == np.float32
    near = np.abs(np.asarray(narrow.logits(tokens)) - expected).max()
    assert 0 < near < 0.1 * np.abs(expected).max()


def test_saving_gives_a_folder_of_the_same_model(folders, model, tmp_path):
    model.save(tmp_path / "copy")
    again = d3d_jax.load_model(tmp_path / "copy")
    assert again.config == model.config
    assert_same(again.target.params, jax.device_get(model.target.params))
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert again.tokenizer.stop_ids == model.tokenizer.stop_ids
    assert again.tokenizer.chat_template == model.tokenizer.chat_template
    # Stop ids that only config.json has are kept, too; transformers stops at those.
    raw = json.loads((folders / "target/config.json").read_text()) | {"eos_token_id": [5, 9]}
    shutil.copytree(folders / "target", tmp_path / "stops")
    (tmp_path / "stops/config.json").write_text(json.dumps(raw))
    (tmp_path / "stops/generation_config.json").unlink()
    stops = d3d_jax.load_model(tmp_path / "stops")
    stops.save(tmp_path / "stops-copy", dtype="bfloat16")
    saved = d3d_jax.load_model(tmp_path / "stops-copy")
    assert saved.tokenizer.stop_ids == stops.tokenizer.stop_ids and 9 in stops.tokenizer.stop_ids
    written = json.loads((tmp_path / "stops-copy/config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    names = {path.name for path in (folders / "target").iterdir()}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names


def refuse(message, call):
    with pytest.raises(d3d_jax.D3DError, match=message):
        call()


def test_bad_input_is_refused_in_a_sentence(folders, model, tmp_path):
    vocab = model.config.vocab_size
    refuse("takes a list of prompts", lambda: model.generate("the hello"))
    refuse("takes a list of prompts", lambda: model.generate([5, 6, 7]))
    refuse("no prompt", lambda: model.generate([]))
    refuse("not token ids", lambda: model.generate([[5]], system="the"))
    refuse("enable_thinking", lambda: model.generate(["the"], thinking=True))
    refuse("mode sync needs a drafter", lambda: model.generate(["the"], mode="sync"))
    for prompt in ([-1], [5, vocab], [5.7], [True], ["a"], [[5]]):
        refuse("token id", lambda prompt=prompt: model.generate([prompt]))
    for prompt in (None, []):
        refuse("a prompt is", lambda prompt=prompt: model.generate([prompt]))
    refuse("max_new_tokens", lambda: model.generate([[5]], max_new_tokens=2.5))
    refuse("a drafter is what", lambda: model.generate([[5]], "drafter"))
    for tokens in ([5, 6], [[5, 6], [7]], "ab", [[1.5]], [[]]):
        refuse(r"\[B, T\]", lambda tokens=tokens: model.logits(tokens))
    for dtype in ("foo", "int8", "float8_e4m3fn"):
        refuse("dtype must be one of", lambda d=dtype: d3d_jax.load_model(model.folder, dtype=d))
    refuse("must be a jax.sharding.Mesh", lambda: d3d_jax.load_model(model.folder, jax.devices()))
    refuse("named by text", lambda: d3d_jax.load_model(""))
    for options in (dict(block_size=0), dict(block_size="3"), dict(policy="best")):
        refuse(
            "block size|policy",
            lambda o=options: d3d_jax.load_drafter(model, folders / "drafter", **o),
        )
    refuse("devices", lambda: d3d_jax.make_mesh("cpu"))
    refuse("devices", lambda: d3d_jax.make_mesh([jax.devices()[0]] * 2))
    refuse(rf"0\.\.{vocab - 1}", lambda: model.logits([[vocab]]))
    refuse("no drafter ships", lambda: d3d_jax.load_drafter(model))
    refuse("not a drafter", lambda: d3d_jax.load_drafter(model, folders / "target"))
    refuse("is a drafter, not a model", lambda: d3d_jax.load_model(folders / "drafter"))
    mesh = d3d_jax.make_mesh(jax.devices(), tensor=8)
    refuse("tensor axis of 8", lambda: d3d_jax.load_model(folders / "target", mesh))
    # A tokenizer that knows more tokens than the embedding has rows.
    config, _ = checkpoint.read_config(folders / "target")
    params = checkpoint.load_params(folders / "target", config, stacked=True)
    raw = json.loads((folders / "target/config.json").read_text())
    files = checkpoint.companion_files(folders / "target")
    tokens = model.tokenizer.vocab_size
    for name in ("embed", "head"):
        params[name] = params[name][: tokens - 1]
    smaller = d3d_jax.ModelConfig.from_hf(raw | {"vocab_size": tokens - 1})
    checkpoint_writing.save_model(tmp_path / "small", smaller, params, extra_files=dict(files))
    refuse(
        rf"tokenizer\.json has token ids up to {tokens - 1}, the embedding has {tokens - 1} rows",
        lambda: d3d_jax.load_model(tmp_path / "small"),
    )
