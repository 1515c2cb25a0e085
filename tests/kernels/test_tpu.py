"""The TPU kernels in Pallas' TPU simulator: races are reported, memory starts out as NaN.

What the TPU compiler says of them is in test_tpu_compile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from d3d_jax.kernels.interval_attention import bench_pairs, reference, tpu, tpu_common
from d3d_jax.kernels.interval_attention.shapes import SHAPES, Shape, by_name, intervals
from d3d_jax.kernels.interval_attention.tiles import (
    FIRST,
    FULL,
    LAST,
    PARTIAL,
    tile_bounds,
    work_list,
)

SIMULATOR = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TILES = tpu.Tiles(rows=128, keys=128, part=None, chunk=128)
ROWS = 428
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def no_races(capsys):
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@functools.partial(jax.jit, static_argnames="divided")
def attend(q, k, v, lo, hi, d_out, d_lse, divided=False):
    """out, lse, dq, dk and dv for the cotangents d_out and d_lse.

    Tiles of 64 rows per head and 128 keys, or of 256 and 256 divided in two parts and two chunks.
    """
    group = q.shape[2] // k.shape[1]
    tiles = tpu.Tiles(rows=64 * group, keys=128, part=None, chunk=128)
    if divided:
        tiles = tpu.Tiles(rows=256 * group, keys=256, part=128, chunk=128)

    def op(q, k, v):
        return tpu.interval_attention(q, k, v, lo, hi, interpret=SIMULATOR, tiles=tiles)

    outputs, pull = jax.vjp(op, q, k, v)
    return *outputs, *pull((d_out, d_lse))


def dense(q, k, v, lo, hi, dtype):
    """Attention from the definition, whose gradient exists for rows that see nothing as well."""
    group = q.shape[2] // k.shape[1]
    index = jnp.arange(k.shape[2])
    visible = (index >= lo[..., None]) & (index < hi[..., None])
    sees = visible.any(-1)[..., None]
    mask = jnp.where(sees, visible, True)[:, :, None]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("btnh,bnsh->btns", q, k, preferred_element_type=dtype)
    scores = jnp.where(mask, scores * q.shape[3] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum("btns,bnsh->btnh", weights, v, preferred_element_type=dtype).astype(q.dtype)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.where(sees[..., None], out, 0), jnp.where(sees, lse, -jnp.inf)


@functools.partial(jax.jit, static_argnames="dtype")
def differentiated(q, k, v, lo, hi, d_out, d_lse, dtype):
    outputs, pull = jax.vjp(lambda q, k, v: dense(q, k, v, lo, hi, dtype), q, k, v)
    return *outputs, *pull((d_out, d_lse))


def expected(q, k, v, lo, hi, d_out, d_lse):
    """What `attend` should give, by automatic differentiation in float64."""
    with jax.enable_x64(True):
        q, k, v, d_out, d_lse = (jnp.asarray(x, jnp.float64) for x in (q, k, v, d_out, d_lse))
        results = differentiated(q, k, v, lo, hi, d_out, d_lse, jnp.float64)
        return [np.asarray(x) for x in results]


def plain_bfloat16(*arguments):
    return differentiated(*arguments, jnp.float32)


def draw(seed, batch, rows, heads, kv_heads, keys, dim, dtype):
    """q, k, v and the cotangents."""
    rng = np.random.default_rng(seed)
    q, d_out = rng.normal(size=(2, batch, rows, heads, dim))
    k, v = rng.normal(size=(2, batch, kv_heads, keys, dim))
    d_lse = jnp.asarray(rng.normal(size=(batch, rows, heads)), jnp.float32)
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in (q, k, v, d_out))
    return (q, k, v), (d_out, d_lse)


def draw_training(group, dim, dtype):
    kv_heads = 2 if group == 1 else 1
    return draw(group, 1, ROWS, group * kv_heads, kv_heads, 300, dim, dtype)


def error(got, want):
    """Largest error over largest value; −inf must be in the same places."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    got, want = got[finite], want[finite]
    assert np.isfinite(got).all()
    return np.abs(got - want).max() / np.abs(want).max()


def spread(got, want):
    """Root mean square error over root mean square value."""
    finite = np.isfinite(want)
    got, want = np.asarray(got, np.float64)[finite], np.asarray(want)[finite]
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


