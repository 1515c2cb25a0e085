"""When a run is given up, by its losses alone."""

import math

import pytest

from d3d_jax.train.guard import ENOUGH, LossGuard


def judge_all(guard, losses):
    return [guard.judge(loss, 1.0) for loss in losses]


def test_spikes_in_a_row_stop_a_run_and_single_ones_do_not():
    guard = LossGuard(3.0, 4)
    usual = [2.0 + 0.1 * (i % 3) for i in range(ENOUGH)]
    assert not any(judge_all(guard, [*usual, 9.0, 9.0, 9.0, 2.0, 9.0, 9.0, 9.0]))
    assert guard.judge(9.0, 1.0) == "loss 9 is above 3 times its median 2.1 for 4 steps"


def test_a_falling_loss_and_a_high_start_are_no_spikes():
    assert not any(judge_all(LossGuard(3.0, 1), [100.0 * 0.9**i for i in range(200)]))
    assert not any(judge_all(LossGuard(3.0, 1), [1.0] * (ENOUGH - 1) + [50.0]))
    assert not any(judge_all(LossGuard(0.0, 1), [1.0] * ENOUGH + [50.0]))


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_what_is_no_number_stops_a_run_at_once(loss, norm):
    assert LossGuard(0.0, 9).judge(loss, norm) is not None


def test_a_guard_given_the_same_losses_again_judges_alike():
    losses = [1.0] * ENOUGH + [5.0] * 3
    whole, resumed = LossGuard(3.0, 4), LossGuard(3.0, 4)
    judge_all(whole, losses)
    judge_all(resumed, losses)
    assert whole.judge(5.0, 1.0) == resumed.judge(5.0, 1.0) is not None
