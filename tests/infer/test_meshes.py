"""Roles on meshes of several devices: the same tokens, and only the collectives that must be."""

import functools

import jax
import numpy as np
import pytest

from d3d_jax import acceptance
from d3d_jax.branches import Rectangle
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.hlo import collectives, largest_result
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.placement import role_meshes
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder
from d3d_jax.models.sharding import make_mesh
from d3d_jax.sampling import SamplingParams
from tests.infer.batches import started
from tests.tiny_models import greedy, memorise, tiny_config, tiny_drafter, tiny_params

PROMPTS = [[5, 6, 7], list(range(20)), [40, 3], [11] * 9]
LENGTH = 16
# A tensor axis of 4 is two kv heads × two query heads each; the vocabulary divides over it.
CONFIG = tiny_config(vocab_size=64)
LAYERS, DRAFTER_LAYERS = CONFIG.num_hidden_layers, 2


@functools.cache
def models():
    params = tiny_params(CONFIG, seed=4, scale=16.0)
    expected = [greedy(CONFIG, params, prompt, LENGTH) for prompt in PROMPTS]
    drafter, own = tiny_drafter(CONFIG, params)
    own = memorise(drafter, own, list(zip(PROMPTS, expected, strict=True)))
    return params, expected, drafter, own


@functools.cache
def roles(target_devices, target_tp, drafter_devices):
    params, _, drafter, own = models()
    target_mesh, drafter_mesh = role_meshes(
        "async",
        target_devices=target_devices,
        target_tp=target_tp,
        drafter_devices=drafter_devices,
    )
    target = Target(CONFIG, decoder.unstack(params), target_mesh, ())
    policy = Rectangle(3, 2, drafter.drafter.block_size)
    return target, DrafterRole(drafter, decoder.unstack(own), drafter_mesh, policy)


PLACEMENTS = {
    "tensor 4, drafter apart": ((0, 1, 2, 3), 4, (4,)),
    "data 2 x tensor 2, drafter split": ((0, 1, 2, 3), 2, (6, 7)),
    "one mesh for both": ((0, 1, 2, 3), 4, (0, 1, 2, 3)),
    "data 4": ((4, 5, 6, 7), 1, (0,)),
}


@pytest.mark.parametrize(
    "placement, mode",
    [*((name, "async") for name in PLACEMENTS), ("data 2 x tensor 2, drafter split", "sync")],
)
def test_every_placement_says_the_same(placement, mode):
    target, drafter = roles(*PLACEMENTS[placement])
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH))
    assert [reply.token_ids for reply in decoding.generate(PROMPTS)] == models()[1]
    assert sum(reply.rounds for reply in decoding.replies) < 45  # 60 without a draft accepted


@functools.cache
def data_parallel_roles():
    """A target of two parts and a drafter of four, each row on its own devices."""
    params, _, drafter, own = models()
    target_mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)
    drafter_mesh = make_mesh(jax.devices()[4:], data=4)
    target = Target(CONFIG, decoder.unstack(params), target_mesh, ())
    policy = Rectangle(3, 2, drafter.drafter.block_size)
    return target, DrafterRole(drafter, decoder.unstack(own), drafter_mesh, policy)


def test_a_part_that_reads_nothing_keeps_what_it_has():
    """Requests of different lengths join one at a time; one is read in three passes."""
    target, drafter = data_parallel_roles()
    long = np.random.default_rng(1).integers(0, 64, 400).tolist()
    prompts = [*PROMPTS, long, *PROMPTS]
    limits = [LENGTH, 3, 7, 2, 5, LENGTH, 11, 4, LENGTH]
    params = models()[0]
    wanted = [greedy(CONFIG, params, p, n) for p, n in zip(prompts, limits, strict=True)]
    sampling = [SamplingParams(max_new_tokens=n) for n in limits]
    rounds = []
    for mode in ("plain", "sync", "async"):
        decoding = Decoder(target, drafter, DecodeConfig(mode), slots=4)
        assert [r.token_ids for r in decoding.generate(prompts, sampling)] == wanted
        rounds.append([reply.rounds for reply in decoding.replies])
    # The drafter's caches are right, too: every mode has the drafts accepted that one device has.
    one = Decoder(*roles((0,), 1, (1,)), DecodeConfig("sync"), slots=4)
    one.generate(prompts, sampling)
    assert rounds[1] == rounds[2] == [reply.rounds for reply in one.replies]


