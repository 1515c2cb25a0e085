"""What the TPU kernels of interval attention share: geometry, block specs, loads, the call itself.

No attention is computed here. Which tiles are visited is decided in `tiles`; which of its parts and
chunks a visited tile needs, by `Step.each_window`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_jax.kernels.interval_attention.tiles import (
    FULL,
    PARTIAL,
    TileBounds,
    WorkList,
    tile_bounds,
)

LANES = 128
# Rows of a block come in whole sublane tiles: 16 rows in bfloat16, 8 in float32, so 16 suit both.
SUBLANES = 16
# row_tile, key_tile and action of a work list, start and stop of the keys that a batch row sees,
# and of the chunks that a part sees.
NUM_SCALARS = 7
# Softmax runs in base 2, whose exponential the hardware has; scores are scaled by this as well.
LOG2E = math.log2(math.e)
# Score of a key that is not seen. Finite, because −inf − −inf would be NaN while a row has seen
# nothing yet; the weights such a row gathers are multiplied by 0 when its first key comes.
MASKED = -1e30


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes of a call. Q row tiles of R = group · block_rows rows, J key tiles.

    A tile of rows consists of P parts and a tile of keys of chunks. One that some row does not see
    wholly is computed part by part, over the chunks that the part needs (x):

        chunk                 0 1 2 3
        part 0 of every head  . . x x
        part 1 of every head  . . . x

    Attributes:
      batch, kv_heads, group, dim: B, K, G, H.
      rows: T, a multiple of block_rows (the caller pads).
      keys: S, any number: the last key tile may reach beyond it.
      block_rows: rows of each query head in a tile.
      key_tile: keys in a tile.
      part_rows: rows of each query head in a part; a multiple of LANES, or block_rows.
      chunk: keys in a chunk; a multiple of LANES.
      interpret: for `pl.pallas_call`.
    """

    batch: int
    kv_heads: int
    group: int
    dim: int
    rows: int
    keys: int
    block_rows: int
    key_tile: int
    part_rows: int
    chunk: int
    interpret: Any

    @property
    def tile_rows(self) -> int:
        return self.group * self.block_rows

    @property
    def tile_lanes(self) -> int:
        """Rows of a tile where they lie along lanes, with the lanes that stay unused."""
        return round_up(self.tile_rows, LANES)

    @property
    def row_tiles(self) -> int:
        return self.rows // self.block_rows

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.key_tile)

    @property
    def parts(self) -> int:
        return self.block_rows // self.part_rows

    @property
    def chunks(self) -> int:
        return self.key_tile // self.chunk

    @property
    def feature_axis(self) -> int:
        """Which axis of a block of keys is H; the other one is the keys.

        A cache of 64 features lies in HBM with its keys along lanes, which a TPU has 128 of. Taking
        it as [B, K, H, S] reads it as it lies; as [B, K, S, H] XLA would copy all of it to a
        padded array twice the size before every call.
        """
        return 1 if self.dim >= LANES else 0

    @property
    def score_scale(self) -> float:
        return self.dim**-0.5 * LOG2E

    def bounds(self, lo: jax.Array | np.ndarray, hi: jax.Array | np.ndarray) -> TileBounds:
        return tile_bounds(lo, hi, self.block_rows, self.key_tile, self.keys)

    def part_bounds(self, lo: jax.Array | np.ndarray, hi: jax.Array | np.ndarray) -> TileBounds:
        """Of every part, the chunks it needs."""
        return tile_bounds(lo, hi, self.part_rows, self.chunk, self.keys)


def to_tiles(x: jax.Array, geometry: Geometry) -> jax.Array:
    """Values of rows [B, N, T] → [B, K, Q, 1, lanes]: a tile's rows along lanes, head-major."""
    g = geometry
    x = x.reshape(g.batch, -1, g.group, g.row_tiles, g.block_rows).swapaxes(2, 3)
    x = x.reshape(g.batch, -1, g.row_tiles, 1, g.tile_rows)
    return jnp.pad(x, ((0, 0),) * 4 + ((0, g.tile_lanes - g.tile_rows),))


def from_tiles(x: jax.Array, geometry: Geometry) -> jax.Array:
    """The inverse of `to_tiles`."""
    g = geometry
    x = x[..., : g.tile_rows].reshape(g.batch, -1, g.row_tiles, g.group, g.block_rows)
    return x.swapaxes(2, 3).reshape(g.batch, -1, g.rows)


