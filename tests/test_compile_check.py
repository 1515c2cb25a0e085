"""`d3d compile-check`: names of hardware, bad input, and tiny programs through the TPU compiler."""

import json
from types import SimpleNamespace

import jax
import pytest

from d3d_jax import cli, compiled, presets, topologies
from d3d_jax.commands import compile_check
from d3d_jax.commands.check_options import CompileCheck
from d3d_jax.errors import D3DError
from d3d_jax.hlo import find_collectives
from d3d_jax.kernels.interval_attention import compiling_for
from tests.tiny_models import tiny_config

TINY, OTHER = "tiny/model", "tiny/other"
SIZES = ("max_tokens=64", "max_blocks=8", "anchors_per_document=8")


@pytest.fixture
def tiny(monkeypatch):
    """A preset whose heads are as wide as the kernels need them."""
    config = tiny_config(hidden_size=128, head_dim=64, intermediate_size=256, vocab_size=512)
    monkeypatch.setattr(presets, "PRESETS", {TINY: config, OTHER: config})


@pytest.mark.parametrize(
    "name, expected",
    [
        ("v5e:4x4", ("v5e", (4, 4))),
        ("v5p:4x4x4", ("v5p", (4, 4, 4))),
        ("tpu7x:2x2x1", ("tpu7x", (2, 2, 1))),
        ("h200:8", ("h200", (8,))),
    ],
)
def test_names_of_hardware_are_read(name, expected):
    assert topologies.parse(name) == expected


@pytest.mark.parametrize(
    "name", ["v5e", "v5e:", "v9:2x2", "v5e:4y4", "v5e:4x", " v5e:4x4", "h100:8"]
)
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(D3DError, match="v5e, v5p, v6e, tpu7x, h200"):
        topologies.parse(name)


@pytest.mark.parametrize("name", ["h200:9", "h200:0", "h200:2x4"])
def test_a_node_has_eight_gpus_at_most(name):
    with pytest.raises(D3DError, match="1 to 8 H200s"):
        topologies.find(name)


@pytest.mark.parametrize(
    "name, how", [("v5e:2x2", "make compile-tpu"), ("h200:8", "make compile-gpu")]
)
def test_a_compiler_that_is_missing_is_named(name, how, monkeypatch):
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    with pytest.raises(D3DError, match=how):
        topologies.find(name)


