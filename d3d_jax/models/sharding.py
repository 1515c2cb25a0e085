"""Meshes and the rules that turn spelled axes into `PartitionSpec`s.

A mesh has three axes for the user: `data` (batch rows), `fsdp` (batch rows, and the weights'
hidden size) and `tensor` (heads, intermediate size, vocabulary). Inside, the tensor axis is two:
`tensor` splits the kv heads and `group` the query heads of each kv head, so that a mesh with more
devices than kv heads holds every key and value tensor / K times and not on every device.

Which parameter has which axes is `models.parameters`; nothing here knows layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from d3d_jax.config import ModelConfig
from d3d_jax.errors import D3DError

USER_AXES = ("data", "fsdp", "tensor")
AXES = (*USER_AXES, "group")
AnyMesh = Mesh | AbstractMesh
Rules = Mapping[str, tuple[str, ...]]

_TENSOR = ("tensor", "group")
# Letter → mesh axes; "." is an axis that is never split.
PARAMETER_RULES: Rules = {
    "v": _TENSOR,
    "q": _TENSOR,
    "k": ("tensor",),
    "f": _TENSOR,
    "d": ("fsdp",),
    ".": (),
}
ACTIVATION_RULES: Rules = {
    "b": ("data", "fsdp"),
    "v": _TENSOR,
    "n": _TENSOR,
    "k": ("tensor",),
    "f": _TENSOR,
    # Of a table that meets activations: theirs is whole on every device.
    "d": ("fsdp",),
    ".": (),
}


def make_mesh(
    devices: Any = None,
    *,
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    arrange: bool = False,
) -> Mesh:
    """A mesh over devices.

    Args:
      devices: `jax.Device`s, taken in their order; None takes all and arranges them.
      data: None takes what the others leave.
      arrange: take the devices, a whole machine or slice, in the order that suits its links.

    Raises:
      D3DError: no devices, or sizes that do not multiply to their number.
    """
    given = jax.devices() if devices is None else list(np.asarray(devices, dtype=object).flat)
    if not all(isinstance(d, jax.Device) for d in given) or len(set(given)) != len(given):
        raise D3DError(f"a mesh takes different jax devices, found {devices!r}")
    for name, size in (("data", data), ("fsdp", fsdp), ("tensor", tensor)):
        if (name, size) != ("data", None) and (type(size) is not int or size < 1):
            raise D3DError(f"{name} must be a whole number of at least 1, found {size!r}")
    if data is None:
        data = max(len(given) // (fsdp * tensor), 1)
    if data * fsdp * tensor != len(given):
        raise D3DError(
            f"a mesh of data {data} × fsdp {fsdp} × tensor {tensor} needs "
            f"{data * fsdp * tensor} devices, {len(given)} were given"
        )
    shape = (data, fsdp, tensor)
    if devices is None or arrange:
        # An axis may be part of a physical one: 8 × 2 of a slice of 4 × 4 chips, for one.
        grid = mesh_utils.create_device_mesh(shape, given, allow_split_physical_axes=True)
    else:
        grid = np.array(given, dtype=object).reshape(shape)
    return Mesh(grid, USER_AXES, axis_types=(AxisType.Auto,) * 3)


def split_tensor(config: ModelConfig, tensor: int) -> tuple[int, int]:
    """The tensor axis as (kv heads, query heads of each kv head).

    Raises:
      D3DError: the heads do not divide over that many devices.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def split(size: int) -> tuple[int, int] | None:
        if kv_heads % size == 0:
            return size, 1
        # Only beside whole kv heads: a device that holds several needs all query heads of each.
        if size % kv_heads == 0 and heads // kv_heads % (size // kv_heads) == 0:
            return kv_heads, size // kv_heads
        return None

    if tensor > 0 and (found := split(tensor)):
        return found
    possible = ", ".join(str(size) for size in range(1, heads + 1) if split(size))
    raise D3DError(
        f"{heads} query heads of {kv_heads} kv heads do not divide over a tensor axis of {tensor}; "
        f"possible are {possible}"
    )


