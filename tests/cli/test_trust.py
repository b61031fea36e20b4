"""Which verbs execute the model file that a profile or plan names: those that docs/files-and-python.md lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import gplan
from gplan.cli import main
from gplan.cli.verbs import VERBS
from gplan.core import Plan

TRACES = Path(__file__).parents[1] / "interop" / "traces"
RAN = "ran.txt"
MODEL = f"""
import torch
from torch import nn

with open({RAN!r}, "a") as ran:
    ran.write("executed\\n")

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def batches(n):
    while True:
        yield torch.randn(n, 8), torch.randn(n, 8)
"""
EXECUTE = {
    "profile": "profile strange.py --budget 0.05 --contention 0 --link 1GB/s",
    "run": "run --steps 2 --engine virtual",
    "verify": "verify --steps 6 --rounds 2 --rivals 1 --engine virtual",
}
"""Verbs that execute the model file, each with arguments that reach it."""
READ_ONLY = {
    "balance": "balance --k 2 --microbatches 4",
    "report": "report gplan.plan.json",
    "explain": "explain",
    "simulate": "simulate gplan.plan.json",
    "show": "show gplan.plan.json",
    "export": "export --to csv",
    "import-plan": "import-plan 2,2 --from torchgpipe --output other.plan.json",
    "import-trace": f"import-trace {TRACES}/gpipe.rank0.json.gz {TRACES}/gpipe.rank1.json.gz --plan gplan.plan.json",
    "layout": "layout llama-3-8b --pp 8",
}
"""Verbs that execute nothing that a file names."""
READ_NOTHING = {"cluster"}


@pytest.fixture
def plan_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the profile and plan of a model file that writes a line to RAN whenever it is executed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(MODEL)
    for verb in (EXECUTE["profile"], READ_ONLY["balance"]):
        with pytest.raises(SystemExit):
            main(verb.split())
    (tmp_path / RAN).unlink()
    return tmp_path


def test_every_verb_is_one_or_the_other() -> None:
    assert set(VERBS) == EXECUTE.keys() | READ_ONLY.keys() | READ_NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("named", ["file", "module"])
def test_only_the_documented_verbs_execute_a_model_file(plan_of_a_stranger: Path, named: str) -> None:
    ran, path = plan_of_a_stranger / RAN, plan_of_a_stranger / "gplan.plan.json"
    if named == "module":
        for name in ("gplan.plan.json", "gplan.profile.json"):
            content = json.loads((plan_of_a_stranger / name).read_text())
            content["model"]["name"] = "strange:model"
            (plan_of_a_stranger / name).write_text(json.dumps(content))
    assert isinstance(gplan.load(path), Plan)
    for verb in ("run", "verify"):
        sys.modules.pop("strange", None)  # a module that is imported already is not executed again
        with pytest.raises(SystemExit):
            main(EXECUTE[verb].split())
        assert ran.exists(), verb
        ran.unlink()
    for verb, arguments in READ_ONLY.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments.split())
        assert (verb, ended.value.code, ran.exists()) == (verb, 0, False)
