"""A plan as text: its stages, its predicted step with bound and gap, and the plans that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import BACKWARD_KINDS, ActionKind, Alternative, HostBound, Plan, Stage, Timeline
from gplan.core.precision import precision_suffix
from gplan.core.units import (
    bytes_text,
    counted,
    percent_text,
    pipeline_text,
    quantity_text,
    replicas_text,
    seconds_text,
)
from gplan.evaluate.compare import samples_per_s, stale_prediction_notes
from gplan.evaluate.replanning import PlanSettings
from gplan.evaluate.rivals import THIS_PLAN
from gplan.partition.balance import alternative_of
from gplan.reporting.text.fitted_table import FittedTable, Line, limited, note_lines
from gplan.schedules.registry import num_devices_of, schedule_info
from gplan.simulation.schedule_trial import Law, law_of
from gplan.simulation.simulator import simulate


def equal_stages_text(bubble: float, law: Law | None, timeline: Timeline) -> str:
    """The bubble of equal stages with free transfers, with the ratio of backward to forward time if it depends on it.

    By a law, K, M and the chunks alone decide. Without one, such as interleaved 1F1B with an M that K does not divide,
    it also depends on that ratio, which is the profile's.
    """
    if law is not None:
        return percent_text(bubble)
    stages = range(timeline.num_stages)
    forward_s = sum(timeline.total_s(ActionKind.FORWARD, stage=stage) for stage in stages)
    backward_s = sum(timeline.total_s(*BACKWARD_KINDS, stage=stage) for stage in stages)
    if not forward_s or not bubble:
        return percent_text(bubble)
    return f"{percent_text(bubble)}, where a backward takes {backward_s / forward_s:.3g} × a forward"


def setting_text(setting: Plan | PlanSettings) -> str:
    """Stages, devices, replicas, schedule, micro-batches and recompute in words."""
    replicas = f"{replicas_text(setting.num_replicas, setting.sharding)} of " if setting.num_replicas > 1 else ""
    return (
        f"{replicas}{pipeline_text(setting.num_stages, setting.num_devices)}, {schedule_info(setting.schedule).title}, "
        f"{counted(setting.num_microbatches, 'micro-batch')} of {setting.microbatch_size}, recompute {setting.recompute}"
    )


_LEAST_HOST_BOUND = 0.01  # of the step, to be named
MICROBATCH, STEP = "per micro-batch", "per step"
"""Heads of columns of seconds."""


def plan_view(plan: Plan) -> RenderableType:
    """One row per stage; below, the predicted step, bubble, bound and gap, then rivals and the frontier."""
    timeline, doubts = simulate(plan), stale_prediction_notes(plan)
    prediction, proof = plan.prediction, plan.proof
    counts = {"num_devices": plan.num_devices, "num_microbatches": plan.num_microbatches}
    law = law_of(plan.schedule, prediction.ideal_bubble, **counts)
    lines = [
        f"predicted step {seconds_text(prediction.step_s)}, "
        f"{quantity_text(samples_per_s(plan, prediction.step_s), 'samples_per_s')}, bubble "
        f"{percent_text(prediction.bubble)} (equal stages and free transfers: {equal_stages_text(prediction.ideal_bubble, law, timeline)})",
        f"{plan.minimize} {seconds_text(proof.objective_s)}, lower bound {seconds_text(proof.lower_bound_s)}, "
        f"gap {percent_text(proof.gap)}: {'proven best' if proof.is_proven else 'best found'} by {proof.solver} "
        f"in {seconds_text(proof.solve_s)}{', as it was made' if doubts else ''}",
    ]
    if (widths := dict(plan.model.settings)).keys() >= {"tensor", "sequence_length"}:  # of a layout
        names = [x for x in ("tensor", "context", "expert", "data") if x in widths]
        split = ", ".join(f"{x} {widths[x]}" for x in names)
        lines.append(f"widths beside the pipeline: {split}; samples of {int(widths['sequence_length']):,} tokens")
    lines += host_bound_lines(prediction.step_s, prediction.host_bound)
    if longest_s := max(stage.cost.all_reduce_s for stage in plan.stages):
        whose = "all replicas and of tied weights" if plan.num_replicas > 1 else "tied weights"
        gathered = (
            ", and to gather the parameters for the next step"
            if plan.is_sharded and plan.sharding == "optimizer"
            else ""
        )
        lines.append(
            f"after its last backward a stage takes up to {seconds_text(longest_s)} to sum the gradients of {whose}{gathered}"
        )
    lines += [text for text in [sharding_text(plan), reserved_text(plan)] if text]
    return Group(
        stages_table(plan, timeline), *map(Text, lines), *note_lines((*plan.notes, *doubts)), *_comparisons(plan)
    )


def reserved_text(plan: Plan) -> str:
    """What the fullest device allocates, reserves and needs; "" where that is not known."""
    if not plan.reserved_bytes:
        return ""
    total, reserved = bytes_text(plan.device_total_bytes), bytes_text(max(plan.reserved_bytes))
    limit = f" of {bytes_text(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
    return (
        f"the fullest device allocates {bytes_text(plan.peak_bytes)}, reserves {reserved}, and needs {total}{limit} with what CUDA "
        "and NCCL take beside it"
    )


def host_bound_lines(step_s: float, found: HostBound | None) -> tuple[str, ...]:
    """How much of the step the devices wait for their hosts, and what would help; nothing below 1 %.

    >>> host_bound_lines(1.0, HostBound(device_step_s=0.625, graphs_step_s=0.8))
    ('host-bound: 38 % of the step; larger micro-batches, torch.compile or CUDA graphs would give up to 1.6 x (CUDA graphs alone 1.2 x)',)
    """
    if found is None or found.device_step_s > (1 - _LEAST_HOST_BOUND) * step_s:
        return ()
    return (
        f"host-bound: {100 * (1 - found.device_step_s / step_s):.0f} % of the step; larger micro-batches, torch.compile or CUDA "
        f"graphs would give up to {step_s / found.device_step_s:.1f} x (CUDA graphs alone {step_s / found.graphs_step_s:.1f} x)",
    )


def sharding_text(plan: Plan) -> str:
    """What a replica holds where replicas divide stages; "" where they do not."""
    if not plan.is_sharded:
        return ""
    fullest = max(plan.stages, key=lambda x: x.gathered_bytes)
    state, gathered = (bytes_text(x) for x in (fullest.memory.optimizer_bytes, fullest.gathered_bytes))
    gathers = {
        "optimizer": f"the whole stage for a step (up to {gathered}, counted with the weights)",
        "weights": f"a layer whenever it runs (up to {gathered} and as much again for the message, counted as workspace)",
    }
    return (
        f"each of {plan.num_replicas} replicas keeps its part of parameters and optimizer state (stage {fullest.index}: "
        f"{state} of state), and gathers {gathers[plan.sharding]}"
    )


def stages_table(plan: Plan, timeline: Timeline) -> FittedTable:
    """One row per stage, by device; `timeline` is the simulated step."""
    idle_s = list(map(timeline.idle_s, range(plan.num_devices)))
    return FittedTable(
        title=f"{plan.model.name}: {setting_text(plan)}{precision_suffix(plan.precision)}",
        lines=tuple(
            _stage_line(plan, stage, timeline, idle_s[device] if stage is stages[0] else None)
            for device in range(plan.num_devices)
            for stages in [plan.stages_of(device)]
            for stage in stages
        ),
        flexible="layers",
        left=("device",),
        groups={MICROBATCH: ("forward", "backward"), STEP: ("compute", "transfers", "idle")},
        spare=("forward", "backward", "transfers", "idle"),
    )


def _stage_line(plan: Plan, stage: Stage, timeline: Timeline, idle_s: float | None) -> Line:
    """A stage; `idle_s` is its device's, None where an earlier line has it and the device's peak memory."""
    stays = plan.devices[stage.index] in plan.devices[stage.index + 1 : stage.index + 2]
    hop_s = 0.0 if stays else stage.cost.activation_s + stage.cost.gradient_s
    place = stage.machine_device.name if stage.machine_device else str(plan.devices[stage.index])
    device = {"device": place if idle_s is not None else ""}
    passes = {"forward": [ActionKind.FORWARD], "backward": BACKWARD_KINDS}
    peak, capacity = bytes_text(plan.device_peak_bytes[plan.devices[stage.index]]), plan.limit_of(stage)
    peak += f" of {bytes_text(capacity)}" if capacity else ""
    cells = {
        **(device if plan.has_chunks else {}),
        "stage": str(stage.index),
        "layers": stage.layers_text,
        **(device if plan.is_for_machine and not plan.has_chunks else {}),
        **(
            {"recomputed": f"{len(stage.recompute_layers)} of {stage.num_layers}"}
            if plan.recompute == "selected"
            else {}
        ),
        **{name: seconds_text(timeline.mean_s(*kinds, stage=stage.index)) for name, kinds in passes.items()},
        "compute": seconds_text(timeline.total_s(ActionKind.FORWARD, *BACKWARD_KINDS, stage=stage.index)),
        "transfers": seconds_text(plan.num_microbatches * hop_s),
        "idle": seconds_text(idle_s) if idle_s is not None else "",
        "peak memory": peak if idle_s is not None else "",
    }
    short = f"{stage.num_layers} from {stage.layer_names[0]}"
    return Line(cells=cells, shorter=(short,) if stage.num_layers > 1 else ())


def _comparisons(plan: Plan) -> Iterator[RenderableType]:
    this = (plan.prediction.step_s, plan.peak_bytes)
    if plan.rivals:
        yield Text("")
        rows = (alternative_of(plan, label=THIS_PLAN), *plan.rivals)
        lines = [
            Line(cells={"plan": x.label, **_cells(plan, x), "cuts": " ".join(map(str, x.cuts)) or "none"}) for x in rows
        ]
        yield _comparison("compared with", lines, flexible="cuts")
    if len(plan.frontier) > 1:
        yield Text("")
        settings = [alternative_text(x) for x in plan.frontier]
        differences = _differences(plan.frontier, settings)
        lines = [
            Line(
                cells={
                    "setting": setting,
                    **({"difference": difference} if any(differences) else {}),
                    **_cells(plan, x),
                },
                style="bold" if (x.step_s, x.peak_bytes) == this else "",
            )
            for x, setting, difference in zip(plan.frontier, settings, differences, strict=True)
        ]
        yield _comparison("less memory, longer steps", lines, flexible="setting")


def _comparison(title: str, lines: Sequence[Line], *, flexible: str) -> FittedTable:
    left, spare = ("plan", "difference"), ("bubble", "change")
    table = FittedTable(title=title, lines=tuple(lines), flexible=flexible, left=left, spare=spare)
    return limited(table, num_last=1, remedy="they are in the file")


def _cells(plan: Plan, x: Alternative) -> dict[str, str]:
    this_s = plan.prediction.step_s
    return {
        "step": seconds_text(x.step_s),
        "change": percent_text(x.step_s / this_s - 1, signed=True) if x.step_s != this_s else "",
        "bubble": percent_text(x.bubble),
        "peak memory": bytes_text(x.peak_bytes),
    }


def alternative_text(x: Alternative) -> str:
    """The setting of another plan in words."""
    replicas = f"{x.num_replicas} × " if x.num_replicas > 1 else ""
    batch = f"{x.num_microbatches} × {x.microbatch_size}"
    stages = pipeline_text(x.num_stages, num_devices_of(x.schedule, x.num_stages))
    sharding = f", shard {x.sharding}" if x.sharding != "none" else ""
    return f"{replicas}{stages}{sharding}, {schedule_info(x.schedule).title}, {batch}, recompute {x.recompute}"


def _differences(alternatives: Sequence[Alternative], settings: Sequence[str]) -> list[str]:
    """How each differs from others with the same setting: its cuts, or more recomputed layers; "" if it does not."""
    differences = []
    for index, x in enumerate(alternatives):
        places = [i for i, setting in enumerate(settings) if setting == settings[index]]
        alike = [alternatives[i].cuts for i in places]
        words = [str(cuts[0]) if len(set(cuts)) > 1 else "…" for cuts in zip(x.cuts, *alike, strict=True)]
        cuts = f"cuts {' '.join(word for word, _ in groupby(words))}" if len(set(alike)) > 1 else ""
        more = "more recomputed" if x.recompute == "selected" and index > places[0] else ""
        differences.append(cuts or more)
    return differences
