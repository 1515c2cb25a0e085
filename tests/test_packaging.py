"""The built wheel: complete, importable outside the checkout, and quiet on import.

What the modules do is tested beside their packages; the `d3d` command has its own tests.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "train", "infer", "assets")
SHIPPED_DATA = {".safetensors", ".json", ".jsonl", ".md"}

IMPORT_ALL = """
import importlib, pkgutil, sys
import d3d_jax
from jax._src import xla_bridge

for module in pkgutil.walk_packages(d3d_jax.__path__, "d3d_jax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "d3d_jax.kernels" in sys.modules
assert not xla_bridge.backends_are_initialized(), "importing d3d_jax started a backend"
"""


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds from a copy, since setuptools would ship stale files of the checkout's `build/`."""
    source = tmp_path_factory.mktemp("source")
    for name in ("d3d_jax", *LINKED):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "-q", "wheel")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source, cwd=out)
    (built,) = out.glob("d3d_jax-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "-q", "install")
    run(*pip, "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def test_wheel_holds_every_module_asset_and_config(wheel: Path):
    # `rglob` follows no links, so each folder gives its own modules.
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "d3d_jax").rglob("*.py")}
    expected.add("d3d_jax/py.typed")
    for name in ("kernels", "train", "infer"):
        expected |= {f"d3d_jax/{path.relative_to(ROOT)}" for path in (ROOT / name).rglob("*.py")}
    for path in (ROOT / "assets").rglob("*"):
        if path.is_file():
            assert path.suffix in SHIPPED_DATA, f"{path} is of a kind the wheel does not ship"
            expected.add(f"d3d_jax/{path.relative_to(ROOT)}")
    expected |= {f"d3d_jax/train/configs/{p.name}" for p in (ROOT / "train/configs").glob("*")}

    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (scripts,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "d3d = d3d_jax.cli:main" in archive.read(scripts).decode()
    assert held == expected


def test_installed_wheel_imports_outside_the_checkout(installed: Path, tmp_path: Path):
    program = """
import d3d_jax, d3d_jax.kernels, d3d_jax.train, d3d_jax.infer
from importlib import resources
for module in (d3d_jax, d3d_jax.kernels, d3d_jax.train, d3d_jax.infer):
    print(module.__file__)
print(resources.files("d3d_jax") / "assets" / "prompts.jsonl")
"""
    paths = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    for path in map(Path, paths.split()):
        assert path.is_relative_to(installed)
        assert path.is_file()


def test_importing_every_module_starts_no_backend(installed: Path, tmp_path: Path):
    run(sys.executable, "-c", IMPORT_ALL, cwd=tmp_path, PYTHONPATH=str(installed))
