"""What people read is true: links lead somewhere, commands exist, every value a program meets is explained."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.load_line import BoundBy
from loadgen.workloads import WORKLOADS
from plimsoll.cli import COMMANDS
from serving.records import Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_has_exactly_the_two_commands_that_ci_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- command: (\w+) -->", text) == ["demo", "tests"]
    for name in ("demo", "tests"):
        done = subprocess.run(
            [sys.executable, ROOT / ".ci" / "readme_command.py", name], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("python3 -m venv .venv && ")


def test_every_page_of_docs_is_reachable_from_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text] == []


@pytest.mark.parametrize("value", BoundBy)
def test_every_binding_limit_is_explained(value):
    assert f"| `{value}` |" in (ROOT / "docs" / "stress.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_of_a_request_is_explained(outcome):
    assert f"`{outcome}`" in (ROOT / "docs" / "measurement.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 130])
def test_every_exit_code_is_explained(code):
    assert f"| {code} |" in (ROOT / "docs" / "stress.md").read_text(encoding="utf-8")


def test_the_readme_names_every_workload_and_only_commands_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in WORKLOADS if name.replace("_", "-") not in text] == []
    assert set(re.findall(r"^(?:\$ )?plimsoll (\w+)", text, re.MULTILINE)) <= set(COMMANDS)
