"""`d3d respond`: the target's answers to prompts, and the training dataset built from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from d3d_jax.commands.loading import sampling_params, target_mesh
from d3d_jax.commands.option_groups import thinking_switch
from d3d_jax.commands.respond_options import Respond
from d3d_jax.commands.runtime import (
    Bar,
    busy,
    join_processes,
    note,
    prompt_ids,
    sigterm_noted,
    start_jax,
    warn_of_turns,
)
from d3d_jax.errors import D3DError
from d3d_jax.infer.loading import model_name
from d3d_jax.infer.model import ModelFiles, open_model
from d3d_jax.processes import first_does, is_first, meet, refuse_different, refuse_lost
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.dataset import (
    ResponseDataset,
    build_dataset,
    document_digest,
    open_dataset,
)
from d3d_jax.train.imports import import_responses
from d3d_jax.train.prompts import Prompt, PromptSource, file_name, open_prompts
from d3d_jax.train.respond import Asked, respond
from d3d_jax.train.responses import (
    SPLITS,
    Manifest,
    ResponseWriter,
    read_manifest,
    read_responses,
)

DATASET = "dataset"
# How often a process asks after the others, in seconds: it is a message over the network.
_ASK_EVERY = 1.0
# How many prompts of a dataset may be refused before it is taken for one of another kind.
_JUDGED = 100
_SAVED = "every answer so far is saved: the same command continues"


def run(options: Respond) -> None:
    """Makes or imports the responses, then builds the dataset."""
    if options.import_from is not None:
        _build(_import(options))
        return
    out = make_responses(options)
    if not options.processes.several:
        _build(out)
        return
    with sigterm_noted(_SAVED) as look:
        if is_first():
            _build(out)
        # JAX ends all processes where one has left long before another.
        meet("built", look)


def make_responses(options: Respond) -> Path:
    """Answers every prompt that the folder does not hold an answer to yet.

    Of several processes each answers a part, on devices of its own.

    Returns:
      The folder.

    Raises:
      D3DError: bad prompts, another run's folder, a chat template that cannot switch thinking, or
        sampling out of range.
      StoppedError: SIGTERM; what is answered is saved.
      LostProcessError: another process has ended early; the same holds.
    """
    assert options.prompts is not None
    sampling = sampling_params(options.sampling, options.max_new_tokens)
    files = open_model(options.target)
    with busy(f"reading {options.prompts}"):
        source = open_prompts(options.prompts, options.column)
    # So that a template that cannot do what is asked is known before anything is written.
    _refuse_unrendered(files, source, options)
    start_jax(cpu_devices=options.placement.num_devices)
    if options.processes.several:
        join_processes(options.processes)
    mesh = target_mesh(files, options.placement)
    out = options.out or Path(f"{source.label}-responses")
    manifest = dataclasses.replace(
        _manifest(files, source.name, options),
        sampling=_described(sampling),
        system=options.system,
    )
    refuse_different(repr((manifest, options.limit, options.column, options.max_prompt_tokens)))
    part, parts = jax.process_index(), jax.process_count()
    opened = functools.partial(ResponseWriter, out, manifest, part=part, parts=parts)
    writer = first_does(opened, f"cannot use the folder {out}") or opened()
    questions = _Questions(files, source, options, writer.done)
    questions.check()
    target, asked = None, questions.ask()
    # What is left may be prompts that cannot be asked, for which no weights are read.
    if (first := next(asked, None)) is not None:
        with busy(f"loading {options.target}"):
            target = files.load(mesh).target
        asked = itertools.chain([first], asked)
    title = "responses" if parts == 1 else f"responses, process {part + 1} of {parts}"
    with sigterm_noted(_SAVED) as look:
        if target is not None:
            with Bar(title, questions.total) as bar:
                respond(
                    target,
                    asked,
                    writer,
                    batch=min(options.batch, questions.missing),
                    sampling=sampling,
                    progress=_Progress(bar, questions, writer, look),
                )
        meet("answered", look)
    questions.report()
    return out


def _refuse_unrendered(files: ModelFiles, source: PromptSource, options: Respond) -> None:
    """Refuses prompts of which the chat template takes none: a file's first, a dataset's many."""
    wrong: D3DError | None = None
    for _, prompt in itertools.islice(source.read(), 1 if source.strict else _JUDGED):
        try:
            prompt_ids(files, prompt, options.system, thinking_switch(options.thinking))
            return
        except D3DError as error:
            wrong = wrong or D3DError(f"{prompt.where}: {error}")
    if wrong is not None:
        raise wrong


class _Questions:
    """This process's part of the prompts, as token ids.

    Attributes:
      total: how many there are to answer, as far as is known.
      missing, present: how many of them had no answer at first, and how many had.
    """

    def __init__(
        self, files: ModelFiles, source: PromptSource, options: Respond, done: set[int]
    ) -> None:
        self._files, self._source, self._options = files, source, options
        chosen = np.zeros(source.rows, bool)
        # The first N of one shuffle: those of a smaller N are among those of a larger.
        chosen[np.random.default_rng(0).permutation(source.rows)[: options.limit]] = True
        own = np.arange(source.rows) % jax.process_count() == jax.process_index()
        self._wanted = chosen & own
        self.total = int(self._wanted.sum())
        self._wanted[[index for index in done if index < source.rows]] = False
        self.missing = int(self._wanted.sum())
        self.present = self.total - self.missing
        self._asked = self._too_long = 0
        self._refusal = ""
        limit = options.max_prompt_tokens or files.config.max_length
        self._most = min(limit, files.config.max_length - 1)

    def check(self) -> None:
        """Looks at all prompts of a file before any is answered; a dataset may hold a few bad ones.

        Raises:
          D3DError: one that the chat template refuses, or longer than the model reads.
        """
        if self._source.strict:
            longer = 0
            for _, prompt in self._source.read(self._is_wanted):
                self._ids(prompt)
                longer += prompt.turns > 1
            warn_of_turns(longer, self._source.label)

    def ask(self) -> Iterator[Asked]:
        """Those that have no answer yet, and are not too long, in the source's order."""
        for index, prompt in self._source.read(self._is_wanted):
            try:
                ids = self._ids(prompt)
            except D3DError as error:
                if self._source.strict:
                    raise
                # As with a record without a prompt: it must not end a long run.
                self._refusal = self._refusal or str(error)
                self.total -= 1
                continue
            if len(ids) > self._most:
                self._too_long += 1
                self.total -= 1
                continue
            self._asked += 1
            yield Asked(index, ids, prompt.split, prompt.task or self._source.label)

    def _is_wanted(self, index: int) -> bool:
        return bool(self._wanted[index])

    def _ids(self, prompt: Prompt) -> list[int]:
        options = self._options
        try:
            thinking = thinking_switch(options.thinking)
            ids = prompt_ids(self._files, prompt, options.system, thinking)
        except D3DError as error:
            raise D3DError(f"{prompt.where}: {error}") from error
        # Of the user's own file only what was said to be left out is.
        if len(ids) > self._most and self._source.strict and options.max_prompt_tokens is None:
            raise D3DError(
                f"{prompt.where}: the prompt has {len(ids)} tokens and the model reads at most "
                f"{self._most}; --max-prompt-tokens leaves longer ones out"
            )
        return ids

    def report(self) -> None:
        """Says which prompts were left out, if any."""
        unusable = self.missing - self._asked - self._too_long
        first = f" ({self._refusal})" if self._refusal else ""
        for count, what in (
            (self._too_long, f"have more than {self._most} tokens"),
            (unusable, f"hold no prompt that the chat template takes{first}"),
        ):
            if count:
                note(f"{count} of {self._source.rows} records of {self._source.label} {what}")


