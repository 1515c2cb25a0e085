"""`d3d compile-check`: what training or decoding needs on hardware that is not here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from d3d_jax import topologies
from d3d_jax.branches import parse_policy
from d3d_jax.commands import check_programs as programs
from d3d_jax.commands.check_options import CompileCheck
from d3d_jax.commands.runtime import busy, note
from d3d_jax.compiled import GIB, Needs, compile_and_measure
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.drafter import Drafter
from d3d_jax.errors import D3DError
from d3d_jax.kernels.interval_attention import compiling_for
from d3d_jax.models import sharding
from d3d_jax.presets import preset
from d3d_jax.topologies import Topology
from d3d_jax.train.config import TrainConfig, load_config


def run(options: CompileCheck) -> None:
    """Prints a table of memory and one of collectives, or one JSON object.

    Raises:
      D3DError: bad input, or, after printing, a program that does not fit into a device.
    """
    target, drafter = preset(options.target), _drafter(options, options.drafter_layers)
    topology = topologies.find(options.topology)
    figures: dict[str, Any] = {
        "target": options.target,
        "drafter": None
        if options.what == "respond"
        else {"from": options.drafter or options.target, **_sizes(drafter)},
        "topology": topology.name,
        "platform": topology.platform,
        "chips": topology.chips,
        "devices": len(topology.devices),
        "device_bytes": topology.hbm,
        "jax": jax.__version__,
    }
    if options.what == "train":
        figures["config"] = dataclasses.asdict(train_config(options, len(topology.devices)))
    else:
        policy = {} if options.what == "respond" else {"policy": options.policy}
        figures |= {"batch": options.batch, "context": options.context, **policy}
    figures["programs"] = found = []
    with compiling_for(topology.platform):
        for program in _programs(options, target, drafter, topology):
            with busy(f"compiling {program.name}"):
                needs = compile_and_measure(program.traced, program.mesh.size)
            found.append({"name": program.name, "mesh": dict(program.mesh.shape), **_json(needs)})
    print(json.dumps(figures)) if options.json else _print(figures)
    shared = options.what == "decode" and options.tp + options.drafter_tp > len(topology.devices)
    check_budget(found, topology, shared)


def _sizes(drafter: Drafter) -> dict[str, int]:
    return {"layers": drafter.model.num_hidden_layers, "block_size": drafter.drafter.block_size}


def _drafter(options: CompileCheck, layers: int | None) -> Drafter:
    """An untrained drafter of a known architecture, as `d3d init-drafter` makes it."""
    source = options.drafter or options.target
    model = preset(source)
    layers = layers or model.num_hidden_layers
    if layers > model.num_hidden_layers:
        raise D3DError(
            f"a drafter of {layers} layers is more than the {model.num_hidden_layers} of {source}"
        )
    section = DrafterConfig(
        block_size=options.block_size,
        mask_token_id=model.vocab_size - 1,
        label_shift=1,
        in_block="bidirectional",
        target=options.target,
        tokenizer_fingerprint="",
        template_fingerprint="",
        source_layers=tuple(range(layers)),
        shares=("embed", "head") if source == options.target else (),
        draft_vocab_size=None,
    )
    return Drafter(dataclasses.replace(model, num_hidden_layers=layers), section)


def train_config(options: CompileCheck, devices: int) -> TrainConfig:
    """The training config with the rows asked for.

    Raises:
      D3DError: no such config, or rows that the mesh does not divide.
    """
    config = load_config(options.config, options.overrides)
    # Rows are split over the data axis and the fsdp axis.
    parts = max(devices // options.tensor, 1) * config.micro_batches
    config = dataclasses.replace(config, batch_rows=options.rows or parts)
    if config.batch_rows % parts:
        raise D3DError(
            f"--rows {config.batch_rows} must be a multiple of {parts}, the devices that rows are "
            "split over times micro_batches"
        )
    return config


def _programs(
    options: CompileCheck, target: ModelConfig, drafter: Drafter, topology: Topology
) -> Iterator[programs.Program]:
    devices = topology.devices
    if options.what == "train":
        mesh = sharding.make_mesh(devices, fsdp=options.fsdp, tensor=options.tensor, arrange=True)
        mesh = sharding.model_mesh(mesh, drafter.model)
        teacher = options.teacher_layers and _drafter(options, options.teacher_layers)
        config = train_config(options, len(devices))
        yield programs.train_step(drafter, config, mesh, teacher or None)
        return
    policy = parse_policy(options.policy, options.block_size)
    for name in ("tp", "drafter_tp"):
        if getattr(options, name) > len(devices):
            option = "--" + name.replace("_", "-")
            raise D3DError(
                f"{option} {getattr(options, name)} is more than the {len(devices)} devices of "
                f"{topology.name}"
            )
    if options.what == "decode" and options.tp + options.drafter_tp > len(devices):
        note("target and drafter share devices here: their arguments add up")
    sizes = {"batch": options.batch, "context": options.context}
    mesh = sharding.make_mesh(devices[: options.tp], tensor=options.tp)
    block_size = options.block_size if options.what == "decode" else 1
    yield from programs.target_steps(target, mesh, block_size=block_size, **sizes)
    if options.what == "respond":
        return
    mesh = sharding.make_mesh(devices[-options.drafter_tp :], tensor=options.drafter_tp)
    yield from programs.drafter_steps(drafter, policy, mesh, **sizes)


def _json(needs: Needs) -> dict[str, Any]:
    return {
        "compile_seconds": round(needs.seconds, 2),
        "bytes_per_device": needs.total,
        "memory": needs.memory and dataclasses.asdict(needs.memory),
        "flops_per_device": needs.flops,
        "kernels": needs.kernels,
        "collectives": {k: dataclasses.asdict(v) for k, v in needs.collectives.items()},
    }


def check_budget(found: list[dict[str, Any]], topology: Topology, shared: bool = False) -> None:
    """Refuses programs that do not fit a device (`D3DError`).

    Args:
      found: as in the JSON; the first word of a name is the role.
      shared: both roles have the same devices: beside a program of one lies what the other holds.
    """

    def needed(program: dict[str, Any]) -> int:
        role = program["name"].split()[0]
        others = [
            other["memory"]["arguments"]
            for other in found
            if shared and other["memory"] and other["name"].split()[0] != role
        ]
        return program["bytes_per_device"] + max(others, default=0)

    largest = max(found, key=needed)
    # A compiler that gives up knows better than the table how much memory it may use.
    failed = [program["name"] for program in found if program["memory"] is None]
    if failed or needed(largest) > topology.hbm:
        beside = ", with what the other role holds there," if shared else ""
        raise D3DError(
            f"{failed[0] if failed else largest['name']} does not fit: it needs{beside} "
            f"{needed(largest) / GIB:.2f} GiB a device, and a device of "
            f"{topology.name} has {topology.hbm / GIB:.2f}"
        )


def _print(figures: dict[str, Any]) -> None:
    hardware = (
        f"{figures['topology']}: {figures['chips']} chips, {figures['devices']} devices of "
        f"{figures['device_bytes'] / GIB:.4g} GiB"
    )
    memory = _table(
        f"{hardware}; GiB a device",
        ("program",),
        ("arguments", "temporaries", "new outputs", "code", "total", "of device"),
    )
    uncounted = " without attention kernels" if figures["platform"] == "hopper" else ""
    work = _table(
        f"one run; TFLOP a device{uncounted}",
        ("program", "mesh"),
        ("TFLOP", "kernels", "compiled in"),
    )
    exchange = _table(
        "collectives of one run; GiB a device is given",
        ("program", "kind"),
        ("count", "GiB", "largest"),
    )
    for program in figures["programs"]:
        name, mesh = program["name"], program["mesh"]
        memory.add_row(name, *_memory_row(program, figures["device_bytes"]))
        work.add_row(
            name,
            " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device",
            f"{program['flops_per_device'] / 1e12:.4g}",
            str(program["kernels"]),
            f"{program['compile_seconds']:.1f} s",
        )
        for kind, found in program["collectives"].items():
            sizes = (f"{found[size] / GIB:.4f}" for size in ("bytes", "largest"))
            exchange.add_row(name, kind, str(found["count"]), *sizes)
    console = Console(highlight=False)
    for table in (memory, work, exchange):
        if table.row_count:
            console.print(table)


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _memory_row(program: dict[str, Any], device_bytes: int) -> list[str]:
    """Columns of sizes; of a program that does not fit only the total is known."""
    total, parts = program["bytes_per_device"], program["memory"]
    sizes = [""] * 4
    if parts is not None:
        new = parts["outputs"] - parts["aliased"]
        found = (parts["arguments"], parts["temporaries"], new, parts["code"])
        sizes = [f"{size / GIB:.2f}" for size in found]
    return [*sizes, f"{total / GIB:.2f}", f"{total / device_bytes:.0%}"]
