"""`d3d export`: drafters as folders that transformers and d3d read without their target."""

import dataclasses

import jax
import numpy as np
import pytest

from d3d_jax.cli import main
from d3d_jax.drafter import read_drafter, save_drafter
from d3d_jax.models import checkpoint, checkpoint_writing
from d3d_jax.models.sharding import make_mesh
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.acceptance import OfflineAcceptance
from tests.models.tiny_gguf import TOKENS
from tests.tiny_folders import write_drafter, write_target, write_tokenizer
from tests.tiny_models import Documents, tiny_config, tiny_params


@pytest.fixture(params=["untied", "tied", "reduced vocabulary"])
def home(request, tmp_path):
    """A target and a drafter of its second layer whose mask vector is no row of the embedding."""
    if request.param == "tied":
        config = tiny_config(
            vocab_size=len(TOKENS) + 4, num_hidden_layers=2, tie_word_embeddings=True
        )
        params = jax.tree.map(np.asarray, tiny_params(config))
        files = dict(write_tokenizer(tmp_path / "tokenizer"))
        checkpoint_writing.save_model(tmp_path / "target", config, params, extra_files=files)
    else:
        write_target(tmp_path / "target")
    vocab = np.arange(9) if request.param == "reduced vocabulary" else None
    write_drafter(tmp_path / "made", tmp_path / "target", vocab=vocab)
    drafter, params = read_drafter(tmp_path / "made", tmp_path / "target", stacked=True)
    params["mask"] = np.linspace(-1, 1, len(params["mask"]), dtype=np.float32)
    config = dataclasses.replace(drafter.drafter, calibration=(0.5,) * 4, pruned_layers=(1,))
    drafter = dataclasses.replace(drafter, drafter=config)
    save_drafter(tmp_path / "drafter", drafter, params)
    return tmp_path


def export(home, *args):
    return main(
        [
            "export",
            *("--target", str(home / "target")),
            *("--drafter", str(home / "drafter")),
            *("--out", str(home / "out")),
            *args,
        ]
    )


def test_transformers_reads_an_exported_drafter_as_a_model_with_fewer_layers(home, capsys):
    transformers = pytest.importorskip("transformers")
    assert export(home) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        home / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    target = checkpoint.load_params(
        home / "target", checkpoint.read_config(home / "target")[0], stacked=True
    )
    drafter, own = read_drafter(home / "drafter", home / "target", stacked=True)
    embed = loaded.get_input_embeddings().weight.detach().numpy()
    mask = drafter.drafter.mask_token_id
    np.testing.assert_array_equal(embed[mask], own["mask"])
    np.testing.assert_array_equal(np.delete(embed, mask, 0), np.delete(target["embed"], mask, 0))
    if "head" in target:
        np.testing.assert_array_equal(loaded.lm_head.weight.detach().numpy(), target["head"])
    assert len(loaded.model.layers) == 1
    assert Tokenizer.from_folder(home / "out").fingerprint == drafter.drafter.tokenizer_fingerprint
    assert export(home) == 2
    assert "out exists already" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [None, 2])
def test_an_exported_drafter_is_read_without_its_target(home, devices):
    assert export(home) == 0
    drafter, own = read_drafter(home / "drafter", home / "target", stacked=True)
    mesh = None if devices is None else make_mesh(jax.devices()[:devices], tensor=devices)
    found, params = read_drafter(home / "out", None, stacked=True, mesh=mesh)
    reduced = drafter.drafter.draft_vocab_size is not None
    assert found == dataclasses.replace(
        drafter,
        drafter=dataclasses.replace(
            drafter.drafter,
            shares=(),
            draft_vocab_size=None,
            calibration=None if reduced else drafter.drafter.calibration,
        ),
    )
    for name in ("layers", "norm", "mask"):
        jax.tree.map(np.testing.assert_array_equal, params[name], own[name])
    # It drafts the same.
    if not reduced and found.model.tie_word_embeddings is False and devices is None:
        documents = Documents([([5, 6, 7], list(range(8, 30))), ([2], [9] * 12)])
        ours, theirs = (
            OfflineAcceptance(which, documents).observe(weights, 2)[1]
            for which, weights in ((drafter, own), (found, params))
        )
        np.testing.assert_array_equal(ours.candidate_ids, theirs.candidate_ids)
        np.testing.assert_array_equal(ours.log_probs, theirs.log_probs)
    # What was trained further is saved with a mask of its own again.
    if devices is None:
        save_drafter(home / "again", found, params)
        again, same = read_drafter(home / "again", None, stacked=True)
        assert again == found
        jax.tree.map(np.testing.assert_array_equal, same, params)


def test_weights_are_written_in_another_type(home):
    assert export(home, "--dtype", "bfloat16") == 0
    _, params = read_drafter(home / "out", None, stacked=True)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
