"""The real small model: parity with transformers + torch, and losslessness of every mode."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import d3d_jax
from d3d_jax import layout
from d3d_jax.config import DecodeConfig
from d3d_jax.drafter import read_drafter
from d3d_jax.infer.batch import Batch
from d3d_jax.infer.loading import load_drafter, shipped_drafter
from d3d_jax.infer.model import load_model
from d3d_jax.infer.role import CHUNKS, pieces
from d3d_jax.models import decoder
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.tiny_models import Documents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("optimized"),
]
NAME = "smollm2-135m"
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def model():
    return load_model(NAME)


@pytest.fixture(scope="module")
def prompts(model):
    lines = (Path(d3d_jax.__file__).parent / "assets" / "prompts.jsonl").read_text().splitlines()
    texts = [p["turns"][0] for p in map(json.loads, lines) if p["split"] == "validation"]
    return [model.tokenizer.chat([{"role": "user", "content": text}]) for text in texts[:20]]


def test_greedy_output_equals_transformers(model, prompts):
    """4 prompts of up to 96 new tokens, token for token; a near-tie would be shown as one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, torch_dtype=torch.float32
    )
    stops = list(model.tokenizer.stop_ids)
    decoder = model.decoder(mode="plain", max_new_tokens=96)
    ours = [reply.token_ids for reply in decoder.generate(prompts[:4])]
    for prompt, tokens in zip(prompts[:4], ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = theirs_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=96,
                eos_token_id=stops,
                pad_token_id=stops[0],
            )
        theirs = output[0, len(prompt) :].tolist()
        if tokens != theirs:
            at = next(i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b)
            with torch.no_grad():
                logits = theirs_model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
            gap = float(logits[theirs[at]] - logits[tokens[at]])
            assert gap < NEAR_TIE, f"differs at token {at} with a logit gap of {gap:.2e}"


@pytest.fixture(scope="module")
def drafter(model):
    return load_drafter(model)


def test_every_mode_says_the_same(model, drafter, prompts):
    replies = {}
    for mode in ("plain", "sync", "async"):
        decoder = model.decoder(drafter, mode=mode, max_new_tokens=64)
        replies[mode] = decoder.generate(prompts[:4])
    for mode in ("sync", "async"):
        for plain, reply in zip(replies["plain"], replies[mode], strict=True):
            assert reply.token_ids == plain.token_ids
            assert reply.finish_reason == plain.finish_reason
    assert sum(r.rounds for r in replies["sync"]) < sum(r.rounds for r in replies["plain"])


def test_modes_sample_the_same(model, drafter, prompts):
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=seed, max_new_tokens=48)
        for seed in range(4)
    ]
    said = [
        model.decoder(drafter, mode=mode, slots=slots).generate(prompts[:4], sampling)
        for mode, slots in (("plain", 1), ("sync", 4), ("async", 3))
    ]
    plain, *others = [[reply.token_ids for reply in replies] for replies in said]
    assert others == [plain] * 2
    assert plain != [
        reply.token_ids for reply in model.decoder(max_new_tokens=48).generate(prompts[:4])
    ]


def test_a_prompt_of_eight_thousand_tokens_is_read_in_chunks(model, drafter, prompts):
    """The model's limit is 8,192; what is said after it is what one whole pass says."""
    ids = [token for prompt in prompts * 20 for token in prompt][:8000]
    async_decoder = model.decoder(drafter, mode="async", max_new_tokens=8)
    said = async_decoder.generate([ids])[0].token_ids
    assert len(said) > 1
    tokens = jnp.array([ids + said[:-1]])
    rows = layout.causal(jnp.zeros((1,), jnp.int32), tokens.shape[1])
    forward = jax.jit(lambda params: decoder.forward(model.config, params, tokens, rows)[0])
    hidden = forward(model.target.params)[:, len(ids) - 1 :]
    scores = decoder.logits(model.target.params, hidden)
    assert said == scores.argmax(axis=-1)[0].tolist()


def test_steps_need_a_tenth_more_memory_than_weights_and_caches(model, drafter):
    """What each compiled step allocates beside its arguments, at batch 1 and 16."""
    drawn = SamplingParams(temperature=1.0, top_p=0.9)
    for slots, sampling in ((1, SamplingParams()), (16, drawn)):
        batch = Batch(model.target, drafter, DecodeConfig("async"), slots, capacity=1024)
        batch.configure([sampling] * slots, [9] * slots)
        target, state, drafts = model.target, batch.state, batch.drafts
        (chunk,) = target.chunks(pieces(0, [1] * CHUNKS[-1]), slots)
        (drafter_chunk,) = drafter.chunks(pieces(0, [1] * CHUNKS[-1]), slots)
        block = target.put(batch.handover)
        steps = {
            "verify": target._verify.lower(target.weights, state, batch.settings, block),
            "read": target._prefill.lower(target.weights, state, batch.settings, chunk),
            "prepare": drafter._prepare.lower(drafter.weights, drafts.cache, drafts.block),
            "draft's read": drafter._prefill.lower(drafter.weights, drafts.cache, drafter_chunk),
        }
        held = sum(
            leaf.nbytes
            for leaf in jax.tree.leaves((target.params, drafter.params, state.cache, drafts.cache))
        )
        for name, step in steps.items():
            memory = step.compile().memory_analysis()
            assert memory.temp_size_in_bytes < 0.1 * held, name


def test_offline_tau_of_the_shipped_drafter_is_decoded_tau(model, drafter, prompts):
    decoder = model.decoder(drafter, mode="sync", max_new_tokens=64)
    replies = decoder.generate(prompts[4:8])

    documents = Documents(
        [(p, reply.token_ids) for p, reply in zip(prompts[4:8], replies, strict=True)]
    )
    home = shipped_drafter(NAME)
    assert home is not None
    settings, params = read_drafter(home, model.folder, stacked=True, dtype=np.float32)
    acceptance = OfflineAcceptance(settings, documents, block_size=drafter.width)
    offline = acceptance.measure(jax.device_put(params))
    assert offline.rounds.tolist() == [reply.rounds for reply in replies]
