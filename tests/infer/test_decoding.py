"""Losslessness of the decoders on tiny random models, with target and drafter on two devices."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import acceptance
from d3d_jax.branches import BestFirst, Rectangle
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder
from d3d_jax.models.sharding import make_mesh
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.infer.batches import started
from tests.tiny_models import (
    VOCAB,
    Documents,
    greedy,
    memorise,
    tiny_config,
    tiny_drafter,
    tiny_params,
)

PROMPTS = [[5, 6, 7], list(range(20)), [40, 3], [11] * 9]
LENGTH = 24


@functools.cache
def models(model_type="qwen3"):
    # Chosen among a few seeds: most random models soon repeat one token for ever.
    config = tiny_config(model_type)
    return config, tiny_params(config, seed=4, scale=16.0)


@functools.cache
def expected(model_type="qwen3"):
    config, params = models(model_type)
    return [greedy(config, params, prompt, LENGTH) for prompt in PROMPTS]


DRAFTERS = {
    "shift 1": {},
    "shift 0": dict(label_shift=0),
    "causal block": dict(in_block="causal"),
    "reduced vocabulary": dict(vocab=tuple(range(0, VOCAB, 2))),
    "block of 2": dict(block_size=2),
    "block of 16": dict(block_size=16),
}


@functools.cache
def trained(kind, model_type="qwen3"):
    """A drafter that has memorised part of what the target says."""
    config, params = models(model_type)
    changes = DRAFTERS[kind]
    drafter, own = tiny_drafter(config, params, **changes)
    return drafter, memorise(drafter, own, list(zip(PROMPTS, expected(model_type), strict=True)))


@functools.cache
def roles(kind="shift 1", model_type="qwen3", stop_ids=(), policy=(3, 2), devices=2):
    config, params = models(model_type)
    drafter, own = trained(kind, model_type)
    first, last = jax.devices()[0], jax.devices()[devices - 1]
    target = Target(config, decoder.unstack(params), make_mesh([first]), stop_ids)
    width = drafter.drafter.block_size
    if isinstance(policy, int):
        policy = BestFirst(policy, width)
    else:
        policy = Rectangle(min(policy[0], width), policy[1], width)
    return target, DrafterRole(drafter, decoder.unstack(own), make_mesh([last]), policy)


def decode(mode, target, drafter, prompts=PROMPTS, count=LENGTH, params=None):
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=count))
    return decoding.generate(prompts, params)


def test_the_target_is_worth_decoding():
    for model_type in ("qwen3", "llama"):
        for tokens in expected(model_type):
            assert len(set(tokens)) > 7


@pytest.mark.parametrize(
    "mode, kind",
    [
        ("plain", "shift 1"),
        *((m, kind) for m in ("sync", "async") for kind in DRAFTERS if kind != "block of 16"),
    ],
)
def test_promise_3_every_mode_says_what_the_target_says(mode, kind):
    replies = decode(mode, *roles(kind))
    assert [reply.token_ids for reply in replies] == expected()
    assert all(reply.finish_reason == "length" for reply in replies)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_llama_and_one_shared_device(mode):
    replies = decode(mode, *roles(model_type="llama", devices=1))
    assert [reply.token_ids for reply in replies] == expected("llama")
    assert sum(reply.rounds for reply in replies) < len(PROMPTS) * (LENGTH - 1)


@pytest.mark.parametrize("kind", ["shift 1", "shift 0"])
def test_every_outcome_occurs_with_hits_and_misses(kind):
    """What the losslessness tests rest on: the trained drafters reach all cases."""
    decoding = Decoder(*roles(kind), DecodeConfig(mode="async", max_new_tokens=LENGTH))
    counts = collections.Counter(len(new) for _, new in decoding.stream(PROMPTS))
    assert set(counts) == {1, 2, 3, 4}
    hits = sum(reply.hits for reply in decoding.replies)
    assert 0 < hits < sum(reply.chances for reply in decoding.replies)


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_stops_and_limits_clip_each_row_for_itself(mode):
    # The stop ends one reply in the middle and appears nowhere in most others.
    tokens = expected()[1]
    stop = next(t for i, t in enumerate(tokens) if i >= 6 and t not in tokens[:i])
    target, drafter = roles(stop_ids=(stop,))
    config, params = models()
    for count in (1, 2, 13):
        replies = decode(mode, target, drafter, count=count)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            tokens = greedy(config, params, prompt, count, (stop,))
            assert reply.token_ids == tokens
            assert reply.finish_reason == ("stop" if tokens[-1] == stop else "length")


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_capacity_grows_without_losing_anything_or_recompiling(mode):
    prompt = np.random.default_rng(0).integers(0, VOCAB, 185).tolist()
    config, params = models()
    target, drafter = roles.__wrapped__()
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=80))
    assert decoding.generate([prompt])[0].token_ids == greedy(config, params, prompt, 80)
    steps = [target._verify, drafter._draft, drafter._prepare, drafter._resolve]
    compiled = [step._cache_size() for step in steps]
    assert compiled[0] == 2  # one for each bucket
    decoding.generate([prompt[5:]])
    assert [step._cache_size() for step in steps] == compiled


def test_bad_prompts_are_refused_before_work_starts():
    target, drafter = roles()
    for prompts, message in [
        ([], "no prompt"),
        ([[]], "prompt 1 is empty"),
        ([[1], [2] * 512], "prompt 2 has 512 tokens"),
        ([[VOCAB]], f"prompt 1 has token id {VOCAB}; ids are 0 to {VOCAB - 1}"),
    ]:
        with pytest.raises(D3DError, match=message):
            Decoder(target, drafter, DecodeConfig(mode="sync")).stream(prompts)
    with pytest.raises(D3DError, match="needs a drafter"):
        Decoder(target, None, DecodeConfig(mode="async"))


def outcome_report(drafter, emitted):
    report = np.full((1, acceptance.TOKENS + drafter.width), -1, np.int32)
    report[0, acceptance.COUNT], report[0, acceptance.ACTIVE] = len(emitted), 1
    report[0, acceptance.TOKENS : acceptance.TOKENS + len(emitted)] = emitted
    return drafter.put(report)


@pytest.mark.parametrize(
    "kind, policy, budget",
    [
        ("shift 1", (4, 2), 32),
        ("shift 0", (4, 2), 32),
        ("shift 1", 9, 40),
        pytest.param("block of 16", (12, 2), 384, marks=pytest.mark.slow),
        ("block of 16", (12, 5), 912),
    ],
)
def test_a_prepared_branch_is_the_synchronous_draft_of_its_outcome(kind, policy, budget):
    """Every outcome, hit or miss: resolve and draft hand over the same block and cache length.

    384 and 912 rows are the paper's packed passes.
    """
    target, drafter = roles(kind, policy=policy)
    assert drafter.policy.budget == budget
    width = drafter.width

    def state():
        return started(target, drafter, PROMPTS[:1])[0].drafts

    block = np.asarray(state().block.tokens)[0].tolist()
    prepared = drafter.prepare(state())[2]
    outcomes = list(zip(prepared.outcome[0].tolist(), prepared.anchors[0].tolist(), strict=True))
    if kind == "shift 0":
        # The early branch starts at the last draft; its first slot says which bonus it is for.
        (_, last), hidden = outcomes.pop(), drafter.prepare(state())[1][:, -1]
        assert last == block[-1]
        read = drafter._read(drafter.params, hidden, jnp.array([last]))
        slots = np.asarray(read.candidate_ids)[0, :, 0]
        bonus = outcome_report(drafter, [*block[1:], int(slots[0])])
        got, _ = drafter.resolve(*drafter.prepare(state()), bonus)
        assert int(got[0, 0]) == 1
        assert got[0, 1 : width - 1].tolist() == slots[1:].tolist()
        other = outcome_report(drafter, [*block[1:], (int(slots[0]) + 1) % VOCAB])
        assert int(drafter.resolve(*drafter.prepare(state()), other)[0][0, 0]) == 0
    missing = next(v for v in range(VOCAB) if (2, v) not in outcomes and v != block[2])
    for count, token in [*outcomes, (2, missing)]:
        outcome = outcome_report(drafter, [*block[1:count], token])
        got, after = drafter.resolve(*drafter.prepare(state()), outcome)
        want, sync = drafter.draft(state(), outcome)
        assert (int(got[0, 0]), int(want[0, 0])) == (int(token != missing), 0)
        np.testing.assert_array_equal(got[0, 1:], want[0, 1:])
        np.testing.assert_array_equal(after.block.candidate_ids, sync.block.candidate_ids)
        np.testing.assert_array_equal(after.cache.length, sync.cache.length)
        size = int(after.cache.length[0])
        for ours, theirs in zip(after.cache.layers, sync.cache.layers, strict=True):
            np.testing.assert_allclose(ours[0][:, :, :size], theirs[0][:, :, :size], atol=1e-5)


@pytest.mark.parametrize("kind", ["shift 0", "causal block", "reduced vocabulary"])
def test_promise_5_offline_tau_is_decoded_tau(kind):
    stop = expected()[1][9]
    target, drafter = roles(kind, stop_ids=(stop,))
    modes = ("sync",) if kind == "shift 0" else ("sync", "async")
    for mode in modes:
        replies = decode(mode, target, drafter)
        pairs = [(p, r.token_ids) for p, r in zip(PROMPTS, replies, strict=True)]
        offline = OfflineAcceptance(trained(kind)[0], Documents(pairs)).measure(trained(kind)[1])
        assert offline.rounds.tolist() == [reply.rounds for reply in replies]
        assert offline.tokens.tolist() == [len(reply.token_ids) - 1 for reply in replies]
        assert offline.tau > 1.2


def test_offline_tau_of_sampled_responses_is_that_of_sampling():
    """What was drawn is what the target says again, with the same seed."""
    target, drafter = roles()
    params = [SamplingParams(0.6, seed=seed, max_new_tokens=LENGTH) for seed in range(len(PROMPTS))]
    replies = decode("sync", target, drafter, params=params)
    assert [reply.token_ids for reply in replies] != expected()
    pairs = [(p, r.token_ids) for p, r in zip(PROMPTS, replies, strict=True)]
    documents = Documents(pairs, greedy=False)
    offline = OfflineAcceptance(trained("shift 1")[0], documents).measure(trained("shift 1")[1])
    assert offline.rounds.tolist() == [reply.rounds for reply in replies]
    assert offline.tau > 1.1


def test_no_responses_have_no_offline_tau():
    with pytest.raises(D3DError, match="empty"):
        OfflineAcceptance(trained("shift 1")[0], Documents([]))


def test_frozen_rows_keep_their_length_on_both_sides():
    target, drafter = roles()
    batch, report = started(target, drafter, PROMPTS, [1, LENGTH, LENGTH, LENGTH])
    assert report[:, acceptance.ACTIVE].tolist() == [0, 1, 1, 1]
    lengths = [len(prompt) for prompt in PROMPTS]
    report = np.asarray(batch.round())
    assert report[0].tolist() == [0, 0, 0] + [-1] * drafter.width
    for cache in (batch.state.cache, batch.drafts.cache):
        assert cache.length[0] == lengths[0] and (cache.length[1:] > np.array(lengths[1:])).all()
    _, drafts = drafter.draft(batch.drafts, drafter.put(report))
    assert drafts.cache.length[0] == lengths[0]
