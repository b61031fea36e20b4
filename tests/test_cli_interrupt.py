"""An interrupt while the command line is still being imported ends it with one line and exit code 130."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv[0] = "gplan"
from gplan.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("module", ["click", "gplan.cli.verbs", "gplan.api", "numpy", "msgspec", "gplan.trial"])
def test_an_interrupted_import_showed_pythons_own_traceback(module: str) -> None:
    command = [sys.executable, "-c", SCRIPT, module, "simulate", "--k", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("interrupted") and done.stderr.count("\n") == 1
