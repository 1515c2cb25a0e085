"""Continuous batching: requests that come, go and end early, each saying what it would alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import acceptance, layout
from d3d_jax.branches import Rectangle
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer import engine as engines
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.engine import Engine
from d3d_jax.infer.role import Piece
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder
from d3d_jax.models.sharding import make_mesh
from d3d_jax.sampling import SamplingParams
from tests.infer.test_decoding import LENGTH, PROMPTS, expected, models, roles
from tests.tiny_models import VOCAB, greedy, tiny_config, tiny_drafter, tiny_params

MODES = ["plain", "sync", "async"]
OTHERS = [[9, 8, 7, 6], [50], [1, 2, 3, 4, 5, 6]]


@functools.cache
def alone(prompt, count):
    config, params = models()
    return greedy(config, params, list(prompt), count)


def drain(engine):
    while engine.unfinished:
        engine.step()
    return [reply.token_ids for reply in engine.results().values()]


@pytest.mark.parametrize("miss", ["stall", "reuse"])
@pytest.mark.parametrize("mode", MODES)
def test_requests_join_and_leave_without_recompiling(mode, miss):
    if miss == "reuse" and mode != "async":
        pytest.skip("nothing is prepared")
    target, drafter = roles.__wrapped__()
    engine = Engine(target, drafter, DecodeConfig(mode=mode, miss=miss), slots=2)
    # Another length of chunk is another program of the passes that read, and of those alone.
    prompts = PROMPTS + OTHERS + [list(range(50)) * 2]
    asked = list(zip(prompts, itertools.cycle([LENGTH, 3, 11, 1, 7]), strict=False))

    def submit(requests):
        for prompt, count in requests:
            engine.submit(prompt, SamplingParams(max_new_tokens=count))

    submit(asked[:3])
    for _ in range(4):
        engine.step()
    submit(asked[3:])
    wanted = [alone(tuple(prompt), count) for prompt, count in asked]
    assert drain(engine) == wanted
    steps = [target._prefill, target._verify, drafter._prefill, drafter._first]
    steps += [drafter._draft, drafter._prepare, drafter._resolve]
    compiled = [step._cache_size() for step in steps]
    decoding = {"plain": 0, "sync": 3, "async": 4}[mode]
    assert [size for size in compiled if size] == [2, 1, *([2, 1, 1, 1][:decoding])]
    submit(asked)
    assert drain(engine) == wanted * 2
    assert [step._cache_size() for step in steps] == compiled
    assert engine.step() == []


@pytest.mark.parametrize("mode", MODES)
def test_every_moment_belongs_to_the_report_that_is_read_next(mode, monkeypatch):
    """By a clock that only waiting moves: 1 s for a piece of a prompt, 100 s for a round."""
    target, drafter = roles()

    def pairs(slot, prompt):
        for start in range(0, len(prompt), 2):
            yield Piece(slot, start, prompt[start : start + 2], start + 2 >= len(prompt))

    monkeypatch.setattr(engines, "pieces", pairs)
    clock, rounds, waited, dispatch = [0.0], [], [], Batch.round

    def dispatched(self):
        rounds.append(dispatch(self))
        return rounds[-1]

    def wait(report):
        waited.append(any(report is one for one in rounds))
        clock[0] += 100.0 if waited[-1] else 1.0

    monkeypatch.setattr(Batch, "round", dispatched)
    monkeypatch.setattr(engines.jax, "block_until_ready", wait)
    monkeypatch.setattr(engines.time, "perf_counter", lambda: clock[0])
    engine = Engine(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH), slots=3)
    for prompt in PROMPTS[:3]:
        engine.submit(prompt)
    drain(engine)
    clock[0] += 5000.0  # nobody's: nothing is under way
    engine.submit(PROMPTS[0])
    drain(engine)
    read = sum(-(-len(prompt) // 2) for prompt in [*PROMPTS[:3], PROMPTS[0]])
    assert engine.timing.prefill == waited.count(False) == read > 4
    assert engine.timing.decode == 100 * waited.count(True) > 0


def test_reuse_never_waits():
    """No conditional, which XLA:GPU would decide on the host; hits and misses both occur."""
    target, drafter = roles()
    decoding = Decoder(target, drafter, DecodeConfig("async", LENGTH, miss="reuse"))
    replies = decoding.generate(PROMPTS)
    assert [reply.token_ids for reply in replies] == expected()
    assert 0 < sum(r.hits for r in replies) < sum(r.chances for r in replies)
    engine = Engine(target, drafter, DecodeConfig("async", LENGTH), slots=4)
    for prompt in PROMPTS:
        engine.submit(prompt)
    engine.step()
    drafts, hidden, prepared = drafter.prepare(engine._batch.drafts)
    report = drafter.put(np.zeros((4, drafter.width + acceptance.TOKENS), np.int32))
    arrays = (prepared.anchors, prepared.offsets, prepared.outcome)

    def text(miss):
        args = (drafter.weights, drafts.cache, hidden, arrays, report)
        return drafter._resolve.lower(*args, miss=miss).compile().as_text()

    assert "conditional" in text("stall") and "conditional" not in text("reuse")


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_row_leaves_the_others_as_they_are(mode):
    target, drafter = roles()
    engine = Engine(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH), slots=4)
    numbers = [engine.submit(prompt) for prompt in PROMPTS]
    numbers.append(engine.submit(OTHERS[0]))
    waiting = engine.submit(OTHERS[1])
    while len(engine.results()[numbers[1]].token_ids) < 5:
        engine.step()
    engine.cancel(numbers[1])
    engine.cancel(waiting)
    told = list(engine.results()[numbers[1]].token_ids)
    while engine.unfinished:
        assert numbers[1] not in dict(engine.step())
    replies = engine.results()
    cut = replies[numbers[1]]
    assert cut.finish_reason == "cancelled" and cut.token_ids == told == expected()[1][: len(told)]
    assert replies[waiting].finish_reason == "cancelled" and replies[waiting].token_ids == []
    for number, prompt in zip([0, 2, 3, 4], [PROMPTS[0], *PROMPTS[2:], OTHERS[0]], strict=True):
        assert replies[number].token_ids == alone(tuple(prompt), LENGTH)


@pytest.mark.parametrize("mode", MODES)
def test_a_device_error_is_one_sentence_and_loses_nothing_read(mode, monkeypatch):
    target, drafter = roles()
    engine = Engine(target, drafter, DecodeConfig(mode=mode, max_new_tokens=LENGTH), slots=2)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=2))
    for prompt in PROMPTS[1:]:
        engine.submit(prompt)
    while engine.results()[0].finish_reason is None:
        engine.step()
    engine.step()

    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: out of luck\nmore")

    role = Target if mode == "plain" else type(drafter)
    step = {"plain": "_verify", "sync": "_draft", "async": "_resolve"}[mode]
    monkeypatch.setattr(target if role is Target else drafter, step, fail)
    with pytest.raises(D3DError, match="INTERNAL: out of luck; 1 replies are complete"):
        while engine.unfinished:
            engine.step()
    engine.cancel(2)
    for step in (engine.step, lambda: engine.submit([1])):
        with pytest.raises(D3DError, match="a device failed"):
            step()
    assert engine.results()[0].token_ids == expected()[0][:2]
    told = engine.results()[1].token_ids
    assert told and told == expected()[1][: len(told)]


def test_a_reply_is_taken_once_and_a_prompt_copied():
    target, _ = roles()
    engine = Engine(target, None, DecodeConfig("plain", 4), slots=1)
    history = list(PROMPTS[0])
    first, second = engine.submit(np.array(PROMPTS[1])), engine.submit(history)
    history.append(10**6)
    with pytest.raises(D3DError, match="request 1 has not ended"):
        engine.take(second)
    drain(engine)
    assert engine.take(first).token_ids == alone(tuple(PROMPTS[1]), 4)
    assert list(engine.results()) == [second]
    assert engine.take(second).token_ids == alone(tuple(PROMPTS[0]), 4)
    with pytest.raises(D3DError, match="there is no request 1"):
        engine.take(second)
    assert engine.submit(PROMPTS[0]) == 2


def test_what_cannot_be_decoded_is_refused_at_once(monkeypatch):
    target, drafter = roles()
    with pytest.raises(D3DError, match="slots must be a whole number of at least 1, found 0"):
        Engine(target, drafter, DecodeConfig(mode="sync"), slots=0)
    with pytest.raises(D3DError, match="needs a drafter"):
        Engine(target, None, DecodeConfig(mode="sync"), slots=1)
    engine = Engine(target, None, DecodeConfig(mode="plain"), slots=1)
    with pytest.raises(D3DError, match="prompt 1 has 512 tokens"):
        engine.submit([1] * 512)
    with pytest.raises(D3DError, match="stop strings need a tokenizer"):
        engine.submit([1], SamplingParams(stop=("a",)))
    with pytest.raises(D3DError, match="takes SamplingParams"):
        engine.submit([1], {"temperature": 1})
    with pytest.raises(D3DError, match="there is no request 7"):
        engine.cancel(7)
    with pytest.raises(D3DError, match="slots must be"):
        Decoder(target, None, DecodeConfig("plain"), slots=0)
    with pytest.raises(D3DError, match="2 sampling settings for 1 prompts"):
        Decoder(target, None, DecodeConfig("plain")).stream([[1]], [SamplingParams()] * 2)
    monkeypatch.setattr(engines.jax, "process_index", lambda: 1)
    with pytest.raises(D3DError, match="decoding runs in one process"):
        Engine(target, None, DecodeConfig(mode="plain"), slots=1)


@functools.cache
def long_roles():
    config = tiny_config(max_position_embeddings=2048)
    params = tiny_params(config, seed=4, scale=16.0)
    return config, params, Target(config, decoder.unstack(params), make_mesh(jax.devices()[:1]), ())


@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.slow), "async"])
def test_long_prompts_are_read_in_chunks_beside_rows_that_decode(mode, monkeypatch):
    """1,300 tokens in three chunks, one between two rounds; every length about a chunk's end."""
    monkeypatch.setattr(engines, "PREFILL_TOKENS", 512)
    config, params, target = long_roles()
    drafter = roles()[1]
    engine = Engine(target, drafter, DecodeConfig(mode=mode, max_new_tokens=20), slots=2)
    done = []
    read, verify = Batch.read, Batch.round

    def noted(name, step):
        def run(self, *args):
            done.append(name if name == "round" else sum(len(piece.tokens) for piece in args[0]))
            return step(self, *args)

        return run

    monkeypatch.setattr(Batch, "read", noted("read", read))
    monkeypatch.setattr(Batch, "round", noted("round", verify))
    rng = np.random.default_rng(0)
    lengths = [3, 1300, 511, 512, 513]
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    engine.submit(prompts[0])
    engine.step()
    for prompt in prompts[1:]:
        engine.submit(prompt)
    replies = drain(engine)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply == greedy(config, params, prompt, 20)
    # The first request decodes while the second is read.
    assert done[:8] == [3, "round", "round", 512, "round", 512, "round", 276]


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=LENGTH),
    SamplingParams(temperature=0.7, top_k=12, seed=2, max_new_tokens=LENGTH),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02, seed=3, max_new_tokens=LENGTH),
    SamplingParams(max_new_tokens=LENGTH),
]


