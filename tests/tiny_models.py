"""Tiny random models for tests: configurations and parameters, without files or tokenizers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax import layout
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.drafter import Drafter
from d3d_jax.models import decoder

VOCAB = 61


def tiny_config(model_type="qwen3", **changes):
    values = dict(
        model_type=model_type,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return ModelConfig(**(values | changes))


def tiny_params(config, seed=0, scale=4.0):
    """Stacked random parameters, large enough that greedy choices vary and are no near-ties."""
    params = decoder.init_params(config, jax.random.key(seed))
    layers = jax.tree.map(lambda x: x * scale if x.ndim > 2 else x, params["layers"])
    return {**params, "embed": params["embed"] * 10, "layers": layers}


def tiny_drafter(config, params, *, layers=(0, 2), vocab=None, **changes):
    """A drafter of some layers of the given target, as (Drafter, stacked parameters)."""
    values = dict(
        block_size=4,
        mask_token_id=1,
        label_shift=1,
        in_block="bidirectional",
        target="tiny",
        tokenizer_fingerprint="t",
        template_fingerprint="c",
        source_layers=layers,
        shares=("embed", "head"),
        draft_vocab_size=None if vocab is None else len(vocab),
    )
    settings = DrafterConfig(**(values | changes))
    own = dict(params)
    own["layers"] = jax.tree.map(lambda x: x[np.array(layers)], params["layers"])
    own["mask"] = params["embed"][settings.mask_token_id]
    if vocab is not None:
        own["draft_vocab"] = jnp.asarray(vocab, jnp.int32)
        own["head"] = decoder.head_weight(params)[own["draft_vocab"]]
    model = dataclasses.replace(config, num_hidden_layers=len(layers))
    return Drafter(model, settings), own


def greedy(config, params, prompt, count, stop_ids=()):
    """Greedy continuation by whole forward passes without a cache: the slow, obvious decoder."""
    size = len(prompt) + count
    run = jax.jit(
        lambda tokens: decoder.logits(
            params,
            decoder.forward(
                config, params, tokens, layout.causal(jnp.zeros((1,), jnp.int32), size)
            )[0],
        )
    )
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(run(padded)[0, len(tokens) - 1])))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
