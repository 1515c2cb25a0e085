"""What the TPU kernels of interval attention share: geometry, block specs, loads, the call itself.

No attention is computed here. Which tiles are visited is decided in `tiles`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_jax.kernels.interval_attention.tiles import TileBounds, WorkList, tile_bounds

LANES = 128
# Rows of a block come in whole sublane tiles: 16 rows in bfloat16, 8 in float32, so 16 suit both.
SUBLANES = 16
# row_tile, key_tile and action of a work list, start and stop of the keys seen.
NUM_SCALARS = 5
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

    Attributes:
      batch, kv_heads, group, dim: B, K, G, H.
      rows: T, a multiple of block_rows (the caller pads).
      keys: S, any number: the last key tile may reach beyond it.
      block_rows: rows of each query head in a tile.
      key_tile: keys in a tile.
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

    def bounds(self, lo: jax.Array, hi: jax.Array) -> TileBounds:
        return tile_bounds(lo, hi, self.block_rows, self.key_tile, self.keys)


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


def seen_keys(lo: jax.Array, hi: jax.Array, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """First key that any row of a batch row sees and the one after the last, [B] int32 each."""
    seeing = lo < hi
    start = jnp.min(jnp.where(seeing, lo, geometry.keys), axis=1)
    return start, jnp.max(jnp.where(seeing, hi, 0), axis=1)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over one dimension of each, in float32 (from bfloat16: accumulated in it)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def load_rows(ref: Any) -> jax.Array:
    """A [G, block_rows, H] block as [R, H]."""
    return ref[...].reshape(-1, ref.shape[-1])


def stored_keys(x: jax.Array, geometry: Geometry) -> jax.Array:
    """Keys or values [B, K, S, H] with the axes in the order in which kernels take them."""
    return x if geometry.feature_axis == 1 else x.swapaxes(2, 3)


class Step(NamedTuple):
    """What the prefetched scalars say of the current grid step."""

    action: jax.Array
    first_key: jax.Array
    # Keys of the batch row that any of its rows sees: start <= j < stop.
    start: jax.Array
    stop: jax.Array

    def when(self, flag: int) -> Callable[[Callable[[], None]], None]:
        return pl.when(self.action & flag != 0)


def split_refs(refs: Sequence[Any], geometry: Geometry) -> tuple[Step, Sequence[Any]]:
    """Reads the scalars that `call` prefetches; the other references are the kernel's own."""
    row_tile, key_tile, action, start, stop = refs[:NUM_SCALARS]
    at = pl.program_id(1)
    batch = jax.lax.div(row_tile[at], jnp.int32(geometry.row_tiles))
    step = Step(action[at], key_tile[at] * geometry.key_tile, start[batch], stop[batch])
    return step, refs[NUM_SCALARS:]


def load_keys(ref: Any, geometry: Geometry, step: Step) -> jax.Array:
    """A block of keys or values with zeros for those that no row sees.

    They may be memory that nothing was ever written to, or lie beyond S; a weight of 0 would not
    keep their NaN out of a matrix product.
    """
    block = ref[...]
    key = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1 - geometry.feature_axis)
    key += step.first_key
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
    seen: tuple[jax.Array, jax.Array],
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
    )(work.row_tile, work.key_tile, work.action, *seen, *(array for array, _ in inputs))
