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
from d3d_jax.config import DecodeConfig, Miss, Mode, ModelConfig
from d3d_jax.errors import D3DError
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.measure import share_hardware
from d3d_jax.infer.replies import Reply
from d3d_jax.infer.stop_strings import TextStream, before_stop
from d3d_jax.infer.target import Target
from d3d_jax.models import checkpoint, checkpoint_writing, decoder, sharding
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.sampling import SamplingParams

# What weights, activations and caches may be.
WEIGHT_TYPES = ("float32", "bfloat16", "float16")
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
class ModelFiles:
    """A checkpoint that was looked at but not loaded: all that can be checked beforehand.

    Attributes:
      name: what it was asked for by.
      folder: the Hugging Face folder.
      tokenizer: with the chat template and every stop id of the checkpoint.
    """

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer

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
        if not isinstance(prompt, Sequence | np.ndarray) or len(prompt) == 0:
            raise D3DError(f"a prompt is a text, messages or token ids, found {prompt!r}")
        if all(isinstance(part, Mapping) for part in prompt):
            messages: list[Any] = list(prompt)
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return self.tokenizer.chat(messages, thinking=thinking)
        if system is not None or thinking is not None:
            raise D3DError("system and thinking need a text or messages, not token ids")
        ids: list[Any] = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        return ids

    def load(self, mesh: Mesh | None = None, dtype: Any = None) -> Model:
        """Reads the weights; arguments and errors as for `load_model`."""
        mesh = sharding.make_mesh(jax.local_devices()[:1]) if mesh is None else mesh
        if not isinstance(mesh, Mesh):
            raise D3DError(f"mesh must be a jax.sharding.Mesh, found {type(mesh).__name__}")
        mesh = sharding.model_mesh(mesh, self.config)
        if dtype is None:
            on_cpu = mesh.devices.flat[0].platform == "cpu"
            dtype = jnp.float32 if on_cpu else checkpoint.weight_type(self.folder)
        dtype = _weight_type(dtype)
        params = checkpoint.load_params(
            self.folder, self.config, stacked=False, mesh=mesh, dtype=dtype
        )
        stop_ids = self.tokenizer.stop_ids
        return Model(self, Target(self.config, params, mesh, stop_ids, dtype))


