"""Which key tiles each tile of rows needs: pure jnp functions of `lo` and `hi`, for the kernels.

Rows are cut into tiles of `rows_per_tile` and keys into tiles of `keys_per_tile`. A row tile needs
the key tiles between its smallest `lo` and its largest `hi`; inside those, the key tiles that every
row sees wholly need no comparison with `lo` and `hi`:

    key tiles          0     1     2     3     4     5
    row 0              . . x x x x x x x x x x . . . .      first = 0, count = 5
    row 1              . . . . x x x x x x x x x x x . .    full_first = 2, full_count = 2
                       partial     full  full  partial

Rows that see nothing count for neither: a kernel gives them 0 and −inf whatever it computed.

    Q row tiles of a batch row    J key tiles
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# What a step of a work list does; a step may be first, last and a computation at once.
FIRST, LAST, PARTIAL, FULL = 1, 2, 4, 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "count", "full_first", "full_count"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TileBounds:
    """int32 [B, Q] each: a row tile needs the key tiles first <= j < first + count, of which those
    with full_first <= j < full_first + full_count are seen wholly by each of its non-empty rows."""

    first: jax.Array
    count: jax.Array
    full_first: jax.Array
    full_count: jax.Array


def tile_bounds(
    lo: jax.Array | np.ndarray,
    hi: jax.Array | np.ndarray,
    rows_per_tile: int,
    keys_per_tile: int,
    num_keys: int,
) -> TileBounds:
    """Bounds of the key tiles needed by every row tile.

    Args:
      lo, hi: [B, T] int32; the last tile is filled up with empty rows. Row order is free, but a
        tile whose rows see very different keys computes all of them.
      rows_per_tile, keys_per_tile: tile sizes.
      num_keys: S. A last key tile that reaches beyond S is never counted as full.
    """
    missing = -lo.shape[1] % rows_per_tile
    lo, hi = (
        jnp.pad(jnp.clip(x, 0, num_keys), ((0, 0), (0, missing))).reshape(
            x.shape[0], -1, rows_per_tile
        )
        for x in (lo, hi)
    )
    seeing = lo < hi
    empty = ~seeing.any(axis=-1)
    start = jnp.min(jnp.where(seeing, lo, num_keys), axis=-1)
    stop = jnp.max(jnp.where(seeing, hi, 0), axis=-1)
    all_start = jnp.max(jnp.where(seeing, lo, 0), axis=-1)
    all_stop = jnp.min(jnp.where(seeing, hi, num_keys), axis=-1)
    first = jnp.where(empty, 0, start // keys_per_tile)
    count = jnp.where(empty, 0, -(-stop // keys_per_tile) - first)
    full_first = -(-all_start // keys_per_tile)
    full_count = jnp.where(empty, 0, jnp.maximum(all_stop // keys_per_tile - full_first, 0))
    full_first = jnp.where(full_count == 0, first, full_first)
    return TileBounds(*(x.astype(jnp.int32) for x in (first, count, full_first, full_count)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["row_tile", "key_tile", "action", "length"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class WorkList:
    """The (row tile, key tile) pairs a kernel visits, one after the other.

    Attributes:
      row_tile: [B·Q·J] int32, b · Q + the row tile's index in batch row b.
      key_tile: [B·Q·J] int32, the key tile's index in the same batch row.
      action: [B·Q·J] int32, the sum of FIRST and LAST (step of its owner) and of PARTIAL or FULL.
      length: [] int32, how many of the steps are real; the rest must not be run.
    """

    row_tile: jax.Array
    key_tile: jax.Array
    action: jax.Array
    length: jax.Array


def work_list(bounds: TileBounds, num_key_tiles: int, *, by_keys: bool = False) -> WorkList:
    """Lists the needed pairs, those of one owner next to each other.

    The owner is the row tile, or the key tile (`by_keys`, for gradients of keys and values: the row
    tiles that see a key tile are not contiguous). Owners come in order of (batch row, tile). One
    that needs nothing gets a single step without PARTIAL or FULL, so that its output is written.
    """
    row_tiles = bounds.first.shape[1]
    key = jnp.arange(num_key_tiles, dtype=jnp.int32)

    def within(first: jax.Array, count: jax.Array) -> jax.Array:
        return (key >= first[..., None]) & (key < (first + count)[..., None])

    needed = within(bounds.first, bounds.count)
    action = jnp.where(within(bounds.full_first, bounds.full_count), FULL, PARTIAL) * needed
    if by_keys:
        needed, action = needed.swapaxes(1, 2), action.swapaxes(1, 2)
    inner = needed.shape[2]
    idle = ~needed.any(axis=2, keepdims=True) & (jnp.arange(inner) == 0)
    listed = (needed | idle).reshape(-1)
    pair = jnp.arange(listed.size, dtype=jnp.int32)
    # A stable sort moves the listed pairs to the front in order; TPUs scatter one by one.
    _, pair, action = jax.lax.sort((~listed, pair, action.reshape(-1)), num_keys=1)
    owner, member = pair // inner, pair % inner
    length = jnp.sum(listed, dtype=jnp.int32)
    change = owner[1:] != owner[:-1]
    edge = jnp.ones(1, bool)
    is_first = jnp.concatenate([edge, change])
    is_last = jnp.concatenate([change, edge]) | (jnp.arange(pair.size) == length - 1)
    action = action + FIRST * is_first + LAST * is_last
    row_tile, key_tile = owner, member
    if by_keys:
        row_tile = owner // num_key_tiles * row_tiles + member
        key_tile = owner % num_key_tiles
    return WorkList(row_tile, key_tile, action.astype(jnp.int32), length)
