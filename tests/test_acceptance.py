import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_jax import acceptance

WIDTH = 4
ids = st.integers(0, 3)


def one_row(drafts, choices, active, remaining, stops):
    """The rule, token by token."""
    emitted = []
    for i, token in enumerate(choices):
        if not active or len(emitted) == remaining:
            break
        emitted.append(token)
        if token in stops or i == len(drafts) or drafts[i] != token:
            break
    alive = active and not (emitted and emitted[-1] in stops) and len(emitted) < remaining
    return emitted, alive


@given(
    st.lists(
        st.tuples(
            st.lists(ids, min_size=WIDTH - 1, max_size=WIDTH - 1),
            st.lists(ids, min_size=WIDTH, max_size=WIDTH),
            st.booleans(),
            st.integers(1, 6),
            st.sampled_from([(-1, -1), (2, -1), (0, 3)]),
        ),
        min_size=3,
        max_size=3,
    )
)
@settings(max_examples=150, deadline=None)
def test_a_batch_of_rows_equals_the_rule_for_each(rows):
    drafts, choices, active, remaining, stop_ids = map(jnp.array, zip(*rows, strict=True))
    accepted, hit = acceptance.accepted_length(drafts, choices), jnp.array([0, 1, 1])
    report, alive, left = acceptance.emit(accepted, choices, hit, active, remaining, stop_ids)
    last = acceptance.last_token(report)
    for i, row in enumerate(rows):
        tokens, expected_alive = one_row(*row)
        assert report[i, :3].tolist() == [len(tokens), expected_alive, hit[i]]
        assert report[i, 3:].tolist() == tokens + [-1] * (WIDTH - len(tokens))
        assert bool(alive[i]) == expected_alive
        assert left[i] == row[3] - len(tokens)
        assert last[i] == (tokens[-1] if tokens else 0)


def test_accepted_length_is_the_longest_matching_prefix():
    drafts = jnp.array([[5, 6, 7], [5, 0, 7], [0, 6, 7]])
    choices = jnp.array([[5, 6, 7, 8]] * 3)
    np.testing.assert_array_equal(acceptance.accepted_length(drafts, choices), [3, 1, 0])
