"""A model of the user's, loaded onto a mesh: what `import d3d_jax` is for.

    model = d3d_jax.load_model("Qwen/Qwen3-8B", d3d_jax.make_mesh(jax.devices()[:4], tensor=4))
    print(model.generate(["Why is the sky blue?"])[0].text)

Drafters are loaded by `infer.loading`; the loop that decodes is `infer.decoding`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from d3d_jax import layout
from d3d_jax.config import DecodeConfig, Mode, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder, Reply
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.roles import DrafterRole, Target
from d3d_jax.models import checkpoint, decoder, sharding
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.tokenizer import Tokenizer

# Text or messages go through the chat template; token ids are taken as they are.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Generation:
    """A reply and its text, special tokens left out.

    Attributes:
      prompt_ids: what the model read.
      reply: its token ids, rounds, hits and finish reason.
    """

    prompt_ids: list[int]
    text: str
    reply: Reply


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint on a mesh, with its tokenizer. Made by `load_model`.

    Attributes:
      name: what it was asked for by.
      folder: the Hugging Face folder it was read from.
      target: its parameters and compiled steps, for the decoders.
      tokenizer: with the chat template and every stop id of the checkpoint.
    """

    name: str
    folder: Path
    target: Target
    tokenizer: Tokenizer

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.target.config

    @property
    def mesh(self) -> Mesh:
        """Where the parameters lie, with the axes of `models.sharding`."""
        return self.target.mesh

    @property
    def dtype(self) -> Any:
        """Type of weights, activations and caches."""
        return self.target.dtype

    def encode(
        self, prompt: Prompt, *, system: str | None = None, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
          prompt: a user's text or `{"role", "content"}` messages, which the chat template renders
            (a text as it is where the model has no template), or token ids.
          system: message put before it; None: the template's own, if any.
          thinking: on or off; None: as the template has it.

        Raises:
          D3DError: the template refuses it, or cannot switch thinking.
        """
        if isinstance(prompt, str):
            if self.tokenizer.chat_template is None and system is None and thinking is None:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if all(isinstance(part, Mapping) for part in prompt):
            messages: list[Any] = list(prompt)
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return self.tokenizer.chat(messages, thinking=thinking)
        if system is not None or thinking is not None:
            raise D3DError("system and thinking need a text or messages, not token ids")
        return [int(token) for token in prompt]  # type: ignore[call-overload]

    def logits(self, tokens: Any) -> jax.Array:
        """Scores of every next token: tokens [B, T] → float32 [B, T, V].

        Rows are read from the first token on, without a cache; V is split over the mesh.
        """
        ids = np.asarray(tokens, np.int32)
        if ids.ndim != 2 or ids.size == 0:
            raise D3DError(f"logits takes token ids [B, T], found an array of shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise D3DError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        return self._logits(self.target.params, ids)

    @functools.cached_property
    def _logits(self) -> Any:
        def run(params: decoder.Params, tokens: jax.Array) -> jax.Array:
            rows = layout.causal(jnp.zeros(tokens.shape[:1], jnp.int32), tokens.shape[1])
            return decoder.logits(params, decoder.forward(self.config, params, tokens, rows)[0])

        return jax.jit(sharding.on_mesh(self.mesh, run))

    def generate(
        self,
        prompts: Sequence[Prompt],
        drafter: DrafterRole | None = None,
        *,
        mode: Mode | None = None,
        max_new_tokens: int = 256,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> list[Generation]:
        """Greedy replies to a batch of prompts, decoded together.

        Args:
          prompts: see `encode`.
          drafter: of `load_drafter`; the text is the same without one, later.
          mode: None: `plain` without a drafter, `sync` where both share hardware, else `async`.
          max_new_tokens: of each reply, the stop token included.

        Raises:
          D3DError: no prompt, an empty one or one that leaves no room, or what `encode` refuses.
        """
        ids = [self.encode(p, system=system, thinking=thinking) for p in _several(prompts)]
        decoding = self.decoder(drafter, mode=mode, max_new_tokens=max_new_tokens)
        replies = decoding.generate(ids)
        return [
            Generation(prompt, self.tokenizer.decode(reply.token_ids), reply)
            for prompt, reply in zip(ids, replies, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        drafter: DrafterRole | None = None,
        *,
        mode: Mode | None = None,
        max_new_tokens: int = 256,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> Iterator[str]:
        """The text of one reply, piece by piece as it is decoded; arguments as for `generate`."""
        ids = self.encode(prompt, system=system, thinking=thinking)
        decoding = self.decoder(drafter, mode=mode, max_new_tokens=max_new_tokens)
        pieces = decoding.stream([ids])
        text = self.tokenizer.stream()

        def run() -> Iterator[str]:
            for _, new in pieces:
                if piece := text.feed(new):
                    yield piece
            if rest := text.flush():
                yield rest

        return run()

    def decoder(
        self,
        drafter: DrafterRole | None = None,
        *,
        mode: Mode | None = None,
        max_new_tokens: int = 256,
        max_length: int | None = None,
    ) -> Decoder:
        """The decoder that `generate` uses, for its rounds, timing and warm-up."""
        config = DecodeConfig(mode or self.default_mode(drafter), max_new_tokens, max_length)
        return Decoder(self.target, drafter, config)

    def default_mode(self, drafter: DrafterRole | None) -> Mode:
        """The mode expected to be fastest: drafting ahead pays only on hardware of its own."""
        if drafter is None:
            return "plain"
        return "sync" if share_hardware(self.target, drafter) else "async"

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder: weights, configuration, tokenizer, generation settings.

        Raises:
          D3DError: the folder exists, or cannot be written.
        """
        checkpoint.save_model(
            Path(folder).expanduser(),
            self.config,
            self.target.params,
            extra_files={**checkpoint.companion_files(self.folder)},
        )


def load_model(
    name_or_path: str | Path,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
) -> Model:
    """Loads a checkpoint onto a mesh; each process reads only what its devices hold.

    Args:
      name_or_path: a folder, a `.gguf` file, a short name, or a hub id (`org/name[@revision]`).
      mesh: of `sharding.make_mesh`, or any `jax.sharding.Mesh` with the axes data, fsdp and
        tensor; None takes the first device.
      dtype: of weights, activations and caches. None: float32 on CPU, elsewhere the checkpoint's.
      revision: branch, tag or commit of a hub id.

    Raises:
      D3DError: no such model, a damaged or unsupported one, a tokenizer that does not fit it, or a
        mesh that its heads do not divide over.
    """
    folder = resolve_model(name_or_path, revision=revision)
    config, drafter = checkpoint.read_config(folder)
    if drafter is not None and drafter.shares:
        raise D3DError(
            f"{folder} is a drafter without its target's weights: not a model of its own"
        )
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise D3DError(
            f"{folder / 'tokenizer.json'} has token ids up to {tokenizer.vocab_size - 1}, the "
            f"embedding has {config.vocab_size} rows"
        )
    mesh = sharding.make_mesh(jax.devices()[:1]) if mesh is None else mesh
    mesh = sharding.model_mesh(mesh, config)
    if dtype is None and mesh.devices.flat[0].platform == "cpu":
        dtype = jnp.float32
    params = checkpoint.load_params(
        folder, config, stacked=False, mesh=mesh, dtype=dtype, drafter=drafter
    )
    params.pop("mask", None)
    dtype = params["norm"].dtype
    target = Target(config, params, mesh, tokenizer.stop_ids, dtype)
    return Model(str(name_or_path), folder, target, tokenizer)


def _several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | Mapping)):
        raise D3DError("generate takes a list of prompts, so that they are decoded together")
    return prompts
