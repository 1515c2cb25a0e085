"""Every stop id that a folder's generation_config.json lists ends a reply, as in transformers."""

import json

import pytest

from d3d_jax.infer.loading import load_drafter
from d3d_jax.infer.model import load_model
from tests.tiny_folders import write_drafter, write_target

PROMPT = [5, 6, 7]
NEW_TOKENS = 12
# Where in the reply the two stops stand; between them nothing repeats them.
FIRST, SECOND = 4, 8


def reference(folder, prompt):
    """What transformers' own greedy `generate` says, with the settings of the folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A target with two stop ids, its drafter, two prompts and the replies they must get."""
    root = tmp_path_factory.mktemp("stops")
    target = write_target(root / "target")
    write_drafter(root / "drafter", target)
    free = reference(target, PROMPT)
    stops = [free[SECOND], free[FIRST]]
    assert len(free) == NEW_TOKENS and stops[0] not in free[:SECOND]
    assert stops[1] not in free[:FIRST] + free[FIRST + 1 : SECOND]
    changes = {"generation_config.json": stops, "config.json": stops[0]}  # as Qwen3 has them
    for name, stop in changes.items():
        fields = json.loads((target / name).read_text()) | {"eos_token_id": stop}
        (target / name).write_text(json.dumps(fields))
    prompts = [PROMPT, PROMPT + free[: FIRST + 1]]
    replies = [free[: FIRST + 1], free[FIRST + 1 : SECOND + 1]]
    return root, prompts, replies


def test_transformers_stops_at_each(case):
    root, prompts, replies = case
    assert [reference(root / "target", prompt) for prompt in prompts] == replies


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_decoding_stops_at_each(case, mode):
    root, prompts, replies = case
    model, drafter = load_model(root / "target"), None
    if mode != "plain":
        drafter = load_drafter(model, root / "drafter")
    made = model.decoder(drafter, mode=mode, max_new_tokens=NEW_TOKENS).generate(prompts)
    assert [reply.token_ids for reply in made] == replies
    assert [reply.finish_reason for reply in made] == ["stop", "stop"]