def _weight_type(dtype: Any) -> np.dtype:
    try:
        if (kind := jnp.dtype(dtype)).name in WEIGHT_TYPES:
            return kind
    except TypeError:
        pass
    raise D3DError(f"dtype must be one of {', '.join(WEIGHT_TYPES)}, found {dtype!r}")


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint on a mesh. Made by `load_model`.

    Attributes:
      files: where it came from, with its tokenizer.
      target: its parameters and compiled steps, for the decoders.
    """

    files: ModelFiles
    target: Target

    @property
    def name(self) -> str:
        """What it was asked for by."""
        return self.files.name

    @property
    def folder(self) -> Path:
        """The Hugging Face folder it was read from."""
        return self.files.folder

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.files.config

    @property
    def tokenizer(self) -> Tokenizer:
        """With the chat template and every stop id of the checkpoint."""
        return self.files.tokenizer

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
        """Token ids of a prompt; see `ModelFiles.encode`."""
        return self.files.encode(prompt, system=system, thinking=thinking)

    def logits(self, tokens: Any) -> jax.Array:
        """Scores of every next token: tokens [B, T] → float32 [B, T, V].

        Rows are read from the first token on, without a cache; V is split over the mesh.

        Raises:
          D3DError: not a whole array of token ids.
        """
        try:
            ids = np.asarray(tokens)
        except ValueError as error:  # rows of different lengths
            raise D3DError(f"logits takes token ids [B, T]: {error}") from None
        if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise D3DError(f"logits takes token ids [B, T], found {ids.dtype} of shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise D3DError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        return self._logits(self.target.params, ids.astype(np.int32))

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
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int | None = None,
        slots: int | None = None,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> list[Generation]:
        """Replies to a list of prompts.

        Args:
          prompts: see `encode`.
          drafter: of `load_drafter`; in float32 the tokens are those without one, said sooner.
          mode: None: `plain` without a drafter, `sync` where both share hardware, else `async`.
          sampling: for all prompts, or one for each; None: greedy.
          max_new_tokens: of each reply, stop token included; None: what `sampling` says, or 256.
          slots: prompts decoded at a time; None: all of them.

        Raises:
          D3DError: no prompt, an empty one or one that leaves no room, or what `encode` refuses.
        """
        ids = [self.encode(p, system=system, thinking=thinking) for p in _several(prompts)]
        params = _params(sampling, max_new_tokens, len(ids))
        decoding = self.decoder(drafter, mode=mode, slots=slots)
        replies = decoding.generate(ids, params)
        return [
            Generation(
                prompt, before_stop(self.tokenizer.decode(reply.token_ids), reply.stop), reply
            )
            for prompt, reply in zip(ids, replies, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        drafter: DrafterRole | None = None,
        *,
        mode: Mode | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> Iterator[str]:
        """The text of one reply, piece by piece as it is decoded; arguments as for `generate`."""
        ids = self.encode(prompt, system=system, thinking=thinking)
        params = _params(sampling, max_new_tokens, 1)
        decoding = self.decoder(drafter, mode=mode)
        pieces = decoding.stream([ids], params)
        text = TextStream(self.tokenizer, params[0].stop)

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
        miss: Miss = "stall",
        slots: int | None = None,
    ) -> Decoder:
        """The decoder that `generate` uses, for its rounds, timing and warm-up.

        Args:
          miss: see `DecodeConfig`.
          slots: prompts decoded at a time; None: all that are given.

        Raises:
          D3DError: a mode that needs a drafter and has none, or a limit out of range.
        """
        if not isinstance(drafter, DrafterRole | None):
            raise D3DError(f"a drafter is what load_drafter returns, found {drafter!r}")
        mode = mode or self.default_mode(drafter)
        config = DecodeConfig(mode, max_new_tokens, max_length, miss)
        return Decoder(self.target, drafter, config, slots, self.tokenizer)

    def default_mode(self, drafter: DrafterRole | None) -> Mode:
        """The mode expected to be fastest: drafting ahead pays only on hardware of its own."""
        if drafter is None:
            return "plain"
        return "sync" if share_hardware(self.target, drafter) else "async"

    def save(self, folder: str | Path, dtype: Any = None) -> None:
        """Writes a Hugging Face folder: weights, configuration, tokenizer, generation settings.

        Args:
          dtype: type to write weights in; None: the one they were loaded in.

        Raises:
          D3DError: the folder exists, or cannot be written.
        """
        checkpoint_writing.save_model(
            Path(folder).expanduser(),
            self.config,
            self.target.params,
            dtype=None if dtype is None else _weight_type(dtype),
            source=self.folder,
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
    return open_model(name_or_path, revision=revision).load(mesh, dtype)


def open_model(name_or_path: str | Path, *, revision: str | None = None) -> ModelFiles:
    """Finds a checkpoint and reads everything of it but the weights.

    Raises:
      D3DError: as for `load_model`.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise D3DError(f"a model is named by text or a path, found {name_or_path!r}")
    folder = resolve_model(name_or_path, revision=revision)
    config, drafter = checkpoint.read_config(folder)
    if drafter is not None:
        raise D3DError(f"{folder} is a drafter, not a model of its own: load it with load_drafter")
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise D3DError(
            f"{folder / 'tokenizer.json'} has token ids up to {tokenizer.vocab_size - 1}, the "
            f"embedding has {config.vocab_size} rows"
        )
    name = str(name_or_path) if revision is None else f"{name_or_path}@{revision}"
    return ModelFiles(name, folder, config, tokenizer)


def _params(
    sampling: SamplingParams | Sequence[SamplingParams] | None, limit: int | None, count: int
) -> list[SamplingParams]:
    """The settings of each of `count` prompts."""
    one = isinstance(sampling, SamplingParams | None)
    params = [sampling or SamplingParams()] * count if one else list(sampling)  # type: ignore[arg-type]
    if not all(isinstance(p, SamplingParams) for p in params):
        raise D3DError(f"sampling takes SamplingParams, found {sampling!r}")
    if limit is None:
        return params
    return [dataclasses.replace(p, max_new_tokens=limit) for p in params]


def _several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    one = isinstance(prompts, str) or not isinstance(prompts, Sequence)
    if one or (len(prompts) and isinstance(prompts[0], int | float | Mapping)):
        raise D3DError("generate takes a list of prompts, so that they are decoded together")
    return prompts
