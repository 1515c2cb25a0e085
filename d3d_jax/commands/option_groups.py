"""Options that several subcommands share, and how one is shown and checked."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from d3d_jax.config import Miss, Mode
from d3d_jax.errors import D3DError

DType = Literal["float32", "bfloat16"]


def arg(metavar: str, default: str | None = None, name: str | None = None) -> Any:
    """How an option is shown; `default` says what leaving it out means where that is no value."""
    return tyro.conf.arg(
        name=name, metavar=metavar, help_behavior_hint=default and f"(default: {default})"
    )


# Not fields of a common base: tyro would list those of a base before --target.
System = Annotated[str | None, arg("TEXT", "the template's own")]
Thinking = Annotated[Literal["on", "off"] | None, arg("{on,off}", "the template's own")]
RunDType = Annotated[
    DType | None, arg("{float32,bfloat16}", "float32 on CPU, else the checkpoint's")
]


def thinking_switch(thinking: Literal["on", "off"] | None) -> bool | None:
    """What --thinking asks of a chat template; None leaves it to the template."""
    return None if thinking is None else thinking == "on"


def at_least(minimum: int, **values: int | None) -> None:
    """Refuses options, named as the fields are, that lie below a minimum (`D3DError`)."""
    for name, value in values.items():
        if value is not None and value < minimum:
            option = "--" + name.replace("_", "-")
            raise D3DError(f"{option} must be at least {minimum}, found {value}")


def device_indices(option: str, text: str | None) -> tuple[int, ...] | None:
    """The device indices of `0-3,5`; None for None."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise D3DError(f"{option} takes indices of devices such as 0-3,5; found {text!r}")
        if max(len(first), len(last)) > 5:
            raise D3DError(f"{option} {text}: no machine has that many devices")
        if last and int(last) < int(first):
            raise D3DError(f"{option} {text}: {part.strip()} ends before it begins")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) != len(found):
        raise D3DError(f"{option} {text} names no device, or one twice")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class TargetPlacement:
    """Which devices hold the target.

    Attributes:
      target_devices: Devices of the target, as indices of this process's own.
      target_tp: Over how many of them the target is split (tensor parallel); the rest take parts of
        the batch.
    """

    target_devices: Annotated[str | None, arg("I-J,K", "the first --target-tp")] = None
    target_tp: Annotated[int | None, arg("N", "all of --target-devices, or 1")] = None

    def __post_init__(self) -> None:
        at_least(1, target_tp=self.target_tp)
        device_indices("--target-devices", self.target_devices)

    @property
    def target_indices(self) -> tuple[int, ...] | None:
        """Those of --target-devices."""
        return device_indices("--target-devices", self.target_devices)

    @property
    def num_devices(self) -> int:
        """How many devices there must be."""
        return max(*(self.target_indices or (0,)), (self.target_tp or 1) - 1) + 1


@dataclasses.dataclass(frozen=True)
class Placement(TargetPlacement):
    """Which devices hold the models.

    Attributes:
      target_devices: Devices of the target, as indices of this process's own.
      target_tp: Over how many of them the target is split (tensor parallel); the rest take parts of
        the batch.
      drafter_devices: Devices of the drafter, which is split over them.
    """

    drafter_devices: Annotated[str | None, arg("I-J,K", "a device that the target leaves free")] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        device_indices("--drafter-devices", self.drafter_devices)

    @property
    def drafter_indices(self) -> tuple[int, ...] | None:
        """Those of --drafter-devices."""
        return device_indices("--drafter-devices", self.drafter_devices)

    @property
    def num_devices(self) -> int:
        """How many devices there must be, at least two, one for each role."""
        return max(super().num_devices, max(self.drafter_indices or (1,)) + 1)


