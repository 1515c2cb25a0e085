"""The Hopper kernel on a real GPU, at real shapes: `make gpu-check`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.kernels.interval_attention import api, interval_attention, shapes, xla

pytestmark = pytest.mark.gpu
NAMES = [
    "train/qwen3-8b",
    "train/smollm2-135m",
    "decode/qwen3-8b/plain/32768x8",
    "decode/qwen3-8b/verify/4096x1",
    "decode/qwen3-32b/draft928/4096x8",
]


def draw(shape, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (shape.batch, shape.rows, shape.heads, shape.head_dim), dtype)
    size = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    k, v = (jax.random.normal(key, size, dtype) for key in keys[1:])
    return q, k, v, *map(jnp.asarray, shapes.intervals(shape))


@pytest.fixture(autouse=True)
def hopper():
    if api._platform() != "hopper":
        pytest.skip(f"needs a Hopper GPU, and this is {api._platform()}")


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_is_as_near_to_float32_as_xla_is(name):
    arrays = draw(shapes.by_name(name), jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    expected, expected_lse = jax.jit(xla.interval_attention)(*wide, *arrays[3:])
    out, lse = jax.jit(lambda *a: interval_attention(*a, implementation="gpu"))(*arrays)
    plain, _ = jax.jit(xla.interval_attention)(*arrays)

    def error(x):
        return float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - expected) ** 2)))

    assert error(out) <= 1.5 * error(plain)
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(np.where(seen, lse, 0), np.where(seen, expected_lse, 0), atol=2e-2)


def test_gradients_on_the_gpu_are_those_of_xla():
    arrays = draw(shapes.by_name("train/smollm2-135m"), jnp.bfloat16)

    def loss(implementation):
        def run(q, k, v):
            out, lse = interval_attention(q, k, v, *arrays[3:], implementation=implementation)
            lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse)

        return jax.jit(jax.grad(run, argnums=(0, 1, 2)))

    for got, expected in zip(loss("gpu")(*arrays[:3]), loss("xla")(*arrays[:3]), strict=True):
        scale = float(jnp.abs(expected.astype(jnp.float32)).max())
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2 * scale
        )