def training_intervals():
    """[1, ROWS]: three documents of 300 tokens and eight blocks of 16 rows.

    Anchors at 0 (sees nothing), at a document's start (nothing), inside, at the last key, and an
    unused block. Neither 300 nor ROWS is a multiple of a tile, and documents straddle tiles.
    """
    starts = np.repeat([0, 70, 260], [70, 190, 40])
    anchors = np.array([0, 70, 90, 130, 200, 259, 299])
    lo = np.concatenate([starts, np.repeat(np.append(starts[anchors], 0), 16)])
    hi = np.concatenate([np.arange(300) + 1, np.repeat(np.append(anchors, 0), 16)])
    return lo[None].astype(np.int32), hi[None].astype(np.int32)


def mixed_intervals():
    """[1, ROWS]: rows in random order, then rows that see nearly all keys; some are empty."""
    rng = np.random.default_rng(5)
    lo, hi = (x[0, rng.permutation(ROWS)] for x in training_intervals())
    lo = np.where(rng.random(ROWS) < 0.5, rng.integers(0, 301, ROWS), lo)
    lo[190:], hi[190:] = 0, rng.integers(280, 301, ROWS - 190)
    hi[190::5] = lo[190::5]
    return lo[None].astype(np.int32), hi[None].astype(np.int32)


# Every group, head dimension and type, tiles whole and divided; each pair of them once.
CASES = [
    (1, 64, "float32", False),
    (3, 64, "float32", True),
    (4, 128, "float32", False),
    (8, 128, "float32", True),
    (3, 64, "bfloat16", False),
    (8, 128, "bfloat16", True),
]


@pytest.mark.parametrize("group, dim, dtype, divided", CASES)
def test_training_forward_and_backward(group, dim, dtype, divided):
    (q, k, v), (d_out, d_lse) = draw_training(group, dim, dtype)
    for lo, hi in (training_intervals(), mixed_intervals()):
        # A cotangent of an lse of −inf means nothing, whatever it is.
        poisoned = jnp.where((lo < hi)[..., None], d_lse, jnp.nan)
        arguments = (q, k, v, lo, hi, d_out, poisoned)
        got, want = attend(*arguments, divided=divided), expected(*arguments)
        assert [x.dtype for x in got] == [q.dtype, jnp.float32, q.dtype, q.dtype, q.dtype]
        plain = plain_bfloat16(*arguments) if dtype == "bfloat16" else got
        for name, a, b, c in zip(NAMES, got, want, plain, strict=True):
            if dtype == "float32":
                assert error(a, b) <= 1e-5, name
            else:
                assert error(a, b) < 0.05, name
                assert spread(a, b) <= 1.5 * spread(c, b), name


def decode_intervals(lengths, rows):
    hi = np.asarray(lengths)[:, None] + 1 + np.arange(rows)
    return np.zeros_like(hi, np.int32), hi.astype(np.int32)


@pytest.mark.parametrize(
    "rows, group, dim, dtype, tiles",
    [
        (1, 8, 128, "bfloat16", TILES),
        (16, 3, 64, "bfloat16", None),
        (40, 4, 128, "float32", TILES),
    ],
)
def test_decoding_over_a_partly_filled_cache(rows, group, dim, dtype, tiles):
    lengths, keys = [0, 127, 640 - rows], 640
    lo, hi = decode_intervals(lengths, rows)
    (q, k, v), _ = draw(7, 3, rows, group * 2, 2, keys, dim, dtype)
    # What lies beyond the filled part must not matter, whatever it is.
    unused = np.arange(keys) >= hi.max(axis=1)[:, None]
    bad_k, bad_v = (jnp.where(unused[:, None, :, None], jnp.nan, x) for x in (k, v))
    op = functools.partial(tpu.interval_attention, interpret=SIMULATOR, tiles=tiles)
    out, lse = jax.jit(op)(q, bad_k, bad_v, lo, hi)
    want_out, want_lse, *_ = expected(q, k, v, lo, hi, q, jnp.zeros(q.shape[:3]))
    assert error(lse, want_lse) <= 1e-5
    if dtype == "float32":
        assert error(out, want_out) <= 1e-5
    else:
        plain = reference.interval_attention(q, k, v, *map(jnp.asarray, (lo, hi)))[0]
        assert spread(out, want_out) <= 1.5 * spread(plain, want_out)


@pytest.mark.parametrize("group, dim, divided", [(3, 64, True), (4, 128, False)])
def test_keys_that_no_row_sees_may_be_nan_and_get_no_gradient(group, dim, divided):
    (q, k, v), cotangents = draw_training(group, dim, "float32")
    lo, hi = training_intervals()
    lo, hi = np.maximum(lo, 140), np.minimum(hi, 250)
    want = expected(q, k, v, lo, hi, *cotangents)
    unseen = (np.arange(300) < 140) | (np.arange(300) >= 250)
    poisoned = (jnp.where(unseen[:, None], jnp.nan, x) for x in (k, v))
    got = attend(q, *poisoned, lo, hi, *cotangents, divided=divided)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert error(a, b) <= 1e-5, name
    for gradient in got[3:]:
        assert not np.asarray(gradient)[:, :, unseen].any()


