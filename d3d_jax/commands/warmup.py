"""`d3d warmup`: compiles ahead what `d3d generate` with the same options can need."""

from __future__ import annotations

import time

from d3d_jax.commands.loading import open_decoder, sampling_params
from d3d_jax.commands.options import Warmup
from d3d_jax.commands.runtime import Bar, busy, duration, note, start_jax
from d3d_jax.compilation import keep_compiled


def run(options: Warmup) -> None:
    """Runs every program once: at each cache capacity a round, and the passes that read prompts."""
    params = sampling_params(options.sampling, max_new_tokens=1)
    start_jax(cpu_devices=options.placement.num_devices)
    began = time.perf_counter()
    kept_in = keep_compiled()
    files = open_decoder(options.target, options.decoding, options.placement)
    with busy(f"loading {options.target}"):
        decoder = files.load(max_new_tokens=1)
    batch = options.decoding.batch
    with Bar("capacities", 1) as bar:
        decoder.warm_up_all(batch, params, bar.update_total)
    note(
        f"Compiled for batches of {batch} and up to {decoder.limit} tokens in "
        f"{duration(time.perf_counter() - began)}; kept in {kept_in}."
    )
