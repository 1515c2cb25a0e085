"""Sampling: the filters against sorted versions, the distribution against its exact enumeration,
and tokens that no batch, block width or mesh changes.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from d3d_jax import sampling
from d3d_jax.errors import D3DError
from d3d_jax.hlo import collectives, largest_result
from d3d_jax.models import decoder, sharding
from d3d_jax.sampling import Sampling, SamplingParams
from tests.tiny_models import tiny_config

VOCAB = 515  # No multiple of a vector unit's width.
FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=11)
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=7),
    FILTERED,
    SamplingParams(temperature=0.6, top_p=0.7, seed=2**32 - 1),
]

choose = jax.jit(sampling.choose)
kept = jax.jit(sampling.kept)


def some_logits(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 3


def consecutive(batch, width, start=5):
    """Positions [B, T], each row from a place of its own."""
    return jnp.arange(start, start + width) + 100 * jnp.arange(batch)[:, None]


def survivors(logits, params):
    """The tokens of one row [V] that the filters leave, by sorting, in float64."""
    order = logits.astype(np.float64)
    keep = np.ones(len(order), bool)
    if params.top_k is not None:
        keep &= order >= np.sort(order)[::-1][: params.top_k][-1]
    relative = np.exp((order - order.max()) / params.temperature)
    if params.top_p < 1:
        probability = np.where(keep, relative, 0) / relative[keep].sum()
        likelier = np.array([probability[order > value].sum() for value in order])
        keep &= likelier < params.top_p
    return keep & (relative >= params.min_p)


scores = st.one_of(
    st.sampled_from([-0.0, 0.0, 0.5, 1.0, 1.0 + 2**-23, -3.0, 30.0, -1e30, 1e-30, -np.inf]),
    st.floats(-10, 10, width=32),
)
requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-30, 0.01, 0.5, 1.0, 3.0, 100.0]),
    top_k=st.one_of(st.none(), st.integers(1, 12), st.just(2**31 - 1)),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-60, 1e-9, 1 - 1e-9]), st.floats(0.01, 1)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1)),
    seed=st.integers(0, 2**32 - 1),
)


@given(st.data(), st.sampled_from([1, 2, 9]))
@settings(max_examples=200, deadline=None)
def test_the_filters_keep_what_sorting_keeps(data, vocab):
    row = st.lists(scores, min_size=vocab, max_size=vocab).filter(lambda r: max(r) > -np.inf)
    logits = np.array([data.draw(row) for _ in range(3)], np.float32)
    params = [data.draw(requests) for _ in range(3)]
    rows = Sampling.of(params)
    got = np.asarray(kept(logits[:, None], rows))[:, 0]
    tokens = choose(logits[:, None], rows, consecutive(3, 1))[:, 0]
    for mask, x, p, token in zip(got, logits, params, tokens, strict=True):
        # Shares within rounding of a token's own boundary may fall either way.
        tight, loose = (
            dataclasses.replace(
                p,
                top_p=p.top_p if p.top_p == 1 else min(max(p.top_p + slack, 1e-300), 1),
                min_p=min(p.min_p * (1 - 10 * slack), 1),
            )
            for slack in (-1e-5, 1e-5)
        )
        assert (mask >= survivors(x, tight)).all() and (mask <= survivors(x, loose)).all()
        assert mask[x == x.max()].all()
        assert mask[token] and x[token] > -np.inf


@pytest.mark.parametrize(
    "filters, expected",
    [
        (dict(top_k=1), [0, 0, 0, 1, 0]),
        (dict(top_k=2), [0, 1, 1, 1, 0]),  # Two tokens share the second place: both stay.
        (dict(top_k=3), [0, 1, 1, 1, 0]),
        (dict(top_k=99), [1, 1, 1, 1, 1]),
        (dict(top_p=0.5), [0, 0, 0, 1, 0]),  # 1/2, 1/5, 1/5, 1/10 and nothing.
        (dict(top_p=0.51), [0, 1, 1, 1, 0]),
        (dict(top_p=0.91), [1, 1, 1, 1, 0]),
        (dict(top_k=2, top_p=0.55), [0, 0, 0, 1, 0]),  # 5/9 of what top-k leaves.
        (dict(top_k=2, top_p=0.56), [0, 1, 1, 1, 0]),
        (dict(min_p=0.39), [0, 1, 1, 1, 0]),
        (dict(min_p=0.41), [0, 0, 0, 1, 0]),
        (dict(min_p=1), [0, 0, 0, 1, 0]),
        (dict(), [1, 1, 1, 1, 1]),
    ],
)
def test_filters_on_a_row_worked_by_hand(filters, expected):
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([1, 2, 2, 5, 0], np.float32))[None, None]
    rows = Sampling.of([SamplingParams(temperature=1.0, **filters)])
    np.testing.assert_array_equal(kept(logits, rows)[0, 0], np.array(expected, bool))


@pytest.mark.parametrize("around", [1.0, -1.0, 0.1, 1e-30, -3e30])
def test_neighbouring_floats_are_told_apart(around):
    ascending = np.float32(around) + np.spacing(np.float32(abs(around))) * np.arange(5)
    logits = ascending.astype(np.float32)[None, None].repeat(5, axis=0)
    rows = Sampling.of([SamplingParams(temperature=1.0, top_k=k) for k in range(1, 6)])
    np.testing.assert_array_equal(kept(logits, rows)[:, 0], np.tri(5, dtype=bool)[:, ::-1])


def test_kept_sets_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = some_logits(4, VOCAB)
    grid = itertools.product((0.3, 1.0, 2.5), (None, 1, 5, 200), (0.1, 0.95, 1.0), (0.0, 0.05))
    for temperature, top_k, top_p, min_p in grid:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        warpers: list[hf.LogitsProcessor] = [hf.TemperatureLogitsWarper(temperature)]
        if top_k is not None:
            warpers.append(hf.TopKLogitsWarper(top_k))
        warpers += [hf.TopPLogitsWarper(top_p), hf.MinPLogitsWarper(min_p)]
        warped = torch.tensor(logits)
        for warp in warpers:
            warped = warp(torch.zeros((4, 1), dtype=torch.long), warped)
        got = kept(logits[:, None], Sampling.of([params] * 4))[:, 0]
        np.testing.assert_array_equal(got, np.isfinite(warped.numpy()), str(params))


def test_rows_without_filters_keep_everything_whatever_their_sum_rounds_to():
    logits = some_logits(3, 2, 20_000)
    logits[0, 0, 17] = -np.inf
    mask = kept(logits, Sampling.of([SamplingParams(temperature=2.0), SamplingParams(), FILTERED]))
    assert mask[:2].all() and not mask[2].all()


def test_a_row_of_impossible_tokens_gives_the_first_and_no_nan():
    logits = np.full((3, 1, 6), -np.inf, np.float32)
    np.testing.assert_array_equal(
        choose(logits, Sampling.of([MIXED[1], FILTERED, MIXED[0]]), consecutive(3, 1)), 0
    )
    assert kept(logits, Sampling.of([SamplingParams(temperature=1.0)] * 3)).all()


def assert_drawn_from(counts, weights):
    """That counts of draws look like draws in proportion to the weights."""
    assert counts[weights == 0].sum() == 0
    counts, weights = counts[weights > 0], weights[weights > 0]
    assert stats.chisquare(counts, weights * (counts.sum() / weights.sum())).pvalue > 1e-3


@pytest.mark.parametrize(
    "filters", [dict(), dict(top_k=3), dict(top_p=0.75), dict(min_p=0.3, top_p=0.99)], ids=str
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_tokens_follow_the_filtered_softmax(filters, temperature):
    logits = np.array([1.0, -1.0, 0.5, 2.0, -0.3, 1.7])
    params = SamplingParams(temperature=temperature, **filters)
    weights = np.where(survivors(logits, params), np.exp(logits / temperature), 0)
    draws = 30_000
    rows = Sampling.of([dataclasses.replace(params, seed=i) for i in range(draws)])
    same = jnp.broadcast_to(logits.astype(np.float32), (draws, 1, 6))
    counts = np.bincount(np.ravel(choose(same, rows, jnp.full((draws, 1), 9))), minlength=6)
    assert_drawn_from(counts, weights)


def test_positions_of_a_request_are_independent():
    draws, probabilities = 30_000, np.array([0.5, 0.3, 0.2])
    rows = Sampling.of([SamplingParams(temperature=1.0, seed=3)])
    logits = jnp.broadcast_to(np.log(probabilities).astype(np.float32), (1, 2 * draws, 3))
    tokens = np.asarray(choose(logits, rows, jnp.arange(2 * draws)[None])).reshape(draws, 2)
    counts = np.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9)
    assert_drawn_from(counts, np.outer(probabilities, probabilities).ravel())


def test_the_rarest_noise_is_as_frequent_as_it_should_be():
    # With 23 random bits the largest would be 15.9, and tokens less likely than that never drawn.
    levels = np.array([16.5, 18.0])

    @jax.jit
    def extremes(position):
        noise = sampling.gumbel(np.array([2], np.uint32), position[None, None], 2**20)
        return jnp.sum(noise > levels[:, None, None], axis=(1, 2)), jnp.min(noise)

    found, lowest = zip(*map(extremes, jnp.arange(128)), strict=True)
    expected = 2**27 * -np.expm1(-np.exp(-levels))  # 9.2 and 2.0
    low, high = stats.poisson.ppf([[1e-3], [1 - 1e-3]], expected)
    assert (low <= np.sum(found, axis=0)).all() and (np.sum(found, axis=0) <= high).all()
    assert min(lowest) > -2.82


def test_noise_is_made_of_the_bits_of_jax_random():
    seeds, positions = np.array([0, 5, 2**32 - 1], np.uint32), consecutive(3, 2)
    got = sampling.gumbel(seeds, positions, VOCAB)
    for row, t in np.ndindex(3, 2):
        key = jax.random.fold_in(jax.random.key(seeds[row], impl="threefry2x32"), positions[row, t])
        uniform = (np.asarray(jax.random.bits(key, (VOCAB,)), np.float64) + 0.5) / 2**32
        np.testing.assert_allclose(got[row, t], -np.log(-np.log1p(-uniform)), atol=1e-3)


def test_a_token_does_not_depend_on_its_batch_or_block_width():
    logits, positions = some_logits(4, 6, VOCAB), consecutive(4, 6)
    tokens = choose(logits, Sampling.of(MIXED), positions)
    noise = jax.jit(sampling.gumbel, static_argnums=2)
    whole = noise(Sampling.of(MIXED).seed, positions, VOCAB)
    for row, (start, stop) in itertools.product(range(4), [(0, 1), (1, 3), (2, 6)]):
        part = np.s_[row : row + 1, start:stop]
        alone = Sampling.of(MIXED[row : row + 1])
        np.testing.assert_array_equal(choose(logits[part], alone, positions[part]), tokens[part])
        np.testing.assert_array_equal(noise(alone.seed, positions[part], VOCAB), whole[part])
    swapped = choose(logits[::-1], Sampling.of(MIXED[::-1]), positions[::-1])
    np.testing.assert_array_equal(swapped[::-1], tokens)


def test_greedy_rows_of_any_batch_take_the_likeliest_token():
    logits = np.round(some_logits(4, 6, VOCAB))  # Full of ties.
    expected, positions = decoder.likeliest(jnp.asarray(logits)), consecutive(4, 6)
    greedy = Sampling.of([SamplingParams(top_k=3, seed=i) for i in range(4)])
    assert greedy.rule == "greedy"
    np.testing.assert_array_equal(choose(logits, greedy, positions), expected)
    for others in (MIXED[1], FILTERED):
        tokens = choose(logits, Sampling.of([MIXED[0], others, MIXED[0], others]), positions)
        np.testing.assert_array_equal(tokens[::2], expected[::2])
        assert (tokens[1::2] != expected[1::2]).any()


def test_a_batch_does_what_its_most_demanding_row_needs():
    greedy, sampled, filtered, _ = MIXED
    assert Sampling.of([]).rule == Sampling.of([greedy]).rule == "greedy"
    assert Sampling.of([sampled, greedy]).rule == "sampled"
    assert Sampling.of([greedy, filtered, sampled]).rule == "filtered"
    rows = Sampling.of([greedy, filtered])
    dtypes = [x.dtype.name for x in jax.tree.leaves(rows)]
    assert dtypes == ["float32", "int32", "float32", "float32", "uint32"]
    assert rows.top_k.tolist() == [0, 40] and rows.seed.tolist() == [0, 11]


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-60])
def test_temperatures_that_float32_hardly_holds_are_as_good_as_greedy(temperature):
    logits = some_logits(2, 6, VOCAB)
    rows = [SamplingParams(temperature=temperature, top_p=top_p) for top_p in (1.0, 0.5)]
    expected = decoder.likeliest(jnp.asarray(logits))
    np.testing.assert_array_equal(choose(logits, Sampling.of(rows), consecutive(2, 6)), expected)


@pytest.mark.parametrize(
    "sizes", [dict(tensor=8), dict(data=2, fsdp=2, tensor=2), dict(data=4, tensor=2)], ids=str
)
def test_a_split_vocabulary_gives_the_same_tokens_and_stays_split(sizes):
    config = tiny_config(num_attention_heads=8, head_dim=8)
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:8], **sizes), config)
    logits, positions, rows = some_logits(4, 6, 1024), consecutive(4, 6), Sampling.of(MIXED)
    expected = choose(logits, rows, positions)
    split = sharding.named("b.v", logits.shape, mesh, sharding.ACTIVATION_RULES)
    placed = jax.device_put(logits, split)
    compiled = (
        jax.jit(sharding.on_mesh(mesh, sampling.choose)).lower(placed, rows, positions).compile()
    )
    np.testing.assert_array_equal(compiled(placed, rows, positions), expected)
    assert set(collectives(compiled)) == {"all-reduce"}
    assert largest_result(compiled, "all-reduce") <= 4 * 6


@pytest.mark.parametrize(
    "field, value, expected",
    [
        *(
            ("temperature", v, "from 0 (greedy) to 100")
            for v in (-0.1, 101, np.nan, np.inf, True, "1")
        ),
        *(("top_k", v, "None or a whole number from 1 to") for v in (0, -1, 2.0, True, 2**31)),
        *(("top_p", v, "above 0, at most 1") for v in (0, -0.5, 1.01, np.nan, None, False)),
        *(("min_p", v, "from 0 to 1") for v in (-0.1, 1.5, np.nan, True, "0")),
        *(("seed", v, "from 0 to 2**32 - 1") for v in (-1, 2**32, 1.0, False, None)),
        *(("max_new_tokens", v, "from 1 to") for v in (0, -3, 2.5, True, 2**31, None)),
        *(
            ("stop", v, "a tuple of strings")
            for v in ("end", ("",), ["end"], (b"end",), (1,), None)
        ),
        *(
            ("stop_token_ids", v, "a tuple of at most 16 token ids")
            for v in (3, [3], (-1,), (True,), (1.0,), (2**31,), tuple(range(17)))
        ),
    ],
)
def test_fields_out_of_range_are_refused_by_name(field, value, expected):
    with pytest.raises(D3DError) as refusal:
        SamplingParams(**{field: value})
    sentence = str(refusal.value)
    assert sentence.startswith(f"{field} must be ") and expected in sentence
    assert sentence.endswith(f"found {value!r}")


def test_the_ends_of_every_range_are_taken():
    params = SamplingParams(
        temperature=100,
        top_k=1,
        top_p=1,
        min_p=1,
        seed=2**32 - 1,
        max_new_tokens=1,
        stop=("a", "b"),
        stop_token_ids=tuple(range(16)),
    )
    assert not params.greedy and SamplingParams().greedy
