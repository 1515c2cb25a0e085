"""The benchmark as a library: figures by known answers, and points of tiny models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from d3d_jax import intervals
from d3d_jax.errors import D3DError
from d3d_jax.infer import benchmark_bench, engine
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.benchmark import Answer, Conversation, Point
from d3d_jax.infer.benchmark_bench import Bench
from d3d_jax.infer.benchmark_summary import (
    acceptance,
    divergences,
    merged,
    summarise,
)
from d3d_jax.infer.engine import Engine
from d3d_jax.infer.measure import LogitGap, logit_gap
from d3d_jax.infer.measure_rounds import decode
from d3d_jax.infer.plan import Setting
from d3d_jax.sampling import Sampling, SamplingParams, choose
from tests.infer.test_decoding import PROMPTS, models, roles
from tests.tiny_models import greedy

COUNT = 16
CONVERSATIONS = [Conversation(("a", "b")), Conversation(("c",)), Conversation(("d", "e", "f"))]


def chat(conversation, replies):
    """Turns as numbers, each after the reply to the one before."""
    words = [[ord(turn) % 61, 7, 9] for turn in conversation.turns]
    prompt = list(words[0])
    for reply, word in zip(replies, words[1:], strict=False):
        prompt += [*reply, *word]
    return prompt


@functools.cache
def bench():
    return Bench(*roles(), chat, COUNT)


def answer(rounds, tokens=None, hits=0, chances=0, conversation=0):
    tokens = tokens or list(range(1 + sum(rounds)))
    return Answer(conversation, 0, [5], tokens, rounds, hits, chances, "length", 0.5, 1.0)


def test_acceptance_by_known_answers():
    """The last round of a reply never counts; τ is a mean of means, and pooled."""
    found = acceptance([answer([4, 2, 1, 9]), answer([1, 9]), answer([9]), answer([])])
    assert found["rounds"] == 4
    assert found["tau_mean"] == pytest.approx((7 / 3 + 1) / 2, abs=1e-4)
    assert found["tau_pooled"] == 2.0
    assert found["acceptance_by_offset"] == [0.5, 0.25, 0.25]
    # Of two replies that count any, both drawn or one of them twice: 7/3, 2 and 1.
    assert found["tau_interval"] == [1.0, 2.3333]
    nothing = acceptance([answer([9])])
    assert nothing["tau_interval"] is None
    assert nothing["tau_mean"] is None is nothing["tau_pooled"] and nothing["rounds"] == 0


def test_tau_by_position_goes_by_where_a_round_begins():
    """Tokens 1 to 49, then 50, 60 … 190 and 200: the first token of a reply is the prefill's."""
    found = acceptance([answer([49, *[10] * 15, 3, 1])])["tau_by_position"]
    assert found == [
        {"from": 0, "to": 50, "tau": 49.0, "rounds": 1},
        {"from": 50, "to": 100, "tau": 10.0, "rounds": 5},
        {"from": 100, "to": 200, "tau": 10.0, "rounds": 10},
        {"from": 200, "to": 500, "tau": 3.0, "rounds": 1},
    ]