def model_mesh(mesh: Mesh, config: ModelConfig) -> Mesh:
    """The same devices with the axes that the rules name, split as this model's heads need it.

    Raises:
      D3DError: another axis, or a tensor axis that the heads do not divide over.
    """
    if unknown := [name for name in mesh.axis_names if name not in AXES]:
        raise D3DError(f"a mesh may have the axes {', '.join(USER_AXES)}, found {unknown[0]!r}")
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    data, fsdp, tensor, group = (mesh.shape.get(name, 1) for name in AXES)
    grid = np.transpose(mesh.devices, order)
    grid = grid.reshape(data, fsdp, *split_tensor(config, tensor * group))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """A mesh without devices, for planning.

    Raises:
      D3DError: the heads do not divide over the tensor axis.
    """
    sizes = (1, fsdp, *split_tensor(config, tensor))
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(axes: str, shape: Sequence[int], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    """The spec of an array whose dimensions are spelled by `axes`, a letter each.

    A dimension is split over the first of its mesh axes that divide it: a vocabulary of odd size is
    held whole by every device, a batch of one row computed by every row of the mesh.
    """
    split = [_split(letter, size, mesh, rules) for letter, size in zip(axes, shape, strict=True)]
    # As XLA spells what it returns: another spelling of the same would be traced again.
    while split and not split[-1]:
        split.pop()
    return PartitionSpec(*(names or None for names in split))


def _split(letter: str, size: int, mesh: AnyMesh, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that one dimension is split over."""
    names = tuple(name for name in rules[letter] if mesh.shape.get(name, 1) > 1)
    while names and size % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    return names


def named(axes: str, shape: Sequence[int], mesh: AnyMesh, rules: Rules) -> NamedSharding:
    """`partition_spec` on its mesh."""
    return NamedSharding(mesh, partition_spec(axes, shape, mesh, rules))  # type: ignore[arg-type]


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Fixes how an activation is split, where a mesh is set (`on_mesh`); else does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(
        x, partition_spec(axes, x.shape, mesh, ACTIVATION_RULES)
    )


def split_axes(letter: str, size: int, mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of a mesh that an activation's dimension is split over."""
    return _split(letter, size, mesh, ACTIVATION_RULES)


def mesh_axes(letter: str, size: int) -> tuple[str, ...]:
    """`split_axes` of the mesh that is set; none where none is."""
    return split_axes(letter, size, jax.sharding.get_abstract_mesh())


def shared_axes(rows: str, count: int, other: str, size: int) -> tuple[str, ...]:
    """The axes that split `other` if they split `rows`, too; none where they do not.

    Over such axes each device has rows of its own and needs the others' parts of `other` for them.
    """
    axes = mesh_axes(other, size)
    return axes if set(axes) <= set(mesh_axes(rows, count)) else ()


def locally(
    function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., Any]:
    """The function run by every device on its own part (`shard_map`), where a mesh is set.

    For what needs no exchange over the axes it is split by, but which the partitioner would not
    see through: attention by heads, writes to a cache, kernels.

    Args:
      inputs: axes of each argument, an array.
      outputs: of each result; a letter is split as it is in the inputs. One result is returned as
        it is, several as a tuple.
    """

    def run(*args: jax.Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return function(*args)
        split = {
            letter: _split(letter, size, mesh, ACTIVATION_RULES)
            for axes, x in zip(inputs, args, strict=True)
            for letter, size in zip(axes, x.shape, strict=True)
        }

        def specs(arrays: Sequence[str]) -> tuple[PartitionSpec, ...]:
            return tuple(PartitionSpec(*(split[a] or None for a in axes)) for axes in arrays)

        (first, *more) = specs(outputs)
        local = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=specs(inputs),
            out_specs=(first, *more) if more else first,
            check_vma=False,
        )
        return local(*args)

    return run


def replicate(tree: Any) -> Any:
    """Every leaf whole on every device: what leaves a mesh, and small state."""
    return jax.tree.map(lambda x: constrain(x, "." * x.ndim), tree)


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `constrain` inside it in force; for jit, where only tracing pays for it."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced
