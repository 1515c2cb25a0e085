import dataclasses
import functools
import itertools
import json
import os
import resource
import signal
import types

import jax
import numpy as np
import pytest

from d3d_jax.commands.prune import _Progress, candidates
from d3d_jax.drafter import read_drafter
from d3d_jax.errors import D3DError
from d3d_jax.files import hold
from d3d_jax.models import checkpoint_writing
from d3d_jax.models.sharding import make_mesh
from d3d_jax.train import importance
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.dataset import open_dataset
from d3d_jax.train.distillation import Teacher
from d3d_jax.train.pruning import PruneConfig, Pruning, Step, layers_left, without
from tests.tiny_models import Documents, tiny_config, tiny_drafter, tiny_params
from tests.train.tiny_runs import CONFIG, make_dataset

DEPTH = 4


@functools.cache
def models():
    config = tiny_config(num_hidden_layers=DEPTH)
    params = tiny_params(config, scale=1.0)
    drafter, own = tiny_drafter(config, params, layers=tuple(range(DEPTH)))
    return config, params, drafter, jax.device_get(own)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a dataset and the target."""
    folder = tmp_path_factory.mktemp("pruning")
    make_dataset(folder)
    config, params, *_ = models()
    checkpoint_writing.save_model(folder / "target", config, jax.device_get(params))
    return folder


def pruned(home, out, training=CONFIG, report=lambda doing, metrics: None, **changes):
    _, _, drafter, own = models()
    return Pruning(
        drafter,
        own,
        PruneConfig(**({"layers": 2, "keep": 0.0, "documents": 2} | changes)),
        training,
        open_dataset(home / "dataset", "train"),
        open_dataset(home / "dataset", "validation"),
        home / "target",
        out,
        report,
        make_mesh(jax.devices()[:1]),
    )


def test_a_gate_of_zero_is_the_drafter_without_that_layer(home):
    _, _, drafter, own = models()
    validation = open_dataset(home / "dataset", "validation")
    gated = OfflineAcceptance(drafter, validation, 1)
    shallower = OfflineAcceptance(without(drafter, own, 0)[0], validation, 1)
    said = []
    for layer in range(DEPTH):
        gates = np.ones(DEPTH, np.float32)
        gates[layer] = 0
        said.append(gated.observe(own, 2, gates=gates)[1].log_probs)
        params = without(drafter, own, layer)[1]
        np.testing.assert_array_equal(said[-1], shallower.observe(params, 2)[1].log_probs)
    said.append(gated.observe(own, 2, gates=np.ones(DEPTH, np.float32))[1].log_probs)
    assert len({x.tobytes() for x in said}) == DEPTH + 1, "every layer matters"


def test_the_layer_whose_removal_scores_best_goes():
    worth = np.array([0.5, 0.1, 0.3])
    ranking = importance.by_measure(lambda params, gates: float(worth @ gates), {}, [0, 2, 5])
    assert ranking.whole == pytest.approx(0.9) and ranking.least == 2
    assert ranking.scores == pytest.approx({0: 0.4, 2: 0.8, 5: 0.6})


@pytest.mark.parametrize("vocab", [None, np.arange(0, 61, 2)], ids=["whole", "reduced"])
def test_the_divergence_from_the_teacher_ranks_layers(home, vocab):
    config, params, *_ = models()
    drafter, own = tiny_drafter(config, params, layers=tuple(range(DEPTH)), vocab=vocab)
    mesh = make_mesh(jax.devices()[:1])
    validation = open_dataset(home / "dataset", "validation")
    teacher = Teacher(drafter, own, None)
    measure = importance.of_divergence(drafter, teacher, validation, CONFIG, 1, mesh)
    ranking = importance.by_measure(measure, own, layers_left(drafter))
    # Of the whole drafter from itself; rounding alone.
    assert abs(ranking.whole) < 1e-5 < -max(ranking.scores.values())


@pytest.mark.slow
def test_pruning_to_a_depth_and_continuing_after_a_full_disk(home, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(doing, metrics):
        if doing == "recovering 2 layers" and metrics["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))

    training = dataclasses.replace(CONFIG, batch_rows=1)
    try:
        with pytest.raises(D3DError, match="no checkpoint can be written"):
            pruned(home, tmp_path / "a", training, fill).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first = json.loads((tmp_path / "a/pruning.json").read_text())["steps"]
    assert [step["depth"] for step in first] == [3]
    outcome = pruned(home, tmp_path / "a", training).run()
    assert [dataclasses.asdict(step) for step in outcome.steps[:1]] == first
    assert [step.depth for step in outcome.steps] == [3, 2] and outcome.exported == 2
    gone = tuple(step.removed for step in outcome.steps)
    assert set(map(int, outcome.steps[1].candidates)) == set(range(DEPTH)) - {gone[0]}

    whole = pruned(home, tmp_path / "b", training).run()
    drafters = [
        read_drafter(tmp_path / name / "drafter", home / "target", stacked=True, dtype=np.float32)
        for name in "ab"
    ]
    jax.tree.map(np.testing.assert_array_equal, *(params for _, params in drafters))
    assert drafters[0][0].drafter.pruned_layers == gone == tuple(s.removed for s in whole.steps)
    with pytest.raises(D3DError, match="pruning with pruning layers 2, and this one has 1"):
        pruned(home, tmp_path / "a", training, layers=1)


def test_recovery_learns_from_what_it_names(home, tmp_path):
    """One step without warm-up from the same parameters: what it changes tells what it learnt."""
    training = dataclasses.replace(CONFIG, batch_rows=1, steps=1, warmup_steps=0, eval_every=1)
    learnt = []
    for recovery in ("responses", "plain", "margin"):
        out = tmp_path / recovery
        changes = dict(layers=3, criterion="last", recovery=recovery, documents=1)
        outcome = pruned(home, out, training, **changes).run()
        assert outcome.exported == 3 and outcome.steps[0].removed == DEPTH - 1
        _, params = read_drafter(out / "drafter", home / "target", stacked=True)
        leaves = jax.tree.leaves(params["layers"])
        learnt.append(np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in leaves]))
    assert all(np.any(a != b) for a, b in itertools.combinations(learnt, 2))


def test_the_criterion_kl_removes_what_changes_the_drafter_least(home, tmp_path):
    changes = dict(layers=3, criterion="kl", recovery="none", documents=1)
    (step,) = pruned(home, tmp_path, **changes).run().steps
    scores = {int(layer): score for layer, score in step.candidates.items()}
    assert len(scores) == DEPTH and max(scores.values()) < 0
    assert step.removed == max(scores, key=scores.__getitem__)


def test_no_validation_responses_are_refused_before_anything_is_written(home, tmp_path):
    _, _, drafter, own = models()
    train, empty = open_dataset(home / "dataset", "train"), Documents([])
    config, mesh = PruneConfig(layers=2), make_mesh(jax.devices()[:1])
    arguments = drafter, own, config, CONFIG, train, empty, home / "target", tmp_path / "out"
    with pytest.raises(D3DError, match="validation split is empty"):
        Pruning(*arguments, mesh=mesh)
    assert not (tmp_path / "out").exists()


def test_a_ranking_that_is_stopped_keeps_the_candidates_it_measured(home, tmp_path, monkeypatch):
    measured, told = [], []

    def report(doing, metrics):
        if doing == "ranking 4 layers":
            told.append((metrics["step"], metrics["steps"]))

    def measure(self, drafter):
        def one(params, gates):
            measured.append(gates.tolist())
            if len(measured) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return float(gates @ np.array([4.0, 1.0, 2.0, 3.0]))

        return one

    monkeypatch.setattr(Pruning, "_measure", measure)
    monkeypatch.setattr(Pruning, "_tau", lambda self, drafter, params: 2.0)
    changes = dict(layers=3, recovery="none")
    with pytest.raises(D3DError, match="stopped by SIGTERM; what was measured is kept"):
        pruned(home, tmp_path, report=report, **changes).run()
    assert len(measured) == 3 and told == [(0, 4), (0, 4), (1, 4)]
    outcome = pruned(home, tmp_path, report=report, **changes).run()
    assert told[3:] == [(2, 4), (3, 4), (4, 4)]
    assert outcome.steps[0].removed == 1 and len(measured) == 5
    assert len({tuple(gates) for gates in measured}) == 5


def test_a_depth_that_loses_too_much_is_not_exported(home, tmp_path, monkeypatch):
    taus = iter([2.0, 1.9, 1.99, 1.5, 1.9])  # unpruned; removed, recovered; removed, recovered
    monkeypatch.setattr(Pruning, "_tau", lambda self, drafter, params: next(taus))
    outcome = pruned(home, tmp_path, keep=0.99, layers=1, recovery="none", criterion="last").run()
    assert [step.tau for step in outcome.steps] == [1.99, 1.9] and outcome.exported == 3
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["num_hidden_layers"] == 3 and config["d3d"]["pruned_layers"] == [3]


def test_one_pruning_at_a_time_works_in_a_folder(home, tmp_path):
    pruning = pruned(home, tmp_path)
    before = (tmp_path / "pruning.json").read_text()
    with hold(tmp_path, alone=True):
        with pytest.raises(D3DError, match="another run is adding to"):
            pruning.run()
        with pytest.raises(D3DError, match="another run is adding to"):
            pruned(home, tmp_path)
    assert (tmp_path / "pruning.json").read_text() == before


def test_every_part_of_a_pruning_has_its_own_total():
    told = []
    bar = types.SimpleNamespace(
        begin=lambda total: told.append(total), update=lambda *args: told.append(args)
    )
    progress = _Progress(bar)
    progress("ranking 4 layers", {"step": 0, "steps": 4})
    progress("ranking 4 layers", {"step": 1, "steps": 4})
    progress("recovering 3 layers", {"step": 1, "steps": 9, "loss": 0.5})
    assert told == [
        4,
        (0, "ranking 4 layers"),
        (1, "ranking 4 layers"),
        9,
        (1, "recovering 3 layers, loss 0.50"),
    ]


def test_an_impossible_depth_is_refused(home, tmp_path):
    with pytest.raises(D3DError, match="4 layers: the depth"):
        pruned(home, tmp_path, layers=4)


def test_the_table_of_candidates_goes_by_layers_of_the_unpruned_drafter():
    steps = [
        Step(2, 1, 1.0, 1.5, 0.0, 0.0, {"0": 1.25, "1": 1.5, "2": 1.0}),
        Step(1, 0, 1.0, 1.5, 0.0, 0.0, {"0": 1.125, "2": 1.0}),
    ]
    found = candidates("tau", steps)
    assert [[column.header, *column.cells] for column in found.columns] == [
        ["without layer", "0", "1", "2"],
        ["2", "1.250", "1.500", "1.000"],
        ["1", "1.125", "", "1.000"],
    ]


def test_layers_are_named_as_in_the_unpruned_drafter():
    _, _, drafter, own = models()
    less, params = without(*without(drafter, own, 1), 2)
    assert layers_left(less) == [0, 3] and less.drafter.pruned_layers == (1, 2)
    assert less.drafter.source_layers == (0, 3)
    kept = jax.tree.leaves(params["layers"])[0], jax.tree.leaves(own["layers"])[0]
    np.testing.assert_array_equal(kept[0], np.asarray(kept[1])[[0, 3]])


@pytest.mark.parametrize("criterion, gone", [("even", [5, 3, 1, 4, 2]), ("last", [6, 5, 4, 3, 2])])
def test_places(criterion, gone):
    layers, found = list(range(7)), []
    for _ in gone:
        found.append(importance.by_place(criterion, layers).least)
        layers.remove(found[-1])
    assert found == gone
