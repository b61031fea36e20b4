"""Planning, layouts, simulation, reports and exports work where torch is not installed; the rest names the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gplan
from tests.made import make_profile

HIDDEN = """
import sys
NAMES = ("torch",)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
ON_WINDOWS = """
NAMES = ("fcntl", "resource", "termios", "pwd")
for name in NAMES:
    sys.modules.pop(name, None)
"""
VERBS = """
from gplan.cli.verbs import exit_code
for line in sys.argv[1:]:
    code = exit_code(line.split())
    print(f"exit {code}: {line}", flush=True)
assert "torch" not in sys.modules or "torch" not in NAMES
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def without_torch(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=folder
    )


def test_planning_verbs_need_no_torch(tmp_path: Path) -> None:
    gplan.save(make_profile([1.0, 2.0, 3.0, 2.0], weight_bytes=8, output_bytes=[4, 4, 4, 0]), tmp_path / "p.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines = (
        "--version",
        "balance p.json --k 2 --microbatches 4 --output plan.json",
        "balance p.json --devices 4 --schedule auto --recompute auto --output auto.json",
        "show p.json",
        "show plan.json --json",
        "explain plan.json --profile p.json",
        "simulate --k 4 --microbatches 8",
        "report plan.json --profile p.json --output page",
        "export plan.json --to csv --output plan.csv",
        "export plan.json --to pytorch --output plan.py",
        "layout config.json --pp 4",
        "layout config.json --pp 4 --to torchtitan",
        "profile --help",
    )
    done = without_torch(HIDDEN + VERBS, *lines, folder=tmp_path)
    assert [x for x in done.stdout.splitlines() if x.startswith("exit ")] == [f"exit 0: {x}" for x in lines], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page" / "index.html").exists()


@pytest.mark.parametrize("line", ["profile model.py", "run --plan plan.json"])
def test_verbs_that_need_torch_name_the_command(line: str, tmp_path: Path) -> None:
    gplan.save(make_profile([1.0, 2.0]), tmp_path / "p.json")
    (tmp_path / "model.py").write_text("def model():\n    return []\n")
    done = without_torch(HIDDEN + VERBS, "balance p.json --k 2 --output plan.json", line, folder=tmp_path)
    assert done.stdout.splitlines()[-1] == f"exit 2: {line}"
    (error,) = [x for x in done.stderr.splitlines() if x.startswith("error")]
    assert error.endswith(
        " needs torch, which is not installed here; install it with: pip install 'gplan[torch]', or in a clone of gplan: pip install '.[torch]'"
    )


def test_windows_plans_and_names_what_runs_need(tmp_path: Path) -> None:
    """With Linux's torch, and without the modules that Python has on Linux and macOS only."""
    gplan.save(make_profile([1.0, 2.0, 3.0]), tmp_path / "p.json")
    (tmp_path / "model.py").write_text("def model():\n    return []\n")
    lines = ("balance p.json --k 2 --output plan.json", "report plan.json --profile p.json", "profile model.py")
    lines += ("run --plan plan.json",)
    done = without_torch(HIDDEN + ON_WINDOWS + VERBS, *lines, folder=tmp_path)
    codes = [x.partition(":")[0] for x in done.stdout.splitlines() if x.startswith("exit ")]
    assert codes == ["exit 0", "exit 0", "exit 2", "exit 2"], done.stdout + done.stderr
    errors = [x for x in done.stderr.splitlines() if x.startswith("error")]
    assert len(errors) == 2 and all(" needs Linux or macOS; on Windows run it in WSL" in x for x in errors)


def test_functions_that_need_torch_name_the_command(tmp_path: Path) -> None:
    code = (
        HIDDEN
        + "import gplan\ntry:\n    gplan.profile('model.py')\nexcept gplan.UsageError as error:\n    print(error)"
    )
    done = without_torch(code, folder=tmp_path)
    assert done.stdout.startswith("gplan.profile needs torch, which is not installed here"), done.stderr


def test_an_old_torch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1'\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport gplan_profiler.torch_compat"
    done = without_torch(code, folder=tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        'torch 2.9.1 is too old: gplan needs torch 2.11 or newer; install one with: pip install "torch>=2.11"'
    )
