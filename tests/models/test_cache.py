import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import layout
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder
from tests.tiny_models import tiny_config, tiny_params


def test_writes_land_after_each_rows_length_and_past_capacity_are_dropped():
    keys = jnp.full((2, 1, 4, 1), -1.0)
    new = jnp.arange(6.0).reshape(2, 3, 1, 1)
    got, _ = caches.write((keys, keys), new, new, jnp.array([0, 2]))
    np.testing.assert_array_equal(got[:, 0, :, 0], [[0, 1, 2, -1], [-1, -1, 3, 4]])
    one, _ = caches.write((keys[:1], keys[:1]), new[:1, :1], new[:1, :1], jnp.array([1]))
    np.testing.assert_array_equal(one[0, 0, :, 0], [-1, 0, -1, -1])
    full, _ = caches.write((keys[:1], keys[:1]), new[:1, :1] + 7, new[:1, :1], jnp.array([4]))
    np.testing.assert_array_equal(full, keys[:1])


def test_growing_keeps_what_was_there():
    config = tiny_config()
    cache = caches.empty(config, 2, 1, 256, jnp.float32)
    cache = caches.KVCache(
        tuple((k + i, v - i) for i, (k, v) in enumerate(cache.layers)), jnp.array([9])
    )
    grown = caches.grow(cache, 512)
    assert grown.capacity == 512 and grown.length == 9
    np.testing.assert_array_equal(grown.layers[1][0][:, :, :256], cache.layers[1][0])
    assert [caches.bucketed(n) for n in (1, 256, 257, 1025)] == [256, 256, 512, 2048]


@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 8), (4, 1), (3, 8)])
def test_promise_2_no_step_copies_the_cache(batch, rows, as_users_compile):
    """The compiled step copies no cache-shaped array and updates it by scatters alone, in place."""
    config = tiny_config()
    params = decoder.unstack(tiny_params(config))
    cache = caches.empty(config, 3, batch, 512, jnp.float32)

    def step(params, cache, tokens):
        hidden, cache = decoder.forward(
            config, params, tokens, layout.causal(cache.length, rows), cache
        )
        return hidden, cache

    compiled = jax.jit(step, donate_argnums=1).lower(
        params, cache, jnp.zeros((batch, rows), jnp.int32)
    )
    text = compiled.compile(compiler_options=as_users_compile).as_text()
    assert "scatter" in text
    shape = rf"f32\[{batch},2,512,16\]\S*"
    assert not re.findall(rf"{shape} (?:copy|dynamic-update-slice)\(", text)
