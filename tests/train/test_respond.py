"""Answering prompts: the same tokens in any batch, order and part, and what an end leaves."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil

import jax
import pytest

from d3d_jax import files
from d3d_jax.commands.respond import ensure_dataset
from d3d_jax.errors import D3DError
from d3d_jax.infer.target import Target
from d3d_jax.models import decoder
from d3d_jax.models.sharding import make_mesh
from d3d_jax.sampling import SamplingParams
from d3d_jax.train import respond as respond_module
from d3d_jax.train import responses
from d3d_jax.train.dataset import open_dataset
from d3d_jax.train.respond import Asked, prompt_seed, respond
from d3d_jax.train.responses import ResponseWriter, read_responses
from tests.infer.test_decoding import models
from tests.tiny_models import VOCAB, greedy
from tests.train.test_responses import MANIFEST

LIMIT = 12
ASKED = [Asked(i * 3, [(i * 7 + j) % VOCAB for j in range(2 + i % 5)], None, "t") for i in range(9)]
SAMPLED = SamplingParams(temperature=1.5, top_k=20, seed=3)


@functools.cache
def target():
    config, params = models()
    return Target(config, decoder.unstack(params), make_mesh(jax.devices()[:1]), (7,))


def answers(folder, asked=ASKED, batch=4, sampling=None, **part):
    """What is in the folder after answering, by index."""
    manifest = dataclasses.replace(MANIFEST, vocab_size=VOCAB, stop_ids=(7,), max_new_tokens=LIMIT)
    writer = ResponseWriter(folder, manifest, **part)
    asked = [one for one in asked if one.index not in writer.done]
    respond(target(), asked, writer, batch=batch, sampling=sampling)
    return {r.index: r for r in read_responses(folder)}


def test_greedy_answers_are_plain_decodings(tmp_path):
    config, params = models()
    for index, response in answers(tmp_path).items():
        asked = ASKED[index // 3]
        want = greedy(config, params, asked.ids, LIMIT, stop_ids=(7,))
        assert (response.prompt_ids, response.response_ids) == (asked.ids, want)
        assert response.finish_reason == ("stop" if want[-1] == 7 else "length")
        assert response.task == "t"


def test_a_sampled_answer_depends_on_its_index_and_the_seed_alone(tmp_path, monkeypatch):
    whole = answers(tmp_path / "whole", sampling=SAMPLED)
    assert {len(r.response_ids) for r in whole.values()} != {LIMIT}, "some end at the stop token"
    monkeypatch.setattr(respond_module, "WINDOW", 2)
    # Two parts, one after the other, then the rest by one.
    for part in (0, 1):
        share = [one for one in ASKED[:6] if one.index % 2 == part]
        answers(tmp_path / "parts", share, 2, SAMPLED, part=part, parts=2)
    assert answers(tmp_path / "parts", ASKED, 2, SAMPLED) == whole
    other = answers(tmp_path / "other", sampling=dataclasses.replace(SAMPLED, seed=4))
    assert all(other[i].response_ids != whole[i].response_ids for i in whole)


def test_the_same_prompt_is_answered_otherwise_at_another_index(tmp_path):
    twice = [Asked(0, [5, 6, 7]), Asked(1, [5, 6, 7])]
    first, second = answers(tmp_path, twice, sampling=SAMPLED).values()
    assert first.response_ids != second.response_ids
    assert len({prompt_seed(seed, index) for seed in range(30) for index in range(30)}) == 900


def test_the_longest_prompt_of_a_window_is_first_and_no_other_window_is_read_yet(
    tmp_path, monkeypatch
):
    read = []

    def source():
        for one in ASKED:
            read.append(one.index)
            yield one

    submitted = []
    monkeypatch.setattr(respond_module, "WINDOW", 4)
    engine = respond_module.Decoder.engine

    def spied(self, requests):
        made = engine(self, requests)
        submit = made.submit

        def noted(ids, params):
            submitted.append((len(ids), len(read)))
            return submit(ids, params)

        made.submit = noted
        return made

    monkeypatch.setattr(respond_module.Decoder, "engine", spied)
    writer = ResponseWriter(
        tmp_path, dataclasses.replace(MANIFEST, vocab_size=VOCAB, max_new_tokens=4)
    )
    respond(target(), source(), writer, batch=4)
    lengths = [length for length, _ in submitted]
    assert lengths == [5, 4, 3, 2, 6, 4, 3, 2, 5]
    assert submitted[0][1] == 4, "nothing beyond the first window is read before it is needed"


def test_an_interrupt_keeps_what_was_answered(tmp_path):
    manifest = dataclasses.replace(MANIFEST, vocab_size=VOCAB, stop_ids=(7,), max_new_tokens=LIMIT)

    def interrupt(tokens):
        if len(writer.done) >= 3:
            raise KeyboardInterrupt

    writer = ResponseWriter(tmp_path, manifest)
    with pytest.raises(KeyboardInterrupt):
        respond(target(), ASKED, writer, batch=4, progress=interrupt)
    kept = {r.index: r for r in read_responses(tmp_path)}
    assert 3 <= len(kept) < len(ASKED)
    assert answers(tmp_path) == answers(tmp_path / "straight")


def test_a_full_disk_ends_the_run_and_what_was_written_stays(tmp_path, monkeypatch):
    fsync, room = os.fsync, iter(range(4))

    def full_disk(descriptor):
        if next(room, None) is None:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full_disk)
        patch.setattr(responses, "_FLUSH_SECONDS", -1.0)
        with pytest.raises(D3DError, match="No space left on device"):
            answers(tmp_path / "full")
    kept = list(read_responses(tmp_path / "full"))
    assert len(kept) == 3, "the manifest, and a response a shard"
    assert answers(tmp_path / "full") == answers(tmp_path / "straight")


CHANGES = {"other lengths": [5, 6, 2], "other tokens": [6, 2]}


@pytest.mark.parametrize("change", ["another seed", "other indices", *CHANGES, "nothing"])
def test_a_dataset_of_other_responses_is_built_again(tmp_path, change):
    manifest = dataclasses.replace(MANIFEST, sampling={"greedy": False, "seed": 1})

    def write(manifest, indices, tokens):
        with ResponseWriter(tmp_path, manifest) as writer:
            for index in indices:
                writer.add(index, [1, 2], tokens, "stop", "train")

    write(manifest, range(3), [5, 2])
    dataset = ensure_dataset(tmp_path)
    made = (dataset / "lengths.npz").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "responses")
    if change == "another seed":
        manifest = dataclasses.replace(manifest, sampling={"greedy": False, "seed": 2})
    indices = range(1, 4) if change == "other indices" else range(3)
    write(manifest, indices, CHANGES.get(change, [5, 2]))
    assert ensure_dataset(tmp_path) == dataset
    assert open_dataset(dataset, "train").manifest == manifest
    assert (made == (dataset / "lengths.npz").stat().st_mtime_ns) == (change == "nothing")
