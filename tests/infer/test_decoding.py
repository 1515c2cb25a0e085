"""Losslessness of the decoders on tiny random models, with target and drafter on two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.branches import Rectangle
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.roles import DrafterRole, DraftState, Target, pad_prompts, role_mesh
from d3d_jax.models import decoder
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.tiny_models import VOCAB, greedy, tiny_config, tiny_drafter, tiny_params

PROMPTS = [[5, 6, 7], list(range(20)), [40, 3]]
LENGTH = 24


@functools.cache
def models(model_type="qwen3"):
    config = tiny_config(model_type)
    return config, tiny_params(config)


@functools.cache
def expected(model_type="qwen3"):
    config, params = models(model_type)
    return [greedy(config, params, prompt, LENGTH) for prompt in PROMPTS]


def roles(model_type="qwen3", stop_ids=(), policy=(3, 2), devices=2, **drafter_changes):
    config, params = models(model_type)
    drafter, own = tiny_drafter(config, params, **drafter_changes)
    first, last = jax.devices()[0], jax.devices()[devices - 1]
    target = Target(config, decoder.unstack(params), role_mesh([first]), stop_ids)
    policy = Rectangle(*policy, drafter.drafter.block_size)
    return target, DrafterRole(drafter, decoder.unstack(own), role_mesh([last]), policy)


def decode(mode, target, drafter, prompts=PROMPTS, count=LENGTH):
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=count))
    return decoding.generate(prompts)


DRAFTERS = {
    "two layers": {},
    "exact first draft": dict(layers=(0, 1, 2), in_block="causal"),
    "shift 0": dict(label_shift=0),
    "reduced vocabulary": dict(vocab=np.arange(0, VOCAB, 2)),
    "block of 2": dict(block_size=2, policy=(2, 1)),
    "one branch": dict(policy=(1, 1)),
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_promise_3_every_mode_says_what_the_target_says(mode, drafter):
    replies = decode(mode, *roles(**drafter))
    assert [reply.token_ids for reply in replies] == expected()
    assert all(reply.finish_reason == "length" for reply in replies)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_llama_and_one_shared_device(mode):
    replies = decode(mode, *roles("llama", devices=1))
    assert [reply.token_ids for reply in replies] == expected("llama")


def test_drafts_are_really_used():
    """Shift 1 and causal blocks make the anchor's slot the target itself: it is always right."""
    target, drafter = roles(layers=(0, 1, 2), in_block="causal")
    for mode in ("sync", "async"):
        for reply in decode(mode, target, drafter):
            assert reply.rounds < LENGTH - 1 and reply.tau is not None and reply.tau >= 1.9
    assert any(reply.hits for reply in decode("async", target, drafter))


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_stops_and_limits_clip_each_row_for_itself(mode):
    stop = expected()[1][7]
    target, drafter = roles(stop_ids=(stop,), layers=(0, 1, 2), in_block="causal")
    config, params = models()
    for count in (1, 2, 13):
        replies = decode(mode, target, drafter, count=count)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            tokens = greedy(config, params, prompt, count, (stop,))
            assert reply.token_ids == tokens
            assert reply.finish_reason == ("stop" if tokens[-1] == stop else "length")


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_capacity_grows_without_losing_anything(mode):
    prompt = np.random.default_rng(0).integers(0, VOCAB, 232).tolist()
    config, params = models()
    target, drafter = roles(layers=(0, 1, 2), in_block="causal")
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=40))
    assert decoding.generate([prompt])[0].token_ids == greedy(config, params, prompt, 40)
    # Two buckets were used, and each compiled its steps once.
    assert target._verify._cache_size() == 2
    decoding.generate([prompt[::-1]])
    assert target._verify._cache_size() == 2


def test_bad_prompts_are_refused_before_work_starts():
    target, drafter = roles()
    for prompts, message in [
        ([[]], "prompt 0 is empty"),
        ([[1], [2] * 512], "prompt 1 has 512 tokens"),
        ([[VOCAB]], "beyond the vocabulary"),
    ]:
        with pytest.raises(D3DError, match=message):
            Decoder(target, drafter, DecodeConfig(mode="sync")).stream(prompts)
    with pytest.raises(D3DError, match="needs a drafter"):
        Decoder(target, None, DecodeConfig(mode="async"))


