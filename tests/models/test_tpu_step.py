"""A target's verification on a mesh of TPU chips, through the real compiler and without a TPU."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from d3d_jax import layout
from d3d_jax.hlo import collectives
from d3d_jax.kernels.interval_attention import compiling_for
from d3d_jax.models import cache as caches
from d3d_jax.models import decoder, parameters, sharding
from d3d_jax.presets import preset

pytest.importorskip("libtpu", reason="needs the TPU compiler: make compile-tpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
from jax.experimental import topologies

pytestmark = pytest.mark.tpu_compiler
LAYERS, BATCH, ROWS, KEYS = 2, 2, 16, 4096


@pytest.mark.parametrize(
    "name, chips", [("Qwen/Qwen3-8B", "v5e:2x2"), ("Qwen/Qwen3-32B", "v5e:4x4")]
)
def test_verification_on_a_mesh_takes_the_kernel_and_the_collectives_expected(name, chips):
    config = dataclasses.replace(preset(name), num_hidden_layers=LAYERS)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chips).devices
    mesh = sharding.make_mesh(devices, tensor=len(devices))
    mesh = sharding.model_mesh(mesh, config)
    whole = NamedSharding(mesh, P())
    shape = (BATCH, config.num_key_value_heads, KEYS, config.head_dim)
    split = sharding.named("bk..", shape, mesh, sharding.ACTIVATION_RULES)
    buffer = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
    length = jax.ShapeDtypeStruct((BATCH,), jnp.int32, sharding=whole)
    cache = caches.KVCache(((buffer, buffer),) * LAYERS, length)
    tokens = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.int32, sharding=whole)

    def verify(params, cache, tokens):
        rows = layout.causal(cache.length, ROWS)
        hidden, cache = decoder.forward(config, params, tokens, rows, cache)
        return decoder.likeliest(decoder.logits(params, hidden)), cache

    params = parameters.abstract(config, mesh, stacked=False)
    with compiling_for("tpu"):
        step = jax.jit(sharding.on_mesh(mesh, verify), donate_argnums=1)
        compiled = step.lower(params, cache, tokens).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == LAYERS
    assert collectives(compiled) == {"all-reduce": 2 * LAYERS + 3}
    memory = compiled.memory_analysis()
    assert memory is not None
    # The cache is updated in place: all of it is an argument that is an output, too.
    held = 2 * LAYERS * split.shard_shape(shape)[1] * BATCH * KEYS * config.head_dim * 2
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held


@pytest.mark.parametrize(
    "chips, sizes",
    [
        ("v5e:4x4", {"fsdp": 8, "tensor": 2}),
        ("v5e:8x8", {"fsdp": 16}),
        ("v5p:4x4x4", {"fsdp": 32, "tensor": 2}),
    ],
)
def test_a_mesh_may_split_the_links_of_a_slice(chips, sizes):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chips).devices
    mesh = sharding.make_mesh(devices, **sizes, arrange=True)
    assert set(mesh.devices.flat) == set(devices)
    assert all(mesh.shape[axis] == size for axis, size in sizes.items())
