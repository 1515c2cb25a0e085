import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_jax.branches import BestFirst, Branches, Rectangle, parse_policy
from d3d_jax.errors import D3DError
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params


def drafter_config(**changes):
    config = tiny_config()
    return tiny_drafter(config, tiny_params(config), **changes)[0].drafter


SHIFTS = {shift: drafter_config(label_shift=shift) for shift in (0, 1)}


def nothing(ids):
    """Log-probabilities for a policy that does not look at them."""
    return jnp.full(ids.shape, jnp.nan)


@pytest.mark.parametrize("outcomes, fan_out, budget", [(12, 2, 384), (12, 5, 912), (16, 2, 512)])
def test_budgets_of_the_paper(outcomes, fan_out, budget):
    rectangle = Rectangle(outcomes, fan_out, 16)
    assert rectangle.budget == budget
    assert BestFirst(rectangle.num_branches, 16).budget == budget


def test_rejections_take_the_likeliest_other_tokens_and_full_acceptance_the_bonus():
    block = jnp.array([[9, 1, 5, 3]])
    # At offset 2 the drafted token is not the likeliest: it is left out all the same.
    ids = jnp.array([[[1, 2, 4], [4, 5, 6], [3, 7, 8], [10, 11, 12]]])
    chosen = Rectangle(3, 2, 4).choose(SHIFTS[1], block, ids, nothing(ids))
    np.testing.assert_array_equal(chosen.anchors, [[2, 4, 4, 6, 10]])
    np.testing.assert_array_equal(chosen.offsets, [[1, 1, 2, 2, 4]])
    at, hit = chosen.find(jnp.array([2]), jnp.array([6]))
    assert at[0] == 3 and hit[0]
    for count, token in [(2, 5), (1, 6), (3, 7), (4, 11), (0, 0)]:
        assert not chosen.find(jnp.array([count]), jnp.array([token]))[1][0]
    assert chosen.find(jnp.array([4]), jnp.array([10]))[1][0]


def test_shift_0_prepares_full_acceptance_from_the_last_draft():
    block = jnp.array([[9, 1, 5, 3]])
    ids = jnp.array([[[1, 2], [5, 6], [3, 7]]])
    chosen = Rectangle(4, 1, 4).choose(SHIFTS[0], block, ids, nothing(ids))
    np.testing.assert_array_equal(chosen.anchors, [[2, 6, 7, 3]])
    np.testing.assert_array_equal(chosen.offsets, [[1, 2, 3, 3]])
    at, hit = chosen.find(jnp.array([4]), jnp.array([42]))
    assert at[0] == 3 and hit[0]  # any bonus: its first draft will decide
    assert not chosen.find(jnp.array([3]), jnp.array([3]))[1][0]


def drawn(seed, batch, width, shift, size, drafts="likeliest"):
    """A block with its candidates, as a drafter would leave them.

    Log-probabilities are multiples of 1/8, so that sums are exact and ties are frequent.
    """
    rng = np.random.default_rng(seed)
    slots = width - 1 + shift
    ids = rng.permuted(np.tile(np.arange(50), (batch, slots, 1)), axis=-1)[..., :size]
    log_probs = -np.sort(rng.integers(0, 64, ids.shape), axis=-1).astype(np.float32) / 8
    rank = rng.integers(1 if drafts == "likeliest" else size, size=(batch, width - 1, 1))
    taken = np.take_along_axis(ids[:, : width - 1], rank, axis=2)
    block = np.concatenate([np.full((batch, 1), 7), taken[..., 0]], axis=1)
    return block.astype(np.int32), ids.astype(np.int32), log_probs


def best_of_all(block, ids, log_probs, shift, count):
    """The obvious version for one row: score every outcome, sort, take the first."""
    width, outcomes, reached = len(block), [], 0.0
    for k in range(1, width):
        of = dict(zip(ids[k - 1].tolist(), log_probs[k - 1].tolist(), strict=True))
        draft = int(block[k])
        outcomes += [(reached + q, (k, v, k)) for v, q in of.items() if v != draft]
        reached += of[draft]
    if shift == 1:
        last = zip(ids[-1].tolist(), log_probs[-1].tolist(), strict=True)
        outcomes += [(reached + q, (width, v, width)) for v, q in last]
    else:
        outcomes.append((reached, (width, int(block[-1]), width - 1)))
    return [outcome for _, outcome in sorted(outcomes, key=lambda o: -o[0])[:count]]


