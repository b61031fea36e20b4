"""Which plans can be carried out here, seen from the plan alone, and what a reader of the run must know of them.

Devices of another kind or speed cannot be imitated. What is refused is refused before a process starts.
"""

from __future__ import annotations

from gplan.errors import FileError, UsageError
from gplan.nouns import Plan
from gplan.schedules.misfit import misfit_of
from gplan.units import bytes_text, counted
from profiler.model.available import available_bytes


def check_runnable(plan: Plan) -> None:
    """Raise UsageError for a plan that gplan cannot run, FileError for one that contradicts itself."""
    if plan.device.kind == "given":
        raise UsageError(
            f"the plan was made from {plan.model.name}, another planner's profile: it has figures and no model to run; "
            "run a plan of a profile that `gplan profile` made of a model file"
        )
    names = plan.layer_names
    twice = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise FileError(
            f"the plan has layer {twice[0]} {names.count(twice[0])} times; expected every layer once; balance again"
        )
    misfit = misfit_of(plan)
    if misfit is not None:
        raise FileError(f"the plan cannot be carried out: {misfit.reason}; balance again with --schedule")
    selecting = [stage for stage in plan.stages if stage.recompute_layers]
    if selecting and plan.recompute != "selected":
        raise FileError(
            f"stage {selecting[0].index} names layers to recompute, the plan has recompute {plan.recompute!r}; expected "
            "'selected', or stages that name none; balance again"
        )


def check_fits_here(plan: Plan) -> None:
    """Raise UsageError where this host has not the memory for all stages at once."""
    needed = plan.num_replicas * sum(stage.memory.peak_bytes for stage in plan.stages)
    available = available_bytes()
    if needed > available:
        stages = counted(plan.num_replicas * plan.num_stages, "stage")
        raise UsageError(
            f"the plan's {stages} need {bytes_text(needed)} together, this host has {bytes_text(available)} left: run it on "
            "more hosts with torchrun, or balance with smaller micro-batches or --recompute always"
        )


def notes_on_machine(plan: Plan) -> tuple[str, ...]:
    """What is not as on the machine that the plan was made for: all stages run on cores of this host."""
    firsts = [plan.stages_of(i)[0] for i in range(plan.num_devices)]
    device, places = plan.device, [stage.place for stage in firsts if stage.place is not None]
    if device.kind != "cpu":
        made_for = f"{device.name} ({device.kind})"
    elif any(place.speed != 1.0 for place in places) or len({place.host for place in places}) > 1:
        made_for = ", ".join(f"{x.name} (host {x.host}, speed {x.speed:g})" for x in places)
    else:
        return ()
    return (
        f"the plan was made for another machine: {made_for}; here every stage ran on cores of this host, so what was "
        "measured is not what was predicted",
    )
