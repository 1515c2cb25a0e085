"""The commands of README.md and REPRODUCE.md: read from their fences and parsed, never run."""

import argparse
import importlib
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from d3d_jax import cli, topologies
from d3d_jax.branches import parse_policy
from d3d_jax.commands import compile_check
from d3d_jax.commands.benchmark_options import Benchmark
from d3d_jax.commands.check_options import CompileCheck
from d3d_jax.commands.options import InitDrafter, Train
from d3d_jax.commands.prune_options import Prune
from d3d_jax.commands.respond_options import Respond
from d3d_jax.commands.sweep_options import Sweep
from d3d_jax.errors import D3DError
from d3d_jax.presets import PRESETS
from d3d_jax.train.config import load_config

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`(python -m d3d_jax\.[^`]+)`")
# A line of the README's table of folders.
FOLDER = re.compile(r"\w+/ ")
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
LARGEST_BLOCK = 16


class Command(NamedTuple):
    """One command of a document: the variables it sets, its program, and what that is given."""

    variables: dict[str, str]
    program: str
    words: list[str]

    def __str__(self) -> str:
        return shlex.join([self.program, *self.words])


def command_of(text: str) -> Command:
    words = shlex.split(text, comments=True)
    variables: dict[str, str] = {}
    while match := VARIABLE.fullmatch(words[0]):
        variables[match[1]] = match[2]
        words.pop(0)
    return Command(variables, words[0], words[1:])


def commands_of(document: str) -> Iterator[Command]:
    """Those of the fences that name no language, continued lines joined, and benchmarks in text."""
    text = (ROOT / document).read_text()
    blocks = [block for language, block in FENCE.findall(text) if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line in (*lines, *INLINE.findall(text)):
        if line.strip() and not FOLDER.match(line):
            yield from map(command_of, line.split(" && "))


def check_d3d(command: Command) -> None:
    options = cli._parse(command.words)
    if isinstance(options, CompileCheck) and options.what == "train":
        compile_check.train_config(options, math.prod(topologies.parse(options.topology)[1]))
    elif config := getattr(options, "config", None):
        load_config(config, options.overrides)
    for policy in _policies(options):
        parse_policy(policy, LARGEST_BLOCK)
    prompts = getattr(options, "prompts", None)
    if isinstance(prompts, str) and prompts.startswith("assets/"):
        assert (ROOT / prompts).is_file()


def _policies(options: Any) -> tuple[str, ...]:
    chosen = getattr(getattr(options, "decoding", options), "policy", None)
    return (chosen,) if isinstance(chosen, str) else chosen or ()


class _Parsed(Exception):
    """What stops a benchmark once it has read its command line."""


def check_module(command: Command) -> None:
    assert command.words[0] == "-m", f"{command} runs no module"
    module = importlib.import_module(command.words[1])
    assert hasattr(module, "argparse"), f"{command} would be run and not parsed"
    read = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: Any) -> None:
        read(parser, *args)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(sys, "argv", command.words[1:])
        module.main()


def check_recipe(command: Command) -> None:
    """A recipe of `train/launch/`, whose own command `train/test_launch.py` parses."""
    script = (ROOT / command.words[-1]).read_text()
    known = set(re.findall(r"\$\{([A-Z_]+):", script))
    assert set(command.variables) <= known, f"{command} sets more than {sorted(known)}"
    if config := command.variables.get("CONFIG"):
        micro_batches = command.variables.get("MICRO_BATCHES", "16")
        load_config(config, (f"micro_batches={micro_batches}",))


def check_make(command: Command) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    wanted = {word for word in command.words if "=" not in word}
    assert wanted <= targets, f"{command}: no such target"


CHECKS = {
    "d3d": check_d3d,
    "python": check_module,
    "bash": check_recipe,
    "sbatch": check_recipe,
    "make": check_make,
    # Not ours.
    "pip": lambda command: None,
    "git": lambda command: None,
    "cd": lambda command: None,
}


@pytest.mark.parametrize("document", ["README.md", "REPRODUCE.md"])
def test_every_command_is_one_that_its_program_takes(document):
    found = list(commands_of(document))
    assert sum(command.program == "d3d" for command in found) > 10
    assert any(command.program == "python" for command in found)
    for command in found:
        try:
            CHECKS[command.program](command)
        except (SystemExit, D3DError) as error:
            pytest.fail(f"{document}: {command}: {error}")


@pytest.mark.parametrize(
    "text",
    [
        "d3d evaluate --target a --drafter b --data c --documets 5",
        "d3d evaluate --target a --drafter b",
        "d3d reproduce --target a",
        "d3d train --config qwen3-8b --target a --drafter b --data c --out d stepz=5",
        "d3d train --config qwen3-9b --target a --drafter b --data c --out d",
        "d3d train --config qwen3-8b --target a --drafter b --data c --out d micro_batches=3",
        "d3d compile-check --target Qwen/Qwen3-8B --topology v5e:4x4 --rows 256 micro_batches=32",
        "d3d generate --target a --policy rectangle:17,2 --prompt b",
        "d3d plan --target a --data b --policy best-first:8 worst-first:8",
        "python -m d3d_jax.infer.bench_batch --bloc-size 4",
        "python -m d3d_jax.infer.no_such_bench",
        "MICRO_BATCHS=4 bash train/launch/tpu_pod.sh",
        "MICRO_BATCHES=3 CONFIG=qwen3-8b bash train/launch/tpu_pod.sh",
        "bash train/launch/no_such_recipe.sh",
        "make compile-gpus",
    ],
)
def test_a_wrong_command_is_found(text):
    command = command_of(text)
    with pytest.raises((SystemExit, D3DError, AssertionError, ImportError, FileNotFoundError)):
        CHECKS[command.program](command)


def test_what_a_command_reads_an_earlier_one_has_written():
    written: set[Path] = set()
    for command in commands_of("REPRODUCE.md"):
        if command.program in ("bash", "sbatch"):
            assert Path(command.variables["DRAFTER"]) in written
            written.add(Path(command.variables["RUN"]) / "drafter")
        if command.program != "d3d":
            continue
        options = cli._parse(command.words)
        for name in ("data", "drafter", "vocab_from"):
            given = getattr(getattr(options, "decoding", options), name, None)
            for one in given if isinstance(given, tuple) else (given,):
                if one is not None and str(one) not in PRESETS:
                    assert Path(one) in written, f"{command} reads {one}, which nothing wrote"
        for file in getattr(options, "files", ()):
            assert file.parent in written, f"{command} reads {file}, which nothing wrote"
        written |= _outputs(options)


def _outputs(options: Any) -> set[Path]:
    """The folders that later commands may name."""
    if isinstance(options, InitDrafter):
        return {options.out}
    if isinstance(options, Respond) and options.out is not None:
        return {options.out / "dataset"}
    if isinstance(options, Benchmark | Sweep):
        return {options.out}
    return {options.out / "drafter"} if isinstance(options, Train | Prune) else set()