def interval_tiles(x: jax.Array, geometry: Geometry) -> jax.Array:
    """lo or hi [B, T] → [B, 1, Q, 1, lanes], the same for each head of a tile."""
    rows = jnp.broadcast_to(x[:, None], (x.shape[0], geometry.group, x.shape[1]))
    return to_tiles(rows, geometry)


def limits(lo: jax.Array, hi: jax.Array, geometry: Geometry) -> tuple[jax.Array, ...]:
    """First key that any row of a batch row sees and the one after the last, [B] int32 each; of
    the chunks that a part sees the same, [B·Q·P] each."""
    seeing = lo < hi
    start = jnp.min(jnp.where(seeing, lo, geometry.keys), axis=1)
    stop = jnp.max(jnp.where(seeing, hi, 0), axis=1)
    parts = geometry.part_bounds(lo, hi)
    return start, stop, parts.first.reshape(-1), (parts.first + parts.count).reshape(-1)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over one dimension of each, in float32 (from bfloat16: accumulated in it)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def stored_keys(x: jax.Array, geometry: Geometry) -> jax.Array:
    """Keys or values [B, K, S, H] with the axes in the order in which kernels take them."""
    return x if geometry.feature_axis == 1 else x.swapaxes(2, 3)


@dataclasses.dataclass(frozen=True)
class Window:
    """What one computation takes of a tile.

    Attributes:
      row, rows: the first row of each head, and how many.
      key, keys: the first key, and how many.
      masked: whether some row may not see all of those keys.
    """

    row: Any
    rows: int
    key: Any
    keys: int
    masked: bool

    def heads(self, geometry: Geometry) -> list[pl.Slice | slice]:
        """Its rows, where those of a tile lie one head after the other."""
        g = geometry
        if self.rows == g.block_rows:
            return [pl.ds(0, g.tile_rows)]
        return [
            pl.ds(pl.multiple_of(head * g.block_rows + self.row, self.rows), self.rows)
            for head in range(g.group)
        ]


class Step(NamedTuple):
    """What the prefetched scalars say of the current grid step."""

    action: jax.Array
    row_tile: jax.Array
    key_tile: jax.Array
    # Keys of the batch row that any of its rows sees: start <= j < stop.
    start: jax.Array
    stop: jax.Array
    # The same of the chunks that a part sees, for all parts.
    part_start: Any
    part_stop: Any

    def when(self, flag: int) -> Callable[[Callable[[], None]], None]:
        return pl.when(self.action & flag != 0)

    def key(self, geometry: Geometry, window: Window) -> jax.Array:
        """Index of the window's first key."""
        return self.key_tile * geometry.key_tile + window.key

    def each_window(self, geometry: Geometry, accumulate: Callable[[Window], None]) -> None:
        """Runs `accumulate` on a full tile at once, else on the chunks that each part needs."""
        g = geometry
        self.when(FULL)(lambda: accumulate(Window(0, g.block_rows, 0, g.key_tile, False)))

        @self.when(PARTIAL)
        def _():
            @pl.loop(0, g.parts)
            def _(part):
                index = self.row_tile * g.parts + part
                before = self.key_tile * g.chunks
                first = jnp.maximum(self.part_start[index] - before, 0)
                count = jnp.minimum(self.part_stop[index] - before, g.chunks) - first
                row = pl.multiple_of(part * g.part_rows, g.part_rows)
                key = pl.multiple_of(first * g.chunk, g.chunk)
                # One softmax over all of a part's chunks costs less than one for each; but how
                # many keys it takes must be static.
                for chunks in range(1, g.chunks + 1):
                    window = Window(row, g.part_rows, key, chunks * g.chunk, True)
                    pl.when(count == chunks)(functools.partial(accumulate, window))


def split_refs(refs: Sequence[Any], geometry: Geometry) -> tuple[Step, Sequence[Any]]:
    """Reads the scalars that `call` prefetches; the other references are the kernel's own."""
    row_tile, key_tile, action, start, stop, *parts = refs[:NUM_SCALARS]
    at = pl.program_id(1)
    batch = jax.lax.div(row_tile[at], jnp.int32(geometry.row_tiles))
    step = Step(action[at], row_tile[at], key_tile[at], start[batch], stop[batch], *parts)
    return step, refs[NUM_SCALARS:]


