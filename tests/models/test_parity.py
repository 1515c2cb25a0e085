"""Parity with transformers on torch, module by module, so that a failure names the module.

Over tiny random models of every shape the supported families have. Their weights are numbers that
bfloat16 holds exactly, so that the bfloat16 tests measure the arithmetic alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from d3d_jax import layout
from d3d_jax.config import ModelConfig, Yarn
from d3d_jax.models import cache as caches
from d3d_jax.models import checkpoint_writing, decoder, rotary
from tests.tiny_models import VOCAB, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def _shape(model_type, **changes):
    return tiny_config(model_type, num_hidden_layers=2, **changes)


SHAPES = {
    "qwen3 tied, heads wider than D, GQA 2": _shape("qwen3", tie_word_embeddings=True),
    "qwen3 untied, GQA 8": _shape("qwen3", num_attention_heads=16, head_dim=8, rope_theta=5e6),
    # Every sequence below is longer than the original length of 16.
    "qwen3 untied, GQA 5, YaRN": _shape(
        "qwen3",
        num_attention_heads=5,
        num_key_value_heads=1,
        rope_scaling=Yarn(4.0, 16),
        max_position_embeddings=64,
    ),
    "llama tied, GQA 2": _shape("llama", head_dim=8, tie_word_embeddings=True),
    "llama untied, GQA 8": _shape(
        "llama", num_attention_heads=8, num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-5
    ),
}
BATCH, ROWS = 2, 21
LAYER = 1  # The layer looked into.


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice."""

    config: ModelConfig
    params: Any  # Ours, stacked, float32.
    unstacked: Any
    layer: decoder.Layer
    theirs: Any  # The torch model, float32.
    half: Any  # The torch model, bfloat16.

    @property
    def their_layer(self) -> Any:
        return self.theirs.model.layers[LAYER]


