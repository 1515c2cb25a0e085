"""What `d3d sweep` takes; as light as `commands.options`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from d3d_jax.commands.option_groups import Placement, RunDType, arg, at_least
from d3d_jax.errors import D3DError

# What the JSON says it is.
KIND = "d3d sweep"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Measure how speed depends on block size, branches, concurrency and drafter, beside the plan.

    Along each axis that is asked for, prompts of --data are decoded greedily, the settings taking
    turns; what d3d plan predicts from single steps and recorded responses stands beside it.

    Attributes:
      target: Model to decode: a name, hub id, folder or .gguf file.
      data: Dataset folder of greedy responses of that target.
      out: Folder for sweep.json and a plot of each axis.
      drafter: Folders or hub ids of drafters; of several, the first is taken for the other axes.
      block_size: Block sizes to compare.
      branches: Numbers N of best-first branches to compare.
      c: Sizes C of the rectangle C, F to compare, with every --f.
      f: Sizes F of the rectangle to compare, with every --c.
      concurrency: Numbers of prompts decoded together to compare.
      split: Part of the dataset.
      samples: Prompts to decode, evenly spread.
      repeats: How often every setting is measured.
      documents: Responses to measure acceptance on for the plan, evenly spread; 0 for all.
      max_new_tokens: Longest reply, the stop token included.
      context: Tokens in the caches while single steps are timed.
      dtype: Type of weights, activations and caches.
      json: Print sweep.json instead of tables.
      placement: Which devices hold the models.
    """

    target: Annotated[str, arg("MODEL")]
    data: Annotated[Path, arg("DIR")]
    out: Annotated[Path, arg("DIR")]
    drafter: Annotated[tuple[str, ...], arg("MODEL ...", "the one shipped for this target")] = ()
    block_size: Annotated[tuple[int, ...], arg("W ...", "none")] = ()
    branches: Annotated[tuple[int, ...], arg("N ...", "none")] = ()
    c: Annotated[tuple[int, ...], arg("C ...", "none")] = ()
    f: Annotated[tuple[int, ...], arg("F ...", "none")] = ()
    concurrency: Annotated[tuple[int, ...], arg("N ...", "none")] = ()
    split: Literal["train", "validation"] = "validation"
    samples: int = 8
    repeats: int = 3
    documents: int = 32
    max_new_tokens: int = 96
    context: int = 128
    dtype: RunDType = None
    json: bool = False
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        at_least(0, documents=self.documents)
        at_least(1, samples=self.samples, context=self.context, repeats=self.repeats)
        at_least(2, max_new_tokens=self.max_new_tokens)
        for name, minimum in (
            ("block_size", 2),
            ("branches", 1),
            ("c", 2),
            ("f", 1),
            ("concurrency", 1),
        ):
            for value in getattr(self, name):
                at_least(minimum, **{name: value})
        if bool(self.c) != bool(self.f):
            raise D3DError("--c and --f go together: they are the sides of one rectangle")
        axes = (self.block_size, self.branches, self.c, self.concurrency, self.drafter[1:])
        if not any(axes):
            raise D3DError(
                "name an axis: --block-size, --branches, --c with --f, --concurrency, or several "
                "of --drafter"
            )
        if max(self.concurrency, default=1) > self.samples:
            raise D3DError(
                f"--concurrency {max(self.concurrency)} needs as many --samples, found "
                f"{self.samples}"
            )
