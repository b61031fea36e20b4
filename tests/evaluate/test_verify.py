"""Verification of a plan and its rivals on made hosts, and once on the virtual engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import LeftOut, Plan, Verification
from gplan.core.errors import FileError, UsageError
from gplan.evaluate.verify import Runner, ranking_of, verify
from tests.evaluate.hosts import MadeHost, usual_plan, usual_profile


def verified(host: Runner, plan: Plan | None = None, **options: int) -> Verification:
    return verify(plan or usual_plan(), usual_profile(), host, engine="torch", num_steps=8, **options)


def test_perfect_prediction() -> None:
    found = verified(MadeHost(), num_rivals=3)
    standing = ranking_of(found)
    assert len(found.contenders) == 4
    assert standing.largest_error == pytest.approx(0.0, abs=1e-9)
    assert standing.regret == 0.0
    assert standing.rank_correlation == 1.0
    assert found.notes == ()


def test_faster_rival_is_found_despite_drift() -> None:
    host = MadeHost(slowness=lambda plan: 0.9 if plan.schedule == "1f1b" else 1.2, drift=0.01)
    found = verified(host)
    standing, faster = ranking_of(found), next(x for x in found.contenders if x.label == "schedule 1f1b")
    assert standing.best == faster.label
    expected = 1.2 * found.chosen.predicted_s / (0.9 * faster.predicted_s) - 1
    assert standing.regret == pytest.approx(expected)
    assert not standing.is_within_noise


def test_kept_disturbed_runs_are_noted() -> None:
    assert (
        "counted although more than half of the steps were interrupted"
        in verified(MadeHost(disturbed=range(99))).notes[0]
    )


def test_interrupt_is_noted() -> None:
    assert verified(MadeHost(interrupted_at=9)).notes == ("interrupted: the results are of the first round",)
    assert verified(MadeHost(interrupted_at=15)).notes == ("interrupted: the results are of the whole rounds so far",)


def test_failure_of_the_plan_is_noted() -> None:
    host = MadeHost()
    host.fails = lambda _plan: len(host.calls) == 4  # this plan's turn in the second round
    (note,) = verified(host, num_rivals=1).notes
    assert note == "the plan failed in a later round, so the results are of the first round: a process was stopped"


def test_left_out_rivals_are_named() -> None:
    found = verified(MadeHost(fails=lambda plan: plan.schedule == "1f1b"), usual_plan(num_microbatches=7))
    assert LeftOut(label="half the micro-batches", reason="7 have no half") in found.left_out
    assert LeftOut(label="schedule 1f1b", reason="a process was stopped") in found.left_out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rounds": 0}, "asked for 0 rounds; expected at least 1"),
        ({"num_rivals": -1}, "asked for -1 rivals; expected 0 or more"),
    ],
)
def test_bad_counts_are_refused_before_running(options: dict[str, int], message: str) -> None:
    host = MadeHost()
    with pytest.raises(UsageError, match=message):
        verified(host, **options)
    assert host.calls == []


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="asked for 3 steps a run; expected at least 6"):
        verify(usual_plan(), usual_profile(), MadeHost(), engine="torch", num_steps=3)


def test_verification_round_trip(tmp_path: Path) -> None:
    found = verified(MadeHost(drift=0.01), num_rivals=2)
    gplan.save(found, tmp_path / "v.json")
    assert gplan.load(tmp_path / "v.json") == found


def test_contradictory_file_is_refused(tmp_path: Path) -> None:
    found = verified(MadeHost(), num_rivals=1)
    run = found.contenders[1].run
    moved = replace(run.plan, stages=tuple(replace(x, device=1 - x.index) for x in run.plan.stages))
    broken = replace(found, contenders=(found.chosen, replace(found.contenders[1], run=replace(run, plan=moved))))
    gplan.save(broken, tmp_path / "v.json")
    with pytest.raises(FileError, match=r"contenders\[1\]\.run\.plan\.stages\[0\]\.device"):
        gplan.load(tmp_path / "v.json")


def test_contender_with_extra_rounds_is_refused() -> None:
    found = verified(MadeHost(), num_rivals=1)
    fewer = replace(found.chosen, steps_s=found.chosen.steps_s[:1])
    with pytest.raises(ValueError, match=r"has 4 rounds; expected at most 1, as the plan has"):
        replace(found, contenders=(fewer, found.contenders[1]))


def batches(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.zeros(batch_size, 4), torch.zeros(batch_size, 4)


def test_verify_on_the_virtual_engine() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    functions = {"loss": nn.functional.mse_loss, "optimizer": lambda x: torch.optim.SGD(x, lr=0.1), "batches": batches}
    profile = gplan.profile(
        model,
        inputs=(torch.zeros(2, 4),),
        microbatch_sizes=[2],
        contention=0,
        budget_s=0.1,
        link=gplan.Link(latency_s=1e-5, bytes_per_s=1e9),
        **functions,
    )  # type: ignore[arg-type]
    plan = gplan.balance(profile, num_devices=2, num_microbatches=2)
    found = gplan.verify(
        plan, profile, model=model, engine="virtual", num_steps=6, num_rounds=1, num_rivals=1, **functions
    )  # type: ignore[arg-type]
    assert found.engine == "virtual"
    assert found.chosen.label == "this plan" and len(found.contenders) == 2
    assert found.chosen.measured_s == pytest.approx(found.chosen.run.timeline.step_s)
