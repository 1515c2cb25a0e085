"""What `d3d respond` takes; only light modules are imported here (see `commands.options`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from d3d_jax.commands.option_groups import (
    Processes,
    System,
    TargetPlacement,
    Thinking,
    TokenChoice,
    arg,
    at_least,
)
from d3d_jax.errors import D3DError


@dataclasses.dataclass(frozen=True)
class Respond:
    """Let the target answer prompts and build the training dataset from its answers.

    An interrupted run continues where it stopped when the same command is given again, also by
    another number of processes.

    Attributes:
      target: Model that answers: a name, hub id, folder or .gguf file.
      prompts: A file (JSONL, .jsonl.gz or parquet), hub:org/name[@revision][:split], or
        tfds:name[:split] prepared as ArrayRecord. The first user turn of each conversation is the
        prompt, with the system message before it.
      column: Field of the records that holds the prompt: turns, a text, or messages with role and
        content or from and value.
      limit: Answer only so many of the prompts, chosen by chance, always the same; a later run with
        more adds to them.
      max_prompt_tokens: Leave out longer prompts.
      import_from: Instead of prompts: JSONL (or .gz) of responses that the target wrote elsewhere,
        as token ids, conversations, or the output of vLLM or SGLang. Texts are encoded again, which
        may split them into other tokens than the target chose.
      requests: The request file of a batch output to import.
      system: System message put before prompts that have none.
      thinking: Whether the target thinks before it answers; its chat template must be able to
        switch that. Of imported responses: whether it did.
      greedy: The responses to import were made by taking the likeliest token each time.
      sampled: They were sampled, as servers do unless told otherwise. What is measured on such
        ones, as on those of --temperature, is of decoding that samples.
      out: Folder for the responses and, in dataset/, the dataset.
      max_new_tokens: Longest response, the stop token included.
      batch: Prompts decoded together, by each process.
      sampling: How tokens are chosen.
      placement: Which devices hold the target, of each process's own.
      processes: Whether this is one of several processes that answer a part of the prompts each.
        Several on one host with GPUs need a CUDA_VISIBLE_DEVICES of their own each.
    """

    target: Annotated[str, arg("MODEL")]
    prompts: Annotated[str | None, arg("SOURCE", "none")] = None
    column: Annotated[str | None, arg("NAME", "turns, messages, conversations or prompt")] = None
    limit: Annotated[int | None, arg("N", "all")] = None
    max_prompt_tokens: Annotated[int | None, arg("N", "what the model reads")] = None
    import_from: Annotated[Path | None, arg("FILE", "none")] = None
    requests: Annotated[Path | None, arg("FILE", "none")] = None
    system: System = None
    thinking: Thinking = None
    greedy: bool = False
    sampled: bool = False
    out: Annotated[Path | None, arg("DIR", "named after the prompts")] = None
    max_new_tokens: int = 192
    batch: int = 24
    sampling: TokenChoice = dataclasses.field(default_factory=TokenChoice)
    placement: TargetPlacement = dataclasses.field(default_factory=TargetPlacement)
    processes: Processes = dataclasses.field(default_factory=Processes)

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens, batch=self.batch, limit=self.limit)
        at_least(1, max_prompt_tokens=self.max_prompt_tokens)
        if (self.prompts is None) == (self.import_from is None):
            raise D3DError("give either --prompts or --import-from")
        if self.import_from is None:
            self._check_asking()
        else:
            self._check_importing()

    def _check_asking(self) -> None:
        if self.sampled or self.greedy or self.requests is not None:
            raise D3DError(
                "--greedy, --sampled and --requests describe imported responses: --import-from"
            )
        if self.sampling.temperature == 0 and self.sampling != TokenChoice():
            raise D3DError(
                "--top-k, --top-p, --min-p and --seed are for drawn tokens: give a --temperature "
                "above 0"
            )

    def _check_importing(self) -> None:
        if self.sampled == self.greedy:
            raise D3DError(
                "say how the tokens to import were chosen: --greedy, or --sampled, as servers do "
                "unless told otherwise"
            )
        names = ("system", "column", "limit", "max_prompt_tokens", "max_new_tokens", "batch")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        if (
            any(getattr(self, name) != defaults[name] for name in names)
            or self.sampling != TokenChoice()
            or self.placement != TargetPlacement()
            or self.processes.several
        ):
            raise D3DError(
                "--import-from takes responses as they are: --system, --column, --limit, "
                "--max-prompt-tokens, --max-new-tokens, --batch, sampling, devices and processes "
                "go with --prompts"
            )
