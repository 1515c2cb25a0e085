"""The attention benchmark's candidates do the same work, and its counts are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.kernels.interval_attention import api, shapes
from d3d_jax.kernels.interval_attention import bench_candidates as bench
from d3d_jax.kernels.interval_attention.bench_pairs import computed_pairs, visible_pairs
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
    lo, hi = shapes.intervals(TRAIN)
    visible = sum(max(0, int(h) - int(low)) for low, h in zip(lo[0], hi[0], strict=True))
    assert visible_pairs(TRAIN) == visible + 5 * 16 * 16
    dense = (160 + 80) * (160 + 80)
    assert computed_pairs(TRAIN, "dense mask", jnp.float32) == dense
    assert computed_pairs(TRAIN, "reference", jnp.float32) == 240 * 160 + 5 * 16 * 16
    skipped = computed_pairs(TRAIN, "xla", jnp.float32)
    assert visible_pairs(TRAIN) < skipped < dense


@pytest.mark.parametrize("name", [s.name for s in shapes.TRAIN])
def test_little_more_is_computed_than_is_visible(name):
    shape = shapes.by_name(name)
    # The heads of SmolLM2 train on rows of 1024 tokens, whose documents are short for the tiles
    # that matrix units want: XLA on CPU takes smaller ones.
    small = shape.keys <= 1024
    for implementation in ("xla",) if small else ("tpu", "gpu", "xla"):
        pairs = computed_pairs(shape, implementation, jnp.bfloat16)
        assert 1 <= pairs / visible_pairs(shape) <= 1.3, implementation


def test_splash_attention_gives_the_same():
    shape = Shape("s", 1, 128 + 8 * 16, 4, 2, 128, 128, "train", 128)
    inputs = bench.make_inputs(shape, jnp.float32)
    fixed = (inputs.lo, inputs.hi)

    def loss(run):
        def total(q, k, v):
            keys, values = (x[:, :128].swapaxes(1, 2) for x in (k, v))
            out = run(q, k, v, keys, values, *fixed)
            return jnp.sum(out**2), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))

    arrays = inputs.q, inputs.k, inputs.v
    got = loss(bench.splash(shape, interpret=True))(*arrays)
    expected = loss(bench.ours(shape, "reference"))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert visible_pairs(shape) < computed_pairs(shape, "splash", jnp.float32) <= 256**2


def test_splash_attention_is_offered_where_it_can_do_the_work(monkeypatch):
    monkeypatch.setattr(bench, "splash", lambda shape: shape.name)
    offered = []
    with api.compiling_for("tpu"):
        for shape in shapes.SHAPES:
            if "splash" in bench.candidates(shape, jnp.bfloat16):
                offered.append(shape.name)
    assert offered == [s.name for s in shapes.TRAIN if s.head_dim == 128]
