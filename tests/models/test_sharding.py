"""Meshes and rules; a forward pass and its gradient on eight devices against one; collectives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from d3d_jax import layout
from d3d_jax.errors import D3DError
from d3d_jax.hlo import collectives, largest_result
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.presets import PRESETS, preset
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params

# Two kv heads of four query heads: a tensor axis of 8 needs both its parts.
CONFIG = tiny_config(num_attention_heads=8, head_dim=8, vocab_size=64)
# The embedding's gradient comes from both of its uses.
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def loss_of(config):
    """A scalar of every logit and, for its gradient, of every parameter."""

    def loss(params, tokens):
        rows = layout.causal(jnp.zeros(tokens.shape[:1], jnp.int32), tokens.shape[1])
        hidden, _ = decoder.forward(config, params, tokens, rows)
        scores = decoder.logits(params, hidden)
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - scores[..., 3]), scores

    return loss


def tokens_for(config, batch=8, rows=12):
    return np.random.default_rng(0).integers(0, config.vocab_size, (batch, rows)).astype(np.int32)


@functools.cache
def on_one_device():
    params, tokens = jax.device_get(tiny_params(TIED)), tokens_for(TIED)
    gradient, logits = jax.jit(jax.grad(loss_of(TIED), has_aux=True))(params, tokens)
    return params, tokens, gradient, logits


@pytest.mark.parametrize(
    "sizes",
    [dict(tensor=8), dict(fsdp=4), dict(data=2, fsdp=2, tensor=2), dict(data=8)],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_those_of_one_device(sizes, tied):
    config = tiny_config(num_attention_heads=8, head_dim=8, vocab_size=64, tie_word_embeddings=tied)
    params, tokens = jax.device_get(tiny_params(config)), tokens_for(config)
    gradient = jax.grad(loss_of(config), has_aux=True)
    expected, logits = jax.jit(gradient)(params, tokens)
    count = int(np.prod(list(sizes.values())))
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:count], **sizes), config)
    placed = jax.device_put(params, parameters.shardings(params, mesh))
    got, got_logits = jax.jit(sharding.on_mesh(mesh, gradient))(placed, tokens)
    np.testing.assert_allclose(got_logits, logits, rtol=1e-4, atol=1e-4)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale), got, expected
    )


def compile_forward(config, mesh, stacked, batch=8):
    params = parameters.abstract(config, mesh, stacked=stacked, dtype=jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, 12), jnp.int32)

    def run(params, tokens):
        hidden = loss_of(config)(params, tokens)[1]
        return decoder.likeliest(hidden)

    return jax.jit(sharding.on_mesh(mesh, run)).lower(params, tokens).compile()


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_tensor_parallel_passes_hold_two_sums_a_layer_and_three_around_them(tensor):
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:tensor], tensor=tensor), CONFIG)
    found = collectives(compile_forward(CONFIG, mesh, stacked=False))
    # One for the embedding's rows and two to find the likeliest token; no gather of anything.
    expected = {} if tensor == 1 else {"all-reduce": 2 * CONFIG.num_hidden_layers + 3}
    assert found == expected


def test_data_parallel_passes_hold_no_collective():
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices(), data=8), CONFIG)
    assert collectives(compile_forward(CONFIG, mesh, stacked=True)) == {}


def test_fsdp_gathers_each_weight_where_it_is_used():
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices(), fsdp=8), CONFIG)
    found = collectives(compile_forward(CONFIG, mesh, stacked=True))
    # Seven matrices in the body of the scan, and the head: never a whole stack. Of the embedding
    # the rows are exchanged, for which each device is told all tokens.
    assert found == {"all-gather": 9, "all-to-all": 1}


def test_weights_split_two_ways_are_gathered_over_fsdp_alone():
    sizes = dict(data=2, fsdp=2, tensor=2)
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices(), **sizes), CONFIG)
    found = collectives(compile_forward(CONFIG, mesh, stacked=True))
    # As with fsdp alone, and as with tensor alone, the body of the scan counting once.
    assert found == {"all-gather": 9, "all-to-all": 1, "all-reduce": 2 + 3}


def test_collectives_of_several_arrays_are_counted():
    mesh = sharding.make_mesh(jax.devices()[:2])

    def sums(a, b):
        return jax.lax.psum((a, b), "data")

    split = jax.shard_map(sums, mesh=mesh, in_specs=P("data"), out_specs=(P(), P()))
    arrays = (jnp.ones((2, 3)), jnp.ones((4,)))
    compiled = jax.jit(split).lower(*arrays).compile()
    assert collectives(compiled)["all-reduce"] >= 1
    assert largest_result(compiled, "all-reduce") == 3


def test_a_32b_model_is_planned_and_compiled_without_being_allocated():
    config = preset("Qwen/Qwen3-32B")
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices(), tensor=8), config)
    params = parameters.abstract(config, mesh, stacked=True)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def run(params, tokens):
        return decoder.likeliest(loss_of(config)(params, tokens)[1])

    compiled = jax.jit(sharding.on_mesh(mesh, run)).lower(params, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    norms = (2 * 64 + 1) * 5120 + 2 * 64 * 128  # vectors, which every device holds
    matrices = 32_762_123_264 - norms
    assert memory.argument_size_in_bytes == 2 * (matrices // 8 + norms) + 2 * 16 * 4


@pytest.mark.parametrize("heads, kv_heads, sizes", [(6, 3, [1, 3, 6]), (8, 4, [1, 2, 4, 8])])
def test_every_size_that_is_accepted_gives_the_same_logits(heads, kv_heads, sizes):
    config = tiny_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, vocab_size=64
    )
    params, tokens = tiny_params(config), tokens_for(config, batch=2)
    loss = loss_of(config)
    expected = jax.jit(loss)(params, tokens)[1]
    accepted = []
    for size in range(1, 9):
        try:
            sharding.split_tensor(config, size)
        except D3DError:
            continue
        accepted.append(size)
        mesh = sharding.make_mesh(jax.devices()[:size], tensor=size)
        mesh = sharding.model_mesh(mesh, config)
        placed = jax.device_put(params, parameters.shardings(params, mesh))
        got = jax.jit(sharding.on_mesh(mesh, loss))(placed, tokens)[1]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert accepted == sizes


def test_presets_divide_over_the_slices_people_have():
    for name, config in PRESETS.items():
        sizes = (1,) if "SmolLM2" in name else (1, 2, 4, 8)
        for size in sizes:
            kv, group = sharding.split_tensor(config, size)
            assert kv * group == size and config.num_key_value_heads % kv == 0
    assert sharding.split_tensor(preset("Qwen/Qwen3-32B"), 64) == (8, 8)
    assert sharding.split_tensor(preset("Qwen/Qwen3-14B"), 40) == (8, 5)


def test_more_devices_than_kv_heads_hold_each_key_only_as_often_as_needed():
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices(), tensor=8), CONFIG)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 2, "group": 4}
    shape = (4, 2, 256, 8)
    held = sharding.named("bk..", shape, mesh, sharding.ACTIVATION_RULES).shard_shape(shape)
    assert held == (4, 1, 256, 8)


def test_an_odd_vocabulary_is_held_whole_and_the_rest_split():
    config = tiny_config(vocab_size=61)
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:2], tensor=2), config)
    specs = jax.tree.map(
        lambda leaf: leaf.sharding.spec, parameters.abstract(config, mesh, stacked=True)
    )
    assert specs["embed"] == P() == specs["head"]
    assert specs["layers"]["mlp"]["up"]["weight"] == P(None, "tensor")
    params, tokens = tiny_params(config), tokens_for(config, batch=2)
    expected = loss_of(config)(params, tokens)[1]
    placed = jax.device_put(params, parameters.shardings(params, mesh))
    got = jax.jit(sharding.on_mesh(mesh, loss_of(config)))(placed, tokens)[1]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [None, 24])
def test_candidates_of_a_split_vocabulary_are_the_same_in_the_same_order(vocab):
    from d3d_jax.drafter import candidates

    ids = None if vocab is None else np.arange(vocab) * 2
    _, params = tiny_drafter(CONFIG, tiny_params(CONFIG), vocab=ids)
    hidden = jax.random.normal(jax.random.key(0), (2, 4, CONFIG.hidden_size))
    # Equal scores, whose order the lower id decides, on devices apart and on one.
    head = decoder.head_weight(params)
    params["head"] = head.at[5].set(head[3]).at[len(head) - 1].set(head[3])
    expected = candidates(params, hidden, 6)
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:8], tensor=8), CONFIG)
    placed = jax.device_put(params, parameters.shardings(params, mesh))
    compiled = jax.jit(sharding.on_mesh(mesh, lambda params, hidden: candidates(params, hidden, 6)))
    got = compiled(placed, hidden)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: sharding.split_tensor(preset("Qwen/Qwen3-14B"), 16),
            "possible are 1, 2, 4, 8, 40",
        ),
        (lambda: sharding.split_tensor(CONFIG, 0), "tensor axis of 0"),
        (lambda: sharding.make_mesh(jax.devices()[:4], tensor=8), "needs 8 devices, 4 were given"),
        (
            lambda: sharding.make_mesh(jax.devices()[:4], tensor=0),
            "tensor must be a whole number of at least 1, found 0",
        ),
        (lambda: sharding.model_mesh(_mesh("model"), CONFIG), "found 'model'"),
        (lambda: sharding.model_mesh(_mesh("tensor", 6), CONFIG), "tensor axis of 6"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(D3DError, match=message):
        make()


def _mesh(name, count=2):
    return Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(AxisType.Auto,))


def test_any_mesh_of_the_users_is_taken_device_by_device():
    grid = np.array(jax.devices()).reshape(2, 4)
    mine = Mesh(grid, ("tensor", "data"), axis_types=(AxisType.Explicit,) * 2)
    mesh = sharding.model_mesh(mine, CONFIG)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2, "group": 1}
    assert (mesh.devices[:, 0, :, 0] == grid.T).all()
    assert sharding.model_mesh(mesh, CONFIG) == mesh
