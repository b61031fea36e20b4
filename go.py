"""Sets gplan up in its own virtual environment and runs something in it; needs Python 3.10+ and nothing else.

    python3 go.py demo     profile, balance, explain, train and report a small transformer; results in demo/
    python3 go.py test     style, types and all tests; with --fast only the tests that take about two minutes
    python3 go.py shell    only the set-up; prints how to use it

The set-up is done once and again only when the pinned packages change.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "gplan-set-up"
ACTIVATE = f"{BIN / 'activate'}" if os.name == "nt" else f"source {BIN / 'activate'}"
HOW = f"for models of your own: `{ACTIVATE}`, then `gplan --help`"

DEMO = (
    ("profile", "examples/transformer_lm.py", "--microbatch-size", "4", "--output", "demo/gplan.profile.json"),
    (
        "balance",
        "demo/gplan.profile.json",
        "--k",
        "2",
        "--microbatches",
        "8",
        "--memory",
        "160MiB",
        "--output",
        "demo/gplan.plan.json",
    ),
    ("explain", "demo/gplan.plan.json", "--profile", "demo/gplan.profile.json"),
    (
        "run",
        "--plan",
        "demo/gplan.plan.json",
        "--profile",
        "demo/gplan.profile.json",
        "--steps",
        "60",
        "--check",
        "--output",
        "demo/gplan.run.json",
    ),
    ("report", "demo/gplan.run.json", "--profile", "demo/gplan.profile.json", "--output", "demo/report"),
)
TESTS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest", "-n", "2", "--dist", "loadfile"),  # two processes; a file stays in one
)


def main(arguments: list[str]) -> int:
    """Run one of the commands above; the exit code of the first step that fails."""
    if sys.version_info < (3, 10):  # noqa: UP036 - what runs this is the user's own Python
        print(f"this is Python {sys.version.split()[0]}; gplan needs Python 3.10 or newer", file=sys.stderr)
        return 2
    if arguments[:1] not in (["demo"], ["test"], ["shell"]):
        print(__doc__, file=sys.stderr)
        return 2
    set_up()
    if arguments[0] == "demo":
        code = run_all([[program("gplan"), *step] for step in DEMO])
        if code == 0:
            print(f"\nthe charts: demo/report/index.html\n{HOW}")
        return code
    if arguments[0] == "test":
        steps = [[program("python"), "-m", *step] for step in TESTS]
        given = arguments[1:]
        steps[-1] += ["-m", "not slow"] * ("--fast" in given) + [x for x in given if x != "--fast"]
        return run_all(steps)
    print(HOW)
    return 0


def set_up() -> None:
    """Make the virtual environment and install the pinned packages, unless that was done before."""
    wanted = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    print(f"setting up {VENV} (once; a few minutes, most of them for torch)", flush=True)
    try:
        if not Path(program("pip")).exists():
            venv.create(VENV, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit("this Python cannot make virtual environments; install its venv package (Debian: python3-venv)")
    pip = [program("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for step in ([*pip, "-r", str(LOCK)], [*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]):
        if subprocess.run(step, check=False).returncode:
            sys.exit("the packages could not be installed; see above. Run the command again once that is mended")
    STAMP.write_text(wanted)


def run_all(steps: list[list[str]]) -> int:
    """Run the steps one after the other, showing each; stop at the first that fails."""
    for step in steps:
        print(f"\n$ {' '.join([Path(step[0]).name, *step[1:]])}", flush=True)
        try:
            code = subprocess.run(step, cwd=ROOT, check=False).returncode
        except KeyboardInterrupt:
            return 130
        if code:
            return code
    return 0


def program(name: str) -> str:
    """A program of the virtual environment."""
    return str(BIN / (f"{name}.exe" if os.name == "nt" else name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
