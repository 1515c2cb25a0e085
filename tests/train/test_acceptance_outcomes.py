"""Hit rates without running the target: exactly those of asynchronous decoding, on tiny models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from d3d_jax.branches import BestFirst, Rectangle
from d3d_jax.config import DecodeConfig
from d3d_jax.drafter import Drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder, parameters
from d3d_jax.models.sharding import make_mesh
from d3d_jax.train import acceptance
from d3d_jax.train.acceptance import Acceptance, OfflineAcceptance, walk
from d3d_jax.train.outcomes import Rounds, hit_rate
from d3d_jax.train.policies import budgets, compare, most_candidates, rectangles
from d3d_jax.train.step import place
from tests.tiny_models import (
    VOCAB,
    Documents,
    greedy,
    memorise,
    tiny_config,
    tiny_drafter,
    tiny_params,
)

PROMPTS = [[5, 6, 7], list(range(20)), [40, 3], [11] * 9]
LENGTH = 40
DRAFTERS = {
    "shift 1": {},
    "causal block": dict(in_block="causal"),
    "reduced vocabulary": dict(vocab=tuple(range(0, VOCAB, 2))),
    "block of 2": dict(block_size=2),
}


@functools.cache
def target():
    config = tiny_config()
    return config, tiny_params(config, seed=4, scale=16.0)


@functools.cache
def pairs():
    config, params = target()
    return [(prompt, greedy(config, params, prompt, LENGTH)) for prompt in PROMPTS]


@functools.cache
def trained(kind):
    """A drafter that has memorised the beginning of what the target says."""
    drafter, own = tiny_drafter(*target(), **DRAFTERS[kind])
    begun = [(prompt, response[: LENGTH // 2]) for prompt, response in pairs()]
    return drafter, memorise(drafter, own, begun, steps=40)


def assert_same(split, one):
    """What two measurements observed, exactly but for the rounding of probabilities."""
    for found, expected in zip(split, one, strict=True):
        for field in dataclasses.fields(expected):
            ours, theirs = getattr(found, field.name), getattr(expected, field.name)
            if field.name in ("log_probs", "label_log_probs", "log_normalisers"):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
            elif field.name != "drafter":
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_documents_are_split_over_a_mesh(fsdp):
    """Four at a time, of which one group is not full: what is measured is one device's, exactly."""
    drafter, params = trained("shift 1")
    documents = Documents([*pairs(), (PROMPTS[0], pairs()[1][1][:9]), (PROMPTS[2], [7, 8, 9])])
    mesh = make_mesh(jax.devices()[:4], fsdp=fsdp)
    params = jax.tree.map(np.asarray, params)
    placed = place(params, parameters.shardings(params, mesh))
    split, one = (
        OfflineAcceptance(drafter, documents, mesh=mesh).observe(placed, 3),
        OfflineAcceptance(drafter, documents).observe(params, 3),
    )
    assert_same(split, one)
    assert len(split[0].tokens) == len(documents) and split[0].tokens[-1] == 2


def test_a_long_response_is_read_in_several_passes(monkeypatch):
    drafter, params = trained("shift 1")
    documents = Documents(pairs())
    one = OfflineAcceptance(drafter, documents).observe(params, 3)
    monkeypatch.setattr(acceptance, "ANCHORS", 8)
    monkeypatch.setattr(acceptance, "MOST_ROWS", 16 * drafter.drafter.block_size)
    several = OfflineAcceptance(drafter, documents)
    parts = [anchors[anchors >= 0] for _, anchors, _ in several._passes(documents[0], 3)]
    assert [len(part) for part in parts] == [16, 16, LENGTH - 1 - 32]
    assert_same(several.observe(params, 3), one)


def test_the_interval_of_tau_is_of_responses_drawn_anew():
    """Every response alike: no width. Half say 2 and half 4 tokens a round: 3 within."""
    alike = Acceptance(np.full(8, 6), np.full(8, 3), [], [], 4)
    assert alike.interval() == (2.0, 2.0)
    low, high = Acceptance(np.array([2, 4] * 8), np.ones(16, int), [], [], 4).interval()
    # The standard error of a mean of 16 such responses is 1/4: 1.96 of them on either side.
    assert 3 - low == pytest.approx(0.49, abs=0.1) == high - 3


@functools.cache
def observed(kind) -> Rounds:
    drafter, params = trained(kind)
    width = drafter.drafter.block_size
    temperatures = np.array([calibration(width), (1.0,) * width])
    return OfflineAcceptance(drafter, Documents(pairs())).observe(params, 31, temperatures)[1]


def calibration(width):
    """Temperatures that change which branches are best."""
    return (0.4, 3.0, 0.7, 1.9)[:width]


def decoded(drafter, params, policy, stop_ids=()):
    """Hits and chances of asynchronous decoding."""
    config, own = target()
    first, last = jax.devices()[:2]
    roles = (
        Target(config, decoder.unstack(own), make_mesh([first]), stop_ids),
        DrafterRole(drafter, decoder.unstack(params), make_mesh([last]), policy),
    )
    decoding = Decoder(*roles, DecodeConfig(mode="async", max_new_tokens=LENGTH))
    replies = decoding.generate(PROMPTS)
    return sum(reply.hits for reply in replies), sum(reply.chances for reply in replies)


