"""A plan as text: its stages, and what is known of how good it is."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.bubble import idle_pieces
from gplan.nouns import ActionKind, Plan, Stage, Timeline
from gplan.simulator import simulate
from gplan.tables.fitting import Column, FittedTable, Line
from gplan.tables.notes import note_lines
from gplan.units import bytes_text, percent_text, quantity_text, seconds_text

_NUMBERS = ("forward", "backward", "communication", "idle", "peak memory")


def plan_view(plan: Plan) -> RenderableType:
    """One row a stage; below, the predicted step, bubble, bound and gap."""
    timeline = simulate(plan)
    table = FittedTable(
        title=f"{plan.model.name}: {plan.num_stages} stages, {plan.schedule}, {plan.num_microbatches} micro-batches of "
        f"{plan.microbatch_size}, recompute {plan.recompute}",
        columns=(
            Column(key="stage"),
            Column(key="layers", is_left=True, is_flexible=True),
            *(Column(key=name) for name in _NUMBERS),
        ),
        lines=tuple(_stage_line(plan, stage, timeline) for stage in plan.stages),
        spare=("communication", "idle"),
    )
    prediction, proof = plan.prediction, plan.proof
    lines = [
        f"predicted step {seconds_text(prediction.step_s)}, "
        f"{quantity_text(plan.batch_size / prediction.step_s, 'samples_per_s')}, bubble "
        f"{percent_text(prediction.bubble)} (equal stages and free transfers: {percent_text(prediction.ideal_bubble)})",
        f"{plan.minimize} {seconds_text(proof.objective_s)}, lower bound {seconds_text(proof.lower_bound_s)}, "
        f"gap {percent_text(proof.gap)}: {'proven best' if proof.is_proven else 'best found'} by {proof.solver} "
        f"in {seconds_text(proof.solve_s)}",
    ]
    return Group(table, *map(Text, lines), *note_lines(plan.notes))


def _stage_line(plan: Plan, stage: Stage, timeline: Timeline) -> Line:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    idle_s = sum(x.duration_s for x in idle_pieces(timeline) if x.device == stage.index)
    capacity = plan.memory_limit_bytes
    peak = bytes_text(stage.memory.peak_bytes)
    communication_s = plan.num_microbatches * (stage.cost.activation_s + stage.cost.gradient_s)
    cells = (
        str(stage.index),
        f"{first} … {last} ({stage.num_layers})" if stage.num_layers > 1 else first,
        seconds_text(stage.cost.forward_s),
        seconds_text(timeline.mean_s(stage=stage.index, kind=ActionKind.BACKWARD)),
        seconds_text(communication_s),
        seconds_text(idle_s),
        f"{peak} of {bytes_text(capacity)}" if capacity else peak,
    )
    return Line(cells=cells, shorter=(f"{stage.num_layers} from {first}",) if stage.num_layers > 1 else ())
