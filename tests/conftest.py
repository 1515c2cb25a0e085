"""Every test process gets eight CPU devices, so that meshes of several axes can be tested."""

import importlib.metadata
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
EMITTERS = "xla_cpu_use_fusion_emitters"
# Later versions do not know this flag of XLA, and would end the process at it.
HAS_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")


def pytest_configure(config):
    """The first process makes the cache; others, which inherit its environment, find it named."""
    # Of two ways to emit fused operations the older compiles three times as fast. Its programs are
    # slower, which matters to the real model among the slow tests.
    if HAS_EMITTERS and "not slow" in config.option.markexpr:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{EMITTERS}=false"
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


@pytest.fixture
def as_users_compile():
    """Compiler options for tests that look at what became of a program."""
    return {EMITTERS: True} if HAS_EMITTERS else {}


@pytest.fixture(scope="module", autouse=True)
def programs_freed():
    """Each compiled program takes places in memory, of which Linux gives a process only so many."""
    yield
    jax.clear_caches()