def load_rows(ref: Any, window: Window) -> jax.Array:
    """The window's rows of a [G, block_rows, H] block, [R, H]."""
    return ref[:, pl.ds(window.row, window.rows)].reshape(-1, ref.shape[-1])


def window_keys(ref: Any, geometry: Geometry, window: Window) -> jax.Array:
    """The window's keys or values of a block."""
    keys = pl.ds(window.key, window.keys)
    return ref[keys] if geometry.feature_axis == 1 else ref[:, keys]


def load_keys(ref: Any, geometry: Geometry, step: Step, window: Window) -> jax.Array:
    """The window's keys or values, with zeros for those that no row sees.

    They may be memory that nothing was ever written to, or lie beyond S; a weight of 0 would not
    keep their NaN out of a matrix product.
    """
    block = window_keys(ref, geometry, window)
    if not window.masked:
        return block
    key = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1 - geometry.feature_axis)
    key += step.key(geometry, window)
    return jnp.where((key >= step.start) & (key < step.stop), block, jnp.zeros_like(block))


class Specs:
    """Block specs of the arrays a kernel meets; a grid step is (kv head, step of the work list).

    Index maps get the step's indices and then the prefetched scalars, whose first two are the
    row tile and the key tile of every step.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = g = geometry
        self.rows = pl.BlockSpec((None, g.group, g.block_rows, g.dim), self._row_block)
        if g.feature_axis == 1:
            self.keys = pl.BlockSpec((None, None, g.key_tile, g.dim), self._key_block)
        else:
            self.keys = pl.BlockSpec((None, None, g.dim, g.key_tile), self._key_block)
        self.key_gradients = pl.BlockSpec((None, None, g.key_tile, g.dim), self._gradient_block)
        lanes = (None, None, None, 1, g.tile_lanes)
        self.interval = pl.BlockSpec(lanes, functools.partial(self._lane_block, shared=True))
        self.lanes = pl.BlockSpec(lanes, functools.partial(self._lane_block, shared=False))

    def _split(self, row_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        tiles = jnp.int32(self.geometry.row_tiles)
        return jax.lax.div(row_tile, tiles), jax.lax.rem(row_tile, tiles)

    def _row_block(self, head, step, row_tile, *_):
        batch, tile = self._split(row_tile[step])
        return batch, head, tile, 0

    def _key_block(self, head, step, row_tile, key_tile, *_):
        batch, _ = self._split(row_tile[step])
        at = (key_tile[step], 0) if self.geometry.feature_axis == 1 else (0, key_tile[step])
        return batch, head, *at

    def _gradient_block(self, head, step, row_tile, key_tile, *_):
        return self._split(row_tile[step])[0], head, key_tile[step], 0

    def _lane_block(self, head, step, row_tile, *_, shared: bool):
        batch, tile = self._split(row_tile[step])
        return batch, 0 if shared else head, tile, 0, 0


def call(
    kernel: Callable[..., None],
    geometry: Geometry,
    work: WorkList,
    limits: tuple[jax.Array, ...],
    inputs: list[tuple[jax.Array, pl.BlockSpec]],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: list[Any],
    *,
    name: str,
    dots: int,
) -> list[jax.Array]:
    """Runs `kernel` on every step of a work list, once for each kv head.

    Args:
      dots: matrix products of [R, H] by [keys, H] a step does, for the cost estimate.
    """
    g = geometry
    # Half of all pairs: so it is for causal rows, and for a cache that is half full on average.
    pairs = g.batch * g.kv_heads * g.group * g.rows * g.keys // 2
    arrays = [array for array, _ in inputs] + [shape for shape, _ in outputs]
    cost = pl.CostEstimate(
        flops=2 * dots * pairs * g.dim,
        transcendentals=pairs,
        bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
    )
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=NUM_SCALARS,
        grid=(g.kv_heads, work.length),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        scratch_shapes=scratch,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[shape for shape, _ in outputs],
        # Heads are independent (chips with two cores share them out); steps of a head accumulate.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=g.interpret,
        name=name,
    )(work.row_tile, work.key_tile, work.action, *limits, *(array for array, _ in inputs))
