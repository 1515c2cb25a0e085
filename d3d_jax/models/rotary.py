"""Rotary position embeddings, YaRN included: tables of positions, and turning queries and keys."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import ModelConfig


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, float32 [H/2], and the factor on cos and sin.

    On the host and in transformers' order of roundings: XLA's float32 powers are up to 15 units in
    the last place away, and at position 131,071 one unit turns the fast pairs by 0.01 radians.
    YaRN: arXiv 2309.00071, section 3.2 (which pairs are slowed down) and 3.4 (the factor).
    """
    dim, theta = config.head_dim, config.rope_theta
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = (theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = 1 / periods
    if (yarn := config.rope_scaling) is None:
        return plain, 1.0

    def pair(turns: float) -> float:
        """The (fractional) pair that turns this many times within the trained length."""
        period = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = 0.001 if low == high else high - low
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0, 1)
    slowed = 1 / (np.float32(yarn.factor) * periods)
    return slowed * (1 - kept) + plain * kept, yarn.scale


def rotary_tables(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """positions [B, T] → cos and sin [B, T, 1, H/2] in float32."""
    frequencies, scale = rotary_frequencies(config)
    angle = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [B, T, N, H] in the half-split convention of Hugging Face weights."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
