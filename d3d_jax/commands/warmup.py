"""`d3d warmup`: compiles ahead what `d3d generate` with the same options can need."""

from __future__ import annotations

import time

import jax

from d3d_jax.commands.loading import load_decoder
from d3d_jax.commands.options import Warmup
from d3d_jax.commands.runtime import Bar, busy, duration, note, start_jax


def run(options: Warmup) -> None:
    """Runs every prompt length and cache capacity once."""
    start_jax(cpu_devices=options.placement.num_devices)
    began = time.perf_counter()
    with busy(f"loading {options.target}"):
        decoder, _ = load_decoder(options.target, options.decoding, options.placement, 1)
    batch = options.decoding.batch
    with Bar("prompt lengths", 1) as bar:
        decoder.warm_up_all(batch, bar.update_total)
    config = jax.config
    note(
        f"Compiled for batches of {batch} and up to {decoder.limit} tokens in "
        f"{duration(time.perf_counter() - began)}; kept in {config.jax_compilation_cache_dir}."  # type: ignore[attr-defined]
    )
