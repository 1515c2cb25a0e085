"""Tiny random models for tests: configurations and parameters, without files or tokenizers."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from d3d_jax import layout
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.drafter import Drafter
from d3d_jax.models import decoder
from d3d_jax.train import objective
from d3d_jax.train.packing import build_row

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
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    return ModelConfig(**(values | changes))


def tiny_params(config, seed=0, scale=4.0):
    """Stacked random parameters whose every part matters: attention is sharp, norms are uneven."""
    params = decoder.init_params(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params["layers"])
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves) + 1)

    def uneven(key, norm):
        return norm * (1 + 0.3 * jax.random.normal(key, norm.shape))

    leaves = [
        leaf * scale if leaf.ndim > 2 else uneven(key, leaf)
        for key, leaf in zip(keys, leaves, strict=False)
    ]
    params["layers"] = jax.tree.unflatten(tree, leaves)
    params["norm"] = uneven(keys[-1], params["norm"])
    params["embed"] = params["embed"] * 3
    if "head" in params:
        params["head"] = params["head"] * 10
    return params


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


@functools.partial(jax.jit, static_argnums=0)
def _scores(config, params, tokens):
    rows = layout.causal(jnp.zeros((1,), jnp.int32), tokens.shape[1])
    return decoder.logits(params, decoder.forward(config, params, tokens, rows)[0])


def greedy(config, params, prompt, count, stop_ids=()):
    """Greedy continuation by whole forward passes without a cache: the slow, obvious decoder."""
    # A few padded sizes, because each one compiles.
    size = -(-(len(prompt) + count) // 64) * 64
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(_scores(config, params, padded)[0, len(tokens) - 1])))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def memorise(drafter, params, pairs, steps=60):
    """Trains a tiny drafter until it knows most of the given (prompt, response) pairs.

    A random drafter is never right twice in a row; one that is often right several tokens ahead,
    and often wrong, reaches every outcome of a verification.
    """
    config = drafter.drafter
    documents = []
    for prompt, response in pairs:
        anchors = np.arange(len(prompt), len(prompt) + len(response) - 1)
        documents.append((np.array(prompt + response, np.int32), len(prompt), anchors))
    size = sum(len(tokens) for tokens, _, _ in documents)
    row = build_row(documents, size, sum(len(a) for _, _, a in documents))
    batch = {name: jnp.asarray(leaf)[None] for name, leaf in row.items()}
    index = None
    if "draft_vocab" in params:
        places = jnp.arange(len(params["draft_vocab"]))
        index = jnp.full((VOCAB,), -1, jnp.int32).at[params["draft_vocab"]].set(places)
    labels = objective.make_labels(
        batch,
        block_size=config.block_size,
        label_shift=config.label_shift,
        gamma=4.0,
        draft_index=index,
    )
    frozen = {k: v for k, v in params.items() if k in drafter.frozen(params)}
    trained = {k: v for k, v in params.items() if k not in frozen}
    optimizer = optax.adam(3e-3)

    def loss(trained):
        every = {**trained, **frozen}
        sums = objective.denominators(labels)
        return objective.drafter_loss(drafter, every, batch, labels, sums, 1.0)[0]

    @jax.jit
    def train(trained):
        def step(carry, _):
            trained, state = carry
            updates, state = optimizer.update(jax.grad(loss)(trained), state)
            return (optax.apply_updates(trained, updates), state), None

        return jax.lax.scan(step, (trained, optimizer.init(trained)), length=steps)[0][0]

    return {**train(trained), **frozen}


class Documents:
    """As much of a dataset as offline acceptance needs: (prompt, response) pairs of token ids."""

    def __init__(self, pairs, greedy=True):
        self.pairs = pairs
        self.manifest = types.SimpleNamespace(sampling={"greedy": greedy})

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        prompt, response = self.pairs[i]
        return {"tokens": np.array(prompt + response, np.int32), "prompt_length": len(prompt)}
