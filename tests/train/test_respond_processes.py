"""Real processes that answer prompts: two at once, one killed, stopped, continued by more.

The file is its own child program: `python -m tests.train.test_respond_processes ARGUMENTS OF d3d`.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from d3d_jax import cli
from d3d_jax.errors import D3DError
from d3d_jax.train import responses
from d3d_jax.train.dataset import open_dataset
from d3d_jax.train.responses import read_responses
from tests.models.test_processes import free_port
from tests.tiny_folders import write_target

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 60


class Run:
    """Processes that answer into one folder, of which any that is left is killed in the end.

    Args:
      extra: more options of each process.
      seconds: how long an answer of each takes; "fail" fails at the third.
    """

    def __init__(self, folder, out, count=1, *, extra=None, seconds=None):
        command = [sys.executable, "-m", "tests.train.test_respond_processes", "respond"]
        command += ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
        command += ["--temperature", "1.5", "--batch", "3", "--max-new-tokens", "24"]
        self.out = folder / out
        command += ["--out", str(self.out)]
        meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "D3D_CACHE": str(folder / "cache")}
        self.logs = [folder / f"{out} {i} of {count} {time.time()}.log" for i in range(count)]
        self.children = []
        for index, log in enumerate(self.logs):
            several = [*meet, "--process-id", str(index)] if count > 1 else []
            several += extra[index] if extra else []
            environment["SECONDS"] = str(seconds[index]) if seconds else "0.1"
            with log.open("w") as said:
                self.children.append(
                    subprocess.Popen(
                        [*command, *several], cwd=ROOT, stdout=said, stderr=said, env=environment
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for one in self.children:
            one.kill()
            one.wait()

    def said(self):
        return "\n".join(f"process {i}:\n{log.read_text()}" for i, log in enumerate(self.logs))

    def wait_for_shards(self, part=0, parts=1):
        """Until this part of the processes has written two shards in this run."""
        before = len(self.shards(part, parts))
        end = time.monotonic() + 120
        while len(self.shards(part, parts)) < before + 2:
            assert all(one.poll() is None for one in self.children), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)

    def shards(self, part, parts):
        files = (self.out / "responses").glob("part-*.jsonl")
        return [file for file in files if int(file.stem.removeprefix("part-")) % parts == part]

    def wait(self):
        """Exit states."""
        for one in self.children:
            try:
                one.wait(120)
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running\n{self.said()}")
        return [one.returncode for one in self.children]


def answers(out):
    return {response.index: response for response in read_responses(out)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("respond")
    write_target(folder / "target")
    lines = [json.dumps({"turns": [f"the hello {i}"]}) for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    with Run(folder, "alone") as alone:
        assert alone.wait() == [0], alone.said()
    assert len(answers(folder / "alone")) == PROMPTS
    return folder


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_processes_answer_as_one(folder):
    with Run(folder, "both", 2) as both:
        assert both.wait() == [0, 0], both.said()
    assert "responses to train on" in both.logs[0].read_text()
    assert "responses to train on" not in both.logs[1].read_text()
    assert answers(folder / "both") == answers(folder / "alone")
    one, two = (open_dataset(folder / out / "dataset", "train") for out in ("alone", "both"))
    assert one.manifest == two.manifest
    assert [one[i]["tokens"].tolist() for i in range(len(one))] == [
        two[i]["tokens"].tolist() for i in range(len(two))
    ]


def test_what_one_of_two_left_that_was_killed_is_continued_by_three(folder):
    with Run(folder, "killed", 2) as both:
        both.wait_for_shards(1, 2)
        both.children[1].kill()
        assert both.wait()[0] != 0, both.said()
    kept = answers(folder / "killed")
    assert 0 < len(kept) < PROMPTS and not (folder / "killed/dataset").exists()
    with Run(folder, "killed", 3) as three:
        assert three.wait() == [0, 0, 0], three.said()
    assert answers(folder / "killed") == answers(folder / "alone")


@pytest.mark.parametrize("count", [1, 2])
def test_sigterm_saves_and_says_so(folder, count):
    out = f"stopped {count}"
    with Run(folder, out, count) as run:
        run.wait_for_shards()
        for one in run.children:
            one.send_signal(signal.SIGTERM)
        assert run.wait() == [143] * count, run.said()
    assert run.said().count("stopped by SIGTERM; every answer so far is saved") == count
    assert 0 < len(answers(folder / out)) < PROMPTS
    with Run(folder, out) as one:
        assert one.wait() == [0], one.said()
    assert answers(folder / out) == answers(folder / "alone")


def test_another_run_in_the_same_folder_is_refused(folder):
    with Run(folder, "taken", 2, seconds=[1, 1]) as both:
        both.wait_for_shards(1, 2)
        with Run(folder, "taken") as other:
            assert other.wait() == [2], other.said()
            assert "another run is adding to" in other.said()


def test_sigterm_to_one_that_waits_and_one_that_works(folder):
    with Run(folder, "waits", 2, seconds=[0.5, 0]) as both:
        both.wait_for_shards(0, 2)
        end = time.monotonic() + 60
        while len(both.shards(1, 2)) < PROMPTS // 2 and time.monotonic() < end:
            time.sleep(0.1)
        for one in both.children:
            one.send_signal(signal.SIGTERM)
        assert both.wait() == [143, 143], both.said()
        assert both.said().count("stopped by SIGTERM") == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_ends_the_other_in_good_order(folder, failing):
    seconds = ["fail", 0.3] if failing == 0 else [0.3, "fail"]
    began = time.monotonic()
    with Run(folder, f"fails {failing}", 2, seconds=seconds) as both:
        # Of the other it is said that the same command may go on.
        assert both.wait() == ([2, 75] if failing == 0 else [75, 2]), both.said()
    assert time.monotonic() - began < 50, "neither waits for JAX's own barrier"
    said = [log.read_text() for log in both.logs]
    assert "error: enough" in said[failing]
    assert "another process of this run has ended early" in said[1 - failing]
    assert "Traceback" not in both.said() and "Check failure" not in both.said()


def test_processes_that_were_asked_different_things_are_refused(folder):
    with Run(folder, "differ", 2, extra=[["--limit", "8"], ["--limit", "9"]]) as both:
        assert both.wait() == [2, 2], both.said()
    assert both.said().count("have different options, prompts or targets") == 2
    assert not (folder / "differ").exists()


if __name__ == "__main__":
    # Slow enough to be interrupted; the death of another is noticed sooner.
    responses._FLUSH_SECONDS = 0.0
    jax.distributed.initialize = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=10
    )
    add = responses.ResponseWriter.add

    seconds, added = os.environ["SECONDS"], []

    def slow_add(*arguments, **named):
        added.append(1)
        if seconds != "fail":
            time.sleep(float(seconds))
        elif len(added) == 3:
            raise D3DError("enough")
        add(*arguments, **named)

    responses.ResponseWriter.add = slow_add
    sys.exit(cli.main(sys.argv[1:]))
