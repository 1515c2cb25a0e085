"""`d3d respond`: the target's answers to prompts, and the training dataset built from them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

from d3d_jax.commands.loading import target_mesh
from d3d_jax.commands.option_groups import TargetPlacement, thinking_switch
from d3d_jax.commands.options import Respond
from d3d_jax.commands.runtime import (
    Bar,
    busy,
    note,
    prompt_ids,
    prompt_text,
    start_jax,
    warn_of_turns,
)
from d3d_jax.errors import D3DError
from d3d_jax.infer.loading import model_name
from d3d_jax.infer.model import open_model
from d3d_jax.models import checkpoint
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.dataset import build_dataset, open_dataset
from d3d_jax.train.respond import respond
from d3d_jax.train.responses import (
    Manifest,
    ResponseWriter,
    import_responses,
    read_prompts,
    read_responses,
)

DATASET = "dataset"


def run(options: Respond) -> None:
    """Makes or imports the responses, then builds the dataset."""
    file = options.prompts or options.import_from
    assert file is not None
    out = options.out or Path(f"{file.name.split('.')[0]}-responses")
    if options.prompts is not None:
        make_responses(
            options.target,
            file,
            out,
            options.max_new_tokens,
            options.batch,
            system=options.system,
            thinking=thinking_switch(options.thinking),
            placement=options.placement,
        )
    else:
        folder = resolve_model(options.target)
        manifest = _manifest(
            options.target, folder, file, options.max_new_tokens, greedy=not options.sampled
        )
        with busy(f"importing {file}"):
            import_responses(file, out, manifest)
    dataset = ensure_dataset(out)
    train, validation = (_count(dataset, split) for split in ("train", "validation"))
    note(f"{dataset}: {train} responses to train on, {validation} held out")


def make_responses(
    target_name: str,
    file: Path,
    out: Path,
    max_new_tokens: int,
    batch: int,
    *,
    system: str | None = None,
    thinking: bool | None = None,
    placement: TargetPlacement | None = None,
) -> int:
    """Answers every prompt of a file that `out` does not hold an answer to yet.

    Args:
      system: message put before each prompt.
      thinking: on or off; None: as the chat template has it.
      placement: of the target; None: on the first device.

    Returns:
      How many answers `out` holds then.

    Raises:
      D3DError: bad prompts, another run's folder, a prompt too long for the model, or a chat
        template that cannot switch thinking.
    """
    prompts = read_prompts(file)
    warn_of_turns(prompts, file)
    files, task = open_model(target_name), file.name.split(".")[0]
    rows = [
        (prompt_ids(files, prompt_text(p), system, thinking), p.split, p.task or task)
        for p in prompts
    ]
    placement = placement or TargetPlacement()
    start_jax(cpu_devices=placement.num_devices)
    mesh = target_mesh(files, placement)
    most = files.config.max_length
    for number, (ids, _, _) in enumerate(rows, start=1):
        if len(ids) >= most:
            raise D3DError(
                f"{file}: prompt {number} has {len(ids)} tokens, {target_name} takes at most "
                f"{most - 1}"
            )
    manifest = _manifest(target_name, files.folder, file, max_new_tokens)
    manifest = dataclasses.replace(manifest, system=system, thinking=thinking)
    writer = ResponseWriter(out, manifest)
    if missing := len(rows) - len(writer.done):
        with busy(f"loading {target_name}"):
            target = files.load(mesh).target
        with Bar("responses", len(rows)) as bar:
            respond(target, rows, writer, batch=min(batch, missing), progress=_Speed(bar))
    return len(writer.done)


class _Speed:
    """Passes progress on to a bar, with the tokens per second so far."""

    def __init__(self, bar: Bar):
        self.bar, self.tokens, self.began = bar, 0, time.perf_counter()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        self.tokens += tokens
        speed = self.tokens / (time.perf_counter() - self.began)
        self.bar.update(done, f"{speed:.0f} tokens/s" if self.tokens else "")


def ensure_dataset(responses: Path) -> Path:
    """The dataset of a folder of responses; built unless one of exactly these is there."""
    out = responses / DATASET
    if out.exists():
        held = sum(1 for _ in read_responses(responses))
        if sum(_count(out, split) for split in ("train", "validation")) == held:
            return out
    with busy("building the dataset"):
        return build_dataset(responses, out, overwrite=out.exists())


def _count(dataset: Path, split: str) -> int:
    try:
        return len(open_dataset(dataset, split))
    except D3DError:
        return 0  # it has no such split


def _manifest(
    name: str, folder: Path, file: Path, max_new_tokens: int, greedy: bool = True
) -> Manifest:
    tokenizer, (model, _) = Tokenizer.from_folder(folder), checkpoint.read_config(folder)
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise D3DError(f"cannot read {file}: {error.strerror}") from None
    return Manifest(
        target=model_name(name),
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=tokenizer.template_fingerprint,
        vocab_size=model.vocab_size,
        stop_ids=tokenizer.stop_ids,
        sampling={"greedy": greedy},
        max_new_tokens=max_new_tokens,
        # With its hash, so that a run is not continued with other prompts of the same name.
        prompts=f"{file.name} sha256:{digest[:16]}",
    )
