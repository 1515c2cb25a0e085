"""The real small model: parity with transformers + torch, and losslessness of every mode."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import d3d_jax
from d3d_jax.config import DecodeConfig
from d3d_jax.drafter import load_drafter
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.loading import load_drafter_role, load_target, shipped_drafter
from d3d_jax.models.registry import resolve_model
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.tiny_models import Documents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "smollm2-135m"
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def folder():
    return resolve_model(NAME)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, jax.devices()[:1])


@pytest.fixture(scope="module")
def prompts(target):
    lines = (Path(d3d_jax.__file__).parent / "assets" / "prompts.jsonl").read_text().splitlines()
    texts = [p["turns"][0] for p in map(json.loads, lines) if p["split"] == "validation"]
    return [target[1].chat([{"role": "user", "content": text}]) for text in texts[:20]]


def test_greedy_output_equals_transformers(folder, target, prompts):
    """20 prompts of up to 128 new tokens, token for token; a near-tie would be shown as one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    stops = list(target[1].stop_ids)
    decoder = Decoder(target[0], None, DecodeConfig(mode="plain", max_new_tokens=128))
    ours = [reply.token_ids for reply in decoder.generate(prompts)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(
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
                logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
            gap = float(logits[theirs[at]] - logits[tokens[at]])
            assert gap < NEAR_TIE, f"differs at token {at} with a logit gap of {gap:.2e}"


@pytest.fixture(scope="module")
def drafter(folder, target):
    home = shipped_drafter(NAME)
    assert home is not None
    return load_drafter_role(home, folder, target[1], jax.devices()[1:])


def test_every_mode_says_the_same(target, drafter, prompts):
    replies = {}
    for mode in ("plain", "sync", "async"):
        decoder = Decoder(target[0], drafter, DecodeConfig(mode=mode, max_new_tokens=64))
        replies[mode] = decoder.generate(prompts[:4])
    for mode in ("sync", "async"):
        for plain, reply in zip(replies["plain"], replies[mode], strict=True):
            assert reply.token_ids == plain.token_ids
            assert reply.finish_reason == plain.finish_reason
    assert sum(r.rounds for r in replies["sync"]) < sum(r.rounds for r in replies["plain"])


def test_offline_tau_of_the_shipped_drafter_is_decoded_tau(folder, target, drafter, prompts):
    decoder = Decoder(target[0], drafter, DecodeConfig(mode="sync", max_new_tokens=64))
    replies = decoder.generate(prompts[4:8])

    documents = Documents(
        [(p, reply.token_ids) for p, reply in zip(prompts[4:8], replies, strict=True)]
    )
    home = shipped_drafter(NAME)
    assert home is not None
    settings, params = load_drafter(home, folder, stacked=True, dtype=np.float32)
    acceptance = OfflineAcceptance(settings, documents, block_size=drafter.width)
    offline = acceptance.measure(jax.device_put(params))
    assert offline.rounds.tolist() == [reply.rounds for reply in replies]
