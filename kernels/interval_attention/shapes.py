"""Named real shapes of interval attention, shared by tests and benchmarks, and their intervals.

Training: S clean rows of packed documents and A blocks of W rows by ascending anchor. Decoding: the
passes of one round over a cache: a token, the verification of a block, and packed drafts of a spine
with the branches of 384 and 912 rows that the paper names.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: q [batch, rows, heads, head_dim], k and v [batch, kv_heads, keys, head_dim].

    Attributes:
      name: kind, model and pass, for test ids and benchmark tables.
      clean_rows: C, the rows that are not rows of a block of width `BLOCK`.
    """

    name: str
    batch: int
    rows: int
    heads: int
    kv_heads: int
    keys: int
    head_dim: int
    kind: Literal["train", "decode"]
    clean_rows: int

    @property
    def blocks(self) -> int:
        return (self.rows - self.clean_rows) // BLOCK


def _train(model: str, heads: int, kv_heads: int, head_dim: int, keys: int, blocks: int) -> Shape:
    rows = keys + blocks * BLOCK
    return Shape(f"train/{model}", 1, rows, heads, kv_heads, keys, head_dim, "train", keys)


TRAIN = (
    _train("qwen3-0.6b", 16, 8, 128, 4096, 128),
    _train("qwen3-1.7b", 16, 8, 128, 4096, 128),
    _train("qwen3-4b", 32, 8, 128, 4096, 128),
    _train("qwen3-8b", 32, 8, 128, 4096, 128),
    _train("qwen3-14b", 40, 8, 128, 4096, 128),
    _train("qwen3-32b", 64, 8, 128, 4096, 128),
    _train("smollm2-135m", 9, 3, 64, 1024, 64),
)

DECODE = tuple(
    Shape(
        f"decode/{model}/{name}/{keys}x{batch}",
        batch,
        rows,
        heads,
        kv_heads,
        keys,
        head_dim,
        "decode",
        min(rows, BLOCK),
    )
    for model, heads, kv_heads, head_dim in (
        ("qwen3-0.6b", 16, 8, 128),
        ("qwen3-8b", 32, 8, 128),
        ("qwen3-32b", 64, 8, 128),
        ("smollm2-135m", 9, 3, 64),
    )
    for name, rows in (("plain", 1), ("verify", 16), ("draft400", 400), ("draft928", 928))
    for keys in (4096, 32768)
    for batch in (1, 8)
)

SHAPES = TRAIN + DECODE


def by_name(name: str) -> Shape:
    """Raises ValueError with the names there are."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise ValueError(f"no shape {name!r}; there are {', '.join(shape.name for shape in SHAPES)}")


def intervals(shape: Shape, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """lo and hi [B, T] int32 such as the shape's pass has.

    Training: documents of an eighth to half of the row, and blocks anchored at random tokens (an
    eighth of them unused). Decoding: caches filled to between a quarter and all but the rows to
    come, each batch row to another length, and branches anchored along the spine.
    """
    rng = np.random.default_rng(seed)
    build = _training_row if shape.kind == "train" else _decoding_row
    rows = [build(shape, rng, index) for index in range(shape.batch)]
    lo, hi = (np.stack(x).astype(np.int32) for x in zip(*rows, strict=True))
    return lo, hi


def _training_row(shape: Shape, rng: np.random.Generator, _: int):
    keys = shape.keys
    lengths = rng.integers(max(1, keys // 8), max(2, keys // 2), size=keys)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(keys)
    clean_lo = starts[np.searchsorted(starts, at, side="right") - 1]
    anchors = np.sort(rng.integers(0, keys, shape.blocks))
    used = np.arange(shape.blocks) < shape.blocks - shape.blocks // 8
    block_lo = np.where(used, clean_lo[anchors], 0)
    block_hi = np.where(used, anchors, 0)
    lo = np.concatenate([clean_lo, np.repeat(block_lo, BLOCK)])
    return lo, np.concatenate([at + 1, np.repeat(block_hi, BLOCK)])


def _decoding_row(shape: Shape, rng: np.random.Generator, index: int):
    most = shape.keys - shape.clean_rows
    length = most // 4 + (most - most // 4) * (index + 1) // shape.batch
    length -= int(rng.integers(0, max(1, most // 64)))
    spine = length + 1 + np.arange(shape.clean_rows)
    offsets = np.sort(1 + np.arange(shape.blocks) % BLOCK)
    hi = np.concatenate([spine, np.repeat(length + offsets, BLOCK)])
    return np.zeros_like(hi), hi
