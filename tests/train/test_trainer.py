"""The trainer on a tiny drafter: resume bit for bit, learning, refusals."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import struct
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tensorboardX.proto.event_pb2 import Event

from d3d_jax.drafter import read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.files import hold
from d3d_jax.models import checkpoint, checkpoint_writing
from d3d_jax.train import run_folder
from d3d_jax.train import trainer as trainers
from d3d_jax.train.config import load_config
from d3d_jax.train.distillation import Teacher
from tests.tiny_models import VOCAB, tiny_config, tiny_params
from tests.train.tiny_runs import CONFIG, make_dataset, make_trainer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def points(folder):
    """The curves in a folder as tag → [(step, value)], those of its files joined."""
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: int(file.name.rpartition("-")[2])):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):  # those from there on are void
                for tag, curve in found.items():
                    found[tag] = [point for point in curve if point[0] < event.step]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def weights(folder):
    config, section = checkpoint.read_config(folder)
    return checkpoint.load_params(folder, config, stacked=True, drafter=section)


def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, dataset):
    # So that nothing but the signal makes the loop look at a step at once.
    rarely = dict(eval_every=6, checkpoint_every=6)
    straight = make_trainer(tmp_path / "straight", dataset, **rarely).train()

    def final_state(run):
        with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
            return manager.restore(6, args=ocp.args.StandardRestore())

    def interrupt(metrics):
        if metrics["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "stopped"
    with pytest.raises(D3DError, match=r"SIGTERM at step 4; saved"):
        make_trainer(run, dataset, interrupt, **rarely).train()
    assert not (run / "drafter").exists()
    resumed = make_trainer(run, dataset, **rarely).train()
    jax.tree.map(np.testing.assert_array_equal, weights(resumed), weights(straight))
    # The export is bfloat16; the checkpoints hold the float32 parameters and optimizer state.
    states = final_state(run), final_state(tmp_path / "straight")
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points(run / "tensorboard")["loss"]] == [1, 2, 3, 4, 5, 6]


def test_it_learns_and_its_export_loads(tmp_path, dataset):
    seen = []
    out = make_trainer(tmp_path / "run", dataset, seen.append, steps=60, eval_every=60).train()
    for record in seen:
        assert record["tokens_per_second"] > 0 and record["model_flops"] == seen[0]["model_flops"]
        assert 0 <= record["input_wait"] < 1 and 0 <= record["checkpoint_wait"] < 1
    curves = points(tmp_path / "run/tensorboard")
    assert curves["loss"] == [(record["step"], np.float32(record["loss"])) for record in seen]
    assert curves["tau"] == [(60, np.float32(seen[-1]["tau"]))]
    assert [step for step, _ in curves["accuracy/1"]] == list(range(1, 61))
    assert seen[-1]["loss"] < 0.5 * seen[0]["loss"]
    assert seen[-1]["tau"] > 1.5
    config = tiny_config()
    target = tmp_path / "target"
    checkpoint_writing.save_model(target, config, jax.device_get(tiny_params(config, scale=1.0)))
    drafter, params = read_drafter(out, target, stacked=False)
    assert drafter.drafter.num_anchors == CONFIG.anchors_per_document
    assert params["embed"].shape == (VOCAB, config.hidden_size) and len(params["layers"]) == 2


def test_metrics_are_read_while_the_next_step_runs(tmp_path, dataset, monkeypatch):
    events = []
    make_step = trainers.make_step

    def recorded(*args):
        step = make_step(*args)

        def dispatch(*inputs):
            events.append("dispatch")
            return step(*inputs)

        dispatch.trace = step.trace
        return dispatch

    monkeypatch.setattr(trainers, "make_step", recorded)
    report = lambda metrics: events.append(metrics["step"])  # noqa: E731
    make_trainer(tmp_path, dataset, report, eval_every=6, checkpoint_every=4).train()
    late = ["dispatch", "dispatch", 1, "dispatch", 2]
    assert events == [*late, "dispatch", 3, 4, "dispatch", "dispatch", 5, 6]


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path, dataset, monkeypatch):
    taus = iter([1.5, 3.0, 2.0])
    measured = types.SimpleNamespace(summary=lambda: {"tau": next(taus)})
    monkeypatch.setattr(trainers.OfflineAcceptance, "measure", lambda *_: measured)
    changes = dict(eval_every=2, checkpoint_every=1, keep_checkpoints=1)
    make_trainer(tmp_path, dataset, **changes).train()
    with ocp.CheckpointManager((tmp_path / "checkpoints").absolute()) as manager:
        assert sorted(manager.all_steps()) == [4, 6]


def test_the_best_can_be_exported_and_what_is_not_trained_by_may_change(
    tmp_path, dataset, monkeypatch
):
    taus = iter([1.5, 3.0, 2.0])
    measured = types.SimpleNamespace(summary=lambda: {"tau": next(taus)})
    monkeypatch.setattr(trainers.OfflineAcceptance, "measure", lambda *_: measured)

    def stop(metrics):
        if metrics["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(D3DError, match="stopped by SIGINT"):
        make_trainer(tmp_path, dataset, stop, eval_every=2).train()
    # Measured after 2 steps, and then after 5 and 6.
    changes = dict(eval_every=1, remat="full", checkpoint_every=5, export="best")
    out = make_trainer(tmp_path, dataset, **changes).train()
    settings = json.loads((tmp_path / "config.json").read_text())["train"]
    assert settings["remat"] == "full" and settings["export"] == "best"
    with ocp.StandardCheckpointer() as checkpointer:
        path = (tmp_path / "checkpoints/5/default").absolute()
        best = checkpointer.restore(path)["params"]["norm"]
    np.testing.assert_array_equal(weights(out)["norm"], best.astype(jnp.bfloat16))
    # The record of what made an export stays.
    with pytest.raises(D3DError, match=r'ended run with .* "best", and this one has "last"'):
        make_trainer(tmp_path, dataset, **changes | {"export": "last"})


def test_a_run_that_diverges_stops_and_leaves_both_states(tmp_path, dataset):
    message = r"nan at step 2; the state after step 1 is in .*diverged/1, .*; lower learning_rate"
    changes = dict(learning_rate=1e30, warmup_steps=0, clip_norm=1e30)
    # Read before the next step, and while it runs, which must not change the state either.
    for name, every in (("at-once", 1), ("late", 6)):
        with pytest.raises(D3DError, match=message):
            make_trainer(tmp_path / name, dataset, checkpoint_every=every, **changes).train()
        assert not (tmp_path / name / "drafter").exists()
    with ocp.CheckpointManager((tmp_path / "at-once/checkpoints").absolute()) as manager:
        assert manager.all_steps() == [1]
    with ocp.StandardCheckpointer() as checkpointer:
        good, *left = (
            checkpointer.restore((tmp_path / path).absolute())
            for path in ("at-once/checkpoints/1/default", "at-once/diverged/1", "late/diverged/1")
        )
    assert good["step"] == 1 and np.isfinite(good["params"]["norm"]).all()
    for state in left:
        jax.tree.map(np.testing.assert_array_equal, state, good)


def test_a_loss_that_stays_high_ends_a_run_and_leaves_its_state(tmp_path, dataset):
    # From the step that there are enough losses on, every one counts as a spike.
    changes = dict(steps=30, spike_factor=0.01, spike_steps=3, eval_every=30, checkpoint_every=7)
    with pytest.raises(D3DError, match=r"above 0.01 times its median .* for 3 steps at step 23;"):
        make_trainer(tmp_path, dataset, **changes).train()
    # Read while the next step ran, so it is the state after that.
    with ocp.StandardCheckpointer() as checkpointer:
        assert checkpointer.restore((tmp_path / "diverged/24").absolute())["step"] == 24
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 23))
    with ocp.CheckpointManager((tmp_path / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == 14, "the spikes began with step 21"


def test_a_full_disk_ends_a_run_in_one_sentence_and_loses_nothing(tmp_path, dataset):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(metrics):
        if metrics["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))

    try:
        with pytest.raises(D3DError, match=r"no checkpoint can be .* \(File too large\); those in"):
            make_trainer(tmp_path, dataset, fill).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "drafter").exists()
    with ocp.CheckpointManager((tmp_path / "checkpoints").absolute()) as manager:
        assert manager.all_steps() == [2]
    seen = []
    make_trainer(tmp_path, dataset, seen.append).train()
    assert seen[0]["step"] == 3
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", ["initial_state", "make_step"])
def test_too_little_memory_ends_a_run_in_one_sentence(where, tmp_path, dataset, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 bytes.\nat")

    def make_step(*_):
        full.trace = lambda *_: types.SimpleNamespace(jaxpr=jax.make_jaxpr(jnp.sin)(1.0).jaxpr)
        return full

    monkeypatch.setattr(trainers, where, make_step if where == "make_step" else full)
    with pytest.raises(D3DError, match=r"micro_batches, .* \(RESOURCE_EXHAUSTED: .* bytes.\)"):
        make_trainer(tmp_path, dataset).train()


def test_metrics_that_cannot_be_written_end_a_run(tmp_path, dataset, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.Curves, "add", full)
    with pytest.raises(D3DError, match=r"cannot write the metrics .*\(No space left on device\)"):
        make_trainer(tmp_path, dataset).train()


def test_the_export_drops_temperatures_of_other_parameters(tmp_path, dataset):
    calibrated = dict(calibration=(0.5, 0.6, 0.7, 0.8))
    out = make_trainer(tmp_path, dataset, drafter=calibrated, steps=1).train()
    exported = checkpoint.read_config(out)[1]
    assert exported is not None and exported.calibration is None


def test_settings_and_devices_are_checked_first(tmp_path, dataset):
    make_trainer(tmp_path / "run", dataset)
    with pytest.raises(D3DError, match=r"run with train learning rate 0.01, and this .* 0.5; cho"):
        make_trainer(tmp_path / "run", dataset, learning_rate=0.5)
    with pytest.raises(D3DError, match="run with initial parameters"):
        make_trainer(tmp_path / "run", dataset, seed=1)
    with pytest.raises(D3DError, match="multiple of the 2 devices that rows"):
        make_trainer(tmp_path / "other", dataset, batch_rows=1)
    with pytest.raises(D3DError, match="responses with target tiny, the drafter was made for big"):
        make_trainer(tmp_path / "other", dataset, drafter=dict(target="big"))


def test_one_run_at_a_time_works_in_a_folder_and_an_ended_one_is_left_as_it_is(tmp_path, dataset):
    trainer = make_trainer(tmp_path, dataset, steps=1)
    with hold(tmp_path, alone=True):
        for begin in (trainer.train, lambda: make_trainer(tmp_path, dataset, export="best")):
            with pytest.raises(D3DError, match="another run is adding to"):
                begin()
    (tmp_path / "other/drafter").mkdir(parents=True)
    with pytest.raises(D3DError, match=r"no run made .*drafter"):
        make_trainer(tmp_path / "other", dataset)
    out = make_trainer(tmp_path, dataset, steps=1).train()
    lines = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    assert make_trainer(tmp_path, dataset, steps=1).train() == out
    assert len(lines.splitlines()) == 1 and (tmp_path / "metrics.jsonl").read_text() == lines
    assert not (tmp_path / "checkpoints").exists()


def test_a_teacher_holds_no_array_that_the_run_takes_over(tmp_path, dataset):
    trainer = make_trainer(tmp_path / "run", dataset)
    params = jax.tree.map(jnp.asarray, trainer.params)

    def taught(teacher_params):
        teacher = Teacher(trainer.drafter, teacher_params)
        changes = {"params": params, "teacher": teacher, "run": tmp_path / "taught"}
        return dataclasses.replace(trainer, **changes)

    with pytest.raises(D3DError, match="give it copies"):
        taught({**trainer.params, "norm": params["norm"]})
    reduced = {**trainer.params, "draft_vocab": np.arange(0, VOCAB, 2)}
    for other, own in (
        (dict(block_size=2), trainer.params),
        (dict(target="another"), trainer.params),
        ({}, reduced),
    ):
        config = dataclasses.replace(trainer.drafter.drafter, **other)
        teacher = Teacher(dataclasses.replace(trainer.drafter, drafter=config), own)
        with pytest.raises(D3DError, match="another vocabulary, of another target, or blocks of"):
            dataclasses.replace(trainer, teacher=teacher)
    # What is not trained may be the same.
    assert taught({**trainer.params, "embed": params["embed"]}).teacher


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
        (("remat=1",), "remat must be one of none, full, dots"),
        (("compute=float16",), "compute must be one of auto, float32, bfloat16"),
    ]:
        with pytest.raises(D3DError, match=message):
            load_config("smollm2-135m", overrides)
    with pytest.raises(D3DError, match="no training config 'nope'"):
        load_config("nope")
    (tmp_path / "empty.yaml").write_text("steps: 3\n")
    with pytest.raises(D3DError, match="is missing in"):
        load_config(str(tmp_path / "empty.yaml"))