def test_speeds_and_speedups_by_known_answers():
    """11 tokens, ten of them by rounds; the speedup is the median of the ratios of each repeat."""
    plain = [Point([answer([1] * 10)], 1.0, decode) for decode in (5.0, 10.0, 20.0)]
    ours = [Point([answer([5, 5], hits=1, chances=4)], 1.0, d) for d in (2.5, 2.0, 5.0)]
    found = summarise(ours, plain, devices=2)
    assert found["tokens_per_second_decode"]["median"] == 4.0
    assert found["tokens_per_second_decode_per_device"]["median"] == 2.0
    assert found["speedup_decode"]["median"] == 4.0
    assert found["tokens_per_second_end_to_end"]["median"] == pytest.approx(11 / 3.5, rel=1e-4)
    assert found["speedup_end_to_end"]["median"] == pytest.approx(21 / 6, rel=1e-4)
    assert found["hit_rate"] == 0.25
    assert summarise(ours, None, devices=2)["speedup_decode"] is None
    # One standard error is 1, and t(0.975) of one degree of freedom 12.706.
    assert intervals.student([1.0, 3.0]) == pytest.approx([2 - 12.706, 2 + 12.706], abs=1e-3)
    low, high = intervals.student([2.0, 5.0, 4.0])
    assert found["speedup_decode"]["interval"] == pytest.approx([low, high], rel=1e-4)
    assert summarise(ours[:1], plain[:1], 1)["speedup_decode"]["interval"] is None
    # What a peer says with its prefill is no decoding, however many tokens they are; and nobody
    # knows what its host did.
    said = [dataclasses.replace(answer([5, 2]), token_ids=list(range(11)))]
    peer = Point(said, 1.0, 7.0, None, None, 2, compiled=None, peak_bytes=[None])
    found = summarise([peer], None, 1)
    assert found["tokens_per_second_decode"]["median"] == 1.0
    assert found["round_ms"]["median"] == 3500.0 and found["peak_bytes"] == [None]
    unknown = ("host_ms_per_round", "benchmark_overhead", "compiled_while_timed")
    assert all(found[name] is None for name in unknown)
    assert merged([peer, peer]).host is None and merged([peer, peer]).rounds == 4
    both = summarise([merged(ours[:2])], [merged(plain[:2])], devices=1)
    assert both["tokens"] == 22 and both["replies"] == 2
    assert both["speedup_decode"]["median"] == pytest.approx(15 / 4.5, rel=1e-4)


def test_the_gap_of_a_divergence_is_the_targets_own():
    config, params = models()
    target, _ = roles()
    prompt = [5, 6, 7]
    first, second, *_ = greedy(config, params, prompt, 3)
    scores = target.logits_after([*prompt, first])
    other = int(np.argsort(scores)[-2])
    ours, theirs = answer([1, 1], [first, second, 3]), answer([1], [first, other])
    ours.prompt_ids = prompt
    later = dataclasses.replace(ours, turn=1)
    points = Point([ours, later]), Point([theirs, dataclasses.replace(later)])
    compared, (found,) = divergences(target, *points, [SamplingParams()])
    assert compared == 1, "after a divergence prompts differ"
    assert (found.position, found.plain, found.other) == (1, second, other)
    assert found.logit_gap == pytest.approx(float(scores[second] - scores[other]), rel=1e-5)
    assert found.logit_gap > 0 and not found.near_tie
    assert logit_gap(target, [*prompt, first], (second, second)) == LogitGap(0.0, True)
    longer = answer([1, 1], [first, second, 4])
    cut = answer([1], [first, second])
    _, (found,) = divergences(target, Point([longer]), Point([cut]), [SamplingParams()])
    assert (found.position, found.plain, found.other, found.logit_gap) == (2, 4, None, None)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_what_is_chosen_is_preferred_to_everything_else(temperature):
    target, _ = roles()
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature, seed=3)
    scores = target.logits_after(prompt)[None, None]
    chosen = choose(jax.numpy.asarray(scores), Sampling.of([params]), np.array([[len(prompt)]]))
    chosen = int(np.asarray(chosen)[0, 0])
    gaps = [logit_gap(target, prompt, (chosen, t), params).gap for t in range(61) if t != chosen]
    assert min(gaps) > 0


@pytest.mark.parametrize("mode, concurrency", [("plain", 1), ("sync", 2), ("async", 1)])
def test_a_point_asks_each_turn_after_the_models_own_reply(mode, concurrency):
    config, params = models()
    decoding = bench().warmed(mode, 0.0, concurrency, CONVERSATIONS)
    point = bench().point(decoding, 0.0, CONVERSATIONS)
    assert [(a.conversation, a.turn) for a in point.answers] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    replies = {}
    for found in point.answers:
        before = [replies[found.conversation, turn] for turn in range(found.turn)]
        assert found.prompt_ids == chat(CONVERSATIONS[found.conversation], before)
        assert found.token_ids == greedy(config, params, found.prompt_ids, COUNT)
        assert 1 + sum(found.rounds) == COUNT and found.finish_reason == "length"
        assert (found.chances > 0) == (mode == "async")
        assert 0 < found.first_seconds < found.seconds
        replies[found.conversation, found.turn] = found.token_ids
    assert point.compiled == 0 and point.left_out == 0
    assert point.dispatched > 0 and 0 < point.outside < point.seconds
    assert Point.from_json(dataclasses.asdict(point)) == point


