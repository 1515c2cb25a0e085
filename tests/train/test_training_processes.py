"""Real processes that train: two on one mesh, killed, stopped and continued; four as Slurm starts
them, continued by one; one killed again and again.

The file is its own child program: `python -m tests.train.test_training_processes FOLDER RUN PORT
COUNT INDEX`.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from d3d_jax.commands import option_groups
from d3d_jax.commands.runtime import join_processes
from d3d_jax.drafter import read_drafter, save_drafter
from d3d_jax.errors import D3DError, LostProcessError
from d3d_jax.models import checkpoint_writing
from d3d_jax.models.sharding import make_mesh
from tests.models.test_processes import free_port
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params
from tests.train.tiny_runs import make_dataset, make_trainer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150
CHANGES = dict(
    steps=24, batch_rows=4, learning_rate=1e-3, eval_every=12, checkpoint_every=4, warmup_steps=2
)


def child(folder, run, port, count, index):
    """Trains in `RUN` as process INDEX of COUNT, slowly enough to be interrupted."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if "SLURM_JOB_ID" in os.environ:
        join_processes(option_groups.Processes(distributed=True))
        assert (jax.process_count(), jax.process_index()) == (count, index)
    elif count > 1:
        join_processes(
            option_groups.Processes(
                coordinator=f"127.0.0.1:{port}", num_processes=count, process_id=index
            )
        )
    # Weights are split over all processes, and so are rows.
    mesh = make_mesh(data=2, fsdp=2) if count > 1 else make_mesh(fsdp=4)
    # Each process reads the parts of its own devices.
    drafter = read_drafter(
        folder / "initial", folder / "target", stacked=True, mesh=mesh, dtype=np.float32
    )
    trainer = make_trainer(
        folder / run,
        folder / "data/dataset",
        lambda _: time.sleep(0.1),
        mesh=mesh,
        drafter=drafter,
        **CHANGES,
    )
    trainer.train()


class Processes:
    """Children of one run, of which any that is left is killed in the end."""

    def __init__(self, folder, run, count, variables=lambda index: {}):
        command = [sys.executable, "-m", "tests.train.test_training_processes", str(folder), run]
        command += [str(free_port()), str(count)]
        self.metrics = folder / run / "metrics.jsonl"
        self.logs = [folder / f"{run} {i} of {count}.log" for i in range(count)]
        self.children = []
        for index, log in enumerate(self.logs):
            with log.open("w") as out:
                environment = {**os.environ, **variables(index)}
                self.children.append(
                    subprocess.Popen(
                        [*command, str(index)], cwd=ROOT, env=environment, stdout=out, stderr=out
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for one in self.children:
            one.kill()
            one.wait()

    def logged(self):
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def wait_for_step(self, step):
        end = time.monotonic() + SECONDS
        while self.logged() < step and time.monotonic() < end:
            assert all(one.poll() is None for one in self.children), self.said()
            time.sleep(0.02)
        assert self.logged() >= step, self.said()

    def wait(self, seconds=SECONDS):
        """Exit states."""
        end = time.monotonic() + seconds
        for one in self.children:
            try:
                one.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {seconds} s\n{self.said()}")
        return [one.returncode for one in self.children]

    def said(self):
        return "\n".join(f"process {i}:\n{log.read_text()}" for i, log in enumerate(self.logs))


def final_state(folder, run):
    """The last checkpoint, on this process's first device whatever it was written on."""
    path = (folder / run / "checkpoints" / str(CHANGES["steps"]) / "default").absolute()
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            checkpointer.metadata(path).item_metadata.tree,
        )
        return jax.device_get(checkpointer.restore(path, like))


def slurm(count):
    """The variables that srun gives each task of a job on one node."""
    # Where the first task listens follows from the number of the job.
    for job in range(os.getpid(), os.getpid() + 4096):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", job % 4096 + 65536 - 4096)) != 0:
                break
    common = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(count),
    }
    return lambda index: common | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data").mkdir()
    make_dataset(folder / "data")
    config = tiny_config()
    params = jax.device_get(tiny_params(config, scale=1.0))
    checkpoint_writing.save_model(folder / "target", config, params)
    save_drafter(folder / "initial", *tiny_drafter(config, params))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The last state of a run in this process, on one device."""
    drafter = read_drafter(folder / "initial", folder / "target", stacked=True, dtype=np.float32)
    mesh = make_mesh(jax.devices()[:1])
    make_trainer(
        folder / "alone", folder / "data/dataset", mesh=mesh, drafter=drafter, **CHANGES
    ).train()
    return final_state(folder, "alone")


# How a process says that another is gone: in our words, or in JAX's as it aborts.
GONE = (
    "another process of this run",
    "another task died",
    "leader/coordinator",
)


def assert_near(got, expected):
    """Of every array the difference is at most 1e-5 of it, in norm."""

    def one(a, b):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)

    jax.tree.map(one, got["params"], expected["params"])


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_processes_train_as_one_through_a_stop_and_a_death(folder, alone):
    with Processes(folder, "straight", 2) as straight:
        assert straight.wait() == [0, 0], straight.said()
    records = [json.loads(line) for line in straight.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, CHANGES["steps"] + 1))
    assert_near(final_state(folder, "straight"), alone)
    assert (folder / "straight/drafter/config.json").exists()

    # A signal to either stops both at the same step.
    with Processes(folder, "broken", 2) as both:
        both.wait_for_step(2)
        both.children[1].send_signal(signal.SIGTERM)
        assert both.wait() == [143, 143], both.said()
        assert both.said().count("stopped by SIGTERM at step") == 2
    # The death of one ends the other; the first of them holds the coordinator.
    for victim, step in ((1, 10), (0, 14)):
        with Processes(folder, "broken", 2) as both:
            both.wait_for_step(step)
            both.children[victim].kill()
            assert both.wait()[1 - victim] not in (0, -signal.SIGKILL), both.said()
            # JAX says so where the other was missed outside of a step, while files were written.
            said = both.logs[1 - victim].read_text()
            assert any(how in said for how in GONE), said
    with Processes(folder, "broken", 2) as both:
        assert both.wait() == [0, 0], both.said()
    jax.tree.map(
        np.testing.assert_array_equal,
        final_state(folder, "broken"),
        final_state(folder, "straight"),
    )


def test_four_processes_as_slurm_starts_them_are_continued_by_one_on_another_mesh(folder, alone):
    with Processes(folder, "slurm", 4, slurm(4)) as four:
        four.wait_for_step(CHANGES["steps"] // 2)
        four.children[2].send_signal(signal.SIGINT)
        assert four.wait() == [130] * 4, four.said()
    with Processes(folder, "slurm", 1) as one:
        assert one.wait() == [0], one.said()
    assert_near(final_state(folder, "slurm"), alone)


def test_a_process_killed_at_random_points_ends_at_the_same_bits(folder):
    with Processes(folder, "whole", 1) as one:
        assert one.wait() == [0], one.said()
    points = random.Random(0)
    for _ in range(4):
        with Processes(folder, "killed", 1) as one:
            one.wait_for_step(min(one.logged() + 1, CHANGES["steps"] - 1))
            time.sleep(points.random())
    with Processes(folder, "killed", 1) as one:
        assert one.wait() == [0], one.said()
    jax.tree.map(
        np.testing.assert_array_equal, final_state(folder, "killed"), final_state(folder, "whole")
    )


if __name__ == "__main__":
    try:
        child(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
    except D3DError as error:
        print(error, file=sys.stderr)
        if isinstance(error, LostProcessError):
            os._exit(error.exit_status)  # as `d3d` does
        sys.exit(error.exit_status)
