"""config.json: what is read, what is refused by name, and the way there and back."""

import dataclasses
import json

import jax
import pytest

from d3d_jax.config import ModelConfig, Yarn
from d3d_jax.errors import D3DError
from d3d_jax.models import decoder
from d3d_jax.presets import PRESETS, preset
from tests.tiny_models import tiny_config

# As Qwen3's model cards document it.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SMOLLM2 = json.loads("""{
  "_name_or_path": "a/local/folder", "architectures": ["LlamaForCausalLM"],
  "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
  "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152
}""")
QWEN3_8B = json.loads("""{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
  "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}""")
# One of each kind that matters for the way there and back.
CONFIGS = {
    "qwen3": tiny_config(),
    "llama": tiny_config("llama", head_dim=8, tie_word_embeddings=True),
    "qwen3 yarn": tiny_config(rope_theta=5e6, rope_scaling=Yarn(4.0, 128)),
    "llama yarn": tiny_config("llama", rope_scaling=Yarn(2.5, 128, 1.25, 16, 2, truncate=False)),
}


@pytest.mark.parametrize(
    "raw, name",
    [(SMOLLM2, "HuggingFaceTB/SmolLM2-135M-Instruct"), (QWEN3_8B, "Qwen/Qwen3-8B")],
)
def test_released_files_are_read(raw, name):
    assert ModelConfig.from_hf(raw) == preset(name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_there_and_back(config):
    # Through JSON: that is what lies between the two.
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_reads_ours_and_we_read_theirs(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rope = theirs.rope_parameters
    assert rope["rope_theta"] == config.rope_theta
    if config.rope_scaling is None:
        assert rope["rope_type"] == "default"
    else:
        stated = {"attention_factor": None, "beta_fast": 32, "beta_slow": 1, "truncate": True}
        stated |= {k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")}
        assert rope["rope_type"] == "yarn" and Yarn(**stated) == config.rope_scaling
    theirs.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert ModelConfig.from_hf(written) == config


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}},
        {"rope_scaling": {**YARN, "attention_factor": None, "mscale": None}},
        {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {}},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {**YARN, "beta_fast": 32}},
    ],
    ids=str,
)
def test_yarn_in_every_spelling(change):
    config = ModelConfig.from_hf(QWEN3_8B | change)
    expected = dataclasses.replace(preset("Qwen/Qwen3-8B"), rope_scaling=Yarn(4.0, 32768))
    assert config == expected
    assert config.max_length == 131072


def test_the_longest_sequence():
    assert tiny_config().max_length == 512
    assert tiny_config(rope_scaling=Yarn(2.5, 100)).max_length == 250


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        ({"rope_theta": None}, "'rope_theta' is missing"),
        ({"head_dim": None}, "'head_dim' is missing"),
        ({"num_key_value_heads": None}, "'num_key_value_heads' is missing"),
        ({"tie_word_embeddings": None}, "'tie_word_embeddings' is missing"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; supported are qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": "32"}, "hidden_size must be a positive int, found '32'"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive int"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive int"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive float, found nan"),
        ({"rope_theta": 1}, "rope_theta must be greater than 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*it must be absent"),
        ({"num_experts": 8}, "num_experts = 8 .* must be absent"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size = 64"),
        ({"mlp_only_layers": []}, "mlp_only_layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*'sliding_att"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM"]}, "must be a Qwen3ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"logit_scale": 0.5}, r"unknown field 'logit_scale' = 0\.5; it may change"),
        ({"auto_map": {}, "residual": 1}, "unknown field 'auto_map' = {}, 'residual' = 1"),
    ],
    ids=str,
)
def test_fields_are_refused_by_name(change, message):
    raw = {k: v for k, v in (tiny_config().to_hf() | change).items() if v is not None}
    with pytest.raises(D3DError, match=message):
        ModelConfig.from_hf(raw)


