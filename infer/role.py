"""What both roles of decoding share: parameters and a cache on a mesh, and reading prompts into it.

A batch has B *slots*, a row of the cache each, and a request occupies one until it ends. Prompts
are read in pieces into the batch's cache, one slot at a time, so that a request joins a batch that
is already decoding and a long prompt needs no larger activations than a short one. Where batch rows
are split over devices, every part of the batch reads one slot at once.

A role's methods only dispatch: none waits for a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax import layout
from d3d_jax.config import ModelConfig
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.models.cache import KVCache

# Rows of a pass that reads a prompt, and what shorter pieces are padded to. 512 rows keep the
# matrix units of any accelerator busy.
CHUNKS = (64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one prompt, as many as one pass reads.

    Attributes:
      slot: which the request occupies, of the whole batch.
      start: tokens of the prompt before them.
      last: whether the prompt ends here.
    """

    slot: int
    start: int
    tokens: list[int]
    last: bool


def pieces(slot: int, prompt: list[int]) -> Iterator[Piece]:
    """A whole prompt, piece by piece."""
    for start in range(0, len(prompt), CHUNKS[-1]):
        stop = start + CHUNKS[-1]
        yield Piece(slot, start, prompt[start:stop], stop >= len(prompt))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot", "start", "count", "last"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Place:
    """Where a pass reads: a piece for at most one slot of each of the batch's P parts.

    Attributes:
      slot: [P] int32, counted within the part.
      start: [P] int32, tokens of the prompt before the piece.
      count: [P] int32, tokens of the piece; 0 in a part that reads nothing.
      last: [P] bool, whether the prompt ends here.
    """

    slot: Any
    start: Any
    count: Any
    last: Any

    def rows(self, batch: int) -> jax.Array:
        """[P] the slots counted in the whole batch; `batch`, which does not exist, for no piece."""
        parts = self.slot.shape[0]
        slot = jnp.arange(parts, dtype=jnp.int32) * (batch // parts) + self.slot
        return jnp.where(self.count > 0, slot, batch)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "place"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Chunk:
    """One pass that reads prompts: tokens [P, C] int32, padded at the end, and where they go."""

    tokens: Any
    place: Place


class Role:
    """Parameters on a mesh, and where small arrays of this role go: to all of its devices.

    Args:
      params: arrays, which are put where they belong; or `parameters.abstract` of the mesh, and the
        steps of the role can then be compiled and not be run.
      mesh: of `sharding.make_mesh`, of any devices; batch rows are split over its data axis.
    """

    def __init__(self, config: ModelConfig, params: decoder.Params, mesh: Mesh, dtype: Any):
        self.config = config
        self.mesh = sharding.model_mesh(mesh, config)
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        leaves = jax.tree.leaves(params)
        if not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            params = jax.device_put(params, parameters.shardings(params, self.mesh))
        self.params = params
        # What the steps take: flattening the nested dict of a deep model at every call would cost
        # the host more than anything else that it does for one.
        leaves, self._tree = jax.tree.flatten(params)
        self.weights = tuple(leaves)
        self.dtype = dtype
        self._grow = self._jit(caches.grow, static_argnums=1)
        self._move = jax.jit(lambda x: x, in_shardings=self.sharding)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(sharding.on_mesh(self.mesh, function), **options)

    def _step(self, function: Callable[..., Any], **options: Any) -> Any:
        """Jits a function of the parameters and more, which is then given `weights` for them."""

        @functools.wraps(function)
        def step(weights, *args, **kwargs):
            return function(jax.tree.unflatten(self._tree, weights), *args, **kwargs)

        return self._jit(step, **options)

    def put(self, x: Any) -> Any:
        """Moves arrays to this role's mesh without waiting for them."""
        if isinstance(x, jax.Array):
            if x.sharding == self.sharding:
                return x  # device_put comes to the same, ten times slower
            if x.sharding.num_devices == self.sharding.num_devices == 1:
                # jit moves its arguments, too, in a third of the host's time. Between meshes of
                # several devices it does not.
                return self._move(x)
        return jax.device_put(x, self.sharding)

    def grown(self, cache: KVCache, capacity: int) -> KVCache:
        """The cache with at least `capacity` tokens a row; one copy a bucket."""
        return cache if cache.capacity >= capacity else self._grow(cache, caches.bucketed(capacity))

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `batch` slots that holds at least `capacity` tokens in each."""
        layers, capacity = len(self.params["layers"]), caches.bucketed(capacity)
        return caches.empty(self.config, layers, batch, capacity, self.dtype, self.mesh)

    @property
    def row_split(self) -> int:
        """Over how many groups of devices batch rows can be split."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def parts(self, batch: int) -> int:
        """P, over how many groups of devices the slots of a batch are split.

        Less than `row_split` where that does not divide the batch: groups then repeat each other.
        """
        axes = sharding.split_axes("b", batch, self.mesh)
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def chunks(self, pieces: Iterable[Piece], batch: int) -> Iterator[Chunk]:
        """The passes that read some pieces, on this role's devices."""
        parts, waiting = self.parts(batch), list(pieces)
        size = batch // parts
        while waiting:
            now: dict[int, Piece] = {}
            for piece in waiting:
                now.setdefault(piece.slot // size, piece)
            waiting = [piece for piece in waiting if now[piece.slot // size] is not piece]
            yield self.put(_chunk(now, parts, size))

    def _read_chunk(
        self, params: decoder.Params, cache: KVCache, chunk: Chunk
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states [P, C, D] of a chunk, and the cache with its keys, values and lengths."""
        place = chunk.place
        # A part that reads nothing writes past the capacity: its slot keeps what it has.
        at = jnp.where(place.count > 0, place.start, cache.capacity)
        own = caches.take(cache, place.slot).at(at)
        rows = layout.causal(place.start, chunk.tokens.shape[1])
        hidden, own = decoder.forward(self.config, params, chunk.tokens, rows, own)
        slots = place.rows(cache.length.shape[0])
        length = cache.length.at[slots].set(place.start + place.count, mode="drop")
        return hidden, caches.put(cache, place.slot, own).at(sharding.replicate(length))


def _chunk(pieces: dict[int, Piece], parts: int, size: int) -> Chunk:
    longest = max(len(piece.tokens) for piece in pieces.values())
    rows = next(rows for rows in CHUNKS if rows >= longest)
    slot, start, count = (np.zeros((parts,), np.int32) for _ in range(3))
    tokens, last = np.zeros((parts, rows), np.int32), np.zeros((parts,), bool)
    for part, piece in pieces.items():
        slot[part], start[part], last[part] = piece.slot % size, piece.start, piece.last
        count[part] = len(piece.tokens)
        tokens[part, : count[part]] = piece.tokens
    return Chunk(tokens, Place(slot, start, count, last))
