"""Reading llama-architecture GGUF files: `convert_gguf` turns one into a Hugging Face folder.

Here: the tensor table, the metadata that becomes config.json, the tokenizer rebuilt from the
vocabulary and merges. Not here: where GGUF files come from and where folders are kept
(registry.py), how a folder is read (the checkpoint loader, tokenizer.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from d3d_jax.errors import D3DError

# GGUF name -> (Hugging Face name, shape [out, in] in dimension letters, the config field that
# counts the heads whose rows are interleaved in the file, or None). D hidden, F feed-forward,
# V vocabulary; Q and K are the rows of all query and all key heads.
_MODEL_TENSORS = {
    "token_embd.weight": ("model.embed_tokens.weight", "VD", None),
    "output_norm.weight": ("model.norm.weight", "D", None),
}
_HEAD_TENSOR = {"output.weight": ("lm_head.weight", "VD", None)}
_LAYER_TENSORS = {
    "attn_norm.weight": ("input_layernorm.weight", "D", None),
    "attn_q.weight": ("self_attn.q_proj.weight", "QD", "num_attention_heads"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KD", "num_key_value_heads"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KD", None),
    "attn_output.weight": ("self_attn.o_proj.weight", "DQ", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "D", None),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FD", None),
    "ffn_up.weight": ("mlp.up_proj.weight", "FD", None),
    "ffn_down.weight": ("mlp.down_proj.weight", "DF", None),
}

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type

_TensorTable = dict[str, tuple[str, tuple[int, ...], int | None]]


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Writes `out_dir`, a Hugging Face folder with the dequantised float32 model of a GGUF file.

    The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors, and appears complete or not at all. It must not exist yet, or be empty.

    Raises:
      D3DError: the file is missing, damaged or of another architecture; it lacks a metadata key
        or a tensor, or holds an unknown one; `out_dir` is in use or there is no room for it.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise D3DError(f"{out_dir} already exists; choose a new folder to convert {gguf_path} into")
    reader = _open(gguf_path)
    meta = _Metadata(gguf_path, reader)
    config = _model_config(meta, tied=all(t.name not in _HEAD_TENSOR for t in reader.tensors))
    tokenizer = _build_tokenizer(meta)
    tokenizer_config = _tokenizer_config(meta, config)
    table = _tensor_table(config)
    _check_tensors(meta, reader, table)

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.tmp-", dir=out_dir.parent))
    try:
        _write_json(staging / "config.json", config)
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(staging / "generation_config.json", ids)
        (staging / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        _write_json(staging / "tokenizer_config.json", tokenizer_config)
        _write_weights(meta, reader, table, staging / "model.safetensors")
        staging.chmod(0o755)  # mkdtemp and safetensors make what only the user may read
        (staging / "model.safetensors").chmod(0o644)
        os.replace(staging, out_dir)
    except BaseException:
        shutil.rmtree(staging)
        raise


class _Reader(GGUFReader):
    """A reader that stops at the end of the file, where its parent reads empty values on and on."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise D3DError(f"there is no GGUF file {path}; check the path")
    try:
        return _Reader(path)
    # The reader has no error of its own: what a damaged file raises depends on where it is damaged.
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise D3DError(f"{path} is not a complete GGUF file ({error}); fetch it again") from error
    except OSError as error:
        raise D3DError(f"cannot read {path}: {error.strerror}") from error


class _Metadata:
    """The key-value section of a GGUF file; a missing key is an error, never a default."""

    def __init__(self, path: Path, reader: GGUFReader):
        self.path = path
        self._fields = reader.fields

    def get(self, key: str) -> Any:
        if key not in self._fields:
            raise self.error(f"it lacks the metadata key {key}")
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise self.error(f"the text under the metadata key {key} is damaged") from error

    def optional(self, key: str) -> Any:
        return self.get(key) if key in self._fields else None

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or value < minimum:
            raise self.error(f"the metadata key {key} is {value!r}, not a number from {minimum}")
        return value

    def error(self, what: str) -> D3DError:
        return D3DError(f"cannot read {self.path}: {what}; use a complete GGUF of a llama model")


