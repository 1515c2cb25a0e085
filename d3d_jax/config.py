"""Frozen configuration dataclasses: what a model, a drafter and a decoding run are.

Nothing here reads files or touches a device: `d3d_jax.hf_config` translates to and from mappings of
Hugging Face's `config.json`, and `d3d_jax.models.checkpoint` reads and writes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from d3d_jax.errors import D3DError

InBlock = Literal["bidirectional", "causal"]
Remat = Literal["none", "full", "dots"]
Mode = Literal["plain", "sync", "async"]
Miss = Literal["stall", "reuse"]

# Model types this decoder implements, and the class a checkpoint of each must be of.
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def _is_number(value: Any) -> bool:
    # Compared, because math.isfinite overflows at whole numbers of more than 308 digits.
    return type(value) in (int, float) and abs(value) < 1e300


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Rotary embedding stretched past the trained length: YaRN, arXiv 2309.00071, section 3.

    The defaults are the method's own recommendations, which files that leave them out rely on.
    Computed as transformers 5 does. Some older ones (4.51) take max_position_embeddings /
    original_max_position_embeddings for the factor whatever `factor` says: make them agree there.

    Attributes:
      factor: how many times longer than the trained length the model is to read.
      original_max_position_embeddings: the trained length, in tokens.
      attention_factor: what cos and sin are multiplied with; None: 0.1 ln(factor) + 1.
      beta_fast: pairs that turn more often than this within the trained length stay as they are.
      beta_slow: pairs that turn less often than this are slowed down by `factor`.
      truncate: whether the ramp between the two starts and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, expected: str) -> None:
            if not holds:
                found = getattr(self, name)
                raise D3DError(f"rope_scaling: {name} must be {expected}, found {found!r}")

        original = self.original_max_position_embeddings
        check("factor", _is_number(self.factor) and self.factor >= 1, "a number of at least 1")
        check(
            "original_max_position_embeddings",
            type(original) is int and original > 0,
            "a positive whole number",
        )
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if name != "attention_factor" or value is not None:
                check(name, _is_number(value) and value > 0, "a positive number")
        check("beta_fast", self.beta_fast >= self.beta_slow, f"at least beta_slow {self.beta_slow}")
        check("truncate", isinstance(self.truncate, bool), "true or false")

    @property
    def scale(self) -> float:
        """The factor on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1


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
    rope_scaling: Yarn | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise D3DError(
                f"model_type {self.model_type!r} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not (
                _is_number(value) and value > 0 and (field.type == "float" or type(value) is int)
            ):
                raise D3DError(
                    f"config field {field.name} must be a positive {field.type}, found {value!r}"
                )
        if not isinstance(self.tie_word_embeddings, bool):
            raise D3DError(
                f"tie_word_embeddings must be true or false, found {self.tie_word_embeddings!r}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise D3DError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise D3DError(f"head_dim {self.head_dim} must be even for the rotary embedding")
        if self.rope_theta <= 1:
            raise D3DError(f"rope_theta must be greater than 1, found {self.rope_theta!r}")
        if not isinstance(self.rope_scaling, Yarn | None):
            raise D3DError(f"rope_scaling must be a Yarn or None, found {self.rope_scaling!r}")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head before the rotary embedding; Llama does not."""
        return self.model_type == "qwen3"

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that the model is made for."""
        if (yarn := self.rope_scaling) is None:
            return self.max_position_embeddings
        return int(yarn.factor * yarn.original_max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` mapping.

        Raises:
          D3DError: a field that the mathematics needs is missing, asks for something that this
            decoder does not do, or is unknown (`d3d_jax.hf_config` has the tables).
        """
        from d3d_jax import hf_config  # It builds this class.

        return hf_config.read(config)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` mapping that transformers and this package read back."""
        from d3d_jax import hf_config

        return hf_config.write(self)


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
      source_layers: indices of the layers it was initialised from; none: from random ones.
      shares: parameters that are the target's own and are not stored with the drafter.
      draft_vocab_size: size of the reduced output vocabulary, or None for the whole one.
      num_anchors: K, anchors sampled per response in training; 0 for an untrained drafter.
      calibration: temperatures that make its probabilities at offsets 1, 2, … W − 1 + shift match
        how often they come true (`d3d calibrate`); None where it has not been calibrated.
      pruned_layers: layers that pruning removed, in the order in which they went, by their indices
        in the drafter before any pruning (`d3d prune`).
      mask_in_embedding: the folder stores no mask vector apart: it is the embedding's row of
        `mask_token_id`, as `d3d export` writes it. A drafter that was read has one of its own.
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
    calibration: tuple[float, ...] | None = None
    pruned_layers: tuple[int, ...] = ()
    mask_in_embedding: bool = False

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
        if self.mask_in_embedding and "embed" in self.shares:
            raise D3DError("a mask in the embedding needs an embedding of the drafter's own")
        unknown = set(self.shares) - {"embed", "head"}
        if unknown:
            raise D3DError(f"shares may name embed and head, found {sorted(unknown)}")
        if self.calibration is not None:
            self._check_calibration(self.calibration)

    def _check_calibration(self, calibration: Any) -> None:
        offsets = self.block_size - 1 + self.label_shift
        if not (
            isinstance(calibration, tuple)
            and len(calibration) == offsets
            and all(_is_number(t) and t > 0 for t in calibration)
        ):
            raise D3DError(
                f"calibration must be {offsets} positive numbers, one for each offset that the "
                f"drafter predicts, found {calibration!r}; `d3d calibrate` measures them"
            )

    def temperatures(self, block_size: int) -> tuple[float, ...] | None:
        """The calibration as one temperature for each slot of a block; None where there is none.

        Args:
          block_size: W to draft with, at most the trained one.
        """
        if self.calibration is None:
            return None
        # At shift 0 the anchor's slot predicts nothing.
        slots = self.calibration if self.label_shift == 1 else (1.0, *self.calibration)
        return slots[:block_size]

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


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How to decode.

    Attributes:
      mode: plain (target alone), sync (draft, then verify) or async (draft while verifying).
      max_new_tokens: limit of tokens generated per prompt that states none of its own.
      max_length: longest sequence (prompt and reply) a cache may grow to; None: the model's limit.
      miss: what an asynchronous round does in a row whose outcome was not prepared: draft while the
        target waits (`stall`), or hand over the nearest prepared block (`reuse`).
    """

    mode: Mode = "async"
    max_new_tokens: int = 256
    max_length: int | None = None
    miss: Miss = "stall"

    def __post_init__(self) -> None:
        if self.mode not in ("plain", "sync", "async"):
            raise D3DError(f"mode must be plain, sync or async, found {self.mode!r}")
        if self.miss not in ("stall", "reuse"):
            raise D3DError(f"miss must be stall or reuse, found {self.miss!r}")
        for name in ("max_new_tokens", "max_length"):
            value = getattr(self, name)
            if (name, value) != ("max_length", None) and (type(value) is not int or value < 1):
                raise D3DError(f"{name} must be a whole number of at least 1, found {value!r}")
