"""The Hopper kernel through the real CUDA compiler for an H200, without a GPU.

The compiler comes with the CUDA plugin, best installed beside this environment, not in it:
`pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt` of jax's version (no CUDA libraries).
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from d3d_jax import topologies
from d3d_jax.kernels.interval_attention import gpu
from d3d_jax.kernels.interval_attention.shapes import DECODE, TRAIN, by_name

HAS_PLUGIN = any(
    importlib.util.find_spec(f"jax_plugins.{name}") is not None
    for name in ("xla_cuda13", "xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is not None
)
pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(
        not HAS_PLUGIN, reason="needs the CUDA compiler: jax-cuda13-plugin and jax-cuda13-pjrt"
    ),
]

# Every pass of one model; of the others the one with most of everything.
SHAPES = TRAIN + tuple(
    shape for shape in DECODE if "qwen3-8b" in shape.name or (shape.batch, shape.keys) == (8, 32768)
)


@pytest.fixture(scope="module")
def h200():
    return jax.sharding.SingleDeviceSharding(topologies.find("h200:1").devices[0])


@pytest.fixture(scope="module")
def fine():
    """Kernels that have passed."""
    return set()


def arrays(shape, sharding):
    q = (shape.batch, shape.rows, shape.heads, shape.head_dim)
    k = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    shapes = [(q, jnp.bfloat16), *[(k, jnp.bfloat16)] * 2, *[(q[:2], jnp.int32)] * 2]
    return [jax.ShapeDtypeStruct(*x, sharding=sharding) for x in shapes]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_uses_wgmma_without_spilling_registers(shape, h200, fine, monkeypatch, capfd):
    # Read by the compiler, in this process.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    op = jax.jit(lambda *x: gpu.interval_attention(*x))
    program = op.lower(*arrays(shape, h200)).compile().as_text() or ""
    (kernel,) = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program)
    printed = capfd.readouterr()
    said = printed.out + printed.err
    if kernel in fine:
        # The compiler does not compile what it has compiled for another shape.
        return
    assert ".entry interval_attention" in said and ".target sm_90a" in said
    assert "wgmma.mma_async.sync.aligned.m64" in said
    # ptxas says so when it has to wait for every wgmma at once.
    assert "serialized" not in said
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills == [("0", "0")], spills
    fine.add(kernel)


def test_gradients_compile_for_training(h200):
    shape = by_name("train/smollm2-135m")

    def loss(q, k, v, lo, hi):
        out, lse = gpu.interval_attention(q, k, v, lo, hi)
        seen = jnp.isfinite(lse)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(jnp.where(seen, lse, 0.0))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    program = gradient.lower(*arrays(shape, h200)).compile().as_text() or ""
    assert "mosaic_gpu" in program


@pytest.mark.parametrize("name", ["decode/qwen3-8b/verify/4096x8", "train/qwen3-8b"])
def test_nothing_loops_or_branches_on_the_host(name, h200):
    """XLA on GPUs waits for the condition of such loops and branches."""
    op = jax.jit(lambda *x: gpu.interval_attention(*x))
    text = op.lower(*arrays(by_name(name), h200)).compile().as_text()
    assert text and not re.search(r"= .*\b(while|conditional)\(", text)
