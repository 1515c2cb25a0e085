"""A tiny random llama GGUF file for tests, written with the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "l l", "Ã ©", "1 2"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 512,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED_FORWARD,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    quant: Quant = Quant.F32,
    metadata: Mapping[str, Any] = METADATA,
    drop: Collection[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes the file; returns what each of its tensors means in float32, by GGUF name.

    Matrices are stored as `quant`, norms as float32. `drop` omits tensors, `extra` adds some.
    """
    tensors = _random_tensors(tied) | dict(extra or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    meaning = {}
    for name, tensor in tensors.items():
        if name in drop:
            continue
        kind = quant if tensor.ndim == 2 else Quant.F32
        data = quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meaning[name] = dequantize(data, kind).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def _random_tensors(tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (queries, HIDDEN),
            f"blk.{i}.attn_k.weight": (keys, HIDDEN),
            f"blk.{i}.attn_v.weight": (keys, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, queries),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    return {
        name: (rng.normal(size=shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