def random_params(config):
    """Stacked parameters in NumPy: sharp attention, uneven norms, values bfloat16 holds."""
    shapes = jax.eval_shape(lambda key: decoder.init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        is_norm = "norm" in jax.tree_util.keystr(path)
        x = rng.normal(1.0, 0.3, leaf.shape) if is_norm else rng.normal(0.0, 0.2, leaf.shape)
        return x.astype(jnp.bfloat16).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def pair(request, tmp_path_factory):
    config = request.param
    stored = random_params(config)
    params, unstacked = jax.device_put((stored, decoder.unstack(stored)))
    graph = nnx.split(nnx.eval_shape(lambda: decoder.Layer(config, nnx.Rngs(0))))[0]
    folder = tmp_path_factory.mktemp("parity") / "model"
    checkpoint_writing.save_model(folder, config, stored)

    def load(dtype):
        # Eager attention takes the mask as it is given.
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()

    layer = nnx.merge(graph, unstacked["layers"][LAYER])
    return Pair(config, params, unstacked, layer, load(torch.float32), load(torch.bfloat16))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def token_ids(batch=BATCH, rows=ROWS):
    return np.random.default_rng(1).integers(0, VOCAB, (batch, rows)).astype(np.int32)


def run(module, *args):
    """A torch module's first output, as NumPy."""
    with torch.no_grad():
        out = module(*(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in args))
    return (out[0] if isinstance(out, tuple) else out).float().numpy()


def assert_close(got, expected, bound=3e-6):
    """Largest error relative to the largest value: a few float32 roundings (6e-8) of short sums.

    Measured: at most 2e-7 for the norms, 6e-7 for the other modules, 1.5e-6 for whole logits.
    """
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


def their_tables(model, x, start=0):
    positions = np.arange(start, start + x.shape[1])[None]
    with torch.no_grad():
        return model.model.rotary_emb(torch.tensor(x), torch.tensor(positions))


def their_mask(start, rows):
    """[1, 1, T, S]: row i sees the keys up to its own, at start + i."""
    seen = np.arange(start + rows) <= np.arange(start, start + rows)[:, None]
    return torch.tensor(np.where(seen, 0.0, -np.inf)[None, None], dtype=torch.float32)


def first_rows():
    return layout.causal(jnp.zeros((BATCH,), jnp.int32), ROWS)


def test_embedding(pair):
    ids = token_ids()
    got = decoder.embed_rows(pair.params, ids, first_rows())
    np.testing.assert_array_equal(got, run(pair.theirs.model.embed_tokens, ids))


def test_rms_norm(pair):
    # Rows of every size: eps decides the small ones.
    x = numbers(BATCH, ROWS, pair.config.hidden_size)
    x = x * 10.0 ** np.linspace(-4, 4, ROWS, dtype=np.float32)[:, None]
    for ours, theirs in (
        (pair.layer.attn_norm, pair.their_layer.input_layernorm),
        (pair.layer.mlp_norm, pair.their_layer.post_attention_layernorm),
    ):
        assert_close(ours(x), run(theirs, x), 1e-6)
    if pair.config.qk_norm:
        heads = numbers(BATCH, ROWS, 4, pair.config.head_dim)
        attention = pair.their_layer.self_attn
        assert_close(pair.layer.attn.q_norm(heads), run(attention.q_norm, heads), 1e-6)
        assert_close(pair.layer.attn.k_norm(heads), run(attention.k_norm, heads), 1e-6)
    final = decoder.rms_norm(x, pair.params["norm"], pair.config.rms_norm_eps)
    assert_close(final, run(pair.theirs.model.norm, x), 1e-6)


def test_mlp(pair):
    x = numbers(BATCH, ROWS, pair.config.hidden_size)
    assert_close(pair.layer.mlp(x), run(pair.their_layer.mlp, x))


def test_attention_without_a_cache(pair):
    x = numbers(BATCH, ROWS, pair.config.hidden_size)
    rows = first_rows()
    tables = rotary.rotary_tables(rows.positions, pair.config)
    got, kv = jax.jit(lambda x: pair.layer.attn(x, tables, rows, None, None))(x)
    tables = their_tables(pair.theirs, x)
    assert kv is None
    assert_close(got, run(pair.their_layer.self_attn, x, tables, their_mask(0, ROWS)))


def test_attention_with_a_cache(pair):
    x = numbers(BATCH, ROWS, pair.config.hidden_size)
    kv = caches.empty(pair.config, 1, BATCH, 32, jnp.float32).layers[0]
    their_cache = transformers.DynamicCache()

    @jax.jit
    def step(x, kv, length):
        rows = layout.causal(length, x.shape[1])
        tables = rotary.rotary_tables(rows.positions, pair.config)
        return pair.layer.attn(x, tables, rows, kv, length)

    start = 0
    for rows in (
        9,
        4,
        4,
        4,
    ):  # A prefill, then blocks to verify; greedy generation has single rows.
        part = x[:, start : start + rows]
        got, kv = step(part, kv, jnp.full((BATCH,), start, jnp.int32))
        tables, mask = their_tables(pair.theirs, part, start), their_mask(start, rows)
        assert_close(got, run(pair.their_layer.self_attn, part, tables, mask, their_cache))
        start += rows
    assert start == ROWS
    keys, values = their_cache.layers[LAYER].keys, their_cache.layers[LAYER].values
    assert_close(kv[0][:, :, :ROWS], keys.numpy())
    assert_close(kv[1][:, :, :ROWS], values.numpy())


def test_one_layer(pair):
    x = numbers(BATCH, ROWS, pair.config.hidden_size)
    rows = first_rows()
    tables = rotary.rotary_tables(rows.positions, pair.config)
    got, _ = jax.jit(lambda x: pair.layer(x, tables, rows))(x)
    with torch.no_grad():
        expected = pair.their_layer(
            torch.tensor(x),
            attention_mask=their_mask(0, ROWS),
            position_embeddings=their_tables(pair.theirs, x),
        )
    assert_close(got, expected.numpy())


def our_logits(config, params, ids):
    rows = layout.causal(jnp.zeros((ids.shape[0],), jnp.int32), ids.shape[1])
    run = jax.jit(lambda p: decoder.logits(p, decoder.forward(config, p, ids, rows)[0]))
    return np.asarray(run(params))


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.float().numpy()


def test_logits(pair):
    ids = token_ids()
    assert_close(our_logits(pair.config, pair.params, ids), their_logits(pair.theirs, ids), 1e-5)


def test_greedy_generation(pair):
    config, params, count = pair.config, pair.unstacked, 24

    @jax.jit
    def step(params, tokens, cache):
        hidden, cache = decoder.forward(
            config, params, tokens, layout.causal(cache.length, tokens.shape[1]), cache
        )
        cache = cache.at(cache.length + tokens.shape[1])
        return decoder.likeliest(decoder.logits(params, hidden[:, -1:])), cache

    prompt = token_ids()
    tokens, cache = prompt, caches.empty(config, config.num_hidden_layers, BATCH, 64, jnp.float32)
    ours = []
    for _ in range(count):
        tokens, cache = step(params, tokens, cache)
        ours.append(tokens)
    ours = np.concatenate(ours, axis=1)
    theirs = pair.theirs.generate(
        torch.tensor(prompt, dtype=torch.long),
        attention_mask=torch.ones(prompt.shape, dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )[:, ROWS:]
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert len(set(ours.ravel().tolist())) >= 6  # One token for ever would prove little.


ROTARY = {
    "plain": None,
    "YaRN of Qwen3": Yarn(4.0, 32768),
    "YaRN not truncated": Yarn(4.0, 32768, truncate=False),
    "YaRN with every key": Yarn(2.0, 8192, attention_factor=1.5, beta_fast=16, beta_slow=2),
    "YaRN of a short model": Yarn(8.0, 32),
}


@pytest.mark.parametrize("scaling", ROTARY.values(), ids=ROTARY)
@pytest.mark.parametrize("theta", [1e4, 1e5, 1e6, 5e6])
def test_rotary_tables(scaling, theta):
    positions = np.array([[0, 1, 31, 32, 33, 8191, 8192, 32767, 32768, 65537, 131071]], np.int32)
    for dim in (8, 64, 80, 128):
        config = tiny_config(head_dim=dim, rope_theta=theta, rope_scaling=scaling)
        theirs = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(
            transformers.Qwen3Config(**config.to_hf())
        )
        frequencies, factor = rotary.rotary_frequencies(config)
        assert frequencies.dtype == np.float32 and factor == theirs.attention_scaling
        # One unit in the last place: torch's float32 powers are not always rounded correctly.
        np.testing.assert_array_max_ulp(frequencies, theirs.inv_freq.numpy(), maxulp=1)
        tables = rotary.rotary_tables(jnp.asarray(positions), config)
        # What that unit makes of the angle, twice rounded, and 1e-6 for cos and sin themselves.
        bound = factor * (positions[0, :, None] * frequencies * 2.0**-22 + 1e-6)
        for got, expected in zip(
            tables, theirs(torch.zeros(1), torch.tensor(positions)), strict=True
        ):
            assert np.all(np.abs(got[0, :, 0] - expected[0, :, : dim // 2].numpy()) <= bound)


def test_bfloat16_rms_norm_is_bitwise_theirs():
    # Whole numbers: the float32 sum of their squares is exact in whatever order it is taken.
    x = np.random.default_rng(0).integers(-9, 10, (40, 32)).astype(np.float32)
    scale = numbers(32, seed=1)
    norm = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(32, eps=1e-6)
    norm = norm.to(torch.bfloat16)
    norm.weight.data = torch.tensor(scale).to(torch.bfloat16)
    with torch.no_grad():
        expected = norm(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    half, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16)
    got = decoder.rms_norm(half, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), expected)
    # The wrong order, cast after the scale, gives other numbers: the comparison can fail.
    wide = half.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    late = (wide * weight.astype(jnp.float32)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(late.astype(jnp.float32) != expected)) > 0.1


def test_bfloat16_logits_err_no_more_than_theirs(pair):
    """Measured: 0.82 to 0.90 of transformers' error, at most 0.017 at logits of deviation 1.1."""
    ids = token_ids(8, 40)
    exact = their_logits(pair.theirs, ids)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), pair.params)

    def error(logits):
        return np.sqrt(np.mean((logits - exact) ** 2))

    ours = error(our_logits(pair.config, params, ids))
    theirs = error(their_logits(pair.half, ids))
    assert ours <= 1.1 * theirs
    assert ours <= 0.025
