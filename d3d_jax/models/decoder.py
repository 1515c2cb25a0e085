"""The decoder: Flax NNX modules of one layer, and the one forward pass everything goes through.

Parameters are a pure dict at every jit boundary:

    {"embed": [V, D], "layers": …, "norm": [D],
     "head": [V', D] (absent: tied), "mask": [D] (drafters)}

`layers` is either one dict of stacked leaves [L, …] (storage, sharding, training: a scan) or a
tuple of L dicts (decoding: an unrolled loop, several times faster on CPU). The same layer serves
both.
Every matrix is [out, in], as in Hugging Face checkpoints. No I/O and no loops over steps here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx

from d3d_jax.config import ModelConfig, Remat
from d3d_jax.kernels.packed_attention import packed_attention
from d3d_jax.layout import PackedLayout
from d3d_jax.models.cache import KVCache, LayerKV, write
from d3d_jax.models.linear import PRODUCT, linear
from d3d_jax.models.rotary import rotary_tables, rotate
from d3d_jax.models.sharding import constrain, locally, mesh_axes, shared_axes

Params = dict[str, Any]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalises in float32 and casts back *before* the scale, as transformers does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Cast after the broadcast: the scale's gradient is then summed in its own type.
    return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape).astype(x.dtype)


class Linear(nnx.Module):
    """A bias-free projection; `weight` is [out, in]."""

    def __init__(self, in_dim: int, out_dim: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (out_dim, in_dim), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...])


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis; `weight` is [dim]."""

    def __init__(self, dim: int, eps: float):
        self.weight = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over a `PackedLayout`; Qwen3 normalises each q and k head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.head_dim
        self.q = Linear(d, config.num_attention_heads * h, rngs)
        self.k = Linear(d, config.num_key_value_heads * h, rngs)
        self.v = Linear(d, config.num_key_value_heads * h, rngs)
        self.o = Linear(config.num_attention_heads * h, d, rngs)
        self.q_norm = RMSNorm(h, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps) if config.qk_norm else None
        self.head_dim = h

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        layout: PackedLayout,
        kv: LayerKV | None,
        length: jax.Array | None,
    ) -> tuple[jax.Array, LayerKV | None]:
        """x [B, T, D] → [B, T, D], and the layer's cache with the clean rows written to it."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, tables), rotate(k, tables)
        out, kv = _attend(q, k, v, layout, kv, length)
        return self.o(out.reshape(*x.shape[:2], -1)), kv


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: PackedLayout,
    kv: LayerKV | None,
    length: jax.Array | None,
) -> tuple[jax.Array, LayerKV | None]:
    """Writes the clean rows to the cache, if there is one, and attends, each device to its heads.

    Args:
      q: [B, T, N, H]. k, v: [B, T, K, H].

    Returns:
      [B, T, N, H] and the cache.
    """
    clean = layout.clean_len
    attend = functools.partial(
        packed_attention, clean_len=clean, num_blocks=layout.num_blocks, in_block=layout.in_block
    )

    def uncached(q, k, v, lo, hi):
        keys, values = k[:, :clean].swapaxes(1, 2), v[:, :clean].swapaxes(1, 2)
        return attend(q, k, v, keys, values, lo, hi)

    def cached(q, k, v, lo, hi, keys, values, length):
        if clean:
            keys, values = write((keys, values), k[:, :clean], v[:, :clean], length)
        return attend(q, k, v, keys, values, lo, hi), keys, values

    rows = (q, k, v, layout.lo, layout.hi)
    axes = ("b.n.", "b.k.", "b.k.", "b.", "b.")
    if kv is None or length is None:
        return locally(uncached, axes, ("b.n.",))(*rows), None
    out, keys, values = locally(cached, (*axes, "bk..", "bk..", "b"), ("b.n.", "bk..", "bk.."))(
        *rows, *kv, length
    )
    return out, (keys, values)


class MLP(nnx.Module):
    """The gated SiLU feed-forward of Llama and Qwen3."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        self.gate = Linear(d, f, rngs)
        self.up = Linear(d, f, rngs)
        self.down = Linear(f, d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(constrain(jax.nn.silu(self.gate(x)) * self.up(x), "b.f"))


class Layer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        layout: PackedLayout,
        kv: LayerKV | None = None,
        length: jax.Array | None = None,
        gate: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerKV | None]:
        def add(x: jax.Array, branch: jax.Array) -> jax.Array:
            return constrain(x + (branch if gate is None else branch * gate), "b..")

        attended, kv = self.attn(self.attn_norm(x), tables, layout, kv, length)
        x = add(x, attended)
        return add(x, self.mlp(self.mlp_norm(x))), kv


@functools.lru_cache
def _layer_graph(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))[0]


def _layer(config: ModelConfig, params: Params) -> Layer:
    return nnx.merge(_layer_graph(config), params)


