"""Configurations of released models by hub id: to describe, plan and compile without their files.

Loading a model never looks here: it reads the folder's own config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from d3d_jax.config import ModelConfig
from d3d_jax.errors import D3DError


def _qwen3(width: int, mlp: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )


_QWEN3_4B = _qwen3(2560, 9728, 36, 32, tied=True)
_QWEN3_4B_2507 = dataclasses.replace(_QWEN3_4B, rope_theta=5e6, max_position_embeddings=262144)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
        "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
        "Qwen/Qwen3-4B": _QWEN3_4B,
        "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B_2507,
        "Qwen/Qwen3-4B-Thinking-2507": _QWEN3_4B_2507,
        "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
        "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
        "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
        "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
            model_type="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=1e5,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        ),
    }
)


def preset(name: str) -> ModelConfig:
    """The configuration of a released model.

    Args:
      name: its hub id, as in `PRESETS`.

    Raises:
      D3DError: there is no such preset; the sentence names those there are.
    """
    if name not in PRESETS:
        raise D3DError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]
