"""The demo's verdict: what a round costs, with and without shared hardware, and who beats plain."""

import dataclasses

import pytest

from d3d_jax.infer.demo import Comparison, Difference, Summary
from d3d_jax.infer.demo_report import differences, round_parts, round_seconds, verdict
from d3d_jax.infer.measure import Spread, StepTimes


def milliseconds(value: float) -> Spread:
    return Spread(value / 1e3, 0.0)


TIMES = StepTimes(*map(milliseconds, (25.0, 40.0, 10.0, 30.0, 1.0, 9.0)))
SUMMARIES = {
    "plain": Summary(1.0, None, Spread(40.0, 1.0), 1.0, ()),
    "sync": Summary(2.5, None, Spread(50.0, 1.0), 1.25, ()),
    "async": Summary(2.5, 0.75, Spread(34.0, 1.0), 0.85, (Difference(0, 4, 1e-5),)),
}
COMPARISON = Comparison({}, SUMMARIES, TIMES, shared=True, warm_up=1.0)


def test_a_miss_adds_what_it_takes_longer_than_a_hit():
    assert TIMES.redraft == pytest.approx(0.008)
    parts = round_parts("async", SUMMARIES["async"], TIMES)
    assert parts == pytest.approx({"T_v": 0.040, "T_p": 0.030, "choice": 0.001, "T_d": 0.002})


def test_the_packed_draft_hides_behind_verification_only_on_hardware_of_its_own():
    parts = round_parts("async", SUMMARIES["async"], TIMES)
    assert round_seconds(parts, shared=True) == pytest.approx(0.073)
    assert round_seconds(parts, shared=False) == pytest.approx(0.043)
    assert round_seconds(parts | {"T_p": 0.060}, shared=False) == pytest.approx(0.063)


def test_the_verdict_names_winners_losers_and_their_reasons():
    said = verdict(COMPARISON)
    assert "sync beats plain (1.25 ×)" in said and "20.0 ms a token against 25.0 ms" in said
    assert "async does not beat plain (0.85 ×): target and drafter share" in said
    assert "73.0 ms" in said
    apart = verdict(dataclasses.replace(COMPARISON, shared=False))
    assert "share" not in apart and "43.0 ms" in apart


def test_a_reply_that_differs_is_told_with_its_place_and_logit_gap():
    (sentence,) = differences(COMPARISON)
    assert "async" in sentence and "prompt 1 at token 5" in sentence and "1.0e-05" in sentence
