import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import layout as layouts
from d3d_jax.kernels.packed_attention import packed_attention


def visible(layout):
    """The mask of design: [T, C + A · W] for batch row 0, drawn rule by rule."""
    rows, clean, width = layout.positions.shape[1], layout.clean_len, layout.block_size
    mask = np.zeros((rows, rows), bool)
    for t in range(rows):
        mask[t, int(layout.lo[0, t]) : int(layout.hi[0, t])] = True
        if t >= clean:
            start = clean + (t - clean) // width * width
            stop = start + width if layout.in_block == "bidirectional" else t + 1
            mask[t, start:stop] = True
    return mask


def softmax_attention(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("in_block", ["bidirectional", "causal"])
def test_equals_dense_attention_forward_and_backward(in_block):
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    starts = jnp.array([[0] * 5 + [5] * 5])
    # An anchor at a document's start sees no clean key at all; -1 is an unused block.
    anchors = jnp.array([[0, 3, 5, 8, -1]])
    layout = layouts.packed_documents(positions, starts, anchors, block_size=3, in_block=in_block)
    rows = layout.positions.shape[1]
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (1, rows, 4, 8))
    k, v = (jax.random.normal(key, (1, rows, 2, 8)) for key in keys[1:3])
    weights = jax.random.normal(keys[3], q.shape)

    @jax.jit
    def packed(q, k, v):
        return packed_attention(
            q,
            k,
            v,
            k[:, : layout.clean_len].swapaxes(1, 2),
            v[:, : layout.clean_len].swapaxes(1, 2),
            layout.lo,
            layout.hi,
            clean_len=layout.clean_len,
            num_blocks=layout.num_blocks,
            in_block=in_block,
        )

    mask = visible(layout)
    np.testing.assert_allclose(packed(q, k, v), softmax_attention(q, k, v, mask), atol=1e-5)

    def gradients(attention):
        return jax.jit(jax.grad(lambda *a: jnp.sum(attention(*a) * weights), argnums=(0, 1, 2)))

    got = gradients(packed)(q, k, v)
    expected = gradients(lambda q, k, v: softmax_attention(q, k, v, mask))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_documents_do_not_see_each_other():
    positions = jnp.array([[0, 1, 0, 1, 2]])
    starts = jnp.array([[0, 0, 2, 2, 2]])
    layout = layouts.packed_documents(positions, starts, jnp.array([[1, 3]]), block_size=2)
    mask = visible(layout)
    expected = np.array(
        [
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 1, 1, 0, 0],
            [1, 0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 1, 1],
            [0, 0, 1, 0, 0, 0, 0, 1, 1],
        ],
        bool,
    )
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(layout.positions[0], [0, 1, 0, 1, 2, 1, 2, 1, 2])