class _Progress:
    """Passes progress of this process's part on to a bar, with the tokens per second so far.

    Args:
      look: for a signal that ends the work, by an exception.
    """

    def __init__(
        self, bar: Bar, questions: _Questions, writer: ResponseWriter, look: Callable[[], None]
    ):
        self.bar, self.questions, self.writer, self.look = bar, questions, writer, look
        self.before = len(writer.done) - questions.present
        self.tokens, self.began = 0, time.perf_counter()
        self.asked = self.began

    def __call__(self, tokens: int) -> None:
        self.look()
        if time.perf_counter() - self.asked > _ASK_EVERY:
            refuse_lost()
            self.asked = time.perf_counter()
        self.tokens += tokens
        if not is_first():
            return  # the others' parts take as long
        speed = self.tokens / (time.perf_counter() - self.began)
        done = len(self.writer.done) - self.before
        self.bar.update_total(done, self.questions.total, f"{speed:.0f} tokens/s")


def _import(options: Respond) -> Path:
    """Brings responses made elsewhere into the folder, which it returns."""
    file = options.import_from
    assert file is not None
    files = open_model(options.target)
    if options.thinking is not None:
        # A template that has no such switch is refused, also where no text is to be rendered.
        prompt_ids(files, Prompt("a"), thinking=thinking_switch(options.thinking))
    out = options.out or Path(f"{file.name.split('.')[0]}-responses")
    source = f"imported from {file_name(file)}"
    if options.requests is not None:
        source += f", asked by {file_name(options.requests)}"
    manifest = dataclasses.replace(
        _manifest(files, source, options), sampling={"greedy": options.greedy}
    )
    with busy(f"importing {file}"):
        imported = import_responses(
            file, out, manifest, tokenizer=files.tokenizer, requests=options.requests
        )
    if imported.failed:
        note(f"{imported.failed} lines of {file} tell of a request that failed, and were left out")
    return out


