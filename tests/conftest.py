"""Every test process gets eight CPU devices, so that meshes of several axes can be tested."""

import os

# Nearly all of a test's time goes into compiling programs that run for a moment: LLVM need not
# optimize them. jax reads this when it is imported, in the processes that tests start as well.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# On a CPU unless told otherwise, also where there is more: `make gpu-check` says cuda.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One compilation cache for all commands of a module, which start afresh each time."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def optimized():
    """For modules that run the real model, which takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
    jax.config.update("jax_disable_most_optimizations", True)
