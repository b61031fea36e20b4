"""The workflow runs what CI runs, and the project's files agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.yaml.decode((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    return found


def commands_of(job: str) -> list[str]:
    return [step["run"] for step in workflow()["jobs"][job]["steps"] if "run" in step]


def test_workflow_runs_what_ci_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    of_ci = [x.removeprefix("exec ") for x in lines if x and not x.startswith(("#", "set ", "cd "))]
    assert commands_of("tests") == of_ci


def test_matrix_has_the_oldest_and_the_newest_torch_and_python() -> None:
    from gplan_profiler.torch_compat import NEWEST_TESTED, OLDEST

    matrix = workflow()["jobs"]["versions"]["strategy"]["matrix"]["include"]
    versions = [tuple(map(int, x["torch"].split("."))) for x in matrix]
    assert (min(versions), max(versions)) == (OLDEST, NEWEST_TESTED)
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert oldest is not None and oldest[1] in {x["python"] for x in matrix}
    assert f'torch = ["torch>={".".join(map(str, OLDEST))}"]' in project


def test_workflow_names_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/.]+", "\n".join(commands_of("versions")))
    assert named and all((ROOT / x).exists() for x in named)


def test_python_versions_agree() -> None:
    project, go = (ROOT / "pyproject.toml").read_text(), (ROOT / "go.py").read_text()
    assert 'requires-python = ">=3.10"' in project and 'target-version = "py310"' in project
    assert "sys.version_info < (3, 10)" in go and "needs Python 3.10 or newer" in go


def test_changelog_has_the_version() -> None:
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None and f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_tag_of_this_commit_is_the_version() -> None:
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if shutil.which("git") is None:
        pytest.skip("no git")
    found = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("no git repository")
    assert version is not None and {x for x in found.stdout.split() if x.startswith("v")} <= {f"v{version[1]}"}
