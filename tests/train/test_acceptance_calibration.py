"""Calibration: temperatures by offset, how they are fitted, kept and used."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import cli
from d3d_jax.config import DrafterConfig
from d3d_jax.drafter import candidates
from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, decoder
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.acceptance import OfflineAcceptance
from d3d_jax.train.dataset import build_dataset
from d3d_jax.train.outcomes import (
    ENOUGH,
    TEMPERATURES,
    Rounds,
    fit_temperatures,
    likelihood,
)
from d3d_jax.train.responses import Manifest, ResponseWriter
from tests.tiny_folders import write_drafter, write_target
from tests.tiny_models import VOCAB, Documents, tiny_config, tiny_drafter, tiny_params

EVEN = tuple(range(0, VOCAB, 2))


def some_drafter(**changes):
    config = tiny_config()
    return tiny_drafter(config, tiny_params(config), **changes)


def some_documents():
    rng = np.random.default_rng(0)
    return Documents([([5, 6, 7], rng.integers(0, VOCAB, 20).tolist()), ([8], [9, 10, 11])])


@pytest.mark.parametrize("vocab", [None, EVEN])
def test_temperatures_divide_the_scores_of_their_slot(vocab):
    _, params = some_drafter(vocab=vocab)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 32)), jnp.float32)
    plain_ids, _ = candidates(params, hidden, 5)
    ids, log_probs = candidates(params, hidden, 5, (0.5, 2.0))
    np.testing.assert_array_equal(ids, plain_ids)
    scores = decoder.logits(params, hidden) / jnp.array([0.5, 2.0])[:, None]
    every = np.sort(jax.nn.log_softmax(scores), axis=-1)[..., ::-1]
    np.testing.assert_allclose(log_probs, every[..., :5], atol=1e-5)
    ones = candidates(params, hidden, 5, (1.0, 1.0))[1]
    np.testing.assert_array_equal(ones, candidates(params, hidden, 5)[1])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("vocab", [None, EVEN])
def test_recorded_probabilities_are_whole_at_every_temperature(shift, vocab):
    drafter, params = some_drafter(vocab=vocab, label_shift=shift)
    offsets, size = 3 + shift, len(vocab or range(VOCAB))
    temperatures = np.array([[1.0] * 4, [0.5, 0.7, 2.0, 3.0]])[:, :offsets]
    rounds = OfflineAcceptance(drafter, some_documents()).observe(params, size, temperatures)[1]
    for setting in (0, 1):
        total = np.exp(rounds.calibrated(np.full(offsets, setting))).sum(axis=-1)
        np.testing.assert_allclose(total, 1, rtol=1e-4)
    is_label = rounds.candidate_ids == rounds.labels[..., None]
    of_label = np.where(is_label, rounds.log_probs, -np.inf).max(axis=-1)
    np.testing.assert_allclose(rounds.label_log_probs, of_label, atol=1e-5)
    assert np.isinf(of_label[rounds.labels < 0]).all()
    # The last document is three tokens long, so a round there has two labels at most.
    assert (rounds.labels[rounds.document == 1] >= 0).sum(axis=1).max() == 2


def made_up(accepted, scores, labels, drafter=None) -> Rounds:
    """Rounds of one document whose drafter has `scores` [R, P, V] and its whole vocabulary."""
    log_probs = np.asarray(jax.nn.log_softmax(scores), np.float32)
    count, offsets = labels.shape
    known = np.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    scaled = log_probs[..., None] / TEMPERATURES
    return Rounds(
        drafter or some_drafter()[0].drafter,
        np.tile(TEMPERATURES[:, None], (1, offsets)),
        np.zeros(count, int),
        np.zeros((count, offsets), np.int32),
        labels,
        accepted,
        np.broadcast_to(np.arange(scores.shape[-1]), scores.shape),
        log_probs,
        np.where(labels < 0, -np.inf, known),
        np.log(np.exp(scaled).sum(axis=2)),
    )


def sampled(rows, truth, seed=0):
    """Scores that are `truth` [P] times too sharp for the labels drawn from them."""
    rng = np.random.default_rng(seed)
    fair = rng.normal(size=(rows, len(truth), 12)) * 2
    noise = rng.gumbel(size=fair.shape)
    return fair * np.array(truth)[:, None], np.argmax(fair + noise, axis=-1)


def test_the_temperatures_that_labels_were_drawn_with_are_found():
    truth = TEMPERATURES[[4, 8, 12, 16]]
    scores, labels = sampled(6000, truth)
    rounds = made_up(np.full(6000, 3), scores, labels)
    np.testing.assert_allclose(TEMPERATURES[fit_temperatures(rounds)], truth, rtol=0.1)


def test_only_offsets_that_were_reached_count_and_only_tokens_that_can_be_said():
    scores, labels = sampled(40, (1.0, 1.0, 1.0, 1.0))
    accepted = np.random.default_rng(1).integers(0, 4, 40)
    labels[::7, 0] = -1
    rounds = made_up(accepted, scores, labels)
    loss, number = likelihood(rounds)
    for offset in range(4):
        rows = [r for r in range(40) if accepted[r] >= offset and labels[r, offset] >= 0]
        assert number[offset] == len(rows)
        for setting, temperature in enumerate(TEMPERATURES):
            every = jax.nn.log_softmax(scores[rows, offset] / temperature)
            want = -np.mean([every[i, labels[r, offset]] for i, r in enumerate(rows)])
            np.testing.assert_allclose(loss[setting, offset], want, rtol=1e-4)


def test_an_offset_with_few_labels_takes_the_temperature_before_it():
    scores, labels = sampled(200, (2.0, 2.0, 0.5, 0.5))
    accepted = np.zeros(200, int)
    accepted[: ENOUGH - 1] = 3  # offset 1 is reached always, the others once too seldom
    best = fit_temperatures(made_up(accepted, scores, labels))
    assert set(best.tolist()) == {best[0]} and TEMPERATURES[best[0]] > 1.4


def test_a_calibration_has_a_positive_number_for_each_offset():
    config = some_drafter()[0].drafter
    for wrong in (
        (1.0,) * 3,
        (1.0, 1.0, 1.0, 0.0),
        (1.0, 1.0, 1.0, "1"),
        [1.0] * 4,
        (float("inf"),) * 4,
    ):
        with pytest.raises(D3DError, match="calibration must be 4 positive numbers"):
            dataclasses.replace(config, calibration=wrong)
    with pytest.raises(D3DError, match="calibration must be 3 positive numbers"):
        dataclasses.replace(config, label_shift=0, calibration=(1.0,) * 4)


def test_older_drafters_have_no_calibration_and_newer_ones_are_read_back():
    config = some_drafter()[0].drafter
    section = json.loads(json.dumps(dataclasses.asdict(config)))
    del section["calibration"]
    assert DrafterConfig.from_json(section) == config
    calibrated = dataclasses.replace(config, calibration=(0.5, 1.0, 1.5, 2.0))
    section = json.loads(json.dumps(dataclasses.asdict(calibrated)))
    assert DrafterConfig.from_json(section) == calibrated


def test_slots_have_the_temperatures_of_the_offsets_they_predict():
    config = some_drafter()[0].drafter
    assert config.temperatures(4) is None
    calibrated = dataclasses.replace(config, calibration=(0.5, 1.5, 2.0, 2.5))
    assert calibrated.temperatures(4) == (0.5, 1.5, 2.0, 2.5)
    assert calibrated.temperatures(2) == (0.5, 1.5)
    early = dataclasses.replace(config, label_shift=0, calibration=(0.5, 1.5, 2.0))
    assert early.temperatures(3) == (1.0, 0.5, 1.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, its drafter, and a dataset of made-up responses."""
    home = tmp_path_factory.mktemp("calibrate")
    target = write_target(home / "target")
    write_drafter(home / "drafter", target, block_size=2)
    write_drafter(home / "early", target, block_size=2, label_shift=0)
    tokenizer, (model, _) = Tokenizer.from_folder(target), checkpoint.read_config(target)
    manifest = Manifest(
        target="target",
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=tokenizer.template_fingerprint,
        vocab_size=model.vocab_size,
        stop_ids=(),
        sampling={"greedy": True},
        max_new_tokens=60,
        prompts="made up",
    )
    rng = np.random.default_rng(0)
    with ResponseWriter(home / "responses", manifest) as writer:
        for i in range(6):
            ids = rng.integers(0, model.vocab_size, 64).tolist()
            writer.add(i, ids[:4], ids[4:], "length", "validation" if i < 4 else "train")
    build_dataset(home / "responses", home / "dataset")
    return home


