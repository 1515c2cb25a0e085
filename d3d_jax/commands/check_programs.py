"""The programs of training and decoding, traced with abstract arrays for devices that are not here.

Everything is what `d3d train` and `d3d generate` run, but the arrays, which are shapes with
shardings. What the compiled programs need is `commands.compile_check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax import acceptance
from d3d_jax.branches import Policy
from d3d_jax.config import ModelConfig
from d3d_jax.drafter import Drafter
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.role import CHUNKS, Chunk, Place, Role
from d3d_jax.infer.target import Target
from d3d_jax.models import parameters, sharding
from d3d_jax.models.cache import KVCache
from d3d_jax.sampling import SamplingParams
from d3d_jax.train.config import TrainConfig
from d3d_jax.train.distillation import Teacher
from d3d_jax.train.packing import build_row
from d3d_jax.train.step import abstract_state, make_optimizer, make_step, state_shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program and the mesh of `sharding.model_mesh` that it is to run on."""

    name: str
    traced: Any
    mesh: Mesh


def _abstract(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _whole(tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays that every device holds."""
    where = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: _abstract(x, where), tree)


def _by_rows(tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays [B, …] split by batch rows."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        axes = "b" + "." * (len(x.shape) - 1)
        return _abstract(x, sharding.named(axes, x.shape, mesh, sharding.ACTIVATION_RULES))

    return jax.tree.map(one, tree)


def train_step(
    drafter: Drafter, config: TrainConfig, mesh: Mesh, taught_by: Drafter | None = None
) -> Program:
    """A drafter's train step: float32 weights and moments, split as the mesh says.

    Args:
      mesh: of `sharding.model_mesh`.
      taught_by: the drafter whose distributions it learns; one that shares as much of the target.
    """
    if config.compute == "auto":
        config = dataclasses.replace(config, compute="bfloat16")
    optimizer = make_optimizer(config)
    params = parameters.abstract(
        drafter.model, mesh, stacked=True, dtype=jnp.float32, drafter=drafter.drafter
    )
    shardings = state_shardings(optimizer, params, mesh)
    state = abstract_state(optimizer, params, shardings)
    row = build_row([], config.max_tokens, config.max_blocks)
    batch = jax.tree.map(lambda x: np.broadcast_to(x, (config.batch_rows, *x.shape)), row)
    devices = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    signals = jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=devices)
    frozen = _shared(drafter, mesh, config.compute)
    teacher = None
    if taught_by is not None:
        own = parameters.abstract(
            taught_by.model, mesh, stacked=True, dtype=config.compute, drafter=taught_by.drafter
        )
        teacher = Teacher(taught_by, {**own, **frozen})
    step = make_step(drafter, config, optimizer, shardings)
    traced = step.trace(state, frozen, None, _by_rows(batch, mesh), signals, 1, teacher)
    return Program("train step" if teacher is None else "recovery step", traced, mesh)


def _shared(drafter: Drafter, mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """What a drafter has of its target."""
    whole = parameters.abstract(drafter.model, mesh, stacked=True, dtype=dtype)
    return {name: leaf for name, leaf in whole.items() if name in drafter.drafter.shares}


def target_steps(
    config: ModelConfig, mesh: Mesh, *, batch: int, context: int, block_size: int
) -> Iterator[Program]:
    """What a target runs: a chunk of prompts, and a round's verification or, where a block is one
    token, a step of plain decoding; bfloat16, greedy.

    Args:
      mesh: of `sharding.make_mesh`.
      batch: B, slots.
      context: tokens a slot can hold.
      block_size: W.
    """
    role = Target(config, _weights(config, mesh), mesh, (), jnp.bfloat16)
    state = _state(jax.eval_shape(lambda: role.start(batch, context)), role.mesh)
    rows = jax.eval_shape(lambda: role.settings([SamplingParams()] * batch, [1] * batch))
    settings = _whole(rows, role.mesh)
    handover = _whole(jax.ShapeDtypeStruct((batch, block_size), jnp.int32), role.mesh)
    steps = {
        "prefill": (role._prefill, _chunk(role, batch)),
        "verify" if block_size > 1 else "step": (role._verify, handover),
    }
    for name, (step, rest) in steps.items():
        traced = step.trace(role.weights, state, settings, rest)
        yield Program(f"target {name}", traced, role.mesh)


def drafter_steps(
    drafter: Drafter, policy: Policy, mesh: Mesh, *, batch: int, context: int
) -> Iterator[Program]:
    """What a drafter runs: a chunk of prompts, a draft, the packed pass and its resolution.

    Args:
      mesh: of `sharding.make_mesh`.
      batch: B, slots.
      context: tokens a slot can hold.
    """
    weights = _weights(drafter.model, mesh, drafter)
    role = DrafterRole(drafter, weights, mesh, policy, jnp.bfloat16)
    _, state = jax.eval_shape(lambda: role.start(batch, context))
    state = _state(state, role.mesh)
    report = _whole(
        jax.ShapeDtypeStruct((batch, role.width + acceptance.TOKENS), jnp.int32), role.mesh
    )
    prefill = role._prefill.trace(role.weights, state.cache, _chunk(role, batch))
    yield Program("drafter prefill", prefill, role.mesh)
    draft = role._draft.trace(role.weights, state, report)
    yield Program("drafter draft", draft, role.mesh)
    prepare = role._prepare.trace(role.weights, state.cache, state.block)
    yield Program("drafter prepare", prepare, role.mesh)
    _, hidden, *prepared = prepare.out_info
    resolve = role._resolve.trace(
        role.weights,
        state.cache,
        _by_rows(hidden, role.mesh),
        tuple(_whole(prepared, role.mesh)),
        report,
        miss="stall",
    )
    yield Program("drafter resolve", resolve, role.mesh)


def _weights(config: ModelConfig, mesh: Mesh, drafter: Drafter | None = None) -> dict[str, Any]:
    """A role's parameters, those of a drafter if one is given."""
    mesh = sharding.model_mesh(mesh, config)
    if drafter is None:
        return parameters.abstract(config, mesh, stacked=False)
    own = parameters.abstract(config, mesh, stacked=False, drafter=drafter.drafter)
    return {**own, **_shared(drafter, mesh, jnp.bfloat16)}


def _state(state: Any, mesh: Mesh) -> Any:
    """A role's state where it lies: keys and values split, everything else whole."""

    def cached(x: Any) -> jax.ShapeDtypeStruct:
        return _abstract(x, sharding.named("bk..", x.shape, mesh, sharding.ACTIVATION_RULES))

    layers = jax.tree.map(cached, state.cache.layers)
    whole = _whole(state, mesh)
    return dataclasses.replace(whole, cache=KVCache(layers, whole.cache.length))


def _chunk(role: Role, batch: int) -> Chunk:
    """The longest chunk of prompts, for every part of the batch."""
    parts = role.parts(batch)
    tokens, small = np.zeros((parts, CHUNKS[-1]), np.int32), np.zeros((parts,), np.int32)
    chunk = Chunk(tokens, Place(small, small, small, small.astype(bool)))
    return _whole(chunk, role.mesh)
