"""What is installed is all there is."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    tops = ("serving", "monitor", "loadgen", "alerts", "plimsoll")
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in tops for path in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(listed) - {"grafana"}
