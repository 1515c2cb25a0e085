"""Work lists of the Hopper kernel: which rows and key tiles each CTA takes, in plain XLA.

An *item* is a tile of query rows and a range of the key tiles those rows see. Tiles nobody sees
belong to no item; tiles that every row sees wholly need no comparison:

    key tile      0   1   2   3   4   5   6          first = 1, end = 6
    row a         .   .   x   x   x   x/  .          (x/ a part of the tile)
    row b         .   /x  x   x   x   .   .          full: 2 … 4

A schedule depends on lo and hi only, so the layers of a model share it. Nothing here loops or
branches on data.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from d3d_jax.kernels.interval_attention.tiles import tile_bounds

FIELDS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Item:
    """One item, or arrays of them.

    Attributes:
      index: its place in the schedule.
      batch: batch row; −1 marks an unused item.
      row_tile: tile of query rows, counted in its batch row.
      first, end: key tiles [first, end).
      full_first, full_end: tiles inside [first, end) that every row sees wholly.
      key_begin, key_end: keys seen by at least one row of the tile lie in [key_begin, key_end).
    """

    index: jax.Array
    batch: jax.Array
    row_tile: jax.Array
    first: jax.Array
    end: jax.Array
    full_first: jax.Array
    full_end: jax.Array
    key_begin: jax.Array
    key_end: jax.Array

    @staticmethod
    def read(table, index: jax.Array) -> Item:
        """The item of one row of a table [I, FIELDS]."""
        return Item(index, *(table[index, field] for field in range(FIELDS)))

    def table(self) -> jax.Array:
        fields = dataclasses.fields(self)[1:]
        return jnp.stack([getattr(self, field.name) for field in fields], axis=-1)

    @property
    def used(self) -> jax.Array:
        return self.batch >= 0

    @property
    def count(self) -> jax.Array:
        return self.end - self.first

    @property
    def masked(self) -> jax.Array:
        """Number of tiles that need a comparison. They come first, then the full ones."""
        return self.count - (self.full_end - self.full_first)

    def tile(self, step: jax.Array) -> jax.Array:
        """The key tile of a step: masked tiles left and right of the full ones, then those."""
        left = self.full_first - self.first
        masked = jnp.where(step < left, self.first + step, self.full_end + step - left)
        return jnp.where(step < self.masked, masked, self.full_first + step - self.masked)


def _ceil_div(x: jax.Array, y: jax.Array | int) -> jax.Array:
    return -(-x // y)


def row_tiles(lo: jax.Array, hi: jax.Array, keys: int, rows: int, block_keys: int) -> Item:
    """What each tile of `rows` query rows sees.

    Args:
      lo, hi: [B, R] int32, 0 <= lo and hi <= S, R a multiple of `rows`.
      keys: S.

    Returns:
      Item of arrays [B · R / rows], one a tile, ordered by batch row.
    """
    bounds = jax.tree.map(jnp.ravel, tile_bounds(lo, hi, rows, block_keys, keys))
    per_batch = lo.shape[1] // rows
    lo, hi = (x.reshape(-1, rows) for x in (lo, hi))
    sees = lo < hi
    index = jnp.arange(lo.shape[0], dtype=jnp.int32)
    return Item(
        index,
        index // per_batch,
        index % per_batch,
        bounds.first,
        bounds.first + bounds.count,
        bounds.full_first,
        bounds.full_first + bounds.full_count,
        jnp.min(jnp.where(sees, lo, keys), axis=1),
        jnp.max(jnp.where(sees, hi, 0), axis=1),
    )


def longest_first(tiles: Item) -> Item:
    """One item a tile; long ones start first so that the last CTAs to finish are short."""
    order = jnp.argsort(-tiles.count)
    return jax.tree.map(lambda x: x[order], tiles)


def split(tiles: Item, parts: int, most: int) -> tuple[Item, jax.Array]:
    """Splits the keys of the tiles into items of nearly equal size, about `parts` in all.

    An item takes at most the mean share of all key tiles (more only where its row tile would need
    over `most` items), so the time follows the sum of the lengths of the batch rows, not the
    longest. A row tile that sees nothing keeps one empty item: every row gets a result.

    Returns:
      Item of arrays [parts + tiles], the last ones unused, and the number of items of each tile.
    """
    total = tiles.count.shape[0]
    share = _ceil_div(jnp.sum(tiles.count), parts)
    share = jnp.maximum(jnp.maximum(share, _ceil_div(tiles.count, most)), 1)
    pieces = jnp.maximum(_ceil_div(tiles.count, share), 1)
    stop = jnp.cumsum(pieces)
    index = jnp.arange(parts + total, dtype=jnp.int32)
    of = jnp.searchsorted(stop, index, side="right", method="compare_all")
    used, of = of < total, jnp.minimum(of, total - 1)
    whole = jax.tree.map(lambda x: x[of], tiles)
    piece = index - (stop - pieces)[of]
    first = whole.first + piece * whole.count // pieces[of]
    end = whole.first + (piece + 1) * whole.count // pieces[of]
    full_first = jnp.clip(whole.full_first, first, end)
    items = dataclasses.replace(
        whole,
        index=index,
        batch=jnp.where(used, whole.batch, -1),
        first=first,
        end=end,
        full_first=full_first,
        full_end=jnp.clip(whole.full_end, full_first, end),
    )
    return items, pieces


def merge(
    out: jax.Array, lse: jax.Array, pieces: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Merges the results of the items of each row tile by their log-sum-exp.

    Args:
      out, lse: [I, M, N, H] and [I, N, M] float32, as the items left them.
      pieces: [tiles], how many consecutive items each tile has; at most `most`.

    Returns:
      out [tiles, M, N, H] and lse [tiles, N, M], float32.
    """
    part = jnp.arange(min(most, out.shape[0]), dtype=jnp.int32)
    # A tile with fewer items reads its last one again, with weight 0.
    items = (jnp.cumsum(pieces) - pieces)[:, None] + jnp.minimum(part, pieces[:, None] - 1)
    exists = part < pieces[:, None]
    lse = jnp.where(exists[:, :, None, None], lse[items], -jnp.inf)
    peak = jnp.max(lse, axis=1)
    shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(lse - shift[:, None])
    total = jnp.sum(weights, axis=1)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    weights = (weights / safe[:, None]).swapaxes(2, 3)[..., None]
    merged = jnp.sum(out[items] * weights, axis=1)
    return merged, jnp.where(seen, jnp.log(safe) + shift, -jnp.inf)
