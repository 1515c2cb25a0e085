"""Frozen configuration dataclasses: what a model, a drafter and a decoding run are.

Nothing here reads files or touches a device; `d3d_jax.models.checkpoint` reads and writes the JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from d3d_jax.errors import D3DError

InBlock = Literal["bidirectional", "causal"]
Mode = Literal["plain", "sync", "async"]

_REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# A value outside its set changes the mathematics in a way this decoder does not implement.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0, None),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a dense decoder, under the names of Hugging Face's `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.model_type not in _ARCHITECTURES:
            raise D3DError(
                f"model_type {self.model_type!r} is not supported; "
                f"supported are {', '.join(_ARCHITECTURES)}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = {"int": (int,), "float": (int, float)}.get(str(field.type))
            if kinds and (not isinstance(value, kinds) or isinstance(value, bool) or value <= 0):
                raise D3DError(
                    f"config field {field.name} must be a positive {field.type}, found {value!r}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise D3DError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise D3DError(f"head_dim {self.head_dim} must be even for the rotary embedding")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head before the rotary embedding; Llama does not."""
        return self.model_type == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` mapping.

        Raises:
          D3DError: a field that the mathematics needs is missing, or asks for something that this
            decoder does not do (sliding window, rope scaling, biases, other model types).
        """
        model_type = config.get("model_type")
        if model_type not in _ARCHITECTURES:
            raise D3DError(
                f"config.json: model_type {model_type!r} is not supported; "
                f"supported are {', '.join(_ARCHITECTURES)}"
            )
        for name, allowed in _SUPPORTED_VALUES.items():
            if config.get(name) not in allowed:
                raise D3DError(f"config.json: {name} = {config[name]!r} is not supported")
        values = {}
        for name in _REQUIRED_FIELDS:
            if config.get(name) is None:
                raise D3DError(f"config.json: field {name!r} is missing")
            values[name] = config[name]
        heads = values["num_attention_heads"]
        if not isinstance(heads, int) or heads < 1:
            raise D3DError(f"config field num_attention_heads must be positive, found {heads!r}")
        # Absent in Llama configs by that format's own rule: as many kv heads as heads, D = N·H.
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or values["hidden_size"] // heads
        if model_type == "qwen3" and not config.get("head_dim"):
            raise D3DError("config.json: field 'head_dim' is missing")
        if "tie_word_embeddings" not in config:
            raise D3DError("config.json: field 'tie_word_embeddings' is missing")
        return cls(
            model_type=model_type,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=_rope_theta(config),
            tie_word_embeddings=bool(config["tie_word_embeddings"]),
            **values,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping that transformers and this package read back."""
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            **dataclasses.asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
        }


def _rope_theta(config: Mapping[str, Any]) -> float:
    """transformers 5 nests theta under `rope_parameters`; older writers put it at the top level."""
    nested = config.get("rope_parameters") or {}
    kind = nested.get("rope_type", "default")
    if kind != "default":
        raise D3DError(f"config.json: rope_parameters.rope_type {kind!r} is not supported")
    theta = config.get("rope_theta", nested.get("rope_theta"))
    if theta is None:
        raise D3DError("config.json: field 'rope_theta' is missing")
    return theta


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """What a drafter adds to its `ModelConfig`; the `d3d` section of its `config.json`.

    Attributes:
      block_size: W, rows of a block including the anchor; decoding may use any size up to it.
      mask_token_id: the reserved id whose row the mask vector takes on export.
      label_shift: 0: the slot at offset i predicts the token at offset i; 1: at offset i + 1.
      in_block: whether the rows of a block see each other both ways or causally.
      target: name of the target model whose responses it learnt.
      tokenizer_fingerprint, template_fingerprint: of the target's tokenizer and chat template.
      source_layers: indices of the layers it was initialised from.
      shares: parameters that are the target's own and are not stored with the drafter.
      draft_vocab_size: size of the reduced output vocabulary, or None for the whole one.
      num_anchors: K, anchors sampled per response in training; 0 for an untrained drafter.
    """

    block_size: int
    mask_token_id: int
    label_shift: int
    in_block: InBlock
    target: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    source_layers: tuple[int, ...]
    shares: tuple[str, ...]
    draft_vocab_size: int | None
    num_anchors: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "mask_token_id", "label_shift", "num_anchors"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise D3DError(f"drafter field {name} must be a whole number, found {value!r}")
        if self.block_size < 2:
            raise D3DError(f"block_size must be at least 2, found {self.block_size}")
        if self.label_shift not in (0, 1):
            raise D3DError(f"label_shift must be 0 or 1, found {self.label_shift}")
        if self.in_block not in ("bidirectional", "causal"):
            raise D3DError(f"in_block must be bidirectional or causal, found {self.in_block!r}")
        if self.draft_vocab_size is not None and "head" not in self.shares:
            raise D3DError("a draft vocabulary selects rows of the target's head: share 'head' too")
        unknown = set(self.shares) - {"embed", "head"}
        if unknown:
            raise D3DError(f"shares may name embed and head, found {sorted(unknown)}")

    @classmethod
    def from_json(cls, section: Mapping[str, Any]) -> DrafterConfig:
        """Reads the `d3d` section; unknown or missing fields raise `D3DError` by name."""
        if not isinstance(section, Mapping):
            raise D3DError("config.json: section 'd3d' is not an object of drafter fields")
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(section) - set(known)):
            raise D3DError(f"config.json: unknown drafter field {unknown[0]!r} in section 'd3d'")
        required = {n for n, f in known.items() if f.default is dataclasses.MISSING}
        if missing := sorted(required - set(section)):
            raise D3DError(f"config.json: drafter field {missing[0]!r} is missing in section 'd3d'")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in section.items()
        }
        return cls(**values)

    def num_drafts(self, block_size: int) -> int:
        """Predictions one block of `block_size` rows makes: W at shift 1, W − 1 at shift 0."""
        return block_size - 1 + self.label_shift


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How to decode.

    Attributes:
      mode: plain (target alone), sync (draft, then verify) or async (draft while verifying).
      max_new_tokens: limit of tokens generated per prompt.
      max_length: longest sequence (prompt and reply) a cache may grow to; None: the model's limit.
    """

    mode: Mode = "async"
    max_new_tokens: int = 256
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("plain", "sync", "async"):
            raise D3DError(f"mode must be plain, sync or async, found {self.mode!r}")
        if self.max_new_tokens < 1:
            raise D3DError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}")
