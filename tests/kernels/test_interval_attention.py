import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_jax.kernels.interval_attention import api, compiling_for, interval_attention
from d3d_jax.kernels.interval_attention.xla import SKIP_KEYS, SKIP_ROWS, TILE_ROWS


def dense(q, k, v, lo, hi):
    """Attention row by row in float64 NumPy, from the definition."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros(q.shape), np.full((batch, rows, heads), -np.inf)
    for b, t, n in np.ndindex(batch, rows, heads):
        left, right = int(lo[b, t]), int(hi[b, t])
        if left >= right:
            continue
        scores = k[b, n // group, left:right] @ q[b, t, n] / np.sqrt(dim)
        peak = scores.max()
        weights = np.exp(scores - peak)
        lse[b, t, n] = peak + np.log(weights.sum())
        out[b, t, n] = (weights / weights.sum()) @ v[b, n // group, left:right]
    return out, lse


def draw(seed, batch, rows, keys, heads=4, kv_heads=2, dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(batch, rows, heads, dim)), dtype)
    k, v = jnp.asarray(rng.normal(size=(2, batch, kv_heads, keys, dim)), dtype)
    lo = rng.integers(0, keys + 1, (batch, rows)).astype(np.int32)
    hi = rng.integers(0, keys + 1, (batch, rows)).astype(np.int32)
    return q, k, v, lo, hi


# Few shapes, because each one compiles; what varies freely is the intervals.
@given(st.integers(0, 2**31), st.sampled_from([(1, 1, 1), (2, 9, 12)]))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_matches_the_definition(implementation, seed, shape):
    arrays = draw(seed, *shape)
    out, lse = interval_attention(*arrays, implementation=implementation)
    expected_out, expected_lse = dense(*arrays)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("keys", [40, SKIP_KEYS, 2 * SKIP_KEYS + 5])
def test_tiles_agree_with_one_piece(keys):
    arrays = draw(0, 2, 2 * TILE_ROWS + 3, keys)
    out, lse = interval_attention(*arrays)
    expected_out, expected_lse = dense(*arrays)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("rows", [5, TILE_ROWS + 5])
def test_what_lies_beyond_the_keys_does_not_exist(rows):
    q, k, v, lo, hi = draw(8, 1, rows, SKIP_KEYS + 10)
    lo[:, ::3], hi[:, 1::3] = -SKIP_KEYS - 3, SKIP_KEYS + 13

    def attend(q, k, v, lo, hi):
        out, lse = interval_attention(q, k, v, lo, hi)
        return jnp.sum(out * out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    attend = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2)))
    expected = attend(q, k, v, np.maximum(lo, 0), np.minimum(hi, SKIP_KEYS + 10))
    jax.tree.map(np.testing.assert_array_equal, attend(q, k, v, lo, hi), expected)


def test_tiles_of_keys_that_no_row_of_a_tile_sees_are_not_read():
    q, k, v, lo, hi = draw(6, 1, TILE_ROWS + 9, 4 * SKIP_KEYS)
    lo, hi = np.clip(lo, SKIP_KEYS, None), np.clip(hi, 0, 3 * SKIP_KEYS)
    lo[:, -SKIP_ROWS:] = hi[:, -SKIP_ROWS:]  # the last tile of rows sees nothing at all
    outside = np.r_[0:SKIP_KEYS, 3 * SKIP_KEYS : 4 * SKIP_KEYS]
    spoilt = [x.at[:, :, outside].set(jnp.nan) for x in (k, v)]

    def loss(q, k, v):
        out, lse = interval_attention(q, k, v, lo, hi)
        return jnp.sum(out * out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    got = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, *spoilt)
    expected = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("rows, keys", [(5, 24), (TILE_ROWS + 7, 24), (TILE_ROWS + 7, 300)])
def test_gradients_match_autodiff_of_the_reference_through_out_and_lse(rows, keys):
    q, k, v, lo, hi = draw(1, 1, rows, keys)
    weights = jax.random.normal(jax.random.key(2), q.shape)
    lse_weights = jax.random.normal(jax.random.key(3), q.shape[:3])

    def loss(q, k, v, implementation):
        out, lse = interval_attention(q, k, v, lo, hi, implementation=implementation)
        seen = jnp.isfinite(lse)
        return jnp.sum(out * weights) + jnp.sum(jnp.where(seen, lse, 0.0) * lse_weights)

    def reference_loss(q, k, v):
        # Rows that see nothing are cut before the softmax: its own gradient there is NaN.
        index = jnp.arange(k.shape[2])
        visible = (index >= lo[..., None]) & (index < hi[..., None])
        grouped = q.reshape(*q.shape[:2], 2, 2, -1)
        scores = jnp.einsum("btkgh,bksh->btkgs", grouped, k) * q.shape[-1] ** -0.5
        seen = visible.any(-1)
        mask = jnp.where(seen[..., None], visible, True)[:, :, None, None]
        scores = jnp.where(mask, scores, -jnp.inf)
        out = jnp.einsum("btkgs,bksh->btkgh", jax.nn.softmax(scores), v).reshape(q.shape)
        lse = jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:3])
        seen = seen[..., None]
        return jnp.sum(jnp.where(seen[..., None], out, 0) * weights) + jnp.sum(
            jnp.where(seen, lse, 0) * lse_weights
        )

    expected = jax.grad(reference_loss, argnums=(0, 1, 2))(q, k, v)
    got = jax.grad(lambda q, k, v: loss(q, k, v, "xla"), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_bfloat16_keeps_float32_lse_and_stays_close():
    q, k, v, lo, hi = draw(4, 1, 8, 32, dtype=jnp.bfloat16)
    out, lse = interval_attention(q, k, v, lo, hi)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    expected, expected_lse = dense(q, k, v, lo, hi)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.03)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=jnp.zeros((1, 2, 3, 8))), "multiple"),
        (dict(q=jnp.zeros((2, 8))), "rank 4"),
        (dict(v=jnp.zeros((1, 2, 5, 8))), "one shape"),
        (dict(lo=jnp.zeros((1, 3), jnp.int32)), "lo"),
        (dict(q=jnp.zeros((1, 2, 4, 8), jnp.bfloat16)), "dtype"),
        (dict(implementation="cudnn"), "implementation"),
        (dict(implementation="tpu"), "'tpu' cannot do this: it runs on a TPU, and this is cpu"),
        (dict(implementation="gpu"), "it runs on a Hopper GPU, and this is cpu"),
        (dict(hi=np.full((1, 2), 7, np.int32)), "hi reaches 7, and there are 6 keys"),
        (dict(hi=jnp.ones((1, 2))), "hi must be int32"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    arguments = dict(
        q=jnp.zeros((1, 2, 4, 8)),
        k=jnp.zeros((1, 2, 6, 8)),
        v=jnp.zeros((1, 2, 6, 8)),
        lo=jnp.zeros((1, 2), jnp.int32),
        hi=jnp.ones((1, 2), jnp.int32),
    )
    with pytest.raises(ValueError, match=message):
        interval_attention(**(arguments | change))


def test_the_platform_s_kernel_is_chosen_where_it_can_do_the_work(caplog):
    caplog.set_level("INFO")
    wanted = {
        ("cpu", "bfloat16", 128): "xla",
        ("gpu", "bfloat16", 128): "xla",
        ("hopper", "bfloat16", 128): "gpu",
        ("hopper", "float32", 128): "xla",
        ("hopper", "bfloat16", 80): "xla",
        ("tpu", "float32", 64): "tpu",
        ("tpu", "bfloat16", 96): "xla",
    }
    api._say.cache_clear()
    for _ in range(2):
        for (platform, dtype, head_dim), expected in wanted.items():
            with compiling_for(platform):  # type: ignore[arg-type]
                assert api.choose(dtype, head_dim) == expected
    said = [record.message for record in caplog.records]
    assert len(said) == len(set(said)) == len(wanted)
    assert "xla and not the gpu kernel: it takes bfloat16, not float32" in " ".join(said)
    assert api.choose("bfloat16", 128) == "xla"
    with compiling_for(implementation="reference"):
        assert api.choose("bfloat16", 128) == "reference"
    with compiling_for("hopper"), pytest.raises(ValueError, match="bfloat16, not float32"):
        interval_attention(*draw(0, 1, 1, 4, dim=64), implementation="gpu")
