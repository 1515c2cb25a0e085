"""The Hopper kernel in Mosaic GPU's simulator: races are reported, memory starts out as NaN.

What the CUDA compiler says of it is in test_gpu_compile. Few SMs are pretended, so that small
shapes split their keys, or do not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_jax import layout as layouts
from d3d_jax.kernels.interval_attention import gpu, gpu_schedule, reference, xla
from tests.kernels.mosaic_interpret import interpret


@pytest.fixture
def simulated(monkeypatch):
    """Pretends a number of SMs and returns the op, compiled once for each shape."""

    def on(sms):
        monkeypatch.setattr(gpu, "NUM_SMS", sms)
        return jax.jit(lambda *arguments: gpu.interval_attention(*arguments))

    with interpret(monkeypatch):
        yield on


def draw(seed, batch, rows, heads, kv_heads, keys, dim):
    """bfloat16 q, k, v of unit variance and unsorted intervals, about a quarter of them empty."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, rows, heads, dim))
    k, v = rng.normal(size=(2, batch, kv_heads, keys, dim))
    lo, hi = rng.integers(0, keys + 1, (2, batch, rows)).astype(np.int32)
    lo = lo // 2
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), lo, hi


def dense(q, k, v, lo, hi):
    """The definition in float64. What no row sees takes no part, whatever it is."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    index = np.arange(k.shape[2])
    mask = (index >= np.asarray(lo)[..., None]) & (index < np.asarray(hi)[..., None])
    used = mask.any(1)[:, None, :, None]
    k, v = (np.repeat(np.where(used, x, 0), group, axis=1) for x in (k, v))
    scores = np.einsum("btnh,bnsh->btns", q, k) * q.shape[3] ** -0.5
    scores = np.where(mask[:, :, None], scores, -np.inf)
    peak = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(total) + peak[..., 0]
        out = np.einsum("btns,bnsh->btnh", weights, v) / total[..., None]
    seen = mask.any(-1)[..., None]
    return np.where(seen[..., None], out, 0), np.where(seen, lse, -np.inf)


def check(arrays, results):
    """out is as near to float64 as plain bfloat16 attention, and 0 where a row sees nothing."""
    out, lse = (np.asarray(x, np.float64) for x in results)
    expected, expected_lse = dense(*arrays)
    clean = (*(jnp.nan_to_num(x) for x in arrays[:3]), *arrays[3:])
    plain = np.asarray(reference.interval_attention(*clean)[0], np.float64)
    empty = ~np.isfinite(expected_lse)
    assert (out[empty] == 0).all()
    np.testing.assert_array_equal(lse[empty], -np.inf)
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], atol=1e-5)
    error, allowed = np.abs(out - expected), np.abs(plain - expected)
    assert np.sqrt(np.mean(error**2)) <= 1.5 * np.sqrt(np.mean(allowed**2))
    assert error.max() <= 1.5 * allowed.max()


# SMs, batch, rows, heads, kv heads, keys, head dim. On one SM, 128 rows of all heads are many.
SHAPES = {
    "direct-g1-two-tiles": (1, 1, 130, 1, 1, 304, 64),
    "direct-g3-ring-reused": (1, 1, 128, 3, 1, 520, 128),
    "split-g3-many-splits": (4, 1, 7, 3, 1, 520, 128),
    "split-g4-two-consumers": (4, 1, 20, 4, 1, 300, 64),
    "split-g8-ring-reused": (1, 1, 8, 8, 1, 520, 128),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_float64_as_well_as_plain_bfloat16(simulated, shape):
    sms, *shape = shape
    op = simulated(sms)
    *arrays, lo, hi = draw(0, *shape)
    check((*arrays, lo, hi), op(*arrays, lo, hi))
    # Key tiles that every row sees wholly, except that some rows see nothing.
    lo, hi = lo // 10, shape[4] - hi // 10
    hi[:, ::3] = 0
    check((*arrays, lo, hi), op(*arrays, lo, hi))


def test_packed_documents_with_blocks_in_any_order_and_nan_beyond_the_last_key(simulated):
    starts = jnp.asarray(np.repeat([[0, 40, 180]], [40, 140, 76], axis=1), jnp.int32)
    positions = jnp.arange(256, dtype=jnp.int32)[None] - starts
    anchors = jnp.array([[250, 3, 40, 181, -1, 100, 180, 0]])
    layout = layouts.packed_documents(positions, starts, anchors, block_size=16)
    q, k, v, _, _ = draw(0, 1, 384, 1, 1, 384, 64)
    k, v = (x.at[:, :, 256:].set(jnp.nan) for x in (k, v))
    arrays = (q, k, v, layout.lo, layout.hi)
    check(arrays, simulated(1)(*arrays))


def test_decoding_with_caches_of_very_different_lengths_and_nan_behind_them(simulated):
    op = simulated(4)
    for lengths in ([1020, 0, 130], [0, 127, 128]):
        layout = layouts.causal(jnp.array(lengths), 2)
        q, k, v, _, _ = draw(1, 3, 2, 4, 2, 1024, 64)
        behind = np.arange(1024) >= np.max(layout.hi, axis=1)[:, None]
        k, v = (jnp.where(behind[:, None, :, None], jnp.nan, x) for x in (k, v))
        arrays = (q, k, v, layout.lo, layout.hi)
        check(arrays, op(*arrays))


def test_bounds_outside_the_keys_are_clipped_and_empty_calls_give_nothing(simulated):
    op = simulated(2)
    q, k, v, lo, hi = draw(2, 1, 4, 2, 1, 128, 64)
    results = op(q, k, v, lo - 100, hi + 200)
    check((q, k, v, np.maximum(lo - 100, 0), np.minimum(hi + 200, 128)), results)
    out, lse = op(q, jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan), lo, lo)
    assert (out == 0).all() and (lse == -jnp.inf).all()


def test_gradients_are_those_of_xla_through_out_and_lse(simulated):
    op = simulated(2)
    q, k, v, lo, hi = draw(3, 1, 6, 4, 2, 128, 64)
    weights = jax.random.normal(jax.random.key(0), q.shape)
    lse_weights = jax.random.normal(jax.random.key(1), q.shape[:3])

    def gradients(op):
        def loss(q, k, v):
            out, lse = op(q, k, v, lo, hi)
            lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return jnp.sum(out * weights) + jnp.sum(lse * lse_weights)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for got, expected in zip(gradients(op), gradients(xla.interval_attention), strict=True):
        assert got.dtype == jnp.bfloat16 and np.isfinite(got.astype(np.float32)).all()
        np.testing.assert_allclose(
            got.astype(np.float32), expected.astype(np.float32), atol=0.02, rtol=0.02
        )


@pytest.mark.parametrize(
    "dtype, dim, message",
    [(jnp.float32, 64, "TF32"), (jnp.float16, 64, "bfloat16"), (jnp.bfloat16, 32, "64, 128")],
)
def test_what_it_cannot_do_is_refused(dtype, dim, message):
    q, k = jnp.zeros((1, 2, 2, dim), dtype), jnp.zeros((1, 1, 8, dim), dtype)
    bound = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=message):
        gpu.interval_attention(q, k, k, bound, bound)


ROWS, BLOCK_KEYS, KEYS = 4, 8, 50
KEY_TILES = np.arange(7)


@functools.partial(jax.jit, static_argnums=(2, 3))
def schedule(lo, hi, parts, most):
    """Items, the key tile of each of their steps, how many are masked, and items of a tile."""
    tiles = gpu_schedule.row_tiles(lo, hi, KEYS, ROWS, BLOCK_KEYS)
    if parts is None:
        items, pieces = gpu_schedule.longest_first(tiles), jnp.ones_like(tiles.index)
    else:
        items, pieces = gpu_schedule.split(tiles, parts, most)
    by_step = jax.vmap(lambda item: jax.vmap(item.tile)(jnp.asarray(KEY_TILES)))
    read = jax.vmap(gpu_schedule.Item.read, in_axes=(None, 0))
    items = read(items.table(), jnp.arange(items.index.size))
    return items, by_step(items), items.masked, pieces, tiles.count


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("parts, most", [(5, 3), (20, 16), (None, None)])
def test_items_hold_every_seen_key_once_and_full_tiles_need_no_comparison(parts, most, seed):
    rng = np.random.default_rng(seed)
    lo, hi = rng.integers(0, KEYS + 1, (2, 2, 2 * ROWS)).astype(np.int32)
    lo, hi = np.where(rng.random((2, 1, 1)) < 0.5, [lo // 4, KEYS - hi // 4], [lo, hi])
    items, by_step, masked, pieces, counts = jax.tree.map(np.asarray, schedule(lo, hi, parts, most))
    sizes = (items.end - items.first)[items.used]
    assert (items.used == (np.arange(items.used.size) < pieces.sum())).all()
    if parts is None:
        assert (np.diff(sizes) <= 0).all()
    else:
        share = max(-(-counts.sum() // parts), -(-counts.max() // most), 1)
        assert pieces.max() <= most and sizes.max() <= share

    lo, hi = lo.reshape(2, 2, ROWS), hi.reshape(2, 2, ROWS)
    taken = np.zeros((2, 2, KEY_TILES.size), int)
    for index in np.flatnonzero(items.used):
        place = items.batch[index], items.row_tile[index]
        sees = lo[place] < hi[place]
        left, right = lo[place][sees], hi[place][sees]
        for step, tile in enumerate(by_step[index][: sizes[index]]):
            taken[place][tile] += 1
            whole = (left <= tile * BLOCK_KEYS).all() and (right >= (tile + 1) * BLOCK_KEYS).all()
            assert whole == (step >= masked[index])
        if sees.any():
            assert (items.key_begin[index], items.key_end[index]) == (left.min(), right.max())
    sees = lo < hi
    first = np.min(np.where(sees, lo, KEYS), axis=2, keepdims=True) // BLOCK_KEYS
    end = -(-np.max(np.where(sees, hi, 0), axis=2, keepdims=True) // BLOCK_KEYS)
    np.testing.assert_array_equal(taken, (KEY_TILES >= first) & (KEY_TILES < end))


def test_splitting_follows_the_sum_of_the_lengths():
    lengths = np.array([32768, 1000, 1000, 0, 5000, 128, 129, 4096], np.int32)
    hi = jnp.repeat(lengths[:, None], 64, axis=1)
    tiles = gpu_schedule.row_tiles(jnp.zeros_like(hi), hi, 32768, 64, 128)
    items, pieces = gpu_schedule.split(tiles, 16, 16)
    total = sum(-(-int(n) // 128) for n in lengths)
    assert int(items.count[items.used].sum()) == total
    assert int(items.count.max()) <= -(-total // 16)
    assert int(pieces.sum()) <= 16 + len(lengths)


@pytest.mark.parametrize(
    "rows, heads, expected",
    [(1, 32, True), (16, 64, True), (400, 32, True), (928, 32, False), (6144, 32, False)],
)
def test_keys_are_split_when_rows_are_few(rows, heads, expected):
    assert gpu.splits_keys(rows, heads) == expected