@functools.cache
def sampled_alone():
    """Each prompt decoded plainly on its own."""
    target, _ = roles()
    decoding = Decoder(target, None, DecodeConfig(mode="plain"))
    pairs = zip(PROMPTS, SAMPLED, strict=True)
    return [decoding.generate([prompt], [params])[0].token_ids for prompt, params in pairs]


@pytest.mark.parametrize("mode, slots", [("plain", 4), ("sync", 4), ("async", 4), ("async", 3)])
def test_promise_3_sampling_says_the_same_in_every_mode_and_batch(mode, slots):
    decoding = Decoder(*roles(), DecodeConfig(mode=mode), slots=slots)
    replies = decoding.generate(PROMPTS, SAMPLED)
    assert [reply.token_ids for reply in replies] == sampled_alone()
    assert replies[3].token_ids == expected()[3]
    assert [r.token_ids for r in replies[:3]] != expected()[:3]


@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.slow), "async"])
def test_sampled_tokens_have_the_targets_distribution(mode):
    """Two tokens after a prompt, 1,536 seeds, against the exact probability of every pair."""
    vocab, seeds, temperature = 5, 1536, 0.8
    config = tiny_config(vocab_size=vocab, num_hidden_layers=1)
    params = tiny_params(config, seed=2, scale=2.0)
    target = Target(config, decoder.unstack(params), make_mesh(jax.devices()[:1]), ())
    drafter = tiny_role(config, params)
    prompt = [3, 1]
    decoding = Decoder(target, drafter, DecodeConfig(mode=mode), slots=512)
    settings = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=2)
        for seed in range(seeds)
    ]
    said = decoding.generate([prompt] * seeds, settings)
    counts = np.zeros((vocab, vocab))
    for reply in said:
        counts[tuple(reply.token_ids)] += 1
    probabilities = exact_pairs(config, params, prompt, temperature)
    assert probabilities.min() > 1e-4
    statistic = np.sum((counts - seeds * probabilities) ** 2 / (seeds * probabilities))
    # 24 degrees of freedom: above 51 with probability 0.1 %; the seeds are fixed.
    assert statistic < 51
    uniform = np.full_like(probabilities, 1 / vocab**2)
    assert np.sum((counts - seeds * uniform) ** 2 / (seeds * uniform)) > 200


def tiny_role(config, params):
    drafter, own = tiny_drafter(config, params, layers=(0,))
    mesh = make_mesh(jax.devices()[:1])
    return DrafterRole(drafter, decoder.unstack(own), mesh, Rectangle(3, 1, 4))


def exact_pairs(config, params, prompt, temperature):
    """P(first, second) of the target by enumeration."""

    def next_probabilities(tokens):
        rows = layout.causal(jnp.zeros((1,), jnp.int32), len(tokens))
        hidden, _ = decoder.forward(config, params, jnp.array([tokens]), rows)
        scores = decoder.logits(params, hidden[:, -1])[0]
        return np.asarray(jax.nn.softmax(scores / temperature), np.float64)

    first = next_probabilities(prompt)
    after = [next_probabilities([*prompt, token]) for token in range(len(first))]
    return first[:, None] * np.stack(after)
