"""Gradients equal the plain model's for everything that layers can pass on, cut after every layer and in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import gplan
from gplan.core import Constraints, GradientCheck, Link, Profile, RecomputeMode
from gplan_profiler.measure import ProfileOptions, measure_profile
from tests.model_files import load_model_file
from tests.runtime.boundary_models import ALL, FUNCTIONS, HEAD

QUICK = ProfileOptions(microbatch_sizes=(2,), link=Link(latency_s=0.0, bytes_per_s=1e9), budget_s=0.001, contention=0)


@dataclass(frozen=True, slots=True)
class Case:
    """A model file and its profile."""

    reference: str
    profile: Profile

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)


@pytest.fixture(scope="module", params=sorted(ALL))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each of the models."""
    path = tmp_path_factory.mktemp("boundaries") / "model.py"
    path.write_text(HEAD + FUNCTIONS + ALL[request.param])
    return Case(str(path), measure_profile(load_model_file(str(path)), QUICK))


def gradients_of(case: Case, *, cuts_after: Sequence[int], recompute: RecomputeMode) -> GradientCheck:
    """The gradient check of one step, cut after these layers."""
    constraints = Constraints(cut_after=tuple(case.profile.layers[i].name for i in cuts_after))
    plan = gplan.balance(
        case.profile, num_devices=len(cuts_after) + 1, num_microbatches=3, recompute=recompute, constraints=constraints
    )
    run = gplan.run(plan, model=case.reference, engine="virtual", num_steps=1, check=True)
    assert run.check is not None
    return run.check


def test_cut_after_every_layer(case: Case) -> None:
    check = gradients_of(case, cuts_after=range(case.num_layers - 1), recompute="except-last")
    assert check.passed, check


def test_cut_in_the_middle(case: Case) -> None:
    check = gradients_of(case, cuts_after=[case.num_layers // 2 - 1], recompute="always")
    assert check.passed, check
