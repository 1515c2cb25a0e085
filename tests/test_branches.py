import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.branches import Rectangle
from d3d_jax.errors import D3DError
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params


def drafter_config(**changes):
    config = tiny_config()
    return tiny_drafter(config, tiny_params(config), **changes)[0].drafter


@pytest.mark.parametrize("outcomes, fan_out, budget", [(12, 2, 384), (12, 5, 912), (16, 2, 512)])
def test_budgets_of_the_paper(outcomes, fan_out, budget):
    assert Rectangle(outcomes, fan_out, 16).budget == budget


def test_rejections_take_the_likeliest_other_tokens_and_full_acceptance_the_bonus():
    block = jnp.array([[9, 1, 5, 3]])
    # At offset 2 the drafted token is not the likeliest: it is left out all the same.
    ids = jnp.array([[[1, 2, 4], [4, 5, 6], [3, 7, 8], [10, 11, 12]]])
    chosen = Rectangle(3, 2, 4).choose(drafter_config(), block, ids)
    np.testing.assert_array_equal(chosen.anchors, [[2, 4, 4, 6, 10]])
    np.testing.assert_array_equal(chosen.offsets, [[1, 1, 2, 2, 4]])
    at, hit = chosen.find(jnp.array([2]), jnp.array([6]))
    assert at[0] == 3 and hit[0]
    for count, token in [(2, 5), (1, 6), (3, 7), (4, 11), (0, 0)]:
        assert not chosen.find(jnp.array([count]), jnp.array([token]))[1][0]
    assert chosen.find(jnp.array([4]), jnp.array([10]))[1][0]


def test_shift_0_prepares_full_acceptance_from_the_last_draft():
    config = drafter_config(label_shift=0)
    block = jnp.array([[9, 1, 5, 3]])
    ids = jnp.array([[[1, 2], [5, 6], [3, 7]]])
    chosen = Rectangle(4, 1, 4).choose(config, block, ids)
    np.testing.assert_array_equal(chosen.anchors, [[2, 6, 7, 3]])
    np.testing.assert_array_equal(chosen.offsets, [[1, 2, 3, 3]])
    at, hit = chosen.find(jnp.array([4]), jnp.array([42]))
    assert at[0] == 3 and hit[0]  # any bonus: its first draft will decide
    assert not chosen.find(jnp.array([3]), jnp.array([3]))[1][0]


def test_a_rectangle_wider_than_the_block_is_refused():
    with pytest.raises(D3DError, match="between 1 and the block size 4"):
        Rectangle(5, 1, 4)


def test_a_rectangle_without_fan_out_is_refused():
    with pytest.raises(D3DError, match="F must be at least 1"):
        Rectangle(2, 0, 4)
