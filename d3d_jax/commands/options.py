"""What each subcommand of `d3d` takes, as frozen dataclasses that tyro turns into options.

Only light modules are imported here: this is all that `d3d COMMAND --help` loads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from d3d_jax.commands.option_groups import (
    Decoding,
    DType,
    Placement,
    System,
    TargetPlacement,
    Thinking,
    arg,
    at_least,
    device_indices,
)
from d3d_jax.config import InBlock
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class InitDrafter:
    """Make an untrained drafter from layers of a pretrained model.

    Attributes:
      source: Model whose layers and embedding it starts from: a name, hub id, folder or .gguf file.
      target: Model it will draft for; must have the same tokenizer.
      out: Folder to write; must not exist.
      layers: Indices of the layers to take.
      block_size: W, rows of a block including its anchor.
      label_shift: 1: a slot predicts the token after it; 0: the token at it.
      in_block: Whether the rows of a block see each other both ways or causally.
      mask_token_id: Reserved id of the mask. By default the first embedding row that no token
        uses, or else the highest special token that ends no reply.
      draft_vocab_size: Predict only this many tokens, those most frequent in --vocab-from.
      vocab_from: Dataset whose train responses are counted for --draft-vocab-size.
    """

    source: Annotated[str, arg("MODEL", name="from")]
    target: Annotated[str, arg("MODEL")]
    out: Annotated[Path, arg("DIR")]
    layers: Annotated[tuple[int, ...] | None, arg("L ...", "the first three and the last two")] = (
        None
    )
    block_size: int = 8
    label_shift: Literal[0, 1] = 1
    in_block: InBlock = "bidirectional"
    mask_token_id: Annotated[
        int | None, arg("ID", "a row no token uses, or else a special token")
    ] = None
    draft_vocab_size: Annotated[int | None, arg("N", "the whole vocabulary")] = None
    vocab_from: Annotated[Path | None, arg("DATASET", "none")] = None

    def __post_init__(self) -> None:
        at_least(1, draft_vocab_size=self.draft_vocab_size)
        if (self.draft_vocab_size is None) != (self.vocab_from is None):
            raise D3DError("--draft-vocab-size and --vocab-from go together: give both or neither")


@dataclasses.dataclass(frozen=True)
class Respond:
    """Let the target answer prompts greedily and build the training dataset from its answers.

    An interrupted run continues where it stopped when the same command is given again.

    Attributes:
      target: Model that answers: a name, hub id, folder or .gguf file.
      prompts: JSONL (or .jsonl.gz) of {"turns": [TEXT, ...]}; the first turn is the prompt.
      import_from: Instead of prompts: JSONL (or .gz) of {"prompt_ids", "response_ids"} that the
        target wrote elsewhere.
      system: System message put before each prompt.
      thinking: Whether the target thinks before it answers; its chat template must be able to
        switch that.
      sampled: The responses to import were sampled. They can be trained on, but offline τ, which
        is exact for greedy ones only, is refused.
      out: Folder for the responses and, in dataset/, the dataset.
      max_new_tokens: Longest response, the stop token included.
      batch: Prompts decoded together.
      placement: Which devices hold the target.
    """

    target: Annotated[str, arg("MODEL")]
    prompts: Annotated[Path | None, arg("FILE", "none")] = None
    import_from: Annotated[Path | None, arg("FILE", "none")] = None
    system: System = None
    thinking: Thinking = None
    sampled: bool = False
    out: Annotated[Path | None, arg("DIR", "named after the file")] = None
    max_new_tokens: int = 192
    batch: int = 24
    placement: TargetPlacement = dataclasses.field(default_factory=TargetPlacement)

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens, batch=self.batch)
        if (self.prompts is None) == (self.import_from is None):
            raise D3DError("give either --prompts or --import-from")
        if self.import_from is not None and (self.system, self.thinking) != (None, None):
            raise D3DError("--system and --thinking go with --prompts: imports are token ids")
        if self.sampled and self.import_from is None:
            raise D3DError("--sampled describes imported responses: it goes with --import-from")


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a drafter on responses of its target.

    An interrupted run continues where it stopped when the same command is given again.

    Attributes:
      config: Name of a shipped training config, or a YAML file.
      data: Dataset folder that `d3d respond` built.
      drafter: Folder or hub id of the drafter to start from (`d3d init-drafter`).
      target: The drafter's target model.
      out: Folder of the run; the trained drafter is exported to its drafter/.
      drafter_devices: Devices to train on, as indices of jax.devices().
      overrides: Settings that replace those of the config: key=value ...
    """

    config: Annotated[str, arg("NAME|FILE")]
    data: Annotated[Path, arg("DIR")]
    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    out: Annotated[Path, arg("DIR")]
    drafter_devices: Annotated[str | None, arg("I-J,K", "all")] = None
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], arg("[KEY=VALUE ...]", "")] = ()

    def __post_init__(self) -> None:
        device_indices("--drafter-devices", self.drafter_devices)

    @property
    def drafter_indices(self) -> tuple[int, ...] | None:
        """Those of --drafter-devices."""
        return device_indices("--drafter-devices", self.drafter_devices)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure a drafter's acceptance length on recorded responses, without running the target.

    Attributes:
      drafter: Folder or hub id of the drafter.
      target: Its target model.
      data: Dataset folder of greedy responses of that target.
      split: Part of the dataset.
      block_size: W to draft with.
      documents: How many responses, evenly spread; 0 for all.
      json: Print one JSON object instead of a table.
    """

    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    data: Annotated[Path, arg("DIR")]
    split: Literal["train", "validation"] = "validation"
    block_size: Annotated[int | None, arg("W", "the drafter's own")] = None
    documents: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        at_least(0, documents=self.documents)
        at_least(2, block_size=self.block_size)


@dataclasses.dataclass(frozen=True)
class Generate:
    """Decode prompts and stream the text; figures of each reply go to stderr.

    The prompt comes from --prompt, --prompts-file or, with neither, standard input.

    Attributes:
      target: Model to decode: a name, hub id (org/name or org/name@revision), folder or .gguf file.
      prompt: The prompt.
      prompts_file: JSONL (or .gz) of {"turns": [TEXT, ...]}; the first turn is the prompt.
      system: System message put before the prompt.
      thinking: Whether the target thinks before it answers; its chat template must be able to
        switch that.
      raw: Take the prompt as plain text, without the chat template.
      max_new_tokens: Longest reply, the stop token included.
      json: Print one JSON object a prompt instead of the text.
      decoding: How to decode.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    prompt: Annotated[str | None, arg("TEXT", "standard input")] = None
    prompts_file: Annotated[Path | None, arg("FILE", "none")] = None
    system: System = None
    thinking: Thinking = None
    raw: bool = False
    max_new_tokens: int = 256
    json: bool = False
    decoding: Decoding = dataclasses.field(default_factory=Decoding)
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens)
        if self.prompt is not None and self.prompts_file is not None:
            raise D3DError("give either --prompt or --prompts-file")
        for option in ("system", "thinking"):
            if self.raw and getattr(self, option) is not None:
                raise D3DError(f"--{option} needs the chat template: leave out --raw")


