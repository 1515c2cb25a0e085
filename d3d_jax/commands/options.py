"""What each subcommand of `d3d` takes, as frozen dataclasses that tyro turns into options.

Only light modules are imported here: this is all that `d3d COMMAND --help` loads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from d3d_jax.config import InBlock, Mode
from d3d_jax.errors import D3DError

DType = Literal["float32", "bfloat16"]


def _arg(metavar: str, default: str | None = None, name: str | None = None) -> Any:
    """How an option is shown; `default` says what leaving it out means where that is no value."""
    return tyro.conf.arg(
        name=name, metavar=metavar, help_behavior_hint=default and f"(default: {default})"
    )


# Not fields of a common base: tyro would list those of a base before --target.
System = Annotated[str | None, _arg("TEXT", "the template's own")]
Thinking = Annotated[Literal["on", "off"] | None, _arg("{on,off}", "the template's own")]


def thinking_switch(thinking: Literal["on", "off"] | None) -> bool | None:
    """What --thinking asks of a chat template; None leaves it to the template."""
    return None if thinking is None else thinking == "on"


def _at_least(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            option = "--" + name.replace("_", "-")
            raise D3DError(f"{option} must be at least {minimum}, found {value}")


def _indices(option: str, text: str | None) -> tuple[int, ...] | None:
    """The device indices of `0-3,5`; None for None."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise D3DError(f"{option} takes indices of devices such as 0-3,5; found {text!r}")
        if len(first + last) > 8:
            raise D3DError(f"{option} {text}: no machine has that many devices")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) != len(found):
        raise D3DError(f"{option} {text} names no device, or one twice")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class TargetPlacement:
    """Which devices hold the target.

    Attributes:
      target_devices: Devices of the target, as indices of jax.devices().
      target_tp: Over how many of them the target is split (tensor parallel); the rest take parts of
        the batch.
    """

    target_devices: Annotated[str | None, _arg("I-J,K", "the first --target-tp")] = None
    target_tp: Annotated[int | None, _arg("N", "all of --target-devices, or 1")] = None

    def __post_init__(self) -> None:
        _at_least(1, target_tp=self.target_tp)
        _indices("--target-devices", self.target_devices)

    @property
    def target_indices(self) -> tuple[int, ...] | None:
        """Those of --target-devices."""
        return _indices("--target-devices", self.target_devices)

    @property
    def num_devices(self) -> int:
        """How many devices there must be."""
        return max(*(self.target_indices or (0,)), (self.target_tp or 1) - 1) + 1