def _model_config(meta: _Metadata, tied: bool) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, every number of it taken from the file."""
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise meta.error(f"its architecture is {architecture!r}, not 'llama'")
    if meta.optional("llama.expert_count"):
        raise meta.error("it is a mixture of experts")
    if meta.optional("llama.rope.scaling.type") not in (None, "none"):
        raise meta.error("it scales its rotary embedding")
    head_dim = meta.integer("llama.rope.dimension_count")
    if head_dim % 2 or (meta.optional("llama.attention.key_length") or head_dim) != head_dim:
        raise meta.error(f"its rotary embedding covers {head_dim} numbers, not a whole head")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta.get("tokenizer.ggml.tokens")),
        "hidden_size": meta.integer("llama.embedding_length"),
        "intermediate_size": meta.integer("llama.feed_forward_length"),
        "num_hidden_layers": meta.integer("llama.block_count"),
        "num_attention_heads": meta.integer("llama.attention.head_count"),
        "num_key_value_heads": meta.integer("llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": _shortest(meta.get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(meta.get("llama.rope.freq_base")),
        "max_position_embeddings": meta.integer("llama.context_length"),
        "tie_word_embeddings": tied,
        "bos_token_id": meta.integer("tokenizer.ggml.bos_token_id", 0),
        "eos_token_id": meta.integer("tokenizer.ggml.eos_token_id", 0),
        "pad_token_id": meta.optional("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _tensor_table(config: dict[str, Any]) -> _TensorTable:
    """GGUF name -> (Hugging Face name, shape, heads to un-interleave or None), for every tensor."""
    dims = {
        "V": config["vocab_size"],
        "D": config["hidden_size"],
        "F": config["intermediate_size"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
    }
    named = dict(_MODEL_TENSORS if config["tie_word_embeddings"] else _MODEL_TENSORS | _HEAD_TENSOR)
    for layer in range(config["num_hidden_layers"]):
        for name, (hf_name, letters, heads) in _LAYER_TENSORS.items():
            named[f"blk.{layer}.{name}"] = (f"model.layers.{layer}.{hf_name}", letters, heads)
    return {
        name: (hf_name, tuple(dims[c] for c in letters), config[heads] if heads else None)
        for name, (hf_name, letters, heads) in named.items()
    }


def _check_tensors(meta: _Metadata, reader: GGUFReader, table: _TensorTable) -> None:
    found = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    if unknown := sorted(found.keys() - table.keys()):
        raise meta.error(f"it holds tensors that no llama has ({', '.join(unknown[:5])})")
    if missing := sorted(table.keys() - found.keys()):
        raise meta.error(f"it lacks the tensors {', '.join(missing[:5])}")
    for name, (_, shape, _) in table.items():
        if found[name] != shape:
            raise meta.error(f"tensor {name} has shape {found[name]}, its metadata say {shape}")


def _write_weights(meta: _Metadata, reader: GGUFReader, table: _TensorTable, out: Path) -> None:
    tensors = {}
    for tensor in reader.tensors:
        hf_name, shape, heads = table[tensor.name]
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise meta.error(f"tensor {tensor.name} is stored as unreadable {kind}") from error
        if not np.isfinite(weight).all():
            raise meta.error(f"it is damaged: tensor {tensor.name} holds NaN or infinity")
        weight = weight.reshape(shape)
        if heads is not None:
            weight = _uninterleave(weight, heads)
        tensors[hf_name] = np.ascontiguousarray(weight)
    try:
        save_file(tensors, out, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, too
        raise D3DError(f"cannot write the converted model ({error}); make room for it") from error


def _uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head [x0 y0 x1 y1 …] -> [x0 x1 … y0 y1 …]; (x_i, y_i) is a rotary pair.

    GGUF keeps the two rows of a pair side by side; Hugging Face keeps them half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _build_tokenizer(meta: _Metadata) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of the file."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise meta.error(f"its tokenizer is ({kind}, {pre}), and only (gpt2, smollm) is known")
    if meta.optional("tokenizer.ggml.add_bos_token"):
        raise meta.error("its tokenizer puts a token before every text")
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise meta.error("its vocabulary is damaged (repeated tokens, or tokens without a type)")
    if odd := set(types) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise meta.error(f"its vocabulary has tokens of the unknown types {sorted(odd)}")
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise meta.error("its merges are damaged (one is not a pair)")
    try:
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the only type that tokenizers raises
        raise meta.error(f"its merges do not fit its vocabulary ({error})") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _tokenizer_config(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    tokens = meta.get("tokenizer.ggml.tokens")
    named = {
        "bos_token": config["bos_token_id"],
        "eos_token": config["eos_token_id"],
        "pad_token": config["pad_token_id"],
        "unk_token": meta.optional("tokenizer.ggml.unknown_token_id"),
    }
    for name, index in named.items():
        if index is not None and not 0 <= index < len(tokens):
            raise meta.error(f"its {name} {index} lies outside its vocabulary of {len(tokens)}")
    return {
        # This class takes tokenizer.json as it is; the model-specific ones rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in named.items() if i is not None},
        "chat_template": meta.get("tokenizer.chat_template"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