@dataclasses.dataclass(frozen=True)
class Warmup:
    """Compile every program that `d3d generate` with the same options can need.

    They are kept in the cache folder, so that later runs start at once. A run of fewer prompts than
    --batch decodes them in a batch of its own size, for which it compiles.

    Attributes:
      target: Model to decode: a name, hub id (org/name or org/name@revision), folder or .gguf file.
      decoding: How to decode.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    decoding: Decoding = dataclasses.field(default_factory=Decoding)
    placement: Placement = dataclasses.field(default_factory=Placement)


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Describe a model or drafter: parameters, types, bytes per device, tokenizer.

    Weights are neither read nor downloaded, only the headers of their files. A Qwen3 hub id that
    can be neither found here nor reached is described from its published architecture.

    Attributes:
      model: A name, hub id (org/name or org/name@revision), folder or .gguf file.
      tp: Devices of the tensor axis of a mesh to plan for.
      fsdp: Devices of its fsdp axis.
      dtype: Type the weights would have on the devices.
      json: Print one JSON object instead of a table.
    """

    model: Annotated[tyro.conf.Positional[str], arg("MODEL")]
    tp: int = 1
    fsdp: int = 1
    dtype: Annotated[DType | None, arg("{float32,bfloat16}", "as stored")] = None
    json: bool = False

    def __post_init__(self) -> None:
        at_least(1, tp=self.tp, fsdp=self.fsdp)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Watch plain, synchronous and asynchronous decoding side by side on a real model.

    Attributes:
      target: Model to decode.
      drafter: Folder or hub id of the drafter.
      prompts: How many of the built-in held-out prompts.
      thinking: Whether the target thinks before it answers; its chat template must be able to
        switch that.
      max_new_tokens: Longest reply, the stop token included.
      block_size: W of a round.
      rectangle: C F of the outcomes prepared in async mode.
      out: Folder for the figures (demo.json) and their picture (demo.png).
      from_scratch: First make responses and train a new drafter, then compare with that one.
      work: Folder of the stages of --from-scratch, each of which resumes.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")] = "smollm2-135m"
    drafter: Annotated[str | None, arg("MODEL", "the one shipped for this target")] = None
    prompts: int = 6
    thinking: Thinking = None
    max_new_tokens: int = 128
    block_size: Annotated[int | None, arg("W", "the drafter's own; on CPU at most 4")] = None
    rectangle: Annotated[tuple[int, int] | None, arg("C F", "4 1, C at most W")] = None
    out: Annotated[Path, arg("DIR")] = Path("demo-results")
    from_scratch: bool = False
    work: Annotated[Path | None, arg("DIR", "demo/ in the model cache")] = None
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        at_least(1, prompts=self.prompts)
        at_least(2, block_size=self.block_size, max_new_tokens=self.max_new_tokens)
        if self.from_scratch and self.drafter is not None:
            raise D3DError("--from-scratch trains its own drafter: leave out --drafter")
        if self.work is not None and not self.from_scratch:
            raise D3DError("--work is the folder of --from-scratch: give both or neither")
