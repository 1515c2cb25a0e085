"""Every test process gets eight CPU devices, so that meshes of several axes can be tested."""

import os
import shutil
import tempfile

# Nearly all of a test's time goes into compiling programs that run for a moment: LLVM need not
# optimize them. jax reads this when it is imported, in the processes that tests start as well.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# And the same program, however small, is compiled once for all of them (`pytest_configure`).
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest

# On a CPU unless told otherwise, also where there is more: `make gpu-check` says cuda.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)


CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """The first process makes the cache; others, which inherit its environment, find it named."""
    config.made = None
    if CACHE not in os.environ:
        config.made = os.environ[CACHE] = tempfile.mkdtemp(prefix="d3d-jax-tests-")
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])


def pytest_unconfigure(config):
    """And removes it."""
    if config.made is not None:
        shutil.rmtree(config.made)


@pytest.fixture(scope="module")
def optimized():
    """For modules that run the real model, which takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
    jax.config.update("jax_disable_most_optimizations", True)