@pytest.mark.parametrize(
    "kind, policy",
    [
        ("shift 1", Rectangle(4, 2, 4)),
        ("reduced vocabulary", None),
        pytest.param("causal block", None, marks=pytest.mark.slow),
        pytest.param("block of 2", None, marks=pytest.mark.slow),
    ],
)
def test_the_offline_hit_rate_is_that_of_decoding(kind, policy):
    drafter, params = trained(kind)
    policy = policy or BestFirst(6, drafter.drafter.block_size)
    hits, chances = decoded(drafter, params, policy)
    assert 0 < hits < chances
    assert hit_rate(policy, observed(kind)) == hits / chances


def test_a_calibrated_drafter_chooses_and_hits_as_offline():
    drafter, params = trained("shift 1")
    policy, rounds = BestFirst(4, 4), observed("shift 1")
    config = dataclasses.replace(drafter.drafter, calibration=calibration(4))
    hits, chances = decoded(Drafter(drafter.model, config), params, policy)
    rate = hit_rate(policy, rounds, rounds.calibrated(np.zeros(4, int)))
    assert rate == hits / chances
    assert rate != hit_rate(policy, rounds), "the temperatures change nothing: a poor test"


def test_replies_that_stop_hit_as_offline():
    tokens = pairs()[1][1]
    stop = next(t for i, t in enumerate(tokens) if i > 6 and t not in tokens[:i])
    ended = [r[: r.index(stop) + 1] if stop in r else r for _, r in pairs()]
    assert 8 <= len(ended[1]) < LENGTH
    drafter, params = trained("shift 1")
    documents = Documents(list(zip(PROMPTS, ended, strict=True)))
    rounds = OfflineAcceptance(drafter, documents).observe(params, 7)[1]
    policy = BestFirst(6, 4)
    hits, chances = decoded(drafter, params, policy, (stop,))
    assert hit_rate(policy, rounds) == hits / chances


def test_more_branches_never_hit_less_and_no_temperature_changes_nothing():
    rounds = observed("shift 1")
    rates = [hit_rate(BestFirst(n, 4), rounds) for n in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    np.testing.assert_allclose(rounds.calibrated(np.ones(4, int)), rounds.log_probs, atol=1e-5)


def test_the_rounds_are_those_of_the_walk():
    np.testing.assert_array_equal(walk(np.array([2, 0, 0, 0, 3, 1])), [0, 3, 4])
    assert walk(np.zeros(0)).size == 0
    rounds, (drafter, params) = observed("shift 1"), trained("shift 1")
    acceptance = OfflineAcceptance(drafter, Documents(pairs())).measure(params)
    assert np.concatenate(acceptance.accepted).tolist() == rounds.accepted.tolist()
    for number, (prompt, response) in enumerate(pairs()):
        rows = rounds.document == number
        said = [int(rounds.block[rows][0, 0])]
        for labels, accepted in zip(rounds.labels[rows], rounds.accepted[rows], strict=True):
            said += [t for t in labels[: accepted + 1].tolist() if t >= 0]
        assert said == response, prompt
    half = rounds.of(np.array([True, False, False, True]))
    assert set(half.document.tolist()) == {0, 3}
    assert Rounds.join([half, half]).block.shape[0] == 2 * len(half.block)


def test_what_cannot_be_measured_is_refused():
    rounds = observed("block of 2")
    with pytest.raises(D3DError, match="rectangle:2,1 needs blocks of 4 and 2 candidates"):
        hit_rate(Rectangle(2, 1, 4), rounds)
    with pytest.raises(D3DError, match="needs blocks of 2 and 41 candidates"):
        hit_rate(Rectangle(2, 40, 2), rounds)
    early = dataclasses.replace(rounds.drafter, label_shift=0)
    with pytest.raises(D3DError, match="shift 0 has no offline hit rate"):
        hit_rate(BestFirst(1, 2), dataclasses.replace(rounds, drafter=early))
    with pytest.raises(D3DError, match="62 candidates are asked of a vocabulary of 61"):
        OfflineAcceptance(trained("shift 1")[0], Documents(pairs())).observe({}, 62)


def test_policies_are_compared_at_the_same_number_of_branches():
    assert budgets(8) == [3, 7, 8, 15, 22, 29]
    assert [str(r) for r in rectangles(15, 8)][-1] == "rectangle:8,2"
    for count in budgets(8):
        assert all(r.num_branches <= count for r in rectangles(count, 8))
    assert most_candidates(8) == 29
    rounds = observed("block of 2")
    rows = compare(rounds, rounds.calibrated(np.zeros(2, int)))
    assert [row["branches"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["best_first"] == round(hit_rate(BestFirst(row["branches"], 2), rounds), 4)
        assert row["best_first_calibrated"] is not None
        assert row["rectangles"]
