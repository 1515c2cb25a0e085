"""Hugging Face's `config.json` ↔ `ModelConfig`: which fields are read, ignored and refused.

Every field of a file is in one of the tables below or is refused by name: a field this package does
not know may change the mathematics. Mappings only; `d3d_jax.models.checkpoint` does the files.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from d3d_jax.config import ARCHITECTURES, ModelConfig, Yarn
from d3d_jax.errors import D3DError

_READ = frozenset(field.name for field in dataclasses.fields(ModelConfig)) | {
    "architectures",
    "layer_types",
    "rope_parameters",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
# A value other than this (or null) changes the mathematics in a way this decoder does not do.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    # Fields that must be absent.
    "cross_attention_hidden_size": None,
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "decoder_sparse_step": None,
    "mlp_only_layers": None,
}
# What says nothing about the forward pass at inference. A sliding window counts only together with
# use_sliding_window, and transformers computes the same whatever pretraining_tp is.
_IGNORED = frozenset(
    """
    d3d transformers_version transformers.js_config dtype torch_dtype initializer_range
    attention_dropout use_cache pretraining_tp sliding_window max_window_layers is_llama_config
    unsloth_fixed unsloth_version
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    name_or_path tokenizer_class prefix finetuning_task task_specific_params problem_type
    id2label label2id num_labels is_decoder return_dict output_attentions output_hidden_states
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)
_YARN_KEYS = tuple(field.name for field in dataclasses.fields(Yarn))
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a `config.json` mapping.

    Raises:
      D3DError: a field is missing, contradicts another, is unknown, or has a value this decoder
        does not support.
    """
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise D3DError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _check_fields(config, model_type)
    values = {}
    for name in _REQUIRED:
        if config.get(name) is None:
            raise D3DError(f"config.json: field {name!r} is missing")
        values[name] = config[name]
    theta, scaling = _rope(config)
    return ModelConfig(
        model_type=model_type,
        rope_theta=theta,
        rope_scaling=scaling,
        **_heads(config, model_type),
        **values,
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` mapping, with the rotary fields where every transformers since 4.51 reads.

    transformers 5 moves `rope_theta` and `rope_scaling` into `rope_parameters` itself.
    """
    fields = {
        "architectures": [ARCHITECTURES[model.model_type]],
        **dataclasses.asdict(model),
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if (yarn := model.rope_scaling) is not None:
        stated = {
            field.name: getattr(yarn, field.name)
            for field in dataclasses.fields(yarn)
            if getattr(yarn, field.name) != field.default
        }
        fields["rope_scaling"] = {"rope_type": "yarn", **stated}
    return fields


def _check_fields(config: Mapping[str, Any], model_type: str) -> None:
    """Refuses, by name, what this decoder would compute differently from the model's own code."""
    for name, expected in _FIXED.items():
        value = config.get(name)
        if value is not None and value != expected:
            must = "absent" if expected is None else repr(expected)
            raise D3DError(
                f"config.json: {name} = {reprlib.repr(value)} is not supported; it must be {must}"
            )
    architectures = config.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[model_type]]:
        raise D3DError(
            f"config.json: architectures = {architectures!r} is not supported; a {model_type} "
            f"checkpoint must be a {ARCHITECTURES[model_type]}"
        )
    layer_types = config.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}
    ):
        raise D3DError(
            f"config.json: layer_types = {layer_types!r} is not supported; every layer must be "
            "'full_attention'"
        )
    known = _READ | _IGNORED | _FIXED.keys()
    unknown = [
        f"{name!r} = {reprlib.repr(value)}"
        for name, value in config.items()
        if value is not None and name not in known and not name.startswith("_")
    ]
    if unknown:
        raise D3DError(
            f"config.json: unknown field {', '.join(unknown)}; it may change what the model "
            "computes, so remove it only if you know that it does not"
        )


def _heads(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """`num_key_value_heads` and `head_dim`.

    A Llama config may leave them out and then means as many kv heads as heads, and H = D / N.
    """
    found = {name: config.get(name) for name in ("num_key_value_heads", "head_dim")}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    for name, value in found.items():
        if value is None and model_type != "llama":
            raise D3DError(f"config.json: field {name!r} is missing")
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = heads
    if found["head_dim"] is None:
        if type(heads) is not int or type(width) is not int or heads < 1 or width % heads:
            raise D3DError(
                f"config.json: without head_dim, hidden_size must be a multiple of "
                f"num_attention_heads, found {width!r} and {heads!r}"
            )
        found["head_dim"] = width // heads
    return found


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Theta and YaRN: top-level fields in older files, `rope_parameters` since transformers 5."""
    thetas, scalings = {}, {}
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        if section is None or section == {}:
            continue
        if not isinstance(section, Mapping):
            raise D3DError(f"config.json: {name} must be an object, found {section!r}")
        scalings[name] = _yarn(name, section)
        if section.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = section["rope_theta"]
    for found in (thetas, scalings):
        first = next(iter(found.values()), None)
        if any(value != first for value in found.values()):
            both = " and ".join(f"{name} = {value!r}" for name, value in found.items())
            raise D3DError(f"config.json: {both} contradict each other; keep one")
    if not thetas:
        raise D3DError("config.json: field 'rope_theta' is missing")
    return next(iter(thetas.values())), next(iter(scalings.values()), None)


def _yarn(name: str, section: Mapping[str, Any]) -> Yarn | None:
    """The section's YaRN, or None where it is the plain rotary embedding."""
    kinds = [section[key] for key in ("rope_type", "type") if section.get(key) is not None]
    kind = kinds[0] if kinds else "default"
    for other in kinds:
        if other != kind:
            raise D3DError(f"config.json: {name} has rope_type {kind!r} and type {other!r}")
    if kind not in ("default", "yarn"):
        raise D3DError(
            f"config.json: {name} of rope_type {kind!r} is not supported; supported are "
            "'default' and 'yarn'"
        )
    known = _ROPE_KEYS if kind == "default" else _ROPE_KEYS + _YARN_KEYS
    for key, value in section.items():
        if value is not None and key not in known:
            raise D3DError(
                f"config.json: {name} of rope_type {kind!r} has the unsupported key "
                f"{key!r} = {reprlib.repr(value)}; supported are {', '.join(known)}"
            )
    if section.get("partial_rotary_factor") not in (None, 1.0):
        raise D3DError(
            f"config.json: {name}.partial_rotary_factor = {section['partial_rotary_factor']!r} is "
            "not supported; it must be 1.0"
        )
    if kind == "default":
        return None
    # A null `truncate` would mean false to transformers, not the default: it is left to be refused.
    stated = {
        key: section[key]
        for key in _YARN_KEYS
        if section.get(key) is not None or (key == "truncate" and key in section)
    }
    for key in ("factor", "original_max_position_embeddings"):
        if key not in stated:
            raise D3DError(f"config.json: {name} of rope_type 'yarn' has no {key!r}: add it")
    return Yarn(**stated)
