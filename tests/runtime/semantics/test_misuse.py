"""Misuse gives the same error on every rank at once: what was found, what is expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gplan
from gplan.core.errors import FileError, GplanError, ModelError, UsageError
from gplan.runtime.pipeline import Pipeline
from tests.runtime.semantics.checks import failures, plan_of, profile_of
from tests.runtime.semantics.models import Tied, Tower, row, subject, token_subject

ROW, TOWER, TIED = subject(row), subject(Tower), token_subject(Tied)
INPUTS, TARGETS = ROW.batch(8)

Attack = Callable[[Pipeline], object]
ATTACKS: dict[str, tuple[Attack, str]] = {
    "numbers": (
        lambda pipe: pipe.step(INPUTS.tolist(), TARGETS),
        "a list without a tensor; expected tensors: use torch.as_",
    ),
    "text": (lambda pipe: pipe.step("abc", TARGETS), "the inputs are a str without a tensor; expected"),
    "an array": (
        lambda pipe: pipe.step(INPUTS.numpy(), TARGETS),
        "hold a ndarray; expected tensors, .*torch.as_tensor",
    ),
    "another dtype": (lambda pipe: pipe.step(INPUTS.double(), TARGETS), r"float64; expected torch.float32, .*x.to\("),
    "integers": (lambda pipe: pipe.step(INPUTS.long(), TARGETS), "int64; expected torch.float32"),
    "a meta tensor": (lambda pipe: pipe.step(INPUTS.to("meta"), TARGETS), "on the meta device, which has no values"),
    "another shape": (
        lambda pipe: pipe.step(INPUTS[:, :2], TARGETS),
        "planned to be 2,6:float32; .*fails with 2,2:float",
    ),
    "inputs by a wrong name": (lambda pipe: pipe.step({"z": INPUTS}, TARGETS), "fails with z=2,6:float32"),
    "two inputs": (lambda pipe: pipe.step((INPUTS, INPUTS), TARGETS), "fails with 2,6:float32;2,6:float32"),
    "inputs that differ": (
        lambda pipe: pipe.step((INPUTS, INPUTS[:4]), TARGETS),
        r"shapes \(8, 6\), \(4, 6\); expected as",
    ),
    "no dimension": (lambda pipe: pipe.step(INPUTS[0, 0], TARGETS), "expected as many samples in dimension 0"),
    "no samples": (lambda pipe: pipe.step(INPUTS[:0], TARGETS[:0]), "hold no samples; expected at least one"),
    "too many samples": (
        lambda pipe: pipe.step(INPUTS.repeat(2, 1), TARGETS.repeat(2, 1)),
        r"got 16 samples; the plan is for at most 8 a step \(1 x 4 micro-batches of 2\): give fewer and accumulate",
    ),
    "fewer targets": (
        lambda pipe: pipe.step(INPUTS, TARGETS[:4]),
        r"targets have shape \(4, 6\), the inputs 8 samples;",
    ),
    "one target": (lambda pipe: pipe.step(INPUTS, TARGETS[:1]), r"targets have shape \(1, 6\), the inputs 8 samples;"),
    "more targets": (
        lambda pipe: pipe.eval_step(INPUTS[:4], TARGETS),
        r"shape \(8, 6\), the inputs 4 samples; expected",
    ),
    "an array of targets": (lambda pipe: pipe.step(INPUTS, TARGETS.numpy()), "the targets hold a ndarray; expected"),
    "nothing to predict": (lambda pipe: pipe.predict(INPUTS[:0]), "hold no samples"),
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_misfit_data_refused(name: str, pipe: Pipeline) -> None:
    attack, text = ATTACKS[name]
    with pytest.raises(GplanError, match=text):
        attack(pipe)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    """A pipeline that is used after every error."""
    return gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)


def test_step_after_refused_calls(pipe: Pipeline) -> None:
    fresh = gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)
    for attack, _ in ATTACKS.values():
        with pytest.raises(GplanError):
            attack(pipe)
    assert pipe.step(INPUTS, TARGETS).item() == fresh.step(INPUTS, TARGETS).item()


def test_failing_loss_names_what_it_was_given(pipe: Pipeline) -> None:
    text = r"step \d+, forward of micro-batch 0 on stage 1: the loss fails with an output of 2,6:float32 and targets of 2,3:fl"
    with pytest.raises(GplanError, match=text):
        pipe.step(INPUTS, TARGETS[:, :3])


def test_errors_equal_on_every_rank() -> None:
    def script() -> Any:
        pipe = gplan.pipeline(row, plan_of(ROW, 3), loss=ROW.loss, timeout_s=20.0)
        texts = []
        for attack, _ in ATTACKS.values():
            with pytest.raises(GplanError) as caught:
                attack(pipe)
            texts.append(str(caught.value))
        texts.append(f"a step after all that: {pipe.step(INPUTS, TARGETS).item():.6f}")
        raise UsageError("\n".join(texts))

    texts = failures(3, script)
    assert len(texts) == 4
    assert {text.replace("a and b must have same reduction dim", "") for text in texts[1:]} == {
        texts[1].replace("a and b must have same reduction dim", "")
    }


def test_none_inputs() -> None:
    pipe = gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss)
    for call in (pipe.step, pipe.eval_step):
        with pytest.raises(UsageError, match="the inputs are None, and this process holds the first stage; expected a"):
            call(None, TARGETS)
    with pytest.raises(UsageError, match="inputs are None"):
        pipe.predict(None)


def meta() -> nn.Module:
    with torch.device("meta"):
        return row()


def test_meta_model_refused() -> None:
    for text in failures(2, lambda: gplan.pipeline(meta(), plan_of(ROW, 2), loss=ROW.loss)):
        assert "the Sequential is on the meta device and has no values; pass the function that builds it" in text


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            TOWER,
            r"made for Tower with 5 layers \(floors.0 to floors.4\); row has 5 layers \(0 to 4\); only the plan has floors.0, ",
        ),
        (TIED, "ModelError: row fails with inputs 2,3:int64, as the plan for Tied has them:"),
    ],
    ids=["other layers", "other inputs"],
)
def test_plan_of_another_model_refused(case: Any, text: str) -> None:
    import re

    found = failures(2, lambda: gplan.pipeline(row, plan_of(case, 2), loss=ROW.loss))
    assert len(found) == 3
    assert all(re.search(text, x) for x in found), found


@pytest.mark.parametrize("num_ranks", [3])
def test_wrong_number_of_processes_refused(num_ranks: int) -> None:
    found = failures(2, lambda: gplan.pipeline(row, plan_of(ROW, 2), loss=ROW.loss), num_ranks=num_ranks)
    expected = "there are 3 processes; the plan has 2 stages: use --nproc-per-node 2 or balance with --k 3"
    assert found == [f"UsageError: {expected}"] * num_ranks


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plan": "plan.json"}, r"the plan is a str; expected a Plan: gplan.load\('plan.json'\)"),
        ({"plan": profile_of}, "the plan is a .*; expected a Plan"),
        ({"loss": "mse"}, r"the loss is a str; expected a function: loss\(output, target\)"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number from 0"),
        ({"seed": 2**70}, "expected a whole number from 0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0; expected more than 0 seconds"),
        ({"device": "tpu"}, "device 'tpu' is not known; expected 'cpu', 'cuda' or 'cuda:1'"),
        ({"inputs": torch.ones(0, 6)}, "hold no samples"),
        ({"inputs": np.ones((2, 6))}, "hold a ndarray"),
        ({"model": 42}, "the model is a int; expected an nn.Module, a function that builds one, or model.py:NAME"),
    ],
)
def test_wrong_argument_types_refused(options: dict[str, Any], text: str) -> None:
    given = {"model": row, "plan": plan_of(ROW, 2), "loss": ROW.loss, **options}
    with pytest.raises(UsageError, match=text):
        gplan.pipeline(given.pop("model"), given.pop("plan"), **given)


def test_builder_without_model_refused() -> None:
    with pytest.raises(ModelError, match="gave a NoneType; expected an nn.Module"):
        gplan.pipeline(lambda: None, plan_of(ROW, 2), loss=ROW.loss)  # type: ignore[arg-type, return-value]
    with pytest.raises(FileError, match="other parameters"):
        gplan.pipeline(lambda: row().double(), plan_of(ROW, 2), inputs=INPUTS.double(), loss=ROW.loss)