def _build(responses: Path) -> None:
    dataset = ensure_dataset(responses)
    held = {one.split: len(one) for one in _splits(dataset)}
    train, validation = (held.get(split, 0) for split in SPLITS)
    note(f"{dataset}: {train} responses to train on, {validation} held out")


def ensure_dataset(responses: Path) -> Path:
    """The dataset of a folder of responses; built unless one of exactly these is there."""
    out = responses / DATASET
    if out.exists() and _is_of(out, responses):
        return out
    with busy("building the dataset"):
        return build_dataset(responses, out, overwrite=out.exists())


def _is_of(dataset: Path, responses: Path) -> bool:
    """Whether a dataset holds these responses and no others."""
    manifest = read_manifest(responses)
    left = {
        (r.split, r.index): document_digest(r.prompt_ids + r.response_ids, len(r.prompt_ids))
        for r in read_responses(responses)
    }
    for one in _splits(dataset):
        held = [left.pop((one.split, index), b"") for index in one.indices.tolist()]
        same = hashlib.sha256(b"".join(held)).hexdigest() == one.digest
        if one.manifest != manifest or not same:
            return False
    return not left


def _splits(dataset: Path) -> list[ResponseDataset]:
    """Those splits of a dataset that are there and not damaged."""
    found = []
    for split in SPLITS:
        with contextlib.suppress(D3DError):
            found.append(open_dataset(dataset, split))
    return found


def _manifest(files: ModelFiles, prompts: str, options: Respond) -> Manifest:
    """What is asked of which target; how tokens are chosen is left to say."""
    return Manifest(
        target=model_name(options.target),
        tokenizer_fingerprint=files.tokenizer.fingerprint,
        template_fingerprint=files.tokenizer.template_fingerprint,
        vocab_size=files.config.vocab_size,
        stop_ids=files.tokenizer.stop_ids,
        sampling={"greedy": True},
        max_new_tokens=options.max_new_tokens,
        prompts=prompts,
        thinking=thinking_switch(options.thinking),
    )


def _described(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.greedy:
        return {"greedy": True}
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return {"greedy": False, **{name: getattr(sampling, name) for name in names}}
