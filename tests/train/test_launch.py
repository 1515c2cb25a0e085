"""The recipes of `train/launch/`: run by bash with stand-ins for what starts programs elsewhere."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import yaml

from d3d_jax import cli
from d3d_jax.commands.options import Train
from d3d_jax.errors import D3DError, LostProcessError
from d3d_jax.train.config import CONFIGS, load_config

LAUNCH = Path(__file__).resolve().parents[2] / "train/launch"
STAND_INS = {
    # What a host, or a task of Slurm, would be given.
    "gcloud": 'for last; do :; done; bash -c "$last"',
    "srun": 'while [[ "$1" == -* ]]; do shift; done; "$@"',
    "scontrol": 'echo "$@" >> "$STUBS/scontrol.log"',
    "pip": ":",
    "d3d": 'printf "%s\\n" "$@" > "$STUBS/d3d.log"; exit ${STATUS:-0}',
}


@pytest.fixture
def launch(tmp_path):
    for name, body in STAND_INS.items():
        file = tmp_path / name
        file.write_text(f"#!/usr/bin/env bash\n{body}\n")
        file.chmod(0o755)

    def run(script, **variables):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STUBS": str(tmp_path), **variables}
        return subprocess.run(
            ["bash", str(LAUNCH / script)], env=environment, capture_output=True, text=True
        )

    return run


RECIPES = {
    "tpu_pod.sh": dict(TPU="slice", ZONE="zone"),
    "slurm_gpu.sbatch": dict(SLURM_JOB_ID="7"),
}


@pytest.mark.parametrize("script", RECIPES)
def test_the_command_of_a_recipe_is_one_that_d3d_takes(script, launch, tmp_path):
    done = launch(script, SHARED="/a folder", **RECIPES[script])
    assert done.returncode == 0, done.stderr
    options = cli._parse((tmp_path / "d3d.log").read_text().splitlines())
    assert isinstance(options, Train) and options.processes.several
    assert options.data == Path("/a folder/data/dataset") and options.mesh.fsdp > 1
    assert options.drafter == "/a folder/drafter-0" and options.out == Path("/a folder/run")
    config = load_config(options.config, options.overrides)
    assert config.batch_rows == 16 * config.micro_batches  # one row a device


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_says_what_it_is_not_told(script, launch):
    done = launch(script)
    assert done.returncode != 0 and "unbound" not in done.stderr
    assert "name of the TPU slice" in done.stderr or "folder that all nodes share" in done.stderr


def test_the_pods_of_kubernetes_meet_at_the_first_of_them(launch, tmp_path):
    service, job = yaml.safe_load_all((LAUNCH / "gke_gpu.yaml").read_text())
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [D3DError.exit_status] != [LostProcessError.exit_status]
    (script,) = container["args"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    for index in range(job["spec"]["completions"]):
        file = tmp_path / "pod.sh"
        file.write_text(script)
        done = launch(file, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
        options = cli._parse((tmp_path / "d3d.log").read_text().splitlines())
        assert isinstance(options, Train)
        processes = options.processes
        assert processes.coordinator == f"{name}-0.{pod['subdomain']}:8476"
        assert (processes.num_processes, processes.process_id) == (2, index)
        config = load_config(options.config, options.overrides)
        assert config.batch_rows == 16 * config.micro_batches  # two nodes of eight, a row a device
        assert options.mesh.fsdp == container["resources"]["limits"]["nvidia.com/gpu"]


def test_a_job_that_was_ended_goes_back_into_the_queue(launch, tmp_path):
    assert launch("slurm_gpu.sbatch", SHARED="/s", SLURM_JOB_ID="7", STATUS="2").returncode == 2
    assert not (tmp_path / "scontrol.log").exists()
    ended = launch("slurm_gpu.sbatch", SHARED="/s", SLURM_JOB_ID="7", STATUS="143")
    assert ended.returncode == 143 and (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


def test_every_shipped_config_can_be_read_and_the_papers_say_what_it_publishes():
    configs = {file.stem: load_config(file.stem) for file in CONFIGS.glob("*.yaml")}
    papers = {"qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b"}
    assert {"demo", "smollm2-135m", *papers} == set(configs)
    for name in papers:
        assert configs[name].anchors_per_document == 128 and configs[name].ar_weight == 1.0
    # The two of the paper's drafters of its size are one recipe.
    assert dataclasses.asdict(configs["qwen3-8b"]) == dataclasses.asdict(configs["qwen3-32b"])
