"""The real small model: parity with transformers + torch, and losslessness of every mode."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import d3d_jax
from d3d_jax.drafter import read_drafter
from d3d_jax.infer.loading import load_drafter, shipped_drafter
from d3d_jax.infer.model import load_model
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.tiny_models import Documents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
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
    """20 prompts of up to 128 new tokens, token for token; a near-tie would be shown as one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, torch_dtype=torch.float32
    )
    stops = list(model.tokenizer.stop_ids)
    decoder = model.decoder(mode="plain", max_new_tokens=128)
    ours = [reply.token_ids for reply in decoder.generate(prompts)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = theirs_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=128,
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
