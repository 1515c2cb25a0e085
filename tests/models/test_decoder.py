"""The forward pass against transformers + torch, and against itself in its other forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import flops, layout
from d3d_jax.models import cache as caches
from d3d_jax.models import checkpoint, checkpoint_writing, decoder
from d3d_jax.models.linear import linear
from tests.tiny_models import tiny_config, tiny_params

SHAPES = [
    tiny_config("qwen3", tie_word_embeddings=True),
    tiny_config("qwen3", num_attention_heads=8, head_dim=8),
    tiny_config("qwen3", num_attention_heads=5, num_key_value_heads=1),
    tiny_config("llama", head_dim=8, tie_word_embeddings=True),
]


def full_logits(config, params, tokens):
    rows = layout.causal(jnp.zeros((tokens.shape[0],), jnp.int32), tokens.shape[1])
    return decoder.logits(params, decoder.forward(config, params, tokens, rows)[0])


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_logits_equal_transformers_and_checkpoints_go_both_ways(config, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = tiny_params(config)
    checkpoint_writing.save_model(tmp_path / "ours", config, jax.device_get(params))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", torch_dtype=torch.float32
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 19))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(full_logits(config, params, tokens), expected, atol=2e-4, rtol=1e-4)
    # And back: what transformers writes loads here with the same values.
    model.save_pretrained(tmp_path / "theirs")
    again, section = checkpoint.read_config(tmp_path / "theirs")
    assert section is None and again == config
    loaded = checkpoint.load_params(tmp_path / "theirs", again, stacked=True)
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.device_get(params))


@functools.partial(jax.jit, static_argnums=0)
def cached_step(config, params, cache, tokens):
    """Logits of the tokens that follow those in the cache, and the cache with them."""
    rows = layout.causal(cache.length, tokens.shape[1])
    hidden, cache = decoder.forward(config, params, tokens, rows, cache)
    return decoder.logits(params, hidden), cache


@pytest.mark.parametrize("config", SHAPES[:1] + SHAPES[3:], ids=str)
def test_cached_steps_equal_one_pass(config):
    params = tiny_params(config)
    unstacked = decoder.unstack(params)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 12)).astype(np.int32)
    expected = full_logits(config, params, tokens)
    cache = caches.empty(config, config.num_hidden_layers, 2, 256, jnp.float32)
    start = 0
    for size in (5, 1, 4, 2):
        part = tokens[:, start : start + size]
        got, cache = cached_step(config, unstacked, cache, part)
        np.testing.assert_allclose(got, expected[:, start : start + size], atol=1e-4)
        cache = cache.at(cache.length + size)
        start += size


def test_rolled_back_cache_forgets():
    config = tiny_config()
    params = decoder.unstack(tiny_params(config))
    cache = caches.empty(config, 3, 1, 256, jnp.float32)

    def run(cache, tokens):
        return cached_step(config, params, cache, np.array([tokens], np.int32))

    _, cache = run(cache, [3, 4, 5])
    cache = cache.at(jnp.array([3], jnp.int32))
    expected, _ = run(cache, [6, 7])
    _, dirty = run(cache, [9, 10, 11, 12])
    got, _ = run(dirty.at(jnp.array([3], jnp.int32)), [6, 7])
    np.testing.assert_array_equal(got, expected)


def test_remat_and_scan_agree_with_the_unrolled_form():
    config = tiny_config()
    params = tiny_params(config)
    tokens = np.arange(10, dtype=np.int32)[None]
    rows = layout.causal(jnp.zeros((1,), jnp.int32), 10)
    plain, _ = decoder.forward(config, params, tokens, rows)
    unrolled, _ = decoder.forward(config, decoder.unstack(params), tokens, rows)
    np.testing.assert_allclose(plain, unrolled, atol=1e-4)
    for remat in ("full", "dots"):
        again, _ = decoder.forward(config, params, tokens, rows, remat=remat)
        np.testing.assert_allclose(plain, again, atol=1e-5)


def test_remat_computes_again_what_it_does_not_keep():
    config = tiny_config()
    params = tiny_params(config)
    tokens = np.arange(10, dtype=np.int32)[None]
    rows = layout.causal(jnp.zeros((1,), jnp.int32), 10)

    def work(remat):
        def loss(params):
            return jnp.sum(decoder.forward(config, params, tokens, rows, remat=remat)[0])

        return flops.count(jax.jit(jax.grad(loss)).trace(params).jaxpr)

    assert work("none") < work("dots") < work("full")


def test_skinny_linear_is_a_matrix_product():
    x, weight = jax.random.normal(jax.random.key(0), (2, 3, 8)), jnp.ones((5, 8)).at[2].set(2.0)
    np.testing.assert_allclose(jax.jit(linear)(x, weight), x @ weight.T, atol=1e-5)


def test_likeliest_is_argmax_with_the_lowest_id_of_a_tie():
    logits = jnp.array([[0.0, 3.0, 3.0], [-jnp.inf, -5.0, -9.0]])
    np.testing.assert_array_equal(decoder.likeliest(logits), [1, 1])
