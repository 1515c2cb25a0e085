"""Verification rules: what the target's choices make of a block. Pure functions of small arrays.

A round's outcome leaves the target as one int32 array, the *report* [B, W + 3]: how many tokens the
row emits (`COUNT`), whether it goes on after them (`ACTIVE`), whether its block had been prepared
(`HIT`), and from `TOKENS` on those tokens, −1 beyond them. It is all that the drafter and the host
ever read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

COUNT, ACTIVE, HIT, TOKENS = 0, 1, 2, 3


def accepted_length(drafts: jax.Array, choices: jax.Array) -> jax.Array:
    """How many drafts match what the target says: the longest matching prefix.

    Args:
      drafts: [B, W − 1], x_1 … x_{W−1}.
      choices: [B, W], the target's token after the anchor and after each draft.

    Returns:
      n [B] int32 in 0 … W − 1.
    """
    match = (drafts == choices[:, :-1]).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(match, axis=1), axis=1)


def emit(
    accepted: jax.Array,
    choices: jax.Array,
    hit: jax.Array,
    active: jax.Array,
    remaining: jax.Array,
    stop_ids: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of a round, clipped at the first stop token and at the row's limit.

    The n accepted drafts equal the target's choices, so the n + 1 tokens emitted (the last is the
    correction or the bonus) are simply its first n + 1 choices.

    Args:
      accepted: n [B].
      choices: [B, W].
      hit: [B] int32, passed on to the report.
      active: [B] bool; an inactive row emits nothing.
      remaining: [B] int32, tokens the row may still emit.
      stop_ids: [B, any] int32, each row's own; no token has a negative id.

    Returns:
      The report [B, W + 3], the new `active` and the new `remaining`.
    """
    width = choices.shape[1]
    offset = jnp.arange(width)
    count = jnp.minimum(accepted + 1, remaining)
    is_stop = jnp.any(choices[..., None] == stop_ids[:, None], axis=-1) & (offset < count[:, None])
    first_stop = jnp.where(is_stop.any(axis=1), jnp.argmax(is_stop, axis=1), width)
    count = jnp.where(active, jnp.minimum(count, first_stop + 1), 0)
    remaining = remaining - count
    tokens = jnp.where(offset < count[:, None], choices, -1)
    active = active & (first_stop == width) & (remaining > 0)
    report = jnp.concatenate([count[:, None], active[:, None], hit[:, None], tokens], axis=1)
    return report.astype(jnp.int32), active, remaining


def last_token(report: jax.Array) -> jax.Array:
    """The last token a report emits [B], the next anchor; 0 for a row that emits nothing."""
    count = report[:, COUNT]
    at = TOKENS + jnp.maximum(count - 1, 0)
    return jnp.maximum(jnp.take_along_axis(report, at[:, None], axis=1)[:, 0], 0)