def test_nothing_is_seen_at_all():
    (q, k, v), cotangents = draw_training(3, 64, "float32")
    empty = np.full((1, ROWS), 60, np.int32)
    out, lse, *gradients = attend(q, k, v, empty, empty - 1, *cotangents)
    assert np.isneginf(lse).all()
    for x in (out, *gradients):
        assert not np.asarray(x).any()


def test_a_step_is_run_for_each_needed_tile_and_no_other():
    """Cost follows the filled length, and batch rows of different lengths cost their sum."""
    steps = []
    recorder = pltpu.InterpretParams(grid_point_recorder=lambda token, point, _: record(point))

    def record(point):
        steps.append(tuple(int(x) for x in point))
        return np.int32(0)

    lo, hi = decode_intervals([0, 130, 700], 16)
    (q, k, v), _ = draw(10, 3, 16, 4, 2, 1024, 128, "bfloat16")
    jax.block_until_ready(tpu.interval_attention(q, k, v, lo, hi, interpret=recorder, tiles=TILES))
    needed = sum(-(-int(x) // TILES.keys) for x in hi.max(axis=1))
    assert needed == 1 + 2 + 6
    assert len(steps) == len(set(steps)) == 2 * needed


def test_as_many_pairs_are_computed_as_the_benchmark_counts(monkeypatch):
    computed = []

    def load_rows(ref, window):
        jax.debug.callback(lambda: computed.append(window.rows * window.keys))
        return tpu_common.load_rows(ref, window)

    shape = Shape("t", 1, 1300, 4, 2, 1300, 64, "train", 1300)
    lo = np.repeat(np.array([[0, 1100]], np.int32), [1100, 200], axis=1)
    hi = np.arange(1, 1301, dtype=np.int32)[None]
    (q, k, v), _ = draw(12, 1, 1300, 4, 2, 1300, 64, "bfloat16")
    monkeypatch.setattr(tpu, "load_rows", load_rows)
    monkeypatch.setattr(bench_pairs, "intervals", lambda _: (lo, hi))
    mode = pltpu.InterpretParams()
    jax.block_until_ready(tpu.interval_attention(q, k, v, lo, hi, interpret=mode))
    jax.effects_barrier()
    # Both heads of keys do the same.
    assert sum(computed) == 2 * bench_pairs.computed_pairs(shape, "tpu", jnp.bfloat16)
    assert len(set(computed)) == 5, "full tiles, and one to four chunks"


def test_two_cores_share_the_heads():
    cores = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    (q, k, v), _ = draw(11, 1, 16, 4, 2, 256, 64, "float32")
    lo, hi = decode_intervals([200], 16)
    got = tpu.interval_attention(q, k, v, lo, hi, interpret=cores, tiles=TILES)
    want = expected(q, k, v, lo, hi, q, jnp.zeros(q.shape[:3]))
    for a, b in zip(got, want, strict=False):
        assert error(a, b) <= 1e-5


def test_unsupported_arguments_are_refused_by_name():
    lo = jnp.zeros((1, 2), jnp.int32)
    x = jnp.zeros((1, 2, 2, 96))
    with pytest.raises(ValueError, match="head dimension 96"):
        tpu.interval_attention(x, x, x, lo, lo)
    x = jnp.zeros((1, 2, 2, 64), jnp.float16)
    with pytest.raises(ValueError, match="dtype float16"):
        tpu.interval_attention(x, x, x, lo, lo)


def brute_force(lo, hi, rows_per_tile, keys_per_tile, keys):
    """{(batch row, row tile): {key tile: wholly seen}} from the dense mask, non-empty rows only."""
    needed = {}
    for b, start in np.ndindex(lo.shape[0], -(-lo.shape[1] // rows_per_tile)):
        rows = slice(start * rows_per_tile, (start + 1) * rows_per_tile)
        index = np.arange(-(-keys // keys_per_tile) * keys_per_tile)
        mask = (index >= lo[b, rows, None]) & (index < np.minimum(hi[b, rows, None], keys))
        mask = mask[mask.any(axis=1)]
        tiles = {}
        if mask.size:
            # Key tiles between the first and the last one count as needed: a list of one run.
            per_tile = mask.reshape(len(mask), -1, keys_per_tile)
            seen = np.flatnonzero(per_tile.any(axis=(0, 2)))
            whole = per_tile.all(axis=(0, 2))
            tiles = {j: bool(whole[j]) for j in range(seen[0], seen[-1] + 1)}
        needed[b, start] = tiles
    return needed


@given(st.integers(0, 2**31), st.sampled_from(["any", "sorted", "short", "long"]))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("sizes", [(2, 9, 4, 5, 23), (1, 16, 4, 8, 32), (3, 5, 8, 16, 12)])
def test_bounds_and_work_lists_agree_with_the_dense_mask(sizes, seed, style):
    batch, rows, rows_per_tile, keys_per_tile, keys = sizes
    rng = np.random.default_rng(seed)
    lo, hi = rng.integers(-2, keys + 3, (2, batch, rows)).astype(np.int32)
    if style == "sorted":
        lo, hi = np.sort(lo, axis=1), np.sort(hi, axis=1)
    elif style == "short":
        hi = lo + rng.integers(0, 3, lo.shape).astype(np.int32)
    elif style == "long":
        lo, hi = lo // 8, keys - rng.integers(0, 5, lo.shape).astype(np.int32)
    needed = brute_force(np.maximum(lo, 0), hi, rows_per_tile, keys_per_tile, keys)
    bounds = tile_bounds(lo, hi, rows_per_tile, keys_per_tile, keys)
    row_tiles, key_tiles = -(-rows // rows_per_tile), -(-keys // keys_per_tile)
    for (b, t), tiles in needed.items():
        first, count = int(bounds.first[b, t]), int(bounds.count[b, t])
        assert list(range(first, first + count)) == list(tiles)
        first, count = int(bounds.full_first[b, t]), int(bounds.full_count[b, t])
        assert list(range(first, first + count)) == [j for j, full in tiles.items() if full]

    pairs = {
        (b * row_tiles + t, j): FULL if full else PARTIAL
        for (b, t), tiles in needed.items()
        for j, full in tiles.items()
    }
    for by_keys in (False, True):
        work = work_list(bounds, key_tiles, by_keys=by_keys)
        length = int(work.length)
        listed = np.stack([work.row_tile, work.key_tile, work.action])[:, :length].T.tolist()
        done = {(r, j): a & (PARTIAL | FULL) for r, j, a in listed if a & (PARTIAL | FULL)}
        assert done == pairs
        owners = [(r // row_tiles, j) if by_keys else (r // row_tiles, r) for r, j, _ in listed]
        # Each has at least one step, and idle ones only that one.
        if by_keys:
            every = [(b, j) for b in range(batch) for j in range(key_tiles)]
        else:
            every = [(b, b * row_tiles + t) for b in range(batch) for t in range(row_tiles)]
        assert sorted(set(owners)) == every
        idle = sum(not action & (PARTIAL | FULL) for _, _, action in listed)
        assert length == len(pairs) + idle and idle <= len(every)
        # An owner's steps are one run that begins with FIRST and ends with LAST.
        for i, (_, _, action) in enumerate(listed):
            assert bool(action & FIRST) == (i == 0 or owners[i - 1] != owners[i])
            assert bool(action & LAST) == (i == length - 1 or owners[i + 1] != owners[i])
        assert owners == sorted(owners)


@given(st.integers(1, 10_000), st.integers(1, 16), st.sampled_from([128, 512, 1024]))
@pytest.mark.parametrize("part", [None, 128])
def test_rows_are_cut_into_whole_parts_with_little_padding(part, rows, group, most):
    size, own = tpu._block_rows(rows, group, tpu.Tiles(most, 128, part, 128))
    largest = max(tpu.SUBLANES, most // group // tpu.SUBLANES * tpu.SUBLANES)
    unit = min(part or tpu.SUBLANES, largest)
    assert own == (unit if part else size)
    assert size % unit == 0 and size <= largest
    # As little padding as the fewest possible tiles, all of one size, would have.
    assert -rows % size < unit * -(-rows // (largest // unit * unit))


def test_named_shapes_have_intervals_inside_their_keys():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert by_name("train/qwen3-8b").rows == 4096 + 128 * 16
    with pytest.raises(ValueError, match="train/qwen3-8b"):
        by_name("train/qwen3-9b")
    for shape in SHAPES:
        lo, hi = intervals(shape)
        assert lo.shape == hi.shape == (shape.batch, shape.rows)
        assert lo.dtype == hi.dtype == np.int32
        assert (0 <= lo).all() and (hi <= shape.keys).all()
        assert (lo < hi).mean() > 0.9