@dataclasses.dataclass(frozen=True)
class Placement(TargetPlacement):
    """Which devices hold the models.

    Attributes:
      target_devices: Devices of the target, as indices of jax.devices().
      target_tp: Over how many of them the target is split (tensor parallel); the rest take parts of
        the batch.
      drafter_devices: Devices of the drafter, which is split over them.
    """

    drafter_devices: Annotated[
        str | None, _arg("I-J,K", "a device that the target leaves free")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _indices("--drafter-devices", self.drafter_devices)

    @property
    def drafter_indices(self) -> tuple[int, ...] | None:
        """Those of --drafter-devices."""
        return _indices("--drafter-devices", self.drafter_devices)

    @property
    def num_devices(self) -> int:
        """How many devices there must be, at least two, one for each role."""
        return max(super().num_devices, max(self.drafter_indices or (1,)) + 1)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How to decode.

    Attributes:
      drafter: Folder or hub id of the drafter.
      mode: plain (target alone), sync (draft, then verify) or async (draft while verifying).
        By default plain without a drafter; with one, sync where both roles share hardware (as on a
        CPU) and async elsewhere.
      max_length: Longest prompt and reply together.
      block_size: W of a round.
      rectangle: C F of the outcomes prepared in async mode.
      batch: Prompts decoded together; above 1 a reply is printed when it ends.
      dtype: Type of weights, activations and caches.
    """

    drafter: Annotated[str | None, _arg("MODEL", "the one shipped for this target, if any")] = None
    mode: Annotated[Mode | None, _arg("{plain,sync,async}", "the fastest expected here")] = None
    max_length: Annotated[int | None, _arg("N", "the model's own limit")] = None
    block_size: Annotated[int | None, _arg("W", "the drafter's own; on CPU at most 4")] = None
    rectangle: Annotated[tuple[int, int] | None, _arg("C F", "4 1, C at most W")] = None
    batch: int = 1
    dtype: Annotated[
        DType | None, _arg("{float32,bfloat16}", "float32 on CPU, else the checkpoint's")
    ] = None

    def __post_init__(self) -> None:
        _at_least(1, batch=self.batch)
        _at_least(2, max_length=self.max_length, block_size=self.block_size)
        if self.drafter == "":
            raise D3DError("--drafter names no folder; leave it out to use the shipped one, if any")


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

    source: Annotated[str, _arg("MODEL", name="from")]
    target: Annotated[str, _arg("MODEL")]
    out: Annotated[Path, _arg("DIR")]
    layers: Annotated[tuple[int, ...] | None, _arg("L ...", "the first three and the last two")] = (
        None
    )
    block_size: int = 8
    label_shift: Literal[0, 1] = 1
    in_block: InBlock = "bidirectional"
    mask_token_id: Annotated[
        int | None, _arg("ID", "a row no token uses, or else a special token")
    ] = None
    draft_vocab_size: Annotated[int | None, _arg("N", "the whole vocabulary")] = None
    vocab_from: Annotated[Path | None, _arg("DATASET", "none")] = None

    def __post_init__(self) -> None:
        _at_least(1, draft_vocab_size=self.draft_vocab_size)
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

    target: Annotated[str, _arg("MODEL")]
    prompts: Annotated[Path | None, _arg("FILE", "none")] = None
    import_from: Annotated[Path | None, _arg("FILE", "none")] = None
    system: System = None
    thinking: Thinking = None
    sampled: bool = False
    out: Annotated[Path | None, _arg("DIR", "named after the file")] = None
    max_new_tokens: int = 192
    batch: int = 24
    placement: TargetPlacement = dataclasses.field(default_factory=TargetPlacement)

    def __post_init__(self) -> None:
        _at_least(1, max_new_tokens=self.max_new_tokens, batch=self.batch)
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

    config: Annotated[str, _arg("NAME|FILE")]
    data: Annotated[Path, _arg("DIR")]
    drafter: Annotated[str, _arg("MODEL")]
    target: Annotated[str, _arg("MODEL")]
    out: Annotated[Path, _arg("DIR")]
    drafter_devices: Annotated[str | None, _arg("I-J,K", "all")] = None
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], _arg("[KEY=VALUE ...]", "")] = ()

    def __post_init__(self) -> None:
        _indices("--drafter-devices", self.drafter_devices)

    @property
    def drafter_indices(self) -> tuple[int, ...] | None:
        """Those of --drafter-devices."""
        return _indices("--drafter-devices", self.drafter_devices)


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

    drafter: Annotated[str, _arg("MODEL")]
    target: Annotated[str, _arg("MODEL")]
    data: Annotated[Path, _arg("DIR")]
    split: Literal["train", "validation"] = "validation"
    block_size: Annotated[int | None, _arg("W", "the drafter's own")] = None
    documents: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        _at_least(0, documents=self.documents)
        _at_least(2, block_size=self.block_size)


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

    target: Annotated[str, _arg("MODEL")]
    prompt: Annotated[str | None, _arg("TEXT", "standard input")] = None
    prompts_file: Annotated[Path | None, _arg("FILE", "none")] = None
    system: System = None
    thinking: Thinking = None
    raw: bool = False
    max_new_tokens: int = 256
    json: bool = False
    decoding: Decoding = dataclasses.field(default_factory=Decoding)
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        _at_least(1, max_new_tokens=self.max_new_tokens)
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

    target: Annotated[str, _arg("MODEL")]
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

    model: Annotated[tyro.conf.Positional[str], _arg("MODEL")]
    tp: int = 1
    fsdp: int = 1
    dtype: Annotated[DType | None, _arg("{float32,bfloat16}", "as stored")] = None
    json: bool = False

    def __post_init__(self) -> None:
        _at_least(1, tp=self.tp, fsdp=self.fsdp)


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

    target: Annotated[str, _arg("MODEL")] = "smollm2-135m"
    drafter: Annotated[str | None, _arg("MODEL", "the one shipped for this target")] = None
    prompts: int = 6
    thinking: Thinking = None
    max_new_tokens: int = 128
    block_size: Annotated[int | None, _arg("W", "the drafter's own; on CPU at most 4")] = None
    rectangle: Annotated[tuple[int, int] | None, _arg("C F", "4 1, C at most W")] = None
    out: Annotated[Path, _arg("DIR")] = Path("demo-results")
    from_scratch: bool = False
    work: Annotated[Path | None, _arg("DIR", "demo/ in the model cache")] = None
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        _at_least(1, prompts=self.prompts)
        _at_least(2, block_size=self.block_size, max_new_tokens=self.max_new_tokens)
        if self.from_scratch and self.drafter is not None:
            raise D3DError("--from-scratch trains its own drafter: leave out --drafter")
        if self.work is not None and not self.from_scratch:
            raise D3DError("--work is the folder of --from-scratch: give both or neither")