def test_slots_are_as_many_as_can_be_split():
    decoding = Decoder(*roles(*PLACEMENTS["data 4"]), DecodeConfig("sync", LENGTH), slots=8)
    assert [decoding.engine(requests).slots for requests in (1, 4, 5, 9)] == [4, 4, 8, 8]


def test_a_single_prompt_is_decoded_by_every_part_of_a_data_axis():
    target, drafter = roles(*PLACEMENTS["data 2 x tensor 2, drafter split"])
    decoding = Decoder(target, drafter, DecodeConfig(mode="plain", max_new_tokens=LENGTH))
    assert decoding.generate(PROMPTS[1:2])[0].token_ids == models()[1][1]


def programs(placement):
    """A batch that has read its prompts, and the lowered verify, draft and prepare steps."""
    target, drafter = roles(*PLACEMENTS[placement])
    batch, report = started(target, drafter, PROMPTS)
    report, state, drafts = drafter.put(np.asarray(report)), batch.state, batch.drafts
    block = target.put(batch.handover)
    return batch, (
        target._verify.lower(target.weights, state, batch.settings, block),
        drafter._draft.lower(drafter.weights, drafts, report),
        drafter._prepare.lower(drafter.weights, drafts.cache, drafts.block),
    )


def test_collectives_of_the_steps_are_those_expected():
    verify, draft, prepare = (step.compile() for step in programs("one mesh for both")[1])
    # Two a layer, one for the rows of the embedding, two to find the likeliest token.
    assert collectives(verify) == {"all-reduce": 2 * LAYERS + 3}
    # Of each part of the vocabulary only its candidates are gathered, ids and scores; two of one
    # number a row make their probabilities.
    assert collectives(draft) == {"all-reduce": 2 * DRAFTER_LAYERS + 3, "all-gather": 2}
    assert collectives(prepare) == {"all-reduce": 2 * DRAFTER_LAYERS + 1}
    policy, parts = roles(*PLACEMENTS["one mesh for both"])[1].policy, 4
    rows = len(PROMPTS) * policy.block_size
    assert largest_result(draft, "all-gather") == rows * parts * policy.num_candidates


def test_data_parallel_steps_gather_only_the_report():
    verify = programs("data 4")[1][0].compile()
    assert set(collectives(verify)) == {"all-gather"}
    width = roles(*PLACEMENTS["data 4"])[1].width
    assert largest_result(verify, "all-gather") <= len(PROMPTS) * (width + acceptance.TOKENS)


def test_caches_are_split_by_kv_heads_and_rows():
    batch, _ = programs("data 2 x tensor 2, drafter split")
    report, cache = batch.round(), batch.state.cache
    assert report.sharding.is_fully_replicated
    for keys, values in cache.layers:
        for buffer in (keys, values):
            assert buffer.sharding.shard_shape(buffer.shape) == (2, 1, 256, 16)
    batch.grow(300)
    assert batch.state.cache.layers[0][0].sharding.shard_shape((4, 2, 512, 16)) == (2, 1, 512, 16)


def test_the_drafter_takes_a_device_that_the_target_leaves_free():
    devices = jax.devices()
    target, drafter = role_meshes("async", target_devices=(1, 0))
    assert list(target.devices.flat) == [devices[1], devices[0]]
    assert list(drafter.devices.flat) == [devices[2]]
    assert list(role_meshes("plain")[1].devices.flat) == devices[:1]
    assert list(role_meshes("async")[1].devices.flat) == devices[1:2]
    everything = role_meshes("async", target_devices=range(8))[1]
    assert list(everything.devices.flat) == devices[:1]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(target_devices=(0, 8)), "there is no device 8, only 0 to 7"),
        (dict(drafter_devices=(3, 3)), "names a device twice"),
        (dict(target_devices=(0, 1, 2), target_tp=2), "2 does not divide the 3 target devices"),
    ],
)
def test_impossible_placements_are_refused(options, message):
    with pytest.raises(D3DError, match=message):
        role_meshes("async", **options)