def fails(capsys, *args):
    """The one sentence that a command with bad input ends with."""
    assert cli.main(["compile-check", "--topology", "v5e:2x2", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def four_devices(monkeypatch):
    """Stands in for a topology, so that no compiler is needed."""
    found = topologies.Topology("v5e:2x2", "tpu", tuple(jax.devices()[:4]), 4, 16 * 2**30)
    monkeypatch.setattr(topologies, "find", lambda name: found)


@pytest.mark.parametrize(
    "args, sentence",
    [
        (("--target", "nobody/model"), "no preset 'nobody/model'"),
        (("--target", TINY, "--drafter-layers", "9"), "of 9 layers is more than the 3 of tiny"),
        (("--target", TINY, "--tensor", "3"), "3 devices, 4 were given|needs 3 devices"),
        (("--target", TINY, "--fsdp", "8"), "needs 8 devices, 4 were given"),
        (("--target", TINY, "--rows", "6"), "must be a multiple of 4"),
        (("--target", TINY, "no_such_setting=1"), "unknown training setting"),
        (("--target", TINY, "--config", "nothing"), "no training config 'nothing'"),
        (("--target", TINY, "--what", "decode", "steps=1"), "go with --what train"),
        (("--target", TINY, "--what", "respond", "--teacher-layers", "3"), "go with --what train"),
        (("--target", TINY, "--teacher-layers", "4"), "of 4 layers is more than the 3 of tiny/m"),
        (("--target", TINY, "--what", "decode", "--tp", "5"), "--tp 5 is more than the 4 devices"),
        (("--target", TINY, "--what", "decode", "--tp", "3"), "do not divide over a tensor axis"),
        (("--target", TINY, "--what", "decode", "--policy", "most"), "policy"),
        (("--target", TINY, "--rows", "0"), "--rows must be at least 1"),
    ],
)
def test_bad_input_ends_with_one_sentence(args, sentence, tiny, four_devices, capsys):
    line = fails(capsys, *args)
    assert line.startswith("error: ")
    assert any(part in line for part in sentence.split("|")), line


def needs(total, memory=True):
    parts = compiled.Memory(total, 0, 0, 0, 0) if memory else None
    return compiled.Needs(0.5, total, parts, 7, {"all-reduce": compiled.Exchange(3, 12, 4)}, 2)


def check(monkeypatch, found, *args):
    """Runs the command on devices that compile nothing, with this for every program."""
    monkeypatch.setattr(compile_check, "compile_and_measure", lambda traced, devices: found)
    program = SimpleNamespace(name="train step", traced=None, mesh=jax.make_mesh((4,), ("data",)))
    monkeypatch.setattr(compile_check.programs, "train_step", lambda *args: program)
    return cli.main(["compile-check", "--topology", "v5e:2x2", "--target", TINY, *args])


def test_what_fits_is_printed_in_gib(tiny, four_devices, monkeypatch, capsys):
    assert check(monkeypatch, needs(4 * 2**30), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["devices"] == figures["chips"] == 4 and figures["device_bytes"] == 16 * 2**30
    assert figures["config"]["batch_rows"] == 4 and figures["config"]["max_tokens"] == 4096
    (program,) = figures["programs"]
    assert program["bytes_per_device"] == program["memory"]["arguments"] == 4 * 2**30
    assert program["collectives"]["all-reduce"] == {"count": 3, "bytes": 12, "largest": 4}
    assert check(monkeypatch, needs(4 * 2**30)) == 0
    printed = capsys.readouterr().out
    assert (
        "4.00" in printed and "25%" in printed and "data 4" in printed and "all-reduce" in printed
    )


@pytest.mark.parametrize("memory", [True, False])
def test_what_does_not_fit_is_printed_and_refused(memory, tiny, four_devices, monkeypatch, capsys):
    assert check(monkeypatch, needs(20 * 2**30, memory)) == 2
    said = capsys.readouterr()
    assert "20.00" in said.out
    assert said.err == (
        "error: train step does not fit: it needs 20.00 GiB a device, and a device of v5e:2x2 has "
        "16.00\n"
    )


def test_roles_that_share_devices_must_fit_together():
    """What each holds lies beside every program of the other: 9 + 1 of its own + 5, 4 + 2 + 9."""

    def program(name, arguments, more):
        memory = {"arguments": arguments * 2**30}
        return {"name": name, "memory": memory, "bytes_per_device": (arguments + more) * 2**30}

    found = [program("target verify", 9, 1), program("drafter draft", 5, 0)]
    found.append(program("drafter prepare", 4, 2))
    compile_check.check_budget(found, SimpleNamespace(name="v5e:2x2", hbm=15 * 2**30), shared=True)
    compile_check.check_budget(found, SimpleNamespace(name="v5e:2x2", hbm=10 * 2**30))
    with pytest.raises(D3DError, match=r"target verify does not fit: .* 15\.00 GiB a device"):
        compile_check.check_budget(found, SimpleNamespace(name="x", hbm=14 * 2**30), shared=True)


def test_a_compiler_that_runs_out_of_memory_is_understood():
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm."
    )

    class Lowered:
        def compile(self):
            raise error

    traced = jax.jit(lambda x: x @ x).trace(jax.numpy.ones((2, 2)))
    stand_in = SimpleNamespace(jaxpr=traced.jaxpr, lower=Lowered)
    found = compiled.compile_and_measure(stand_in, 1)
    assert found.memory is None and found.total == int(18.5 * 2**30) and found.flops == 16
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compiled.compile_and_measure(stand_in, 1)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("what", ["train", "recover", "decode", "respond"])
def test_tiny_programs_through_the_tpu_compiler(what, tiny, capsys):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: make compile-tpu")
    args = {
        "train": ("--drafter", OTHER, "--fsdp", "2", "--tensor", "2", *SIZES),
        "recover": ("--teacher-layers", "3", "--fsdp", "2", *SIZES),
        "decode": ("--what", "decode", "--tp", "2"),
        "respond": ("--what", "respond", "--tp", "2"),
    }[what]
    options = ("--target", TINY, "--drafter-layers", "2", "--json", *args)
    assert cli.main(["compile-check", "--topology", "v5e:2x2", *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["chips"] == figures["devices"] == 4
    assert what == "respond" or figures["drafter"]["layers"] == 2
    found = {program["name"]: program for program in figures["programs"]}
    for program in found.values():
        assert 0 < program["bytes_per_device"] < 2**30 and program["kernels"] > 0
        assert program["flops_per_device"] > 0
    if what == "train":
        (step,) = found.values()
        # The state is updated in place, and weights are gathered for each use.
        assert step["memory"]["aliased"] > 0.9 * step["memory"]["arguments"]
        assert step["collectives"]
    elif what == "recover":
        (step,) = found.values()
        # The embedding, the head and a teacher of three layers are read, not updated.
        assert step["name"] == "recovery step"
        assert step["memory"]["aliased"] < 0.8 * step["memory"]["arguments"]
        assert step["kernels"] > 3
    elif what == "respond":
        assert list(found) == ["target prefill", "target step"]
        assert found["target step"]["collectives"]["all-reduce"]["count"] == 2 * 3 + 3
    else:
        assert found["target verify"]["kernels"] == 3
        # Two a layer, the embedding's, and two of the choice of a token.
        assert found["target verify"]["collectives"]["all-reduce"]["count"] == 2 * 3 + 3
        assert found["drafter draft"]["collectives"] == {}


@pytest.mark.tpu_compiler
def test_the_tpu_compiler_sums_gradients_in_float32(tiny):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: make compile-tpu")
    options = CompileCheck(
        target=TINY, drafter=OTHER, topology="v5e:2x2", fsdp=4, block_size=4, overrides=SIZES
    )
    topology = topologies.find(options.topology)
    target = presets.preset(options.target)
    drafter = compile_check._drafter(options, None)
    (program,) = compile_check._programs(options, target, drafter, topology)
    with compiling_for(topology.platform):
        found = find_collectives(program.traced.lower().compile().as_text())
    sums = [one for one in found if one.kind in ("all-reduce", "reduce-scatter")]
    assert {kind for one in sums for kind in one.types} <= {"f32", "s32"}
    # Neither the head's gradient nor the embedding's is ever whole on a device.
    table = target.vocab_size * target.hidden_size
    assert any(one.kind == "reduce-scatter" and one.elements == table // 4 for one in sums)
    assert max(one.elements for one in sums if one.kind == "all-reduce") < table
    # What is gathered of weights goes in bfloat16.
    gathered = [one for one in found if one.kind == "all-gather"]
    assert {kind for one in gathered for kind in one.types} <= {"bf16", "s32"}