def init_params(config: ModelConfig, key: jax.Array, num_layers: int | None = None) -> Params:
    """Random parameters with stacked layers: normal(0.02) matrices, unit norms, float32."""
    count = config.num_hidden_layers if num_layers is None else num_layers
    embed_key, head_key, layer_key = jax.random.split(key, 3)

    def one(key: jax.Array) -> Params:
        layer = Layer(config, nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    vocab = (config.vocab_size, config.hidden_size)
    params: Params = {
        "embed": jax.random.normal(embed_key, vocab) * 0.02,
        "layers": jax.vmap(one)(jax.random.split(layer_key, count)),
        "norm": jnp.ones((config.hidden_size,)),
    }
    if not config.tie_word_embeddings:
        params["head"] = jax.random.normal(head_key, vocab) * 0.02
    return params


def unstack(params: Params) -> Params:
    """The per-layer form of stacked parameters, for decoding."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]

    def layer(i: int) -> Params:
        return jax.tree.map(lambda leaf: leaf[i], params["layers"])

    layers = tuple(layer(i) for i in range(count))
    return {**params, "layers": layers}


def _look_up(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """table [V, D], tokens [B, T] → [B, T, D] in `dtype`.

    Of a split vocabulary each device adds its rows. Of a split hidden size each looks up its part
    for the tokens of all, and they exchange the rows that were asked for, which are fewer than
    those of the table; so the gradient is summed where it belongs.
    """
    vocabulary = mesh_axes("v", table.shape[0])
    exchanged = shared_axes("b", tokens.shape[0], "d", table.shape[1])

    def own(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if exchanged:
            tokens = jax.lax.all_gather(tokens, exchanged, tiled=True)
        if vocabulary:
            at = tokens - jax.lax.axis_index(vocabulary) * table.shape[0]
            mine = (at >= 0) & (at < table.shape[0])
            rows = table[jnp.where(mine, at, 0)].astype(dtype)
            rows = jax.lax.psum(jnp.where(mine[..., None], rows, 0), vocabulary)
        else:
            rows = table[tokens].astype(dtype)
        if exchanged:
            rows = jax.lax.all_to_all(rows, exchanged, split_axis=0, concat_axis=2, tiled=True)
        return rows

    return locally(own, ("vd" if exchanged else "v.", "b."), ("b..",))(table, tokens)


def embed_rows(
    params: Params, tokens: jax.Array, layout: PackedLayout, dtype: Any = None
) -> jax.Array:
    """tokens [B, C + A] (clean rows, then each block's anchor) → rows [B, C + A · W, D].

    A block's rows after its anchor are the drafter's mask vector: which rows are masks follows from
    the layout, so no token id is ever mistaken for one.

    Args:
      dtype: of the rows; None: the embedding's.
    """
    rows = _look_up(params["embed"], tokens, dtype or params["embed"].dtype)
    if layout.num_blocks == 0:
        return rows
    clean, anchors = rows[:, : layout.clean_len], rows[:, layout.clean_len :, None]
    batch, blocks, _, dim = anchors.shape
    # Cast after the broadcast, as a norm's scale is.
    shape = (batch, blocks, layout.block_size - 1, dim)
    masks = jnp.broadcast_to(params["mask"], shape).astype(rows.dtype)
    block_rows = jnp.concatenate([anchors, masks], axis=2).reshape(batch, -1, dim)
    return jnp.concatenate([clean, block_rows], axis=1)


@overload
def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    layout: PackedLayout,
    cache: None = None,
    *,
    remat: Remat = "none",
    gates: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, None]: ...


@overload
def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    layout: PackedLayout,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]: ...


def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    layout: PackedLayout,
    cache: KVCache | None = None,
    *,
    remat: Remat = "none",
    gates: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, KVCache | None]:
    """The one forward pass: training, prefill, decoding, verification, drafts.

    Args:
      tokens: [B, C + A] int32, the clean tokens and then one anchor per block.
      cache: keys and values of earlier tokens. The clean rows are written after `cache.length`
        (which the caller advances by what it accepts) and become part of the keys. Without a
        cache the clean rows are the keys.
      remat: what the backward pass recomputes instead of keeping it: nothing, each layer
        (`full`), or each layer but the products with its weights (`dots`).
      gates: [L], what each layer adds to the residual stream is multiplied by: 0 is the model
        without that layer, for every choice of layers with one compiled function.
      dtype: of activations, and of the weights where they are used; None: the embedding's.

    Returns:
      Hidden states [B, T, D] after the final norm, and the cache with the clean rows written.
    """
    x = constrain(embed_rows(params, tokens, layout, dtype), "b..")
    tables = rotary_tables(layout.positions, config)
    layers = params["layers"]
    if isinstance(layers, tuple):
        written: list[LayerKV] = []
        for i, params_l in enumerate(layers):
            kv, length = (None, None) if cache is None else (cache.layers[i], cache.length)
            gate = None if gates is None else gates[i].astype(x.dtype)
            x, kv = _layer(config, params_l)(x, tables, layout, kv, length, gate)
            if kv is not None:
                written.append(kv)
        if cache is not None:
            cache = KVCache(tuple(written), cache.length)
    else:
        if cache is not None:
            raise ValueError("decoding with a cache takes per-layer parameters: call unstack first")

        def body(x: jax.Array, part: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
            layer, gate = part
            return _layer(config, layer)(x, tables, layout, gate=gate)[0], None

        gates = None if gates is None else gates.astype(x.dtype)
        x, _ = jax.lax.scan(_recomputed(body, remat), x, (layers, gates))
    return rms_norm(x, params["norm"], config.rms_norm_eps), cache


def _recomputed(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The body of a scan over layers with what its backward pass is to keep."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(PRODUCT) if remat == "dots" else None
    # The scan itself keeps XLA from merging the two computations.
    return jax.checkpoint(body, policy=kept, prevent_cse=False)


def head_weight(params: Params) -> jax.Array:
    """The output head [V', D]: its own, or the embedding where they are tied."""
    return params.get("head", params["embed"])


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """hidden [..., D] → float32 logits [..., V'], V' the head's vocabulary."""
    scores: Any = linear(hidden, head_weight(params), jnp.float32)
    return constrain(scores, "b" + "." * (scores.ndim - 2) + "v")


def likeliest(logits: jax.Array) -> jax.Array:
    """argmax over the last axis, the lowest id of a tie, as int32.

    Two plain reductions: XLA:CPU's argmax takes eight times as long (1.7 ms for 8 × 49,152).
    """
    size = logits.shape[-1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == top, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
