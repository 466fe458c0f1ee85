"""What an installed copy of the project holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pyproject_lists_every_directory_that_is_a_package():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots = {"polestar_jax": "polestar_jax"} | setup["package-dir"]
    found = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in roots.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(setup["packages"]) == sorted(found)