def command(name, folders, *args, drafter="drafter"):
    models = ["--target", str(folders / "target"), "--drafter", str(folders / drafter)]
    return cli.main([name, *models, "--data", str(folders / "dataset"), *args])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_calibrate_changes_only_the_calibration_and_evaluate_compares_with_it(folders, capsys):
    before = contents(folders / "drafter")
    assert command("calibrate", folders) == 0
    printed = capsys.readouterr()
    assert "hit rate of best-first:3" in printed.out and "config.json" in printed.err
    after = contents(folders / "drafter")
    assert set(after) == set(before)
    assert [name for name in before if after[name] != before[name]] == ["config.json"]
    raw, old = json.loads(after["config.json"]), json.loads(before["config.json"])
    calibration = raw["d3d"].pop("calibration")
    assert len(calibration) == 2 and set(calibration) <= set(TEMPERATURES.tolist())
    # A random drafter is far too sure of itself.
    assert calibration[0] > 1
    old["d3d"].pop("calibration")
    assert raw == old

    measured = []
    for devices in (["0"], ["0-3", "--fsdp", "2", "--tensor", "2"]):
        assert command("evaluate", folders, "--json", "--drafter-devices", *devices) == 0
        measured.append(json.loads(capsys.readouterr().out))
    assert measured[0] == measured[1] and measured[0]["documents"] == 4

    assert command("evaluate", folders, "--policies", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["calibration"] == calibration and "jax" in figures["versions"]
    rows = figures["policies"]
    assert [row["branches"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 <= row["best_first_calibrated"] <= 1 for row in rows)
    assert command("evaluate", folders, "--policies") == 0
    assert "hit rates of asynchronous decoding" in capsys.readouterr().out


def test_what_cannot_be_calibrated_or_compared_is_refused(folders, capsys):
    before = contents(folders / "early")
    assert command("calibrate", folders, "--documents", "1", drafter="early") == 2
    assert "give more documents" in capsys.readouterr().err
    assert command("calibrate", folders, drafter="nonesuch") == 2
    assert "is no folder of a drafter" in capsys.readouterr().err
    assert command("evaluate", folders, "--policies", drafter="early") == 2
    assert "shift 0 has no offline hit rate" in capsys.readouterr().err
    assert contents(folders / "early") == before
    assert command("calibrate", folders, drafter="early") == 0
    assert "hit rate" not in capsys.readouterr().out
