"""Wheel and sdist: built, installed in a clean environment, and used there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def called(*command: str | Path, cwd: Path) -> str:
    environment = {key: x for key, x in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    called(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def test_packages_hold_code_tables_and_license(packages: Path) -> None:
    (wheel,), (source,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("gplan/api.py", "gplan_profiler/measure.py", "gplan_profiler/analytic/hardware.toml"):
        assert wanted in names
    assert any(x.endswith("licenses/LICENSE") for x in names)
    assert {x.split("/")[0] for x in names if ".dist-info" not in x} == {"gplan", "gplan_profiler"}
    metadata = zipfile.ZipFile(wheel).read(next(x for x in names if x.endswith("METADATA"))).decode()
    needed = [x for x in metadata.splitlines() if x.startswith("Requires-Dist: torch")]
    assert needed and all("extra ==" in x for x in needed), "torch is optional"
    with tarfile.open(source) as files:
        inside = {x.partition("/")[2] for x in files.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= inside


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_packages_install_and_work(packages: Path, tmp_path: Path, kind: str) -> None:
    """The environment has the packages that gplan needs, but no gplan of this folder."""
    (package,) = packages.glob(kind)
    called(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(called(python, "-c", ask, cwd=tmp_path).strip())
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    called(python, "-m", "pip", "install", "--quiet", *options, package, cwd=tmp_path)
    gplan = python.parent / "gplan"
    assert called(gplan, "--version", cwd=tmp_path).startswith("gplan, version ")
    assert Path(called(python, "-c", "import gplan; print(gplan.__file__)", cwd=tmp_path).strip()).is_relative_to(site)
    assert "bubble" in called(gplan, "simulate", "--k", "4", "--microbatches", "8", cwd=tmp_path)
    assert "llama" in called(gplan, "layout", "--help", cwd=tmp_path).lower()


def test_documentation_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    called(sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site", cwd=ROOT)
    assert "gplan.api.pipeline" in (tmp_path / "site" / "api" / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / "site" / page.stem / "index.html").exists(), f"{page.name} is not on the site"