@pytest.mark.parametrize("mode, concurrency", [("async", 1), ("async", 2)])
def test_every_moment_of_a_point_is_of_what_was_waited_for(mode, concurrency, monkeypatch):
    """By a clock that only waiting moves: 1 s for the report of a prompt, 100 s for a round's."""
    decoding = bench().warmed(mode, 0.0, concurrency, CONVERSATIONS)
    clock, rounds, waited = [0.0], [], []
    dispatch, drain = Batch.round, Engine.drain

    def dispatched(self):
        rounds.append(dispatch(self))
        return rounds[-1]

    def wait(report):
        waited.append(any(report is one for one in rounds))
        clock[0] += 100.0 if waited[-1] else 1.0

    def drained(self):
        before = len(waited)
        drain(self)
        del waited[before:]  # off the clock

    monkeypatch.setattr(Batch, "round", dispatched)
    monkeypatch.setattr(Engine, "drain", drained)
    monkeypatch.setattr(engine.jax, "block_until_ready", wait)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock[0])
    point = bench().point(decoding, 0.0, CONVERSATIONS)
    assert point.prefill == waited.count(False) == 6, "every turn has a prompt"
    assert point.decode == 100 * waited.count(True) > 0
    assert point.outside == 0 and (concurrency > 1 or point.decode == 100 * point.rounds)


def test_settings_decode_the_same_prompts_as_far_as_they_are_told():
    """Three prompts in two slots, and nothing is compiled on the clock."""
    config, params = models()
    target, drafter = roles()
    settings = [Setting("plain", 2), Setting("sync", 2, drafter.width)]
    plain, sync = decode(target, drafter, settings, PROMPTS[:3], 8, repeats=2)
    wanted = [greedy(config, params, prompt, 8) for prompt in PROMPTS[:3]]
    for point in (*plain.points, *sync.points):
        assert [a.token_ids for a in point.answers] == wanted and point.compiled == 0
    assert len(plain.points) == len(sync.points) == 2
    assert plain.tau == 1.0 and plain.hit_rate is None is sync.hit_rate


def test_a_turn_that_no_longer_fits_is_left_out_and_counted():
    small = dataclasses.replace(bench(), max_length=24)
    decoding = small.warmed("plain", 0.0, 1, CONVERSATIONS)
    point = small.point(decoding, 0.0, CONVERSATIONS)
    assert point.left_out == 1  # of the third conversation
    assert [(a.conversation, a.turn, len(a.token_ids)) for a in point.answers] == [
        (0, 0, 16), (0, 1, 2), (1, 0, 16), (2, 0, 16), (2, 1, 2),
    ]  # fmt: skip


def test_too_little_memory_is_a_sentence_and_other_failures_are_raised(monkeypatch):
    decoding = bench().warmed("plain", 0.0, 1, CONVERSATIONS)

    def fail(message):
        def measured(*args):
            raise D3DError(message)

        monkeypatch.setattr(benchmark_bench, "measure", measured)

    fail("a device failed while decoding: RESOURCE_EXHAUSTED: out of memory")
    found = bench().point(decoding, 0.0, CONVERSATIONS)
    assert found.startswith("out of memory: a device failed")
    assert bench().point(found, 0.0, CONVERSATIONS) == found
    fail("a device failed while decoding: it caught fire")
    with pytest.raises(D3DError, match="caught fire"):
        bench().point(decoding, 0.0, CONVERSATIONS)


def test_a_cpu_is_one_machine_and_steps_are_timed():
    assert bench().devices("plain") == bench().devices("async") == 1 and bench().shared
    steps = bench().step_times([5, 6, 7], batch=2)
    assert set(steps) == {"plain", "verify", "draft", "prepare", "resolve", "miss"}
    assert all(spread["median"] > 0 for spread in steps.values())
    alone = dataclasses.replace(bench(), drafter=None)
    assert set(alone.step_times([5, 6, 7], batch=1)) == {"plain"}