@pytest.mark.parametrize("shift", [0, 1])
def test_a_prepared_branch_is_the_synchronous_draft_of_its_outcome(shift):
    """Every outcome, hit or miss: resolve and draft hand over the same block and cache length."""
    target, drafter = roles(label_shift=shift, policy=(4, 2))
    tokens, lengths = pad_prompts(PROMPTS[:1])
    report, _ = target.prefill(tokens, lengths, np.array([LENGTH], np.int32), 64)
    report = drafter.put(report)

    def state():
        return drafter.first_draft(drafter.prefill(tokens, lengths, 64), report)[1]

    prepared = drafter.prepare(state())[2]
    outcomes = list(zip(prepared.outcome.tolist(), prepared.anchors[0].tolist(), strict=True))
    block = np.asarray(state().block)[0].tolist()
    missing = next(v for v in range(VOCAB) if (2, v) not in outcomes and v != block[2])
    hits = 0
    for count, token in [*outcomes, (2, missing)]:
        emitted = [*block[1:count], token]
        outcome = np.full((1, drafter.width + 1), -1, np.int32)
        outcome[0, 0], outcome[0, 1 : 1 + count] = count, emitted
        got, after = drafter.resolve(*drafter.prepare(state()), drafter.put(outcome))
        want, sync = drafter.draft(state(), drafter.put(outcome))
        hits += int(got[0, 0])
        assert int(want[0, 0]) == 0
        # At shift 0 the block after full acceptance is a draft short.
        drafts = drafter.width - 1 - int(shift == 0 and count == drafter.width)
        if not (shift == 0 and count == drafter.width and got[0, 0]):
            np.testing.assert_array_equal(got[0, 1 : 1 + drafts], want[0, 1 : 1 + drafts])
        np.testing.assert_array_equal(after.cache.length, sync.cache.length)
        size = int(after.cache.length[0])
        for ours, theirs in zip(after.cache.layers, sync.cache.layers, strict=True):
            np.testing.assert_allclose(ours[0][:, :, :size], theirs[0][:, :, :size], atol=1e-5)
    assert hits >= len(outcomes) - (shift == 0)


class Documents:
    """As much of a dataset as offline acceptance needs."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        prompt, response = self.pairs[i]
        return {"tokens": np.array(prompt + response, np.int32), "prompt_length": len(prompt)}


@pytest.mark.parametrize("changes", [{}, dict(layers=(0, 1, 2), in_block="causal")], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_promise_5_offline_tau_is_decoded_tau(shift, changes):
    target, drafter = roles(label_shift=shift, **changes)
    config, params = models()
    settings, own = tiny_drafter(config, params, label_shift=shift, **changes)
    documents = Documents(list(zip(PROMPTS, expected(), strict=True)))
    offline = OfflineAcceptance(settings, documents).measure(own)
    modes = ("sync", "async") if shift == 1 else ("sync",)
    for mode in modes:
        replies = decode(mode, target, drafter)
        assert offline.rounds.tolist() == [reply.rounds for reply in replies]
        assert offline.tokens.tolist() == [len(reply.token_ids) - 1 for reply in replies]


def test_frozen_rows_keep_their_length():
    target, drafter = roles()
    tokens, lengths = pad_prompts(PROMPTS)
    limits = np.array([1, LENGTH, LENGTH], np.int32)
    report, state = target.prefill(tokens, lengths, limits, 64)
    _, drafts = drafter.first_draft(drafter.prefill(tokens, lengths, 64), drafter.put(report))
    assert isinstance(drafts, DraftState)
    block = jnp.zeros((3, drafter.width), jnp.int32)
    report, state = target.verify(state, target.put(block))
    assert report[0].tolist() == [0] + [-1] * drafter.width
    assert state.cache.length[0] == lengths[0] and state.cache.length[1] > lengths[1]
