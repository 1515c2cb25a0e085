"""The reduced output vocabulary of a drafter: which tokens it may predict. Pure NumPy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from d3d_jax.errors import D3DError


class Documents(Protocol):
    """What counting needs of a dataset (`train.dataset.ResponseDataset` is one)."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> dict[str, Any]: ...


def frequent_tokens(dataset: Documents, vocab_size: int, count: int) -> np.ndarray:
    """The `count` tokens most frequent in the responses, as ascending int32 ids.

    Among equally frequent tokens the lowest ids win; tokens that never occur are equally frequent,
    so where too few occur the lowest ids fill up.

    Args:
      vocab_size: V of the model.

    Raises:
      D3DError: `count` is not between 1 and V.
    """
    if not 1 <= count <= vocab_size:
        raise D3DError(f"a draft vocabulary has between 1 and {vocab_size} tokens, not {count}")
    seen = np.zeros((vocab_size,), np.int64)
    for position in range(len(dataset)):
        document = dataset[position]
        response = document["tokens"][document["prompt_length"] :]
        seen += np.bincount(response, minlength=vocab_size)
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