@given(
    seed=st.integers(0, 10**6),
    shift=st.integers(0, 1),
    size=st.sampled_from([(2, 5), (4, 2), (4, 5), (5, 3)]),
    share=st.sampled_from([0, 0.3, 0.8, 1]),
    drafts=st.sampled_from(["likeliest", "any"]),
)
@settings(max_examples=60, deadline=None)
def test_best_first_is_the_start_of_all_outcomes_sorted(seed, shift, size, share, drafts):
    width, candidates = size
    block, ids, log_probs = drawn(seed, 3, width, shift, candidates, drafts)
    most = (width - 1) * (candidates - 1) + 1
    policy = BestFirst(1 + int(share * (most - 1)), width, candidates)
    chosen = policy.choose(SHIFTS[shift], jnp.array(block), jnp.array(ids), jnp.array(log_probs))
    got = np.stack([chosen.outcome, chosen.anchors, chosen.offsets], axis=-1).tolist()
    for row in range(3):
        want = best_of_all(block[row], ids[row], log_probs[row], shift, policy.num_branches)
        found = [tuple(outcome) for outcome in got[row]]
        assert found == want
        assert len(set(found)) == policy.num_branches


def test_best_first_compiles_and_reads_only_its_own_candidates():
    block, ids, log_probs = drawn(0, 2, 4, 1, 9)
    policy = BestFirst(6, 4, 3)
    anchors = jax.jit(lambda *arrays: policy.choose(SHIFTS[1], *arrays).anchors)
    np.testing.assert_array_equal(
        anchors(block, ids, log_probs), anchors(block, ids[..., :3], log_probs[..., :3])
    )


def test_a_draft_that_is_no_candidate_counts_as_the_last_of_them():
    ids = jnp.array([[[1, 2], [3, 4], [5, 6]]])
    log_probs = jnp.log(jnp.array([[[0.6, 0.2], [0.5, 0.25], [0.9, 0.05]]]))
    # 9 is no candidate of offset 1: offset 2 is reached with 0.2 and not with 0.6.
    chosen = BestFirst(4, 3, 3).choose(SHIFTS[1], jnp.array([[7, 9, 3]]), ids, log_probs)
    np.testing.assert_array_equal(chosen.outcome, [[1, 1, 3, 2]])
    np.testing.assert_array_equal(chosen.anchors, [[1, 2, 5, 4]])


def some_branches(outcomes):
    """Branches of one row from (k, anchor, offset)."""
    rows = jnp.array([outcomes])
    return Branches(rows[..., 1], rows[..., 2], rows[..., 0])


@pytest.mark.parametrize(
    "count, token, index",
    [
        (2, 22, 2),  # the outcome itself
        (2, 99, 1),  # the first of the same k
        (1, 99, 1),  # no k = 1: the nearest
        (3, 99, 0),  # k = 2 and k = 4 are as near: the first listed
        (7, 99, 3),  # the early branch of k = 8 is nearer, and taken only for its own
        (8, 99, 4),
    ],
)
def test_the_nearest_branch(count, token, index):
    prepared = some_branches([(4, 40, 4), (2, 21, 2), (2, 22, 2), (5, 50, 5), (8, 70, 7)])
    assert int(prepared.nearest(jnp.array([count]), jnp.array([token]))[0]) == index


def test_only_an_early_branch_is_the_nearest_of_all_outcomes():
    prepared = some_branches([(4, 30, 3)])
    assert int(prepared.nearest(jnp.array([1]), jnp.array([5]))[0]) == 0


@given(seed=st.integers(0, 10**6), shift=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_the_nearest_branch_is_the_found_one_where_there_is_one(seed, shift):
    arrays = map(jnp.array, drawn(seed, 1, 5, shift, 4))
    prepared = BestFirst(9, 5, 4).choose(SHIFTS[shift], *arrays)
    for k, v in zip(prepared.outcome[0].tolist(), prepared.anchors[0].tolist(), strict=True):
        outcome = jnp.array([k]), jnp.array([v])
        at, hit = prepared.find(*outcome)
        assert hit[0] and int(prepared.nearest(*outcome)[0]) == int(at[0])


def test_candidates_are_enough_for_the_branches():
    assert BestFirst(3, 8).num_candidates == 4
    assert BestFirst(29, 8).num_candidates == 16
    assert BestFirst(29, 2).num_candidates == 29
    assert BestFirst(22, 4, 8).num_candidates == 8
    with pytest.raises(D3DError, match="at least 8 candidates a slot, found 7: raise num_cand"):
        BestFirst(22, 4, 7)


@pytest.mark.parametrize(
    "policy, message",
    [
        (lambda: Rectangle(5, 1, 4), "between 1 and the block size 4"),
        (lambda: Rectangle(2, 0, 4), "F must be at least 1"),
        (lambda: BestFirst(0, 4), "N must be at least 1"),
        (lambda: BestFirst(2, 1), "block size must be at least 2"),
        (
            lambda: parse_policy("rectangle:4", 8),
            "rectangle:C,F or best-first:N, found 'rectangle:4",
        ),
        (lambda: parse_policy("best-first:-1", 8), "rectangle:C,F or best-first:N"),
        (lambda: parse_policy("rectangle:9,1", 8), "between 1 and the block size 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(policy, message):
    with pytest.raises(D3DError, match=message):
        policy()


@pytest.mark.parametrize("policy", [Rectangle(4, 2, 8), BestFirst(7, 8)])
def test_a_policy_is_read_from_its_own_name(policy):
    assert parse_policy(str(policy), 8) == policy
