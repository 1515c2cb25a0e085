"""The trainer on a tiny drafter: resume bit for bit, micro-batches, learning, refusals."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from d3d_jax.drafter import read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, checkpoint_writing
from d3d_jax.train import trainer as trainers
from d3d_jax.train.config import TrainConfig, load_config
from d3d_jax.train.dataset import build_dataset, open_dataset
from d3d_jax.train.packing import PackedBatches
from d3d_jax.train.responses import Manifest, ResponseWriter
from tests.tiny_models import VOCAB, tiny_config, tiny_drafter, tiny_params

CONFIG = TrainConfig(
    steps=6,
    batch_rows=2,
    max_tokens=48,
    max_blocks=12,
    anchors_per_document=6,
    learning_rate=1e-2,
    gamma=3.0,
    warmup_steps=2,
    eval_every=3,
    eval_documents=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Responses that count upwards: something a drafter can learn in a few steps."""
    folder = tmp_path_factory.mktemp("data")
    manifest = Manifest(
        target="tiny",
        tokenizer_fingerprint="t",
        template_fingerprint="c",
        vocab_size=VOCAB,
        stop_ids=(),
        sampling={"greedy": True},
        max_new_tokens=12,
        prompts="counting",
    )
    with ResponseWriter(folder / "responses", manifest) as writer:
        for i in range(20):
            ids = [(i * 3 + j) % VOCAB for j in range(16)]
            writer.add(i, ids[:4], ids[4:], "length", "validation" if i % 5 == 4 else "train")
    return build_dataset(folder / "responses", folder / "dataset")


def target_params():
    return tiny_params(tiny_config(), scale=1.0)


def make(run, dataset, report=lambda metrics: None, seed_of_drafter=0, **changes):
    config = tiny_config()
    drafter, params = tiny_drafter(config, tiny_params(config, seed_of_drafter, scale=1.0))
    return trainers.Trainer(
        drafter,
        jax.device_get(params),
        dataclasses.replace(CONFIG, **changes),
        open_dataset(dataset, "train"),
        open_dataset(dataset, "validation"),
        run,
        report,
        jax.devices()[:2],
    )


def weights(folder):
    config, section = checkpoint.read_config(folder)
    return checkpoint.load_params(folder, config, stacked=True, drafter=section)


def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, dataset):
    straight = make(tmp_path / "straight", dataset).train()

    def final_state(run):
        with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
            return manager.restore(6, args=ocp.args.StandardRestore())

    def interrupt(metrics):
        if metrics["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "stopped"
    with pytest.raises(D3DError, match=r"SIGTERM at step 4; saved"):
        make(run, dataset, interrupt).train()
    assert not (run / "drafter").exists()
    resumed = make(run, dataset).train()
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(straight))
    # The export is bfloat16; the checkpoints hold the float32 parameters and optimizer state.
    states = final_state(run), final_state(tmp_path / "straight")
    jax.tree.map(np.testing.assert_array_equal, *states)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_it_learns_and_its_export_loads(tmp_path, dataset):
    seen = []
    out = make(tmp_path / "run", dataset, seen.append, steps=60, eval_every=60).train()
    assert seen[-1]["loss"] < 0.5 * seen[0]["loss"]
    assert seen[-1]["tau"] > 1.5
    config = tiny_config()
    target = tmp_path / "target"
    checkpoint_writing.save_model(target, config, jax.device_get(target_params()))
    drafter, params = read_drafter(out, target, stacked=False)
    assert drafter.drafter.num_anchors == CONFIG.anchors_per_document
    assert params["embed"].shape == (VOCAB, config.hidden_size) and len(params["layers"]) == 2


@pytest.mark.parametrize("rows", [4])
def test_micro_batches_and_devices_change_nothing(dataset, tmp_path, rows):
    """Gradients of one big batch on one device = 2 micro-batches over 2 devices."""
    made = make(tmp_path / "unused", dataset)
    batch = PackedBatches(
        made.dataset, max_tokens=48, max_blocks=12, anchors_per_document=6, batch_rows=rows, seed=0
    ).batch(0)
    frozen, trained = made.split(made.params)
    results = []
    for parts, sharding in [(1, jax.devices()[0]), (2, made._rows)]:
        config = dataclasses.replace(CONFIG, batch_rows=rows, micro_batches=parts)
        optimizer = optax.sgd(1.0)
        step = trainers.make_step(made.drafter, config, optimizer)
        home = sharding if parts == 1 else made._replicated
        state = {"params": trained, "opt": optimizer.init(trained), "step": np.int32(0)}
        state = jax.tree.map(lambda x, home=home: jax.device_put(np.array(x), home), state)
        state, metrics = step(
            state, jax.device_put(frozen, home), None, jax.device_put(batch, sharding)
        )
        results.append(jax.device_get((state["params"], metrics["loss"], metrics["counts"])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


def test_settings_and_devices_are_checked_first(tmp_path, dataset):
    make(tmp_path / "run", dataset)
    with pytest.raises(D3DError, match="other settings"):
        make(tmp_path / "run", dataset, learning_rate=0.5)
    with pytest.raises(D3DError, match="initial drafter"):
        make(tmp_path / "run", dataset, seed_of_drafter=1)
    with pytest.raises(D3DError, match="multiple of the 2 devices"):
        make(tmp_path / "other", dataset, batch_rows=1)


def test_configs_refuse_what_they_do_not_know(tmp_path):
    assert load_config("smollm2-135m", ("steps=7", "learning_rate=1e-4")).learning_rate == 1e-4
    for overrides, message in [
        (("stepz=7",), "unknown training setting 'stepz'"),
        (("steps=many",), "steps must be of type int"),
        (("steps",), "key=value"),
        (("batch_rows=3", "micro_batches=2"), "multiple of micro_batches"),
        (("eval_every=0",), "eval_every must be of type int and at least 1"),
        (("gamma=0",), "gamma must be above 0"),
        (("learning_rate=.nan",), "learning_rate"),
        (("remat=1",), "remat"),
    ]:
        with pytest.raises(D3DError, match=message):
            load_config("smollm2-135m", overrides)
    with pytest.raises(D3DError, match="no training config 'nope'"):
        load_config("nope")
    (tmp_path / "empty.yaml").write_text("steps: 3\n")
    with pytest.raises(D3DError, match="is missing in"):
        load_config(str(tmp_path / "empty.yaml"))
