"""Hugging Face folders: the key table, bitwise round trips, sharded reading, damaged files."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, checkpoint_writing, decoder, parameters, sharding
from d3d_jax.models.safetensors_folder import SafetensorsFolder
from d3d_jax.presets import preset
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params

CONFIGS = {
    "qwen3 tied": tiny_config(tie_word_embeddings=True),
    "qwen3 untied": tiny_config(num_attention_heads=8, head_dim=8),
    "llama tied": tiny_config("llama", head_dim=8, tie_word_embeddings=True),
}


def host_params(config, dtype=np.float32):
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tiny_params(config))


def save(folder, config, **options):
    params = host_params(config)
    checkpoint_writing.save_model(folder, config, params, **options)
    return params


def assert_same(got, expected):
    """Bit for bit, types included."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_the_paths_and_shapes_of_the_modules(name):
    config = CONFIGS[name]
    expected = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    got = parameters.abstract(config, stacked=True, dtype=jnp.float32)
    assert jax.tree.map(lambda x: x.shape, got) == jax.tree.map(lambda x: x.shape, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_exactly_the_keys_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    raw = transformers.AutoConfig.for_model(**config.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(raw)
    model.save_pretrained(tmp_path / "theirs")
    keys = [
        row.key.format(layer)
        for row in parameters.stored(config)
        for layer in (range(config.num_hidden_layers) if row.in_layer else [None])
    ]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(load_file(tmp_path / "theirs/model.safetensors"))


def test_tensors_of_published_checkpoints_are_counted():
    for name, count in (("Qwen/Qwen3-8B", 399), ("Qwen/Qwen3-32B", 707), ("Qwen/Qwen3-4B", 398)):
        config = preset(name)
        rows = parameters.stored(config)
        layers = sum(row.in_layer for row in rows)
        assert len(rows) - layers + layers * config.num_hidden_layers == count


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_bitwise_in_files_of_any_size(name, dtype, tmp_path):
    config = CONFIGS[name]
    params = host_params(config, dtype)
    checkpoint_writing.save_model(tmp_path / "one", config, params)
    checkpoint_writing.save_model(tmp_path / "many", config, params, max_shard_bytes=20_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one/model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for folder in ("one", "many"):
        assert checkpoint.read_config(tmp_path / folder) == (config, None)
        assert_same(checkpoint.load_params(tmp_path / folder, config, stacked=True), params)
    per_layer = checkpoint.load_params(tmp_path / "many", config, stacked=False)
    assert_same(per_layer, jax.device_get(decoder.unstack(params)))
    # And from the per-layer form, which roles hold.
    checkpoint_writing.save_model(tmp_path / "again", config, per_layer)
    assert_same(checkpoint.load_params(tmp_path / "again", config, stacked=True), params)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_mesh_gets_its_shards_and_each_byte_is_read_once(stacked, tmp_path, monkeypatch):
    config = tiny_config(num_attention_heads=8, head_dim=8, vocab_size=64)
    params = save(tmp_path / "model", config, max_shard_bytes=20_000)
    mesh = sharding.make_mesh(jax.devices(), fsdp=2, tensor=4)
    mesh = sharding.model_mesh(mesh, config)
    read, plain = [], SafetensorsFolder.read

    def recorded(*args):
        part = plain(*args)
        read.append(part.size)
        return part

    monkeypatch.setattr(SafetensorsFolder, "read", recorded)
    got = checkpoint.load_params(tmp_path / "model", config, stacked=stacked, mesh=mesh)
    # kv heads are held by two devices each and vectors by all, and still read once.
    assert sum(read) == sum(leaf.size for leaf in jax.tree.leaves(params))
    largest = max(leaf.size for leaf in jax.tree.leaves(params["layers"])) // 3
    assert max(read) == max(largest, params["embed"].size) // 8
    assert_same(got, params if stacked else jax.device_get(decoder.unstack(params)))
    jax.tree.map(
        lambda leaf, where: leaf.sharding == where or pytest.fail(f"{leaf.sharding}, not {where}"),
        got,
        parameters.shardings(got, mesh),
    )
    # Written back from the mesh they are the same file.
    checkpoint_writing.save_model(tmp_path / "back", config, got)
    assert_same(checkpoint.load_params(tmp_path / "back", config, stacked=True), params)


def test_transformers_reads_what_is_written_and_writes_what_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = CONFIGS["qwen3 untied"]
    params = save(tmp_path / "ours", config, max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", torch_dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert checkpoint.read_config(tmp_path / "theirs") == (config, None)
    assert_same(checkpoint.load_params(tmp_path / "theirs", config, stacked=True), params)


def test_a_pruned_model_writes_fewer_layers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CONFIGS["llama tied"]
    params = host_params(config)
    params["layers"] = jax.tree.map(lambda leaf: leaf[np.array([0, 2])], params["layers"])
    checkpoint_writing.save_model(tmp_path / "model", config, params)
    written, _ = checkpoint.read_config(tmp_path / "model")
    assert written == dataclasses.replace(config, num_hidden_layers=2)
    assert_same(checkpoint.load_params(tmp_path / "model", written, stacked=True), params)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert len(loaded.model.layers) == 2
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_types_are_kept_or_cast(tmp_path):
    config = CONFIGS["qwen3 tied"]
    params = host_params(config)
    drafter, own = tiny_drafter(config, params, vocab=np.arange(9), shares=("embed", "head"))
    own = {k: v for k, v in own.items() if k not in ("embed", "head")}
    section = drafter.drafter
    checkpoint_writing.save_model(
        tmp_path / "model", drafter.model, own, drafter=section, dtype=jnp.bfloat16
    )
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"
    kept = checkpoint.load_params(tmp_path / "model", drafter.model, stacked=True, drafter=section)
    assert kept["norm"].dtype == ml_dtypes.bfloat16 and kept["draft_vocab"].dtype == np.int32
    mesh = sharding.model_mesh(sharding.make_mesh(jax.devices()[:2], tensor=2), config)
    for where in (None, mesh):
        wide = checkpoint.load_params(
            tmp_path / "model",
            drafter.model,
            stacked=False,
            mesh=where,
            drafter=section,
            dtype=np.float32,
        )
        floats = {k: v for k, v in wide.items() if k != "draft_vocab"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(floats)} == {"float32"}
        assert wide["draft_vocab"].dtype == np.int32


def rewrite(folder, change):
    """Changes the tensors of a folder of one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_tied_head_that_is_stored_again_must_be_the_embedding(tmp_path):
    config = dataclasses.replace(CONFIGS["qwen3 tied"], vocab_size=200)
    params = save(tmp_path / "model", config)
    embed = params["embed"]
    rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": embed.copy()}))
    assert_same(checkpoint.load_params(tmp_path / "model", config, stacked=True), params)
    # Rows are sampled: a head that was trained by itself differs in all of them.
    other = embed + np.arange(200, dtype=np.float32)[:, None]
    rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": other}))
    with pytest.raises(D3DError, match=r"model\.safetensors: tensor lm_head\.weight.*row 3.*true"):
        checkpoint.load_params(tmp_path / "model", config, stacked=True)


UP = "model.layers.1.mlp.up_proj.weight"
BAD_TENSORS = {
    "missing": (lambda t: t.pop(UP), rf"tensor {UP} is missing"),
    "shape": (
        lambda t: t.update({UP: t[UP][:, :-1].copy()}),
        rf"safetensors: tensor {UP} has shape \(48, 31\), the config says \(48, 32\)",
    ),
    "type": (
        lambda t: t.update({UP: t[UP].astype(np.int8)}),
        rf"safetensors: tensor {UP} is stored as I8; expected is one of F32, BF16, F16",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(4, np.float32)}),
        r"tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place",
    ),
    "no head": (
        lambda t: t.pop("lm_head.weight"),
        r"lm_head\.weight is missing.*tie_word_embeddings = false",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(case, tmp_path):
    change, message = BAD_TENSORS[case]
    config = CONFIGS["qwen3 untied"]
    save(tmp_path / "model", config)
    rewrite(tmp_path / "model", change)
    with pytest.raises(D3DError, match=message):
        checkpoint.load_params(tmp_path / "model", config, stacked=True)


def test_damaged_files_are_named(tmp_path):
    config = CONFIGS["qwen3 tied"]
    folder = tmp_path / "model"
    save(folder, config, max_shard_bytes=20_000)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    shards = sorted(folder.glob("*.safetensors"))

    def refused(message):
        with pytest.raises(D3DError, match=message):
            checkpoint.load_params(folder, config, stacked=True)

    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-100])
    size = len(content)
    refused(rf"{shards[1].name} is truncated: it has {size - 100} bytes, its header says {size}")
    shards[1].write_bytes(content[:5])
    refused(rf"{shards[1].name} is damaged")
    shards[1].unlink()
    key = min(k for k, v in json.loads(text)["weight_map"].items() if v == shards[1].name)
    refused(rf"index\.json names {shards[1].name} \(for {key}\), and there is no such file")
    shards[1].write_bytes(content)
    swapped = json.loads(text)
    swapped["weight_map"]["model.norm.weight"] = shards[0].name
    index.write_text(json.dumps(swapped))
    refused(rf"says {shards[0].name} holds model\.norm\.weight, which is in {shards[-1].name}")
    for damaged in (text[:40], "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
        index.write_text(damaged)
        refused(r"index\.json is damaged")
    index.unlink()
    refused(r"has no weights: model\.safetensors\.index\.json is missing")
    for shard in shards:
        shard.unlink()
    refused(r"has no weights: model\.safetensors is missing")
    with pytest.raises(D3DError, match=r"no config\.json"):
        checkpoint.read_config(tmp_path)


def test_shards_and_index_must_agree(tmp_path):
    config = CONFIGS["qwen3 tied"]
    folder = tmp_path / "model"
    params = save(folder, config, max_shard_bytes=20_000)
    shards = sorted(folder.glob("*.safetensors"))
    tensors = load_file(shards[1])
    key = min(tensors)
    save_file(load_file(shards[0]) | {key: tensors[key]}, shards[0])
    with pytest.raises(D3DError, match=rf"{shards[1].name} holds {key}, and so does"):
        checkpoint.load_params(folder, config, stacked=True)
    # A whole file beside the shards is what transformers would read.
    save(tmp_path / "whole", config)
    shutil.copy(tmp_path / "whole/model.safetensors", folder)
    assert_same(checkpoint.load_params(folder, config, stacked=True), params)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(D3DError, match=r"model\.safetensors\.index\.json is missing"):
        checkpoint.load_params(folder, config, stacked=True)
    many = dataclasses.replace(config, num_hidden_layers=10**9)
    with pytest.raises(D3DError, match="says 1000000000 layers"):
        checkpoint.load_params(tmp_path / "whole", many, stacked=True)


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(partial):
        (partial / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(D3DError, match="disk full"):
        checkpoint_writing.write_folder(tmp_path / "out", fail)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "out", CONFIGS["qwen3 tied"])
    with pytest.raises(D3DError, match="exists already"):
        save(tmp_path / "out", CONFIGS["qwen3 tied"])
