import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from d3d_jax.train.distillation import taught

SIZE = 5


def lead(p, label):
    return p[label] - np.delete(p, label).max()


def mixed(p, label, alpha):
    return (1 - alpha) * p + alpha * np.eye(SIZE)[label]


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def ask(logits, label, margin):
    rows = jnp.array(logits, jnp.float32)[None]
    return np.asarray(taught(rows, jnp.arange(SIZE)[None] == label, margin)[0], np.float64)


@given(
    arrays(np.float64, SIZE, elements=st.floats(-6, 6)),
    st.integers(0, SIZE - 1),
    st.sampled_from([0.0, 0.01, 0.3]),
)
@settings(max_examples=100, deadline=None)
def test_the_least_mixture_with_the_label_that_has_the_margin(logits, label, margin):
    p = softmax(logits)
    found = ask(logits, label, margin)
    assert found.sum() == pytest.approx(1, abs=1e-5)
    assert lead(found, label) >= margin - 1e-5
    # The least weight by bisection, which knows nothing of the closed form.
    low, high = 0.0, 1.0
    if lead(p, label) >= margin:
        high = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if lead(mixed(p, label, middle), label) >= margin else (middle, high)
        )
    np.testing.assert_allclose(found, mixed(p, label, high), atol=2e-5)


def test_a_teacher_that_is_sure_enough_is_left_alone():
    logits = np.array([0.0, 3.0, 1.0, 0.0, -2.0])
    np.testing.assert_allclose(ask(logits, 1, 0.01), softmax(logits), rtol=1e-5)
    np.testing.assert_allclose(ask(logits, 0, None), softmax(logits), rtol=1e-5)
    certain = np.array([200.0, 0, 0, 0, 0])
    np.testing.assert_array_equal(ask(certain, 0, 0.01), np.eye(SIZE)[0])
    np.testing.assert_allclose(ask(certain, 1, 0.01)[:2], [0.495, 0.505], atol=1e-6)
