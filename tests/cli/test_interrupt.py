"""An interrupt ends the command line with one line and exit code 130, also while it is imported or cleans up."""

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


@pytest.mark.parametrize(
    "module", ["click", "gplan.cli.verbs", "gplan.cli.simulate", "numpy", "msgspec", "gplan.simulation.schedule_trial"]
)
def test_interrupted_import_is_one_line(module: str) -> None:
    command = [sys.executable, "-c", SCRIPT, module, "simulate", "--k", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().startswith("interrupted") and done.stderr.strip().count("\n") == 0