def test_a_null_field_is_an_absent_one():
    nulls = dict.fromkeys(("logit_scale", "quantization_config", "layer_types", "architectures"))
    assert ModelConfig.from_hf(tiny_config().to_hf() | nulls) == tiny_config()


def test_llama_files_may_leave_out_what_the_format_defines():
    raw = SMOLLM2 | {"num_key_value_heads": None}
    assert ModelConfig.from_hf(raw).num_key_value_heads == 9
    assert ModelConfig.from_hf(raw).head_dim == 64
    with pytest.raises(D3DError, match="hidden_size must be a multiple of num_attention_heads"):
        ModelConfig.from_hf(raw | {"hidden_size": 577})


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_type": "linear"}, "rope_type 'linear' is not supported"),
        ({"rope_type": "dynamic"}, "'dynamic'"),
        ({"rope_type": "llama3"}, "'llama3'"),
        ({"rope_type": "longrope"}, "'longrope'"),
        ({"rope_type": None, "type": "linear"}, "'linear'"),
        ({"type": "linear"}, "has rope_type 'yarn' and type 'linear'"),
        ({"rope_type": None}, "rope_type 'default' has the unsupported key 'factor'"),
        ({"mscale": 1.0}, r"unsupported key 'mscale' = 1\.0; supported are rope_type"),
        ({"full_attention": {}}, "unsupported key 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"original_max_position_embeddings": None}, "no 'original_max_position_embeddings'"),
        ({"factor": None}, "no 'factor'"),
        ({"factor": 0.5}, r"factor must be a number of at least 1, found 0\.5"),
        ({"factor": True}, "factor must be a number of at least 1, found True"),
        ({"factor": float("inf")}, "factor must be a number"),
        ({"original_max_position_embeddings": 2.5}, r"positive whole number, found 2\.5"),
        ({"attention_factor": 0}, "attention_factor must be a positive number, found 0"),
        ({"beta_fast": "32"}, "beta_fast must be a positive number, found '32'"),
        ({"beta_slow": 0}, "beta_slow must be a positive number, found 0"),
        ({"beta_slow": 64}, "beta_fast must be at least beta_slow 64, found 32"),
        ({"truncate": 1}, "truncate must be true or false, found 1"),
        ({"rope_theta": 7.0}, r"rope_theta = 1000000 and .*rope_theta = 7\.0 contradict"),
    ],
    ids=str,
)
def test_rotary_sections_are_refused_by_name(section, change, message):
    with pytest.raises(D3DError, match=message):
        ModelConfig.from_hf(QWEN3_8B | {section: YARN | change})


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"rope_scaling": {**YARN, "truncate": None}},
            "truncate must be true or false, found None",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, found 'yarn'"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
            r"rope_scaling = Yarn\(factor=4.* and rope_parameters = Yarn\(factor=2.* contradict",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters = None contradict",
        ),
        ({"original_max_position_embeddings": 32768}, "unknown field 'original_max"),
    ],
    ids=str,
)
def test_rotary_contradictions_are_refused(change, message):
    with pytest.raises(D3DError, match=message):
        ModelConfig.from_hf(QWEN3_8B | change)


def test_configurations_made_in_code_are_checked():
    with pytest.raises(D3DError, match="rope_scaling must be a Yarn or None"):
        tiny_config(rope_scaling={"factor": 4.0})
    with pytest.raises(D3DError, match="factor must be a number of at least 1"):
        Yarn(0.5, 32)


# Distinct parameters as published: a tied head counts once.
@pytest.mark.parametrize(
    "name, count",
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen3-4B-Thinking-2507", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    config = preset(name)
    shapes = jax.eval_shape(lambda key: decoder.init_params(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_presets_by_name():
    assert len(PRESETS) == 9
    longer = preset("Qwen/Qwen3-4B-Instruct-2507")
    assert (longer.rope_theta, longer.max_length) == (5e6, 262144)
    with pytest.raises(D3DError, match=r"no preset 'Qwen/Qwen3-9B'; known are .*Qwen/Qwen3-8B"):
        preset("Qwen/Qwen3-9B")
