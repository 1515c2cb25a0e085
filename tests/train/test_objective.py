"""The objective against a slow NumPy version that takes the examples one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import layout
from d3d_jax.models import decoder
from d3d_jax.train import objective
from d3d_jax.train.cross_entropy import cross_entropy
from d3d_jax.train.packing import build_row
from tests.tiny_models import VOCAB, tiny_config, tiny_drafter, tiny_params

GAMMA, LAMBDA = 3.0, 0.7
LIKELY = 6, 9  # the tokens that the model below says, in every vocabulary


def documents():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, VOCAB, 11), rng.integers(0, VOCAB, 7)
    first[5:11], second[3:7] = LIKELY * 3, LIKELY * 2
    return [(first, 4), (second, 2)]


def packed_batch():
    tokens = [d for d, _ in documents()]
    size, anchors = 24, [[4, 6, 9], [2, 5]]
    batch = dict(
        tokens=np.zeros((1, size), np.int32),
        segments=np.zeros((1, size), np.int32),
        positions=np.zeros((1, size), np.int32),
        starts=np.arange(size, dtype=np.int32)[None].copy(),
        loss_mask=np.zeros((1, size), bool),
        anchors=np.full((1, 6), -1, np.int32),
    )
    start, slot = 0, 0
    for number, ((ids, prompt), at) in enumerate(zip(documents(), anchors, strict=True)):
        rows = slice(start, start + len(ids))
        batch["tokens"][0, rows] = ids
        batch["segments"][0, rows] = number + 1
        batch["positions"][0, rows] = np.arange(len(ids))
        batch["starts"][0, rows] = start
        batch["loss_mask"][0, start + prompt : start + len(ids)] = True
        batch["anchors"][0, slot : slot + len(at)] = np.array(at) + start
        start, slot = start + len(ids), slot + len(at)
    assert len(tokens) == 2
    return {k: jnp.asarray(v) for k, v in batch.items()}, anchors


def slow_loss(drafter, params, anchors, vocab=None):
    """Every block and every response token as an example of its own, unpacked.

    Also, by predicted offset, how many of the labels were likeliest, and how many there are.
    """
    config = drafter.drafter
    width, shift = config.block_size, config.label_shift
    index = {int(t): i for i, t in enumerate(range(VOCAB) if vocab is None else vocab)}
    block_sum = weight_sum = ar_sum = ar_count = 0.0
    hits, counts = np.zeros((2, width - 1 + shift), int)

    def log_probs(tokens, rows):
        hidden, _ = decoder.forward(drafter.model, params, tokens, rows)
        return np.asarray(jax.nn.log_softmax(decoder.logits(params, hidden)[0]))

    for (ids, prompt), at in zip(documents(), anchors, strict=True):
        clean = layout.causal(jnp.zeros((1,), jnp.int32), len(ids))
        log_p = log_probs(jnp.asarray(ids[None]), clean)
        for i in range(prompt, len(ids)):
            if int(ids[i]) in index:
                ar_sum -= log_p[i - 1, index[int(ids[i])]]
                ar_count += 1
        for a in at:
            rows = layout.packed_documents(
                jnp.arange(a)[None],
                jnp.zeros((1, a), jnp.int32),
                # The anchor may stand after the last clean row: the block is placed by hand.
                jnp.array([[a - 1]]),
                block_size=width,
                in_block=config.in_block,
            )
            rows = type(rows)(
                rows.positions.at[:, a:].add(1),
                rows.lo,
                rows.hi.at[:, a:].add(1),
                a,
                1,
                width,
                config.in_block,
            )
            log_p = log_probs(jnp.asarray([*ids[:a], ids[a]])[None], rows)[a:]
            for slot in range(1 - shift, width):
                offset = slot + shift
                if a + offset < len(ids) and int(ids[a + offset]) in index:
                    weight = np.exp(-(offset - 1) / GAMMA)
                    label = index[int(ids[a + offset])]
                    block_sum -= weight * log_p[slot, label]
                    weight_sum += weight
                    hits[offset - 1] += log_p[slot].argmax() == label
                    counts[offset - 1] += 1
    return block_sum / weight_sum + LAMBDA * ar_sum / ar_count, hits, counts


@pytest.mark.parametrize(
    "shift, in_block, vocab",
    # Each pair of them once.
    [
        (0, "bidirectional", None),
        (1, "causal", None),
        (1, "bidirectional", np.arange(0, VOCAB, 3)),
        (0, "causal", np.arange(0, VOCAB, 3)),
    ],
    ids=["0-bidirectional-whole", "1-causal-whole", "1-bidirectional-reduced", "0-causal-reduced"],
)
def test_packed_loss_is_the_sum_of_the_examples(shift, in_block, vocab):
    config = tiny_config()
    target = tiny_params(config)
    # A hidden state on either side of a long row says its token, or that of its negative.
    row = 20 * target["head"][LIKELY[0]]
    target["head"] = target["head"].at[jnp.array(LIKELY)].set(jnp.stack([row, -row]))
    drafter, params = tiny_drafter(
        config, target, label_shift=shift, in_block=in_block, vocab=vocab
    )
    batch, anchors = packed_batch()
    index = None
    if vocab is not None:
        index = jnp.full((VOCAB,), -1, jnp.int32).at[vocab].set(jnp.arange(len(vocab)))
    labels = objective.make_labels(
        batch, block_size=4, label_shift=shift, gamma=GAMMA, draft_index=index
    )
    loss, metrics = objective.drafter_loss(
        drafter, params, batch, labels, objective.denominators(labels), LAMBDA
    )
    expected, hits, counts = slow_loss(drafter, params, anchors, vocab)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_array_equal(metrics["hits"], hits)
    np.testing.assert_array_equal(metrics["counts"], counts)
    assert counts[0] > 0 and hits.any()


def test_chunked_cross_entropy_is_the_dense_one_with_its_gradient():
    hidden, head = (
        jax.random.normal(jax.random.key(0), (13, 8)),
        jnp.eye(8)[jnp.array([0, 3, 5, 1, 7])],
    )
    labels = jnp.arange(13) % 5
    weights = jnp.linspace(0.0, 1.0, 13)

    def dense(hidden, head):
        log_p = jax.nn.log_softmax(hidden @ head.T)
        return -jnp.sum(weights * jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0])

    def chunked(hidden, head):
        return cross_entropy(hidden[None], head, labels[None], weights[None], chunk=4)[0]

    expected = jax.value_and_grad(dense, argnums=(0, 1))(hidden, head)
    got = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


def test_rows_of_the_packing_loader_fit():
    document = {"tokens": np.arange(9, dtype=np.int32), "prompt_length": 3}
    row = build_row([(document["tokens"], 3, np.array([3, 5]))], 16, 4)
    batch = {k: jnp.asarray(v)[None] for k, v in row.items()}
    labels = objective.make_labels(batch, block_size=3, label_shift=1, gamma=1.0)
    np.testing.assert_array_equal(labels.block_labels[0, :2], [[4, 5, 6], [6, 7, 8]])
    assert (labels.block_weights[0, 2:] == 0).all()
    np.testing.assert_array_equal(np.flatnonzero(labels.ar_weights[0]), np.arange(2, 8))
