"""Two real processes, each with two devices of one mesh: reading, computing and writing together.

The file is its own child program: `python -m tests.models.test_processes FOLDER PORT INDEX`.
"""

import faulthandler
import json
import math
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax import layout
from d3d_jax.errors import D3DError
from d3d_jax.models import checkpoint, checkpoint_writing, decoder, parameters, sharding
from d3d_jax.models.safetensors_folder import SafetensorsFolder
from tests.tiny_models import tiny_config, tiny_params

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, LOCAL_DEVICES, SECONDS = 2, 2, 90
# Two kv heads on a tensor axis of four: the devices of a process hold the same key and value
# weights. With fsdp 2 a process has half the hidden size; vectors are whole everywhere.
CONFIG = tiny_config(vocab_size=64)
MESHES = {"tensor 4": (1, 4), "fsdp 2 x tensor 2": (2, 2)}
FORMS = {"stacked": True, "per layer": False}
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)


def forward(params, tokens):
    rows = layout.causal(jnp.zeros(tokens.shape[:1], jnp.int32), tokens.shape[1])
    return decoder.logits(params, decoder.forward(CONFIG, params, tokens, rows)[0])


def own_elements(mesh, stacked):
    """How many numbers the devices of this process hold, what they share counted once."""
    total = 0
    for leaf in jax.tree.leaves(parameters.abstract(CONFIG, mesh, stacked=stacked)):
        held = leaf.sharding.devices_indices_map(leaf.shape)
        mine = {str(i): i for d, i in held.items() if d.process_index == jax.process_index()}
        for index in mine.values():
            total += math.prod(len(range(n)[s]) for s, n in zip(index, leaf.shape, strict=True))
    return total


def record(owner, name, seen):
    """Replaces a function by one that lists what `seen` makes of each of its results."""
    plain, results = getattr(owner, name), []

    def recorded(*args):
        result = plain(*args)
        results.append(seen(result))
        return result

    setattr(owner, name, recorded)
    return results


def child(folder, port, index):
    """Loads, computes and saves on every mesh; writes its figures to `INDEX.json`."""
    faulthandler.dump_traceback_later(SECONDS - 10)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", LOCAL_DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, index, initialization_timeout=30)
    assert (jax.process_count(), jax.device_count()) == (PROCESSES, PROCESSES * LOCAL_DEVICES)
    read = record(SafetensorsFolder, "read", lambda part: part.size)
    wrote = record(checkpoint_writing, "write_folder", lambda _: 1)
    figures = {}
    for mesh_name, (fsdp, tensor) in MESHES.items():
        mesh = sharding.model_mesh(sharding.make_mesh(fsdp=fsdp, tensor=tensor), CONFIG)
        for form, stacked in FORMS.items():
            name = f"{mesh_name}, {form}"
            read.clear()
            wrote.clear()
            params = checkpoint.load_params(folder / "model", CONFIG, stacked=stacked, mesh=mesh)
            figures[name] = {"read": sum(read), "own": own_elements(mesh, stacked)}
            whole = jax.NamedSharding(mesh, jax.P())
            run = jax.jit(sharding.on_mesh(mesh, forward), out_shardings=whole)
            np.save(folder / f"{name} {index}.npy", np.asarray(run(params, TOKENS)))
            checkpoint_writing.save_model(folder / name, CONFIG, params, max_shard_bytes=20_000)
            figures[name]["wrote"] = sum(wrote)
            # The folder is there by now: every process is told, and none waits for the first.
            try:
                checkpoint_writing.save_model(folder / name, CONFIG, params)
            except D3DError as error:
                figures[name]["refused"] = str(error)
    (folder / f"{index}.json").write_text(json.dumps(figures))
    jax.distributed.shutdown()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_children(folder):
    """Runs the processes to their end; one that fails or hangs ends all, and is shown."""
    command = [sys.executable, "-m", "tests.models.test_processes", str(folder), str(free_port())]
    logs = [folder / f"{index}.log" for index in range(PROCESSES)]
    children = []
    try:
        for index, log in enumerate(logs):
            with log.open("w") as out:
                children.append(
                    subprocess.Popen([*command, str(index)], cwd=ROOT, stdout=out, stderr=out)
                )
        end = time.monotonic() + SECONDS
        while any(one.poll() is None for one in children) and time.monotonic() < end:
            if any(one.poll() for one in children):
                break
            time.sleep(0.1)
        states = [one.poll() for one in children]
    finally:
        for one in children:
            one.kill()
            one.wait()
    said = "\n".join(f"process {i}:\n{log.read_text()}" for i, log in enumerate(logs))
    assert states == [0] * PROCESSES, f"exit states {states} (None: still running)\n{said}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the processes left, beside the `model` they read."""
    folder = tmp_path_factory.mktemp("processes")
    checkpoint_writing.save_model(
        folder / "model", CONFIG, tiny_params(CONFIG), max_shard_bytes=20_000
    )
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    run_children(folder)
    return folder


@pytest.fixture(params=[f"{mesh}, {form}" for mesh in MESHES for form in FORMS])
def case(request):
    return request.param


pytestmark = pytest.mark.slow


def figures(folder, case):
    return [json.loads((folder / f"{i}.json").read_text())[case] for i in range(PROCESSES)]


def test_each_process_reads_what_its_devices_hold_and_no_more(folder, case):
    count = parameters.count(CONFIG)
    for one in figures(folder, case):
        assert one["read"] == one["own"]
        assert count / 2 < one["read"] < 0.6 * count


def test_logits_are_those_of_one_device(folder, case):
    expected = np.asarray(jax.jit(forward)(tiny_params(CONFIG), TOKENS))
    for index in range(PROCESSES):
        got = np.load(folder / f"{case} {index}.npy")
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_only_the_first_process_writes_and_bit_for_bit_what_was_read(folder, case):
    assert [one["wrote"] for one in figures(folder, case)] == [1, 0]
    original = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    assert {path.name: path.read_bytes() for path in (folder / case).iterdir()} == original


def test_a_refusal_reaches_every_process(folder, case):
    first, second = (one["refused"] for one in figures(folder, case))
    assert first.endswith("exists already; remove it or choose another folder")
    assert second.startswith("the first process cannot write")


if __name__ == "__main__":
    try:
        child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # JAX's own exit would wait for the other process
