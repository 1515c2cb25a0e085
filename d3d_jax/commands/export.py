"""`d3d export`: a drafter as a Hugging Face folder of its own."""

from __future__ import annotations

import numpy as np

from d3d_jax.commands.evaluate import find_checked
from d3d_jax.commands.options import Export
from d3d_jax.commands.runtime import busy, note
from d3d_jax.drafter import export_drafter


def run(options: Export) -> None:
    """Checks that drafter and target fit together, and writes the folder."""
    folder, target_folder, drafter = find_checked(options.drafter, options.target)
    dtype = None if options.dtype is None else np.dtype(options.dtype)
    with busy(f"writing {options.out}"):
        export_drafter(options.out, folder, target_folder, dtype=dtype)
    note(f"{options.out}: {drafter.model.num_hidden_layers} layers with embedding and tokenizer")
