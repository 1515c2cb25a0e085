"""Models by hub id: real client code on a hand-made cache off line, mocks where the hub answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from d3d_jax.errors import D3DError
from d3d_jax.infer.loading import model_name
from d3d_jax.models.registry import resolve_model

OLD, NEW = "a" * 40, "b" * 40
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
INDEX = "model.safetensors.index.json"
SHARDED = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    INDEX: json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}),
    **dict.fromkeys(SHARDS, "weights"),
}
WHOLE = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}


def write_snapshot(cache: Path, commit: str, files: dict[str, str], refs: tuple[str, ...]) -> Path:
    """Adds one commit of org/name to a hub cache, laid out as the client does."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (repo / "blobs" / f"{commit}-{name}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{commit}-{name}")
    for ref in refs:
        (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture(params=["HF_HUB_OFFLINE", "no connection"])
def cache(request, tmp_path, monkeypatch):
    """The hub client's cache with two commits of org/name, while the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "HF_HUB_OFFLINE")
    # Nothing listens on this port, so that no test depends on the network.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    write_snapshot(tmp_path, OLD, WHOLE, ("v1", "refs/pr/1"))
    write_snapshot(tmp_path, NEW, SHARDED, ("main",))
    return tmp_path


def snapshot(cache: Path, commit: str) -> Path:
    return cache / "models--org--name/snapshots" / commit


def test_off_line_exactly_the_revision_asked_for_is_used(cache):
    assert resolve_model("org/name") == snapshot(cache, NEW)
    for revision, commit in {
        "main": NEW,
        "v1": OLD,
        "refs/pr/1": OLD,
        OLD: OLD,
        NEW: NEW,
    }.items():
        assert resolve_model(f"org/name@{revision}") == snapshot(cache, commit)
        assert resolve_model("org/name", revision=revision) == snapshot(cache, commit)
    assert resolve_model("org/name@v1", revision="v1") == snapshot(cache, OLD)


def test_a_drafter_needs_no_tokenizer(cache):
    files = {name: text for name, text in WHOLE.items() if name != "tokenizer.json"}
    write_snapshot(cache, "d" * 40, files | {"config.json": '{"d3d": {}}'}, ("drafter",))
    assert resolve_model("org/name@drafter") == snapshot(cache, "d" * 40)
    write_snapshot(cache, "e" * 40, files, ("bare",))
    with pytest.raises(D3DError, match=r"tokenizer\.json is missing"):
        resolve_model("org/name@bare")


@pytest.mark.parametrize("revision", ["v2", "c" * 40, OLD[:8]])
def test_off_line_a_revision_that_is_not_cached_is_named(cache, revision):
    with pytest.raises(D3DError, match=f"not answer and no copy of org/name@{revision} is cached"):
        resolve_model(f"org/name@{revision}")
    with pytest.raises(D3DError, match="no copy of org/other is cached"):
        resolve_model("org/other")


@pytest.mark.parametrize("name", [*SHARDED])
def test_an_incomplete_copy_is_refused_by_the_missing_file(cache, name):
    (snapshot(cache, NEW) / name).unlink()
    with pytest.raises(D3DError, match=rf"copy of org/name@main is incomplete: {name} is missing"):
        resolve_model("org/name@main")
    assert resolve_model("org/name@v1") == snapshot(cache, OLD)


@pytest.mark.parametrize("name", [SHARDS[1], "tokenizer.json", "model.safetensors"])
def test_a_link_to_a_blob_that_is_gone_is_no_file(cache, name):
    commit = OLD if name in WHOLE else NEW
    (cache / "models--org--name/blobs" / f"{commit}-{name}").unlink()
    with pytest.raises(D3DError, match=f"{name} is missing"):
        resolve_model(f"org/name@{commit}")


def test_what_the_client_knows_to_be_missing_is_named(cache):
    """A download that the client began lists every file, also those a model can do without."""
    files = {name: {"size": 1, "blob_id": "0"} for name in (*SHARDED, "generation_config.json")}
    trees = cache / "models--org--name/trees"
    trees.mkdir()
    (trees / f"{NEW}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(D3DError, match=r"org/name.*main.* incomplete.*\(generation_config\.json\)"):
        resolve_model("org/name@main")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'])
def test_a_damaged_index_is_refused(cache, index):
    (snapshot(cache, NEW) / INDEX).write_text(index)
    with pytest.raises(D3DError, match=rf"{INDEX} is damaged"):
        resolve_model("org/name")


@pytest.mark.parametrize("revision", ["", "../v1", "/etc/passwd", "a b", "v1^", "v1\n"])
def test_a_revision_that_cannot_be_one_is_refused(cache, revision):
    with pytest.raises(D3DError, match="is no revision of org/name; give a branch, tag or commit"):
        resolve_model("org/name", revision=revision)


def test_two_revisions_are_refused(cache):
    with pytest.raises(D3DError, match="'main' are two revisions: give one"):
        resolve_model("org/name@v1", revision="main")


@pytest.mark.parametrize(("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub")])
def test_the_environment_says_where_the_cache_is(tmp_path, variable, below):
    made = write_snapshot(tmp_path / below, OLD, WHOLE, ("v1",))
    program = "from d3d_jax.models.registry import *; print(resolve_model('org/name@v1'))"
    names = ("HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "HF_HUB_OFFLINE": "1", variable: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(made.resolve())


def test_manifests_keep_the_revision(tmp_path, monkeypatch):
    """The weights differ between revisions, so two of them are two targets."""
    assert model_name("org/name") == "org/name"
    assert model_name("org/name@v1") == "org/name@v1"
    (tmp_path / "org/name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_name("org/name@v1") == "name@v1"  # a folder, as every existing path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub client with both of its calls replaced."""
    calls = Mock()
    calls.snapshot_download.return_value = str(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", calls.snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", calls.model_info)
    for name in WHOLE:
        (tmp_path / name).write_text("{}")
    return calls


def test_a_hub_id_is_downloaded_in_part(hub, tmp_path):
    assert resolve_model("org/name") == tmp_path
    (hub_id,), options = hub.snapshot_download.call_args
    assert hub_id == "org/name" and options["local_files_only"] is False
    assert "*.safetensors" in options["allow_patterns"] and options["revision"] is None
    assert hub.model_info.call_args.kwargs["timeout"] <= 5


def test_the_revision_is_what_is_asked_of_the_hub(hub, tmp_path):
    assert resolve_model("org/name@feature/x") == tmp_path
    for call in (hub.model_info, hub.snapshot_download):
        assert call.call_args.args == ("org/name",)
        assert call.call_args.kwargs["revision"] == "feature/x"


def test_without_the_hub_its_cached_copy_is_used(hub, tmp_path):
    hub.model_info.side_effect = TimeoutError
    assert resolve_model("org/name") == tmp_path
    assert hub.snapshot_download.call_args.kwargs["local_files_only"] is True
    hub.snapshot_download.side_effect = LocalEntryNotFoundError("no")
    with pytest.raises(D3DError, match="does not answer and no copy of org/name is cached"):
        resolve_model("org/name")


def test_a_download_that_breaks_is_reported(hub):
    hub.snapshot_download.side_effect = ConnectionError("reset by peer")
    with pytest.raises(D3DError, match=r"download of org/name@v1 .* failed \(reset by peer\)"):
        resolve_model("org/name@v1")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (RepositoryNotFoundError, "neither a folder nor a hub model is called org/name$"),
        (GatedRepoError, "org/name is gated; accept its terms"),
        (RevisionNotFoundError, "hub model org/name has no branch, tag or commit v9"),
    ],
)
@pytest.mark.parametrize("call", ["model_info", "snapshot_download"])
def test_what_the_hub_refuses_is_reported(hub, call, error, match):
    getattr(hub, call).side_effect = error("404", response=Mock())
    with pytest.raises(D3DError, match=match):
        resolve_model("org/name@v9")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_hub_model_without_a_needed_file_is_refused(hub, tmp_path, name):
    (tmp_path / name).unlink()
    with pytest.raises(D3DError, match=f"hub model org/name holds no {name}; choose one"):
        resolve_model("org/name")
