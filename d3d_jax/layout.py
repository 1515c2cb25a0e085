"""PackedLayout: who may attend to whom in a forward pass, and the builders of every pass.

A pass is a sequence of *clean rows* (real tokens, causal) followed by *block rows* (A blocks of
W rows: an anchor, then mask tokens). Its whole mask is two integers per row, `lo` and `hi`:

                   clean keys 0 1 2 3 4 5 6 7 | block a (anchor at 3) | block b (anchor at 6)
    clean row 2               x x x . . . . . | . . . .               | . . . .
    clean row 5               x x x x x x . . | . . . .               | . . . .
    block a, any row          x x x . . . . . | x x x x               | . . . .
    block b, any row          x x x x x x . . | . . . .               | x x x x

A row sees the clean keys lo <= j < hi and, if it is a block row, the rows of its own block.
A block's `hi` is its anchor's own position: strictly before it, since the anchor is in the block.

Dimension letters used throughout the package:
    B batch   T rows of a pass   S keys      L layers   D hidden size   F intermediate size
    N heads   K kv heads         H head dim  V vocabulary   A blocks    W block width
    C clean rows of a pass       M candidates kept per slot

No arrays of T × S are ever built here; attention itself lives in `d3d_jax.kernels`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from d3d_jax.config import InBlock


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "lo", "hi"],
    meta_fields=["clean_len", "num_blocks", "block_size", "in_block"],
)
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The mask and positions of one pass of T = clean_len + num_blocks · block_size rows.

    Attributes:
      positions: [B, T] int32, for the rotary embedding only; restart in every packed document.
      lo, hi: [B, T] int32 key indices; the row sees clean keys lo <= j < hi.
      clean_len: C, number of clean rows, which come first.
      num_blocks: A.
      block_size: W.
      in_block: whether the rows of a block see each other both ways or causally.
    """

    positions: jax.Array
    lo: jax.Array
    hi: jax.Array
    clean_len: int
    num_blocks: int = 0
    block_size: int = 1
    in_block: InBlock = "bidirectional"

    def __post_init__(self) -> None:
        # Unflattening inside transformations passes placeholders that have no shape.
        if hasattr(self.positions, "shape"):
            rows = self.clean_len + self.num_blocks * self.block_size
            if self.positions.shape[-1] != rows:
                raise ValueError(f"layout of {rows} rows has positions {self.positions.shape}")


def causal(length: jax.Array, num_rows: int) -> PackedLayout:
    """Prefill, plain decoding and verification: `num_rows` clean rows after `length` cached ones.

    Args:
      length: [B] int32, tokens already in the cache.
      num_rows: C.
    """
    positions = length[:, None] + jnp.arange(num_rows, dtype=jnp.int32)
    return PackedLayout(positions, jnp.zeros_like(positions), positions + 1, num_rows)


def branches(
    length: jax.Array,
    offsets: jax.Array,
    *,
    spine_len: int,
    block_size: int,
    in_block: InBlock = "bidirectional",
) -> PackedLayout:
    """A draft pass: a causal spine of `spine_len` rows and blocks anchored inside or after it.

    The spine is the block being verified; branch i is anchored `offsets[:, i]` tokens after the
    cache's end, so it sees the cache and the spine's first `offsets[:, i]` rows. A synchronous
    draft is one branch (with the spine when its tokens are not yet cached, without it when they
    are: then offsets are 0).

    Args:
      length: [B] int32, tokens already in the drafter's cache.
      offsets: [B, A] int32 anchor positions relative to `length`.
    """
    anchors = length[:, None] + offsets
    spine = length[:, None] + jnp.arange(spine_len, dtype=jnp.int32)
    in_blocks = anchors[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)
    batch, num_blocks = offsets.shape
    positions = jnp.concatenate([spine, in_blocks.reshape(batch, -1)], axis=1)
    hi = jnp.concatenate([spine + 1, jnp.repeat(anchors, block_size, axis=1)], axis=1)
    return PackedLayout(
        positions, jnp.zeros_like(hi), hi, spine_len, num_blocks, block_size, in_block
    )


def packed_documents(
    positions: jax.Array,
    starts: jax.Array,
    anchors: jax.Array,
    *,
    block_size: int,
    in_block: InBlock = "bidirectional",
) -> PackedLayout:
    """Training and offline acceptance: packed documents and blocks anchored at their tokens.

    Args:
      positions: [B, S] int32, restarting at 0 in every document.
      starts: [B, S] int32, key index of the first token of the row's document.
      anchors: [B, A] int32 key indices; −1 is an unused block, which sees only itself.
    """
    used = anchors >= 0
    at = jnp.maximum(anchors, 0)
    rows = jnp.arange(positions.shape[1], dtype=jnp.int32)
    clean_hi = jnp.broadcast_to(rows + 1, positions.shape)
    anchor_position = jnp.take_along_axis(positions, at, axis=1)
    block_lo = jnp.where(used, jnp.take_along_axis(starts, at, axis=1), 0)
    block_hi = jnp.where(used, at, 0)
    in_blocks = anchor_position[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)
    batch, num_blocks = anchors.shape

    def join(clean: jax.Array, block: jax.Array) -> jax.Array:
        return jnp.concatenate([clean, jnp.repeat(block, block_size, axis=1)], axis=1)

    return PackedLayout(
        jnp.concatenate([positions, in_blocks.reshape(batch, -1)], axis=1),
        join(starts, block_lo),
        join(clean_hi, block_hi),
        positions.shape[1],
        num_blocks,
        block_size,
        in_block,
    )
