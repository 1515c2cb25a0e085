"""Choosing tokens from logits: temperature, top-k, top-p, min-p, and noise that a key decides.

`SamplingParams` is what one request asks for, on the host; `Sampling` is the same for the rows of a
batch, on the device; `choose` picks the tokens. A token depends on its logits, the request's seed
and its absolute position alone, so a request says the same in any batch, block width and mode.
Pure functions of arrays: no model and no loop over tokens here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.errors import D3DError
from d3d_jax.models.decoder import likeliest

Rule = Literal["greedy", "sampled", "filtered"]
Words = tuple[jax.Array, jax.Array]

# From the least work to the most.
RULES: tuple[Rule, ...] = ("greedy", "sampled", "filtered")
MAX_TEMPERATURE = 100.0
MAX_STOP_IDS = 16


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and where its reply ends.

    The filters apply in the order top-k, top-p, min-p, as in Hugging Face transformers.

    Attributes:
      temperature: what the logits are divided by; 0 is greedy, and the filters do nothing.
      top_k: keep the k most likely tokens; None keeps all.
      top_p: keep the fewest most likely tokens that hold this much of the probability; 1 keeps all.
      min_p: keep tokens at least this probable relative to the most likely one; 0 keeps all.
      seed: of the noise; the same request with the same seed says the same again.
      max_new_tokens: limit of the reply, in tokens.
      stop: strings that end the reply, looked for in its text, which has no special tokens.
      stop_token_ids: tokens that end the reply, beside the model's own.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise D3DError(f"{name} must be {expected}, found {getattr(self, name)!r}")

        largest = np.iinfo(np.int32).max
        check(
            "temperature",
            _number(self.temperature, 0, MAX_TEMPERATURE),
            f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}",
        )
        check(
            "top_k",
            self.top_k is None or _whole(self.top_k, 1, largest),
            f"None or a whole number from 1 to {largest}",
        )
        check("top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0, at most 1")
        check("min_p", _number(self.min_p, 0, 1), "a number from 0 to 1")
        check("seed", _whole(self.seed, 0, 2**32 - 1), "a whole number from 0 to 2**32 - 1")
        check(
            "max_new_tokens",
            _whole(self.max_new_tokens, 1, largest),
            f"a whole number from 1 to {largest}",
        )
        check(
            "stop",
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "a tuple of strings, none of them empty",
        )
        check(
            "stop_token_ids",
            isinstance(self.stop_token_ids, tuple)
            and len(self.stop_token_ids) <= MAX_STOP_IDS
            and all(_whole(token, 0, largest) for token in self.stop_token_ids),
            f"a tuple of at most {MAX_STOP_IDS} token ids (whole numbers of at least 0)",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def rule(self) -> Rule:
        """The least that `choose` has to do for this request."""
        if self.greedy:
            return "greedy"
        filters = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        return "filtered" if filters else "sampled"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "seed"],
    meta_fields=["rule"],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of each row of a batch are chosen.

    Attributes:
      temperature: [B] float32, 0 for greedy rows.
      top_k: [B] int32, 0 for rows without.
      top_p: [B] float32, 1 for rows without.
      min_p: [B] float32, 0 for rows without.
      seed: [B] uint32.
      rule: the most that any row needs. Static, for a step that pays for no more: there are at most
        three programs, and no conditional on the device, which XLA:GPU would decide on the host.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    rule: Rule

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Sampling:
        """The rows' parameters, as NumPy arrays."""
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k or 0 for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([p.seed for p in params], np.uint32),
            rule=RULES[max((RULES.index(p.rule) for p in params), default=0)],
        )