@dataclasses.dataclass(frozen=True)
class DrafterMesh:
    """Which devices work on the drafter, and what is split over them.

    Attributes:
      drafter_devices: Devices to use, as indices of jax.devices().
      fsdp: Over how many of them weights, and in training the optimizer's state, are split by
        hidden size, each having rows of its own.
      tensor: Over how many of them heads, intermediate size and vocabulary are split; the devices
        that both leave take parts of the batch.
    """

    drafter_devices: Annotated[str | None, arg("I-J,K", "all")] = None
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        at_least(1, fsdp=self.fsdp, tensor=self.tensor)
        device_indices("--drafter-devices", self.drafter_devices)

    @property
    def indices(self) -> tuple[int, ...] | None:
        """Those of --drafter-devices."""
        return device_indices("--drafter-devices", self.drafter_devices)

    @property
    def num_devices(self) -> int:
        """How many devices there must be."""
        return max(max(self.indices or (0,)) + 1, self.fsdp * self.tensor)


@dataclasses.dataclass(frozen=True)
class Processes:
    """Whether this is one of several processes that are given the same command.

    Attributes:
      distributed: It is, as Slurm, Open MPI or a TPU pod says.
      coordinator: It is, and this is where the first of them listens.
      num_processes: How many they are.
      process_id: Which of them this is, from 0.
    """

    distributed: bool = False
    coordinator: Annotated[str | None, arg("HOST:PORT", "from the environment")] = None
    num_processes: Annotated[int | None, arg("N", "from the environment")] = None
    process_id: Annotated[int | None, arg("I", "from the environment")] = None

    def __post_init__(self) -> None:
        at_least(1, num_processes=self.num_processes)
        at_least(0, process_id=self.process_id)
        given = [o is not None for o in (self.coordinator, self.num_processes, self.process_id)]
        if any(given) and not all(given):
            raise D3DError(
                "--coordinator, --num-processes and --process-id go together; --distributed alone "
                "takes them from the environment"
            )

    @property
    def several(self) -> bool:
        """Whether it is one of several."""
        return self.distributed or self.coordinator is not None


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
      policy: Outcomes prepared in async mode: best-first:N, the N likeliest, or rectangle:C,F, the
        paper's.
      miss: Where the outcome was not prepared: draft while the target waits, or reuse the nearest
        prepared block.
      batch: Prompts decoded together; above 1 a reply is printed when it ends. A prompt takes the
        place of one that has ended.
      dtype: Type of weights, activations and caches.
    """

    drafter: Annotated[str | None, arg("MODEL", "the one shipped for this target, if any")] = None
    mode: Annotated[Mode | None, arg("{plain,sync,async}", "the fastest expected here")] = None
    max_length: Annotated[int | None, arg("N", "the model's own limit")] = None
    block_size: Annotated[int | None, arg("W", "the drafter's own; on CPU at most 4")] = None
    policy: Annotated[str | None, arg("NAME:SIZES", "best-first:4")] = None
    miss: Miss = "stall"
    batch: int = 1
    dtype: RunDType = None

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch)
        at_least(2, max_length=self.max_length, block_size=self.block_size)
        if self.drafter == "":
            raise D3DError("--drafter names no folder; leave it out to use the shipped one, if any")


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """How tokens are chosen.

    Attributes:
      temperature: 0 takes the likeliest token; above, tokens are drawn.
      top_k: Draw from the K likeliest tokens only.
      top_p: Draw from the fewest likeliest tokens that hold this much of the probability.
      min_p: Draw from tokens at least this probable relative to the likeliest.
      seed: In float32 the same seed draws the same reply in every mode and batch.
    """

    temperature: float = 0.0
    top_k: Annotated[int | None, arg("K", "all")] = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class SamplingOptions(TokenChoice):
    """How tokens are chosen, and where a reply ends.

    Attributes:
      temperature: 0 takes the likeliest token; above, tokens are drawn.
      top_k: Draw from the K likeliest tokens only.
      top_p: Draw from the fewest likeliest tokens that hold this much of the probability.
      min_p: Draw from tokens at least this probable relative to the likeliest.
      seed: In float32 the same seed draws the same reply in every mode and batch.
      stop: Texts that end a reply, besides the model's own stop tokens.
    """

    stop: Annotated[tuple[str, ...], arg("TEXT ...", "none")] = ()
