"""Lossless speculative decoding with standalone block-diffusion drafters, in JAX.

    import d3d_jax

    model = d3d_jax.load_model("smollm2-135m")
    drafter = d3d_jax.load_drafter(model)
    print(model.generate(["Why is the sky blue?"], drafter)[0].text)

What is listed in `__all__` is the public interface; it is imported when first used, so that
`import d3d_jax` itself costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3d_jax.compilation import keep_compiled
    from d3d_jax.config import DecodeConfig, DrafterConfig, ModelConfig, Yarn
    from d3d_jax.errors import D3DError
    from d3d_jax.infer.decoding import Decoder
    from d3d_jax.infer.engine import Engine
    from d3d_jax.infer.loading import load_drafter, shipped_drafter
    from d3d_jax.infer.model import Generation, Model, load_model
    from d3d_jax.infer.replies import Reply
    from d3d_jax.models.registry import resolve_model
    from d3d_jax.models.sharding import make_mesh
    from d3d_jax.models.tokenizer import Tokenizer
    from d3d_jax.presets import preset
    from d3d_jax.sampling import SamplingParams

_HOME = {
    "D3DError": "d3d_jax.errors",
    "DecodeConfig": "d3d_jax.config",
    "Decoder": "d3d_jax.infer.decoding",
    "DrafterConfig": "d3d_jax.config",
    "Engine": "d3d_jax.infer.engine",
    "Generation": "d3d_jax.infer.model",
    "Model": "d3d_jax.infer.model",
    "ModelConfig": "d3d_jax.config",
    "Reply": "d3d_jax.infer.replies",
    "SamplingParams": "d3d_jax.sampling",
    "Tokenizer": "d3d_jax.models.tokenizer",
    "Yarn": "d3d_jax.config",
    "keep_compiled": "d3d_jax.compilation",
    "load_drafter": "d3d_jax.infer.loading",
    "load_model": "d3d_jax.infer.model",
    "make_mesh": "d3d_jax.models.sharding",
    "preset": "d3d_jax.presets",
    "resolve_model": "d3d_jax.models.registry",
    "shipped_drafter": "d3d_jax.infer.loading",
}

__all__ = [
    "D3DError",
    "DecodeConfig",
    "Decoder",
    "DrafterConfig",
    "Engine",
    "Generation",
    "Model",
    "ModelConfig",
    "Reply",
    "SamplingParams",
    "Tokenizer",
    "Yarn",
    "keep_compiled",
    "load_drafter",
    "load_model",
    "make_mesh",
    "preset",
    "resolve_model",
    "shipped_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