def choose(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """The token of every row and position.

    Rows of temperature 0 take the likeliest token. The others draw from the softmax of
    logits / temperature over the tokens `kept`, by the Gumbel-max trick: the argmax of a logit plus
    Gumbel noise has exactly that distribution (Gumbel 1954; Maddison et al., arXiv 1411.0030,
    section 2).

    Args:
      logits: [B, T, V] float32, split over V or not; −inf rules a token out.
      positions: [B, T] int32, absolute positions of the tokens being chosen.

    Returns:
      tokens [B, T] int32.
    """
    if sampling.rule == "greedy":
        return likeliest(logits)
    scores = _scaled(logits, sampling) + gumbel(sampling.seed, positions, logits.shape[-1])
    if sampling.rule == "filtered":
        scores = jnp.where(kept(logits, sampling), scores, -jnp.inf)
    return likeliest(jnp.where(sampling.temperature[:, None, None] == 0, logits, scores))


def kept(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Which tokens the filters leave: top-k, then top-p of what it leaves, then min-p.

    That is the order of Hugging Face transformers. Tokens as likely as the last one kept are kept
    too, where sorting would keep some of them by chance; the likeliest token always is.

    Args:
      logits: [B, T, V] float32.

    Returns:
      [B, T, V] bool; all true for rows whose filters are off.
    """
    top_k, top_p, min_p = (
        x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p)
    )
    order = _order(logits)
    relative = jnp.exp(_scaled(logits, sampling))
    at_k = _threshold(order, jnp.float32(1), jnp.where(top_k > 0, top_k, jnp.inf))
    rest = jnp.where(order >= at_k, relative, 0)
    # A share that rounds to nothing still wants the likeliest token.
    share = jnp.maximum(top_p * jnp.sum(rest, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    at_p = _threshold(order, rest, jnp.where(top_p < 1, share, jnp.inf))
    return (order >= jnp.maximum(at_k, at_p)) & (relative >= min_p)


def _scaled(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """logits / temperature [B, T, V], 0 for the likeliest token of each row; finite or −inf."""
    limits = jnp.finfo(jnp.float32)
    # Bounded, so that a row of −inf alone and a temperature of 0 (not used) give no NaN.
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), limits.min)
    return (logits - top) / jnp.maximum(sampling.temperature[:, None, None], limits.tiny)


def _order(x: jax.Array) -> jax.Array:
    """float32 → uint32 above 0 in the same order; −0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits + sign, -bits)


def _threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t for which the tokens of order ≥ t weigh at least `wanted`; 0 if none does.

    Bisection, a bit a step: on XLA:CPU the 32 sums take a twentieth of the time of sorting, devices
    that split the vocabulary exchange single numbers, and no data decides the number of steps.

    Args:
      order: [B, T, V] uint32.
      weights: float32, [B, T, V] or a scalar.
      wanted: float32 above 0, broadcast to [B, T, 1]; inf for rows that keep everything.

    Returns:
      [B, T, 1] uint32.
    """

    def step(i: jax.Array, t: jax.Array) -> jax.Array:
        higher = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= wanted, higher, t)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros((*order.shape[:-1], 1), jnp.uint32))


def gumbel(seed: jax.Array | np.ndarray, positions: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise that depends on (seed, position, token id) and on nothing else.

    Made of `jax.random.bits(fold_in(key(seed), position), (size,))`, written out below so that it
    fuses: XLA:CPU runs jax's own as a loop over the rounds, nine times slower for 64 rows of
    49,152.

    Args:
      seed: [B] uint32.
      positions: [B, T] int32.

    Returns:
      [B, T, size] float32, from −2.8 to 22.9.
    """
    zero, ids = jnp.uint32(0), jnp.arange(size, dtype=jnp.uint32)
    key = _threefry((zero, jnp.asarray(seed)[:, None]), (zero, positions.astype(jnp.uint32)))
    words = _threefry((key[0][..., None], key[1][..., None]), (zero, ids))
    # All 32 bits, finest near 0, where the largest noise comes from: jax.random.gumbel's has 23 and
    # ends at 15.9, short of what unlikely tokens of a large vocabulary need.
    uniform = ((words[0] ^ words[1]).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def _threefry(key: Words, counter: Words) -> Words:
    """Threefry-2x32 of 20 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011, section 4.2.

    Args:
      key, counter: two uint32 words each, of shapes that broadcast.
    """
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    a, b = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ (b << turn | b >> (32 - turn))
        a = a + schedule[(group + 1) % 3]
        b = b + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b
