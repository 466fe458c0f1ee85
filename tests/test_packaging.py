"""What an installed copy of the project holds: editable and from a wheel, seen from elsewhere."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = SETUP["tool"]["setuptools"]
QUESTIONS = len((ROOT / "polestar_jax/assets/demo.jsonl").read_text().splitlines())
FOLDERS = {"polestar_jax": "polestar_jax"} | SETUPTOOLS["package-dir"]  # package -> folder

LOOK = """
import importlib.util, json, polestar_jax.convert, polestar_jax.kernels
from polestar_jax.cli.demo import questions
print(json.dumps({
    "files": [polestar_jax.__file__, polestar_jax.convert.__file__, polestar_jax.kernels.__file__],
    "top_level": [n for n in ("kernels", "convert", "benchmarks") if importlib.util.find_spec(n)],
    "questions": len(questions()),
}))
"""


def look(folder: Path, path: str = "") -> dict:
    """What a Python started in `folder` sees of the project."""
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", LOOK]
    seen = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    return json.loads(seen.stdout)


def installed_name(file: Path) -> str:
    """Path inside a wheel of a source file."""
    package, folder = max(
        ((p, f) for p, f in FOLDERS.items() if file.is_relative_to(ROOT / f)),
        key=lambda pair: len(pair[1]),
    )
    return str(Path(*package.split(".")) / file.relative_to(ROOT / folder))


def test_pyproject_lists_every_directory_that_is_a_package():
    found = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_module_lies_in_a_package():
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} lacks an __init__.py"


def test_torch_is_needed_by_no_core_dependency():
    needs = [r for r in importlib.metadata.requires("polestar-jax") or [] if "extra ==" not in r]
    assert needs
    assert not [r for r in needs if r.startswith("torch")]


def test_an_editable_install_is_seen_from_another_directory(tmp_path):
    seen = look(tmp_path)
    assert seen["top_level"] == []
    assert seen["questions"] == QUESTIONS


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_asset_and_works_from_another_directory(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("polestar_jax-*.whl")

    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {
        installed_name(file)
        for folder in FOLDERS.values()
        for file in (ROOT / folder).rglob("*")
        if file.is_file()
        and (file.suffix == ".py" or file.name == "py.typed" or "assets" in file.parts)
        and "__pycache__" not in file.parts
    }
    assert names == wanted

    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen = look(elsewhere, path=str(target))
    assert all(Path(file).is_relative_to(target) for file in seen["files"])
    assert seen["top_level"] == []
    assert seen["questions"] == QUESTIONS

    version = subprocess.run(
        [target / "bin" / "polestar-jax", "--version"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert SETUP["project"]["version"] in version.stdout
