"""Compiled programs kept between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from d3d_jax.errors import D3DError
from d3d_jax.models.registry import cache_dir


def keep_compiled(folder: str | Path | None = None) -> Path:
    """Keeps every program that jax compiles from now on, and uses those kept before.

    A folder that JAX_COMPILATION_CACHE_DIR or `jax.config` already names stays in use.

    Args:
      folder: where; None: xla/ in this library's cache folder (`registry.cache_dir`).

    Returns:
      The folder in use.

    Raises:
      D3DError: the folder cannot be made.
    """
    config: Any = jax.config  # its settings are attributes that type checkers do not know
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Small programs too: a step is preceded by dozens of them.
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if folder is None and config.jax_compilation_cache_dir is not None:
        return Path(config.jax_compilation_cache_dir)
    path = Path(folder).expanduser() if folder is not None else cache_dir() / "xla"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise D3DError(f"compiled programs cannot be kept in {path} ({error.strerror})") from None
    config.update("jax_compilation_cache_dir", str(path))
    return path
