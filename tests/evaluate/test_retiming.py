"""A profile scaled to a run: exact at the plan's cuts, everything else unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

import gplan
from gplan.core import ActionKind, Layer, MachineDevice, Plan, Profile, Run
from gplan.core.errors import FileError
from gplan.evaluate.retiming import retime_profile
from gplan.simulation.simulator import simulate
from tests.made import make_profile
from tests.partition.problems import in_halves
from tests.reporting.subjects import make_run

FACTORS = (3.0, 0.5)  # of forwards and of backwards, by stage


def profiled(*, overhead_s: float = 0.1) -> Profile:
    return make_profile([1.0, 2.0, 3.0, 4.0], weight_bytes=1000, overhead_s=overhead_s, optimizer_s=2.0)


def planned(profile: Profile, **options: object) -> Plan:
    return gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="1f1b", **options)  # type: ignore[arg-type]


def slower(plan: Plan) -> Plan:
    """Each stage as much slower as its factor says, in all that it does but its overhead."""
    stages = [
        replace(
            stage,
            cost=replace(
                stage.cost,
                forward_s=0.1 + by * (stage.cost.forward_s - 0.1),
                backward_s=0.1 + by * (stage.cost.backward_s - 0.1),
                recompute_s=by * stage.cost.recompute_s,
                optimizer_s=2 * stage.cost.optimizer_s,
            ),
        )
        for stage, by in zip(plan.stages, FACTORS, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def times_of(profile: Profile) -> list[float]:
    """Forward and backward of every layer, and the optimizer."""
    costs = [layer.costs[0] for layer in profile.layers]
    return [*(y.median_s for x in costs for y in (x.forward, x.backward)), profile.step.optimizer.median_s]


def run_of(plan: Plan, measured: Plan) -> Run:
    return replace(make_run(plan), timeline=replace(simulate(measured), origin="measured"))


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
def test_same_cuts_predict_the_measurement(recompute: str) -> None:
    profile = profiled()
    plan = planned(profile, recompute=recompute)
    measured = slower(plan)
    newer = retime_profile(profile, run=run_of(plan, measured))
    cut = plan.stages[0].layer_names[-1]
    share = {"never": 0.0, "always": 1.0, "except-last": 3 / 4}[recompute]
    again = planned(newer, recompute=recompute, constraints=gplan.core.Constraints(cut_after=(cut,)))
    assert again.cuts == plan.cuts
    for found, wanted in zip(again.stages, measured.stages, strict=True):
        assert found.cost.forward_s == pytest.approx(wanted.cost.forward_s)
        total_s = wanted.cost.backward_s + share * wanted.cost.recompute_s
        found_s = found.cost.backward_s + share * found.cost.recompute_s
        assert found_s == pytest.approx(total_s)
        assert found.cost.optimizer_s == pytest.approx(wanted.cost.optimizer_s)


def test_retiming_does_not_depend_on_the_plans_costs() -> None:
    profile = profiled()
    plan = planned(profile)
    run = run_of(plan, slower(plan))
    costs = [[x.corrected(forward=0.5, backward=4.0, recompute=1.0) for x in layer.costs] for layer in profile.layers]
    layers = (replace(x, costs=tuple(cost)) for x, cost in zip(profile.layers, costs, strict=True))
    step = replace(profile.step, optimizer=profile.step.optimizer.times(0.25))
    again = replace(profile, layers=tuple(layers), step=step)
    assert times_of(retime_profile(again, run=run)) == pytest.approx(times_of(retime_profile(profile, run=run)))


def test_retiming_a_machine_plan() -> None:
    profile = profiled(overhead_s=0.0)
    plan = planned(profile)
    fast = MachineDevice(name="fast", host="made", speed=2.0)
    stages = [
        replace(x, machine_device=fast, cost=replace(x.cost, forward_s=x.cost.forward_s / 2)) for x in plan.stages
    ]
    plan = replace(plan, stages=tuple(stages))
    newer = retime_profile(profile, run=run_of(plan, plan))
    assert times_of(newer) == pytest.approx(times_of(profile))


def test_scaled_times_are_computed() -> None:
    profile = profiled()
    plan = planned(profile)
    newer = retime_profile(profile, run=run_of(plan, slower(plan)))
    timings = [x for layer in newer.layers for cost in layer.costs for x in (*cost.timings.values(), cost.recompute)]
    assert {x.origin for x in (*timings, newer.step.optimizer) if x is not None} == {"computed"}


def test_new_plan_relieves_the_slow_stage() -> None:
    profile = profiled()
    plan = planned(profile)
    newer = retime_profile(profile, run=run_of(plan, slower(plan)))
    assert planned(newer).cuts < plan.cuts


def test_layers_keep_proportions_and_bytes() -> None:
    profile = profiled()
    plan = planned(profile)
    newer = retime_profile(profile, run=run_of(plan, slower(plan)))
    for stage, by in zip(plan.stages, FACTORS, strict=True):
        for i in range(stage.first_layer, stage.end_layer):
            old, new = profile.layers[i].costs[0], newer.layers[i].costs[0]
            assert new.forward.median_s == pytest.approx(by * old.forward.median_s)
            assert new.backward.median_s == pytest.approx(by * old.backward.median_s)
            assert new.stash_bytes == old.stash_bytes
    assert (newer.link, newer.model, newer.num_parameters) == (profile.link, profile.model, profile.num_parameters)
    assert "stage 0 x3.00 and x3.00, stage 1 x0.50 and x0.50" in newer.notes[-1]


def test_halves_of_a_backward_are_scaled_together() -> None:
    profile = in_halves(profiled(overhead_s=0.0))
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="zb-h1")
    run = run_of(plan, plan)
    spans = [
        structs.replace(x, end_s=x.start_s + 3 * x.duration_s) if x.action.kind is not ActionKind.OPTIMIZER else x
        for x in run.timeline.spans
    ]
    run = replace(run, timeline=replace(run.timeline, spans=tuple(spans)))
    newer = retime_profile(profile, run=run)
    for old, new in zip(profile.layers, newer.layers, strict=True):
        for name in ("forward", "backward", "input_gradient", "weight_gradient"):
            before, after = getattr(old.costs[0], name), getattr(new.costs[0], name)
            assert after.median_s == pytest.approx(3 * before.median_s), (old.name, name)


def test_quick_halves_of_a_backward_keep_some_of_their_time() -> None:
    profile = in_halves(profiled(overhead_s=0.5))
    plan = gplan.balance(profile, num_devices=2, num_microbatches=4, schedule="zb-h1")
    run = run_of(plan, plan)
    seconds = {ActionKind.FORWARD: 1.0, ActionKind.INPUT_GRADIENT: 0.4, ActionKind.WEIGHT_GRADIENT: 0.4}
    spans = [structs.replace(x, end_s=x.start_s + seconds.get(x.action.kind, x.duration_s)) for x in run.timeline.spans]
    newer = retime_profile(profile, run=replace(run, timeline=replace(run.timeline, spans=tuple(spans))))
    assert newer.overhead_s == pytest.approx(0.2)
    assert all(x.costs[0].backward.median_s > 0 for x in newer.layers)


def test_stages_quicker_than_the_overhead_lower_it() -> None:
    profile = profiled(overhead_s=0.1)
    plan = planned(profile)
    quick = [replace(x, cost=replace(x.cost, forward_s=0.04, backward_s=0.08)) for x in plan.stages]
    newer = retime_profile(profile, run=run_of(plan, replace(plan, stages=tuple(quick))))
    assert newer.overhead_s == pytest.approx(0.02)
    again = planned(newer, constraints=gplan.core.Constraints(cut_after=(plan.stages[0].layer_names[-1],)))
    assert [x.cost.forward_s for x in again.stages] == pytest.approx([0.04, 0.04])


def test_equal_layers_on_two_stages_differ() -> None:
    profile = profiled()
    plan = planned(profile)
    last = plan.stages[1].first_layer
    layers = [replace(x, same_as=0) if i == last else x for i, x in enumerate(profile.layers)]
    within: list[Layer] = [replace(x, same_as=0) if i == 1 else x for i, x in enumerate(layers)]
    newer = retime_profile(replace(profile, layers=tuple(within)), run=run_of(plan, slower(plan)))
    assert newer.layers[last].same_as is None
    assert newer.layers[1].same_as == 0


def test_another_models_profile_is_refused() -> None:
    run = make_run(planned(profiled()))
    with pytest.raises(FileError, match="the plan has a layer d, which the profile does not have"):
        retime_profile(make_profile([1.0, 2.0, 3.0]), run=run)
    other = replace(profiled(), model=replace(profiled().model, name="other", digest="other"))
    with pytest.raises(FileError, match="the profile is of other"):
        retime_profile(other, run=run)


def test_a_stage_that_took_no_time_is_refused() -> None:
    run = make_run(planned(profiled()))
    spans = [structs.replace(x, end_s=x.start_s) if x.device == 1 else x for x in run.timeline.spans]
    run = replace(run, timeline=replace(run.timeline, spans=tuple(spans)))
    with pytest.raises(FileError, match=r"stage 1 took no time in the run.*ProfilerActivity\.CUDA"):
        retime_profile(profiled(), run=run)
