"""One training step on meshes of eight devices against one; its collectives and its types."""

import dataclasses
import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from d3d_jax.hlo import collectives, find_collectives, largest_result
from d3d_jax.models import parameters, sharding
from d3d_jax.train import step as steps
from d3d_jax.train.packing import build_row
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params
from tests.train.tiny_runs import CONFIG

# Everything divides: two kv heads of four query heads, a draft vocabulary, rows over eight devices.
# The vocabulary is the largest axis, so that what is gathered of it shows.
MODEL = tiny_config(
    vocab_size=512,
    num_attention_heads=8,
    head_dim=8,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=8,
)
LAYERS = (0, 2, 4, 6)
DRAFT_VOCAB = np.arange(0, 512, 2)
ROWS, TOKENS, BLOCKS = 16, 24, 6


def batch():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS):
        first, second = rng.integers(0, MODEL.vocab_size, (2, 11))
        documents = [(first, 4, np.array([4, 6, 9])), (second[:7], 2, np.array([2, 5]))]
        rows.append(build_row(documents, TOKENS, BLOCKS))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@functools.cache
def initial(shared):
    """A drafter and its parameters; with its target's embedding and head, or its own."""
    changes = dict(shares=("embed", "head"), vocab=DRAFT_VOCAB) if shared else dict(shares=())
    drafter, params = tiny_drafter(MODEL, tiny_params(MODEL), layers=LAYERS, **changes)
    return drafter, jax.device_get(params)


def test_the_optimizer_by_known_answers():
    config = dataclasses.replace(
        CONFIG,
        steps=10,
        warmup_steps=2,
        learning_rate=0.3,
        final_lr_fraction=0.1,
        weight_decay=0.5,
        clip_norm=1.0,
        b1=0.9,
    )
    rates = [float(steps.schedule(config)(count)) for count in (0, 1, 2, 6, 10)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.165, 0.03], rtol=1e-6)
    optimizer = steps.make_optimizer(config)
    params = {"matrices": jnp.ones((2, 3, 4)), "norms": jnp.ones((2, 3)), "embed": jnp.ones((5, 3))}
    state = optimizer.init(params)
    update, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    np.testing.assert_allclose(update["matrices"], -0.1 * 0.5, rtol=1e-6)
    assert not update["norms"].any() and not update["embed"].any()
    # 24 + 6 + 15 numbers of 2 are √180 long; the first moment is a tenth of what is left of them.
    _, state = optimizer.update(jax.tree.map(lambda leaf: 2 * leaf, params), state, params)
    moment = optax.tree_utils.tree_get(state, "mu")
    for leaf in jax.tree.leaves(moment):
        np.testing.assert_allclose(leaf, 0.1 * 2 / np.sqrt(180), rtol=1e-5)


def prepare(mesh, shared, optimizer, **changes):
    """The jitted step and its first arguments on a mesh."""
    drafter, params = initial(shared)
    mesh = sharding.model_mesh(mesh, drafter.model)
    changes = dict(batch_rows=ROWS, compute="float32") | changes
    config = dataclasses.replace(CONFIG, **changes)
    frozen, trained = steps.split(drafter, params)
    shardings = steps.state_shardings(optimizer, trained, mesh)
    state = steps.initial_state(optimizer, trained, shardings)
    frozen = steps.place(steps.cast(frozen, config.compute), parameters.shardings(frozen, mesh))
    index = steps.draft_index(drafter, params)
    signals = np.zeros((1,), np.int32)
    rows = sharding.named("b.", (ROWS, 1), mesh, sharding.ACTIVATION_RULES)
    placed = jax.device_put(batch(), rows)
    step = steps.make_step(drafter, config, optimizer, shardings)
    return step, (state, frozen, index, placed, signals, 1)


# An ε that gradients are not lost in: where one is near 0, Adam's own blows up how it was rounded.
ADAM = optax.adam(1e-2, eps=1e-3)


def train(mesh, shared, count=3, optimizer=ADAM, **changes):
    step, (state, *rest, _) = prepare(mesh, shared, optimizer, **changes)
    for number in range(1, count + 1):
        state, metrics = step(state, *rest, number)
    return jax.device_get((state["params"], metrics))


@functools.cache
def on_one_device(shared):
    return train(sharding.make_mesh(jax.devices()[:1]), shared)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "sizes, shared",
    [
        (dict(data=2, fsdp=2, tensor=2), True),
        slow(dict(data=2, fsdp=4, micro_batches=2), False),
        slow(dict(tensor=8), True),
        slow(dict(tensor=8), False),
        slow(dict(fsdp=8), True),
        slow(dict(data=2, fsdp=2, tensor=2, micro_batches=4), False),
    ],
    ids=str,
)
def test_parameters_after_some_steps_are_those_of_one_device(sizes, shared):
    sizes = dict(sizes)
    changes = {"micro_batches": sizes.pop("micro_batches", 1)}
    count = int(np.prod(list(sizes.values())))
    got, metrics = train(sharding.make_mesh(jax.devices()[:count], **sizes), shared, **changes)
    expected, expected_metrics = on_one_device(shared)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        (got, metrics),
        (expected, expected_metrics),
    )


