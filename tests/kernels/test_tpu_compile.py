"""The TPU kernels through the real TPU compiler, for every generation, without a TPU."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import pytest

from d3d_jax.kernels.interval_attention import bench_candidates, tpu
from d3d_jax.kernels.interval_attention.shapes import DECODE, TRAIN, by_name

pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install 'd3d_jax[tpu]'")
# Only from here on: asking for a topology loads libtpu, which looks for a TPU machine otherwise.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
from jax.experimental import topologies

pytestmark = pytest.mark.tpu_compiler

# Chips of each generation, and the VMEM a kernel may take there unless it asks for more. On tpu7x
# the compiler counts up to 16 MiB of its own into a kernel's share.
GENERATIONS = {
    "v4": ("v4:2x2x1", 16),
    "v5e": ("v5e:2x2", 16),
    "v5p": ("v5p:2x2x1", 16),
    "v6e": ("v6e:2x2", 16),
    "tpu7x": ("tpu7x:2x2x1", 32),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    sharding: jax.sharding.Sharding
    vmem: int

    def compile(self, function, *arrays):
        arrays = [jax.ShapeDtypeStruct(*x, sharding=self.sharding) for x in arrays]
        compiled = jax.jit(function).lower(*arrays).compile()
        for kernel, used in kernels(compiled).items():
            assert used <= self.vmem, f"{kernel} takes {used} bytes of VMEM"
        return compiled


@pytest.fixture(scope="module", params=GENERATIONS)
def chip(request):
    name, vmem = GENERATIONS[request.param]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return Chip(jax.sharding.SingleDeviceSharding(topology.devices[0]), vmem * 2**20)


def kernels(compiled):
    """{kernel: bytes of VMEM} of the Pallas kernels in a program."""
    found = {}
    for line in compiled.as_text().splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            size = re.search(r'used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
            assert size, line
            found[line.split("=")[0].strip()] = int(size[1])
    return found


def arrays(shape, dtype):
    q = (shape.batch, shape.rows, shape.heads, shape.head_dim)
    k = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    interval = (q[:2], jnp.int32)
    return (q, dtype), (k, dtype), (k, dtype), interval, interval


def backward(q, k, v, lo, hi, d_out, d_lse):
    _, pull = jax.vjp(lambda q, k, v: tpu.interval_attention(q, k, v, lo, hi), q, k, v)
    return pull((d_out, d_lse))


def compile_training(chip, shape, dtype):
    q, *rest = arrays(shape, dtype)
    compiled = chip.compile(backward, q, *rest, q, (q[0][:3], jnp.float32))
    assert len(kernels(compiled)) == 3, "forward, dq, and dk with dv"


# Models whose heads are the same compile to the same program.
BY_HEADS = {(s.heads, s.kv_heads, s.keys): s for s in TRAIN}.values()


@pytest.mark.parametrize("shape", BY_HEADS, ids=lambda shape: shape.name)
def test_training_compiles(chip, shape):
    compile_training(chip, shape, jnp.bfloat16)


@pytest.mark.parametrize("name", ["train/qwen3-0.6b", "train/smollm2-135m"])
def test_float32_training_compiles(chip, name):
    compile_training(chip, by_name(name), jnp.float32)


@pytest.mark.parametrize(
    "shape",
    [s for s in DECODE if (s.keys, s.batch) in ((4096, 1), (32768, 8))],
    ids=lambda shape: shape.name,
)
def test_decoding_compiles_and_reads_the_cache_where_it_lies(chip, shape):
    compiled = chip.compile(tpu.interval_attention, *arrays(shape, jnp.bfloat16))
    assert len(kernels(compiled)) == 1
    queries = shape.batch * shape.rows * shape.heads * max(shape.head_dim, 128) * 2
    cache = shape.batch * shape.kv_heads * shape.keys * shape.head_dim * 2
    if cache > 8 * queries:
        assert compiled.memory_analysis().temp_size_in_bytes < cache


@pytest.mark.parametrize("rows, keys, heads", [(1, 20, 3), (37, 200, 9), (150, 1000, 24)])
def test_sizes_that_fit_no_tile_compile(chip, rows, keys, heads):
    base = by_name("train/smollm2-135m")
    for dtype, dim in ((jnp.bfloat16, 64), (jnp.float32, 128)):
        shape = dataclasses.replace(base, rows=rows, keys=keys, heads=heads, head_dim=dim)
        compile_training(chip, shape, dtype)


def test_layers_of_one_pass_share_a_work_list(chip):
    def two_layers(q, k, v, lo, hi):
        out, _ = tpu.interval_attention(q, k, v, lo, hi)
        return tpu.interval_attention(out, k, v, lo, hi)

    shape = by_name("decode/qwen3-8b/draft400/4096x8")
    compiled = chip.compile(two_layers, *arrays(shape, jnp.bfloat16))
    assert len(kernels(compiled)) == 2
    assert len(re.findall(r" sort\(", compiled.as_text())) == 1


@pytest.mark.parametrize("chip", ["v5e"], indirect=True)
def test_splash_attention_compiles_as_a_yardstick(chip):
    shape = by_name("train/qwen3-8b")
    run = bench_candidates.splash(shape)

    def loss(q, k, v):
        keys, values = (x[:, : shape.clean_rows].swapaxes(1, 2) for x in (k, v))
        return jnp.sum(run(q, k, v, keys, values, None, None).astype(jnp.float32))

    rows = (shape.batch, shape.rows)
    q, k = ((*rows, n, shape.head_dim) for n in (shape.heads, shape.kv_heads))
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=chip.sharding) for x in (q, k, k)]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    program = gradient.lower(*arrays).compile().as_text() or ""
    assert program.count('custom_call_target="tpu_custom_call"') == 3
