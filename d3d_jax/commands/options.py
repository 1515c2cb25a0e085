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
    DrafterMesh,
    DType,
    Placement,
    Processes,
    SamplingOptions,
    System,
    Thinking,
    arg,
    at_least,
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
      random_layers: Instead, this many layers of random weights: what a pretrained start is
        compared with.
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
    random_layers: Annotated[int | None, arg("N", "none")] = None
    block_size: int = 8
    label_shift: Literal[0, 1] = 1
    in_block: InBlock = "bidirectional"
    mask_token_id: Annotated[
        int | None, arg("ID", "a row no token uses, or else a special token")
    ] = None
    draft_vocab_size: Annotated[int | None, arg("N", "the whole vocabulary")] = None
    vocab_from: Annotated[Path | None, arg("DATASET", "none")] = None

    def __post_init__(self) -> None:
        at_least(1, draft_vocab_size=self.draft_vocab_size, random_layers=self.random_layers)
        if self.layers is not None and self.random_layers is not None:
            raise D3DError("--layers and --random-layers exclude each other")
        if (self.draft_vocab_size is None) != (self.vocab_from is None):
            raise D3DError("--draft-vocab-size and --vocab-from go together: give both or neither")


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
      mesh: Which devices to train on.
      processes: Whether this is one of several processes that train together.
      overrides: Settings that replace those of the config: key=value ...
    """

    config: Annotated[str, arg("NAME|FILE")]
    data: Annotated[Path, arg("DIR")]
    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    out: Annotated[Path, arg("DIR")]
    mesh: DrafterMesh = dataclasses.field(default_factory=DrafterMesh)
    processes: Processes = dataclasses.field(default_factory=Processes)
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], arg("[KEY=VALUE ...]", "")] = ()

    def __post_init__(self) -> None:
        if self.processes.several and self.mesh.drafter_devices is not None:
            raise D3DError(
                "--drafter-devices chooses devices of one process; several train on all they have"
            )


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure a drafter's acceptance length on recorded responses, without running the target.

    Attributes:
      drafter: Folder or hub id of the drafter.
      target: Its target model.
      data: Dataset folder of responses of that target.
      split: Part of the dataset.
      block_size: W to draft with.
      documents: How many responses, evenly spread; 0 for all.
      policies: Also compare the hit rates of asynchronous decoding under best-first and rectangles
        of branches, at several numbers of them.
      json: Print one JSON object instead of a table.
      mesh: Which devices to measure on.
    """

    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    data: Annotated[Path, arg("DIR")]
    split: Literal["train", "validation"] = "validation"
    block_size: Annotated[int | None, arg("W", "the drafter's own")] = None
    documents: int = 0
    policies: bool = False
    json: bool = False
    mesh: DrafterMesh = dataclasses.field(default_factory=DrafterMesh)

    def __post_init__(self) -> None:
        at_least(0, documents=self.documents)
        at_least(2, block_size=self.block_size)


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Fit temperatures that make a drafter's probabilities match how often its tokens come true.

    They go into the config.json of its folder. Best-first branches are chosen better with them;
    the tokens drafted stay the same. Half of the responses are fitted on, half measured on.

    Attributes:
      drafter: Folder of the drafter, which is changed.
      target: Its target model.
      data: Dataset folder of responses of that target.
      split: Part of the dataset; the drafter should not have been trained on it.
      documents: How many responses, evenly spread; 0 for all.
      mesh: Which devices to measure on.
    """

    drafter: Annotated[Path, arg("DIR")]
    target: Annotated[str, arg("MODEL")]
    data: Annotated[Path, arg("DIR")]
    split: Literal["train", "validation"] = "validation"
    documents: int = 0
    mesh: DrafterMesh = dataclasses.field(default_factory=DrafterMesh)

    def __post_init__(self) -> None:
        at_least(0, documents=self.documents)


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a drafter as an ordinary Hugging Face folder, which needs no target to be loaded.

    With the target's embedding, head and tokenizer, and the mask vector in the reserved row of the
    embedding. A drafter of a reduced vocabulary then predicts all of it.

    Attributes:
      drafter: Folder or hub id of the drafter.
      target: Its target model.
      out: Folder to write; must not exist.
      dtype: Type of the weights.
    """

    drafter: Annotated[str, arg("MODEL")]
    target: Annotated[str, arg("MODEL")]
    out: Annotated[Path, arg("DIR")]
    dtype: Annotated[DType | None, arg("{float32,bfloat16}", "the drafter's own")] = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Predict tokens/s of every way to decode and recommend mode, policy, block size and branches.

    The times of single steps are measured here or read from a file, how often the drafter is right
    is measured on recorded responses or read from a file. Both files are JSON that this command
    writes, so that one machine can plan for another.

    Attributes:
      target: Model to decode: a name, hub id, folder or .gguf file.
      drafter: Folder or hub id of the drafter.
      data: Dataset folder of responses of that target, to measure acceptance on.
      split: Part of the dataset.
      documents: How many responses, evenly spread; 0 for all.
      profile: Files of --save-profile to take instead, one for each depth of the drafter.
      times: File of --save-times to take instead of measuring; the models are then not run.
      batch: Numbers of prompts decoded together.
      block_size: Block sizes to compare.
      policy: Policies of asynchronous decoding to compare: best-first:N or rectangle:C,F.
      layers: Depths to time the drafter at (its first layers).
      context: Tokens in the caches while steps are timed.
      save_times: File to write the times to.
      save_profile: File to write the acceptance profile to.
      check: Decode this many prompts of --data with the best settings of each mode, and compare.
      max_new_tokens: Longest reply of --check, the stop token included.
      json: Print one JSON object instead of tables.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    drafter: Annotated[str | None, arg("MODEL", "the one shipped for this target")] = None
    data: Annotated[Path | None, arg("DIR", "none")] = None
    split: Literal["train", "validation"] = "validation"
    documents: int = 32
    profile: Annotated[tuple[Path, ...], arg("FILE ...", "none")] = ()
    times: Annotated[Path | None, arg("FILE", "measured here")] = None
    batch: Annotated[tuple[int, ...], arg("N ...")] = (1,)
    block_size: Annotated[tuple[int, ...], arg("W ...", "powers of two and the drafter's own")] = ()
    policy: Annotated[tuple[str, ...], arg("NAME:SIZES ...", "several of both kinds")] = ()
    layers: Annotated[tuple[int, ...], arg("L ...", "all of its layers")] = ()
    context: int = 128
    save_times: Annotated[Path | None, arg("FILE", "not saved")] = None
    save_profile: Annotated[Path | None, arg("FILE", "not saved")] = None
    check: int = 0
    max_new_tokens: int = 96
    json: bool = False
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        at_least(0, documents=self.documents, check=self.check)
        at_least(1, context=self.context)
        at_least(2, max_new_tokens=self.max_new_tokens)
        for name, minimum in (("batch", 1), ("block_size", 2), ("layers", 1)):
            for value in getattr(self, name):
                at_least(minimum, **{name: value})
        if not self.batch:
            raise D3DError("--batch names no number of prompts")
        self._check_sources()

    def _check_sources(self) -> None:
        """Refuses options that ask for the same thing twice, or for what is not there."""
        if self.data is None and not self.profile:
            raise D3DError("give --data to measure acceptance on, or --profile")
        if self.check and self.data is None:
            raise D3DError("--check decodes prompts of --data: give that too")
        if self.check and self.check < max(self.batch):
            raise D3DError(f"--check must be at least the largest --batch, found {self.check}")
        if self.profile and self.data is not None and not self.check:
            raise D3DError("give either --data or --profile")
        if self.profile and (self.block_size or self.policy or self.save_profile):
            raise D3DError(
                "--block-size, --policy and --save-profile go with --data: a profile has its own"
            )
        if self.times is not None and (self.layers or self.save_times):
            raise D3DError("--layers and --save-times go with measuring: leave out --times")


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
      sampling: How tokens are chosen, and where a reply ends.
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
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
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
      sampling: How tokens are chosen, and where a reply ends.
      decoding: How to decode.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
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
      policy: Outcomes prepared in async mode: best-first:N or rectangle:C,F.
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
    policy: Annotated[str | None, arg("NAME:SIZES", "best-first:4")] = None
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