def test_a_fingerprint_is_of_the_numbers_and_their_places_and_not_of_the_mesh(monkeypatch):
    _, params = initial(False)
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:4], fsdp=2, tensor=2), MODEL)
    placed = steps.place(params, parameters.shardings(params, mesh))
    assert steps.fingerprint(placed) == steps.fingerprint(params)
    swapped = params["norm"][::-1].copy()
    assert steps.fingerprint({**params, "norm": swapped}) != steps.fingerprint(params)
    # Where JAX knows of GPUs alone, as with JAX_PLATFORMS=cuda.
    devices = jax.local_devices

    def without_cpu(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices()

    monkeypatch.setattr(jax, "local_devices", without_cpu)
    assert steps.fingerprint(params) == steps.fingerprint(placed)


def test_the_state_is_split_and_frozen_parameters_have_none():
    mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, tensor=2)
    step, (state, frozen, *rest) = prepare(mesh, True, steps.make_optimizer(CONFIG))
    state, _ = step(state, frozen, *rest)
    assert set(frozen) == {"embed", "head", "draft_vocab"}
    matrices = 0
    for tree in (state["params"], *optax.tree.get_all_with_path(state["opt"], "mu")[0][1:]):
        assert not set(tree) & set(frozen)
        for leaf in jax.tree.leaves(tree["layers"]):
            if leaf.ndim == 3:
                matrices += 1
                assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    assert matrices == 2 * 7
    assert frozen["head"].addressable_shards[0].data.shape == (128, 16)


def test_a_step_only_follows_the_one_before_it():
    mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, tensor=2)
    step, (state, *rest, _) = prepare(mesh, True, steps.make_optimizer(CONFIG))
    before = jax.device_get(state)
    state, _ = step(state, *rest, 2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    state, _ = step(state, *rest, 1)
    assert int(state["step"]) == 1
    assert np.any(np.asarray(state["params"]["norm"]) != before["params"]["norm"])


def compile_step(sizes, shared, **changes):
    count = int(np.prod(list(sizes.values())))
    mesh = sharding.make_mesh(jax.devices()[:count], **sizes)
    step, arguments = prepare(mesh, shared, steps.make_optimizer(CONFIG), **changes)
    return step.lower(*arguments).compile()


def bfloat16_step(**sizes):
    """A compiled step in bfloat16 and its gradients."""
    mesh = sharding.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    step, arguments = prepare(mesh, False, optax.sgd(1.0), compute="bfloat16")
    # Else XLA leaves roundings out where it fuses operations, and fuses as the mesh suggests.
    exactly = {"xla_allow_excess_precision": False}
    compiled = step.lower(*arguments).compile(compiler_options=exactly)
    before = steps.split(*initial(False))[1]
    return compiled, jax.tree.map(np.subtract, before, compiled(*arguments)[0]["params"])


def test_fsdp_sums_bfloat16_gradients_in_float32_and_holds_no_large_one_whole():
    compiled, got = bfloat16_step(data=2, fsdp=4)
    _, expected = bfloat16_step(data=1)

    def check(path, a, b):
        # Norms are computed anew where their terms are summed, some to another rounding.
        least = 5e-3 if "norm" in jax.tree_util.keystr(path) else 1e-5
        assert np.linalg.norm(a - b) < least * np.linalg.norm(b), path

    jax.tree_util.tree_map_with_path(check, got, expected)
    # The head is gathered once for all its rows, the embedding never.
    table = MODEL.vocab_size * MODEL.hidden_size
    sizes = defaultdict(list)
    for one in find_collectives(compiled.as_text()):
        sizes[one.kind].append(one.elements)
    assert sizes["all-gather"].count(table) == 1 and max(sizes["all-gather"]) == table
    # Of its gradient a device gets its own part, and so it does of the embedding's.
    assert sizes["reduce-scatter"] == [table // 4]
    assert max(sizes["all-reduce"]) < table


def test_a_split_vocabulary_exchanges_sums_and_no_logits():
    compiled = compile_step(dict(tensor=8), True)
    found = collectives(compiled)
    rows = ROWS * (TOKENS + BLOCKS * 4) * MODEL.hidden_size
    assert "all-gather" not in found
    assert largest_result(compiled, "all-reduce") <= rows


@pytest.mark.parametrize("remat", ["dots", slow("none"), slow("full")])
def test_bfloat16_steps_keep_float32_masters_and_near_gradients(remat):
    mesh = sharding.make_mesh(jax.devices()[:1])
    sgd = optax.sgd(1.0)
    before = steps.split(*initial(True))[1]
    gradients, losses = [], []
    for changes in (dict(), dict(compute="bfloat16", remat=remat)):
        after, metrics = train(mesh, True, 1, sgd, **changes)
        assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype(np.float32)}
        gradients.append(jax.tree.map(np.subtract, before, after))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, *gradients))
    assert 0 < difference < 0.05 * optax.tree.norm(gradients[0])
