"""What `d3d compile-check` takes; as light as `commands.options`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from d3d_jax.commands.option_groups import arg, at_least
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class CompileCheck:
    """Compile the programs of training or decoding for hardware that is not here.

    Prints what they need of each device: memory against what it has, work, collectives. No weights
    are read or downloaded: models are those whose published architecture is known. It needs the
    compiler of the hardware (pip install 'd3d_jax[tpu]' or 'd3d_jax[cuda13]') and no accelerator.

    Attributes:
      target: Hub id of the model that decodes, or that the drafter is for.
      topology: Hardware: a TPU generation and its chips (v5e:4x4, v5p:4x4x4), or h200:8.
      what: The train step of the drafter, all steps of decoding, or those of `d3d respond`.
      drafter: Hub id of the model that the drafter is made from; one made of the target shares its
        embedding and head.
      drafter_layers: How many of its layers the drafter has.
      teacher_layers: In training, layers of the drafter that it is pruned from and learns from
        (`d3d prune`).
      block_size: W of training, or of a round.
      config: Name of a shipped training config, or a YAML file.
      fsdp: In training, devices that weights are split over beside the batch.
      tensor: In training, devices that heads, intermediate size and vocabulary are split over.
      rows: In training, packed rows of a batch.
      tp: In decoding, devices that the target is split over.
      drafter_tp: In decoding, devices that the drafter is split over; the last of the topology.
      batch: In decoding, prompts decoded together.
      context: In decoding, tokens that a prompt and its reply may have.
      policy: In decoding, outcomes prepared: best-first:N or rectangle:C,F.
      json: Print one JSON object instead of tables.
      overrides: Settings that replace those of the training config: key=value ...
    """

    target: Annotated[str, arg("MODEL")]
    topology: Annotated[str, arg("NAME")]
    what: Literal["train", "decode", "respond"] = "train"
    drafter: Annotated[str | None, arg("MODEL", "the target")] = None
    drafter_layers: Annotated[int | None, arg("N", "all")] = None
    teacher_layers: Annotated[int | None, arg("N", "it learns from responses")] = None
    block_size: int = 16
    config: Annotated[str, arg("NAME|FILE")] = "qwen3-1.7b"
    fsdp: int = 1
    tensor: int = 1
    rows: Annotated[int | None, arg("B", "one a micro-batch where the batch is split")] = None
    tp: int = 1
    drafter_tp: int = 1
    batch: int = 1
    context: int = 4096
    policy: Annotated[str, arg("NAME:SIZES")] = "best-first:4"
    json: bool = False
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], arg("[KEY=VALUE ...]", "")] = ()

    def __post_init__(self) -> None:
        at_least(1, drafter_layers=self.drafter_layers, rows=self.rows, batch=self.batch)
        at_least(1, fsdp=self.fsdp, tensor=self.tensor, tp=self.tp, drafter_tp=self.drafter_tp)
        at_least(2, block_size=self.block_size, context=self.context)
        at_least(1, teacher_layers=self.teacher_layers)
        if self.what != "train" and (self.overrides or self.teacher_layers):
            raise D3DError("settings of a training config, and a teacher, go with --what train")
