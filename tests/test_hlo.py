"""Collectives and FLOPs of compiled programs: from text as compilers write it, and of real ones."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from d3d_jax import flops
from d3d_jax.hlo import Collective, find_collectives
from d3d_jax.models import sharding

# As the TPU compiler writes it: a loop unrolled by two that does not say how often it runs, an
# asynchronous all-gather that two fusions name, and a reduce-scatter.
TPU = """\
HloModule jit_step, is_scheduled=true

%start (param_0: bf16[8,16]) -> (bf16[8,16], bf16[8,64]) {
  %param_0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=7, dimensions={1}
  ROOT %custom-call.1 = (bf16[8,16]{1,0}, bf16[8,64]{1,0}) custom-call(%all-gather.1)
}

%done (param_1: bf16[8,16]) -> bf16[8,64] {
  %param_1 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%param_1), channel_id=7
}

%body (arg: (f32[4,128], u32[], /*index=2*/u32[])) -> (f32[4,128], u32[], /*index=2*/u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %arg = (f32[4,128]{1,0}, u32[]{:T(128)}, /*index=2*/u32[]{:T(128)}) parameter(0)
  %part = f32[4,128]{1,0} get-tuple-element(%arg), index=0
  %turn = u32[]{:T(128)} get-tuple-element(%arg), index=2
  %sent = (f32[4,128]{1,0}, f32[4,128]{1,0:T(4,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%part), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %got = f32[4,128]{1,0} collective-permute-done(%sent)
  %next = u32[]{:T(128)} add(%turn, %two), metadata={op_name="add(%x, %y)"}
  ROOT %out = (f32[4,128]{1,0}, u32[], /*index=2*/u32[]) tuple(%got, %other, /*index=2*/%next)
}

%condition (arg: (f32[4,128], u32[], /*index=2*/u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(7)
  %arg.1 = (f32[4,128]{1,0}, u32[]{:T(128)}, /*index=2*/u32[]{:T(128)}) parameter(0)
  %turn.1 = u32[]{:T(128)} get-tuple-element(%arg.1), index=2
  ROOT %less = pred[]{:T(512)} compare(%turn.1, %limit), direction=LT
}

%all-reduce-scatter.1.clone (input: bf16[32,8]) -> bf16[8,8] {
  %input = bf16[32,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.5 = bf16[32,8]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=11, to_apply=%add
  ROOT %mine = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.5, %at, %zero)
}

ENTRY %main (p: f32[4,128]) -> f32[4,128] {
  %while.1 = (f32[4,128]{1,0}, u32[], u32[]) while(%tuple), condition=%condition, body=%body
  %fusion.1 = (bf16[8,16]{1,0}, bf16[8,64]{1,0}) fusion(%q), kind=kCustom, calls=%start
  %fusion.2 = bf16[8,64]{1,0} fusion(%fusion.1), kind=kCustom, calls=%done
  %fusion.3 = bf16[8,8]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1.clone
  %sums = (f32[]{:T(128)}, pred[3]{0}) all-reduce(%a, %b), channel_id=9, to_apply=%add
  ROOT %result = f32[4,128]{1,0} get-tuple-element(%while.1), index=0
}
"""


def test_collectives_of_a_tpu_program_are_counted_as_often_as_they_run():
    assert sorted(find_collectives(TPU), key=lambda found: found.kind) == [
        Collective("all-gather", elements=512, bytes=1024, times=1, types=("bf16",)),
        Collective("all-reduce", elements=3, bytes=4 + 3, times=1, types=("f32", "pred")),
        # From 0 up to 7 in steps of two: four turns.
        Collective("collective-permute", elements=512, bytes=2048, times=4, types=("f32",)),
        Collective("reduce-scatter", elements=64, bytes=128, times=1, types=("bf16",)),
    ]


def test_a_channel_that_several_share_hides_none_of_them():
    other = "%gathered = bf16[8,128]{1,0} all-gather(%b), channel_id=9, dimensions={1}"
    found = find_collectives(TPU.replace("  ROOT %result", f"  {other}\n  ROOT %result"))
    assert len(found) == 5 and max(one.elements for one in found) == 1024


@pytest.mark.parametrize(
    "old, new",
    [
        ("direction=LT", "direction=NE"),
        ("%next = u32[]{:T(128)} add(%turn, %two)", "%next = u32[]{:T(128)} fusion(%turn)"),
        ("constant(7)", "parameter(0)"),
    ],
)
def test_loops_of_unknown_length_count_once(old, new):
    assert old in TPU
    found = find_collectives(TPU.replace(old, new))
    assert [c.times for c in found if c.kind == "collective-permute"] == [1]


def test_a_counter_may_be_copied():
    """From one memory to another, as the TPU compiler does in large programs."""
    added = "%next = u32[]{:T(128)} add(%turn, %two)"
    copied = added.replace("%next", "%sum") + "\n  %next = u32[]{:T(128)} copy(%sum)"
    assert sorted(find_collectives(TPU.replace(added, copied)), key=str) == sorted(
        find_collectives(TPU), key=str
    )


def test_loops_of_stated_length_and_branches_count():
    line = (
        "%while.1 = (f32[4,128]{1,0}, u32[], u32[]) while(%tuple), condition=%condition, body=%body"
    )
    stated = line + ', backend_config={"known_trip_count":{"n":"28"}}'
    found = find_collectives(TPU.replace(line, stated))
    assert [c.times for c in found if c.kind == "collective-permute"] == [28]
    branches = "f32[4,128]{1,0}) conditional(%i, %a), branch_computations={%body, %done}"
    found = find_collectives(TPU.replace(line, branches))
    assert [c.times for c in found if c.kind == "collective-permute"] == [1]


def test_a_scan_of_a_compiled_program_multiplies_collectives_and_flops():
    mesh = sharding.make_mesh(jax.devices()[:2])

    def step(x, w):
        def body(x, _):
            return jax.lax.psum(x @ w, "data"), None

        return jax.lax.scan(body, x, length=5)[0]

    split = jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    traced = jax.jit(split).trace(jnp.ones((4, 8)), jnp.ones((8, 8)))
    (found,) = find_collectives(traced.lower().compile().as_text())
    assert found == Collective("all-reduce", elements=32, bytes=128, times=5, types=("f32",))
    # Both devices do all of it.
    assert flops.count(traced.jaxpr) == 2 * 5 * (2 * 4 * 8 * 8)


def test_flops_count_what_is_recomputed_and_the_costlier_branch():
    w = jnp.ones((8, 8))

    def loss(x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))

    def gradient(x, recompute):
        function = jax.checkpoint(loss) if recompute else loss
        return jax.jit(jax.grad(function)).trace(x).jaxpr

    x, product = jnp.ones((4, 8)), 2 * 4 * 8 * 8
    assert flops.count(gradient(x, False)) == 4 * product
    assert flops.count(gradient(x, True)) == 6 * product
    branch = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w))
    assert flops.count(branch.trace(x).jaxpr) == 2 * product
