"""The attention benchmark's candidates do the same work, and its counts are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.kernels.interval_attention import bench
from d3d_jax.kernels.interval_attention.shapes import Shape

TRAIN = Shape("t", 1, 160 + 5 * 16, 4, 2, 160, 64, "train", 160)
VERIFY = Shape("v", 2, 16, 4, 2, 96, 64, "decode", 16)
DRAFT = Shape("d", 2, 16 + 3 * 16, 4, 2, 96, 64, "decode", 16)


@pytest.mark.parametrize("shape", [TRAIN, VERIFY, DRAFT], ids=lambda shape: shape.name)
def test_all_candidates_give_the_same(shape):
    inputs = bench.make_inputs(shape, jnp.float32)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.keys, inputs.values, inputs.lo, inputs.hi)
    results = {n: run(*arrays) for n, run in bench.candidates(shape, jnp.float32).items()}
    assert set(results) == {"reference", "xla", "dense mask"}
    # A first row of a document or an unused block sees only itself: every row sees something.
    if not shape.blocks:
        for name, (run, own) in bench.decode_forms(shape, inputs).items():
            results[name] = jax.jit(run)(*own).reshape(inputs.q.shape)
    for name, result in results.items():
        np.testing.assert_allclose(result, results["reference"], atol=1e-5, err_msg=name)


def test_pairs_are_counted():
    lo, hi = bench.intervals(TRAIN)
    visible = sum(max(0, int(h) - int(low)) for low, h in zip(lo[0], hi[0], strict=True))
    assert bench.visible_pairs(TRAIN) == visible + 5 * 16 * 16
    dense = (160 + 80) * (160 + 80)
    assert bench.computed_pairs(TRAIN, "dense mask", jnp.float32) == dense
    assert bench.computed_pairs(TRAIN, "reference", jnp.float32) == 240 * 160 + 5 * 16 * 16
    skipped = bench.computed_pairs(TRAIN, "xla", jnp.float32)
    assert bench.visible_pairs(TRAIN) < skipped < dense
