"""How much a layer must change before the best plan does, worked out by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from gplan.core import Constraints, Profile
from gplan.core.progress import no_progress
from gplan.evaluate.explain.sensitivity import MOST_LAYERS, Sensitivities, layer_sensitivities, relevant_layers
from tests.evaluate.explain.settings import plan_of, setting
from tests.made import make_profile


def found_for(profile: Profile, *, bottleneck: int = 1, seconds: float = 60.0, **given: object) -> Sensitivities:
    return layer_sensitivities(
        profile,
        setting(**given),
        bottleneck=bottleneck,
        deadline_s=time.perf_counter() + seconds,
        progress=no_progress,
    )


def of_times(times_s: Sequence[float]) -> Profile:
    """Layers that take so long, forward and backward."""
    return make_profile([x / 2 for x in times_s], [x / 2 for x in times_s])


def test_a_cut_moves_where_the_other_plan_is_better() -> None:
    """Loads 4 | 2 3, largest 5, against 4 2 | 3, largest 6: the cut moves where 2 + 3x > 6, or 4x + 2 < 5."""
    found = {x.layer: x for x in found_for(of_times([4, 2, 3]), minimize="max-stage").layers}
    slower, faster = found["c"].slower, found["a"].faster
    assert slower is not None and faster is not None
    assert slower.factor == pytest.approx(4 / 3, rel=0.004)
    assert faster.factor == pytest.approx(3 / 4, rel=0.004)
    assert slower.moved == faster.moved == ("b",)
    assert (found["c"].faster, found["a"].slower, found["b"].slower, found["b"].faster) == (None, None, None, None)
    assert (found["c"].stage, found["c"].time_s) == (1, 3.0)


def test_a_cut_moves_by_the_simulated_step_too() -> None:
    """GPipe: T = 3 (sum + 3 max) of the forwards; 2 | 1 1.5 against 2 1 | 1.5: c moves the cut where 1 + 1.5x > 3."""
    found = {x.layer: x for x in found_for(make_profile([2.0, 1.0, 1.5])).layers}
    assert found["c"].slower is not None
    assert found["c"].slower.factor == pytest.approx(4 / 3, rel=0.004)


def test_a_cut_that_is_constrained_for_never_moves() -> None:
    """As above, with the cut after a constrained for."""
    found = found_for(of_times([4, 2, 3]), minimize="max-stage", constraints=Constraints(cut_after=("a",)))
    assert [(x.slower, x.faster) for x in found.layers] == [(None, None)] * 3


def test_a_tie_is_no_change() -> None:
    """2 | 2 2 and 2 2 | 2 are as good, whatever b takes; a alone decides only once it differs from c."""
    found = {x.layer: x for x in found_for(of_times([2, 2, 2]), minimize="max-stage").layers}
    assert (found["b"].slower, found["b"].faster) == (None, None)


def test_a_change_beyond_four_times_is_none() -> None:
    """10 | 1 1 against 10 1 | 1: c would have to take more than ten times as long."""
    found = {x.layer: x for x in found_for(of_times([10, 1, 1]), minimize="max-stage").layers}
    assert found["c"].slower is None
    nearer = {x.layer: x for x in found_for(of_times([3, 1, 1]), minimize="max-stage").layers}
    assert nearer["c"].slower is not None and nearer["c"].slower.factor == pytest.approx(3.0, rel=0.004)


def test_order_of_relevant_layers() -> None:
    plan = plan_of(of_times([1, 1, 0, 3, 3, 0, 1, 1, 1]), num_stages=3, minimize="max-stage")
    assert plan.cuts == (4, 5)
    assert [plan.layer_names[i] for i in relevant_layers(plan, 0)] == ["d", "e", "a", "b"]
    assert [plan.layer_names[i] for i in relevant_layers(plan, 1)] == ["d", "e"]


def test_no_more_layers_are_looked_at_than_the_limit() -> None:
    plan = plan_of(of_times([1.0] * 64), num_stages=16, num_microbatches=1, minimize="max-stage")
    assert len(relevant_layers(plan, 3)) == MOST_LAYERS


def test_what_the_time_did_not_suffice_for_is_named() -> None:
    found = found_for(of_times([4, 2, 3]), minimize="max-stage", seconds=-1.0)
    assert found.layers == ()
    assert sorted(found.left_out) == ["a", "b", "c"]
