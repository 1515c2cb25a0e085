import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from d3d_jax.models import parameters, sharding
from d3d_jax.train import step as steps
from d3d_jax.train.cross_entropy import cross_entropy
from d3d_jax.train.distillation import Teacher, taught
from tests.tiny_models import tiny_drafter, tiny_params
from tests.train import test_step

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


@pytest.mark.parametrize("margin", [None, 0.2])
def test_the_chunked_divergence_is_the_dense_one_with_its_gradient(margin):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (13, 8)), jax.random.normal(keys[1], (SIZE, 8))
    fixed = jax.random.normal(keys[2], (13, 6)), jax.random.normal(keys[3], (SIZE, 6))
    labels, weights = jnp.arange(13) % SIZE, jnp.linspace(0.0, 1.0, 13)
    logits = fixed[0] @ fixed[1].T
    wanted = np.stack([ask(logits[i], int(labels[i]), margin) for i in range(13)])

    def dense(hidden, head):
        log_q = jax.nn.log_softmax(hidden @ head.T)
        return jnp.sum(weights[:, None] * wanted * (np.log(wanted) - log_q))

    def chunked(hidden, head, fixed):
        teacher = fixed[0][None], fixed[1]
        return cross_entropy(hidden[None], head, labels[None], weights[None], teacher, margin, 4)[0]

    expected = jax.value_and_grad(dense, argnums=(0, 1))(hidden, head)
    got = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, head, fixed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)
    assert expected[0] > 1
    to_teacher = jax.grad(chunked, argnums=2)(hidden, head, fixed)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(to_teacher))


@pytest.mark.slow
def test_distillation_on_a_mesh_is_that_on_one_device():
    config = test_step.MODEL
    drafter, params = tiny_drafter(
        config, tiny_params(config, 3), layers=(0, 1, 2), vocab=test_step.DRAFT_VOCAB
    )
    params = jax.device_get(params)

    def train(mesh, taught=True):
        step, (state, *rest, _) = test_step.prepare(mesh, True, test_step.ADAM)
        where = parameters.shardings(params, sharding.model_mesh(mesh, config))
        teacher = Teacher(drafter, steps.place(params, where), 0.01) if taught else None
        for number in (1, 2):
            state, metrics = step(state, *rest, number, teacher)
        return jax.device_get((state["params"], metrics))

    alone = train(sharding.make_mesh(jax.devices()[:1]))
    split = train(sharding.make_mesh(jax.devices(), data=2, fsdp=2, tensor=2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        split,
        alone,
    )
    alone_untaught = train(sharding.make_mesh(jax.devices()[:1]), taught=False)
    losses = [float(metrics["diffusion"]) for _, metrics in (alone, alone_untaught)]
    assert abs(losses[0] - losses[1]) > 0.1
