"""What the command line prints: profiles, plans and runs as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gplan.bubble import idle_pieces
from gplan.compare import compare, prediction_error
from gplan.nouns import ActionKind, LayerCost, Plan, Profile, Run, Stage, Timeline, Timing
from gplan.simulator import simulate
from gplan.units import bytes_text, count_text, error_text, percent_text, quantity_text, seconds_text

_BAR_CELLS = 8


def profile_view(profile: Profile, *, width: int) -> RenderableType:
    """One row a layer, for each micro-batch size, in `width` characters; below, the sum against the whole model."""
    views: list[RenderableType] = []
    for index, size in enumerate(profile.microbatch_sizes):
        views.extend([_layer_table(profile, index, width), _whole_line(profile, index, size)])
    step, link = profile.step, profile.link
    views.append(
        f"optimizer {step.optimizer_name}: {seconds_text(step.optimizer.median_s)} a step, zero_grad "
        f"{seconds_text(step.zero_grad.median_s)}, "
        f"state {bytes_text(step.state_bytes)}; link: {seconds_text(link.latency_s)} + "
        f"{bytes_text(link.bytes_per_s)}/s ({link.origin}); "
        + (f"the loss is a {profile.loss_reduction} over the samples" if profile.loss else "no loss was measured")
    )
    views.append(
        f"{count_text(profile.num_parameters)} parameters in {len(profile.layers)} layers; {profile.num_samples} "
        f"samples, {profile.num_refused} refused as disturbed; {profile.device.name}, threads: {profile.device.num_threads}"
    )
    return Group(*views)


def plan_view(plan: Plan) -> RenderableType:
    """One row a stage; below, the predicted step, bubble, bound and gap."""
    timeline = simulate(plan)
    table = _table(
        f"{plan.model.name}: {plan.num_stages} stages, {plan.schedule}, {plan.num_microbatches} micro-batches of "
        f"{plan.microbatch_size}, recompute {plan.recompute}"
    )
    for name in ("stage", "layers", "forward", "backward", "communication", "idle", "peak memory"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for stage in plan.stages:
        table.add_row(*_stage_row(plan, stage, timeline))
    prediction, proof = plan.prediction, plan.proof
    lines = [
        f"predicted step {seconds_text(prediction.step_s)}, "
        f"{quantity_text(plan.batch_size / prediction.step_s, 'samples_per_s')}, bubble "
        f"{percent_text(prediction.bubble)} (equal stages and free transfers: {percent_text(prediction.ideal_bubble)})",
        f"{plan.minimize} {seconds_text(proof.objective_s)}, lower bound {seconds_text(proof.lower_bound_s)}, "
        f"gap {percent_text(proof.gap)}: {'proven best' if proof.is_proven else 'best found'} by {proof.solver} "
        f"in {seconds_text(proof.solve_s)}",
    ]
    return Group(table, *lines, *_note_lines(plan.notes))


def run_view(run: Run) -> RenderableType:
    """Predicted beside measured, as it came."""
    virtual = " (virtual: one process computes all stages, the devices exist on the clock only)"
    table = _table(f"predicted versus measured, engine {run.engine}{virtual if run.engine == 'virtual' else ''}")
    for name in ("quantity", "stage", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    for row in compare(run).rows:
        stage = "" if row.stage is None else str(row.stage)
        predicted, measured = quantity_text(row.predicted, row.unit), quantity_text(row.measured, row.unit)
        table.add_row(row.quantity, stage, predicted, measured, error_text(row.error, row.unit))
    lines = [
        f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps; medians of {run.steps_text}"
    ]
    return Group(table, *lines, *_check_lines(run), *_note_lines(run.notes))


def _note_lines(notes: Sequence[str]) -> list[Text]:
    return [Text(f"note: {note}", style="yellow") for note in notes]


def _check_lines(run: Run) -> list[Text]:
    check = run.check
    if check is None:
        return []
    verdict = "equal" if check.passed else "DIFFER"
    return [
        Text(
            f"gradients {verdict}: largest relative difference {check.max_relative_error:.1e} "
            f"({check.worst_parameter}) over {check.num_parameters} parameters, tolerance {check.tolerance:.0e}; loss "
            f"{check.loss:.6f} against {check.plain_loss:.6f}; plain model run on {check.reference}",
            style="green" if check.passed else "bold red",
        )
    ]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")


def _layer_table(profile: Profile, index: int, width: int) -> Table:
    """As many columns as fit into `width` characters; numbers are never cut, long names are shortened."""
    rows = [_LayerRow(x.name, x.kind, x.weight_bytes, x.costs[index]) for x in profile.layers]
    if profile.loss:
        rows.append(_LayerRow("(loss)", "", 0, profile.loss[index]))
    longest_s = max(row.total_s for row in rows)
    cells = [row.cells(longest_s) for row in rows]
    table = _table(f"{profile.model.name}, micro-batch size {profile.microbatch_sizes[index]}")
    columns = _columns_that_fit(cells, width)
    for name in columns:
        left = name in ("layer", "kind", "bar")
        title = {"bar": "", "spread": "±", "spread ": "±"}.get(name, name)
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[name] for name in columns))
    return table


def _columns_that_fit(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """All columns, less the least needed ones until the rest fits."""
    columns = list(rows[0])
    for spare in (None, "kind", "bar", "spread", "spread ", "gradient", "workspace", "output"):
        columns = [name for name in columns if name != spare]
        widths = [max(len(name.strip()), *(len(row[name]) for row in rows)) for name in columns]
        if sum(widths) + 2 * (len(columns) - 1) <= width:
            break
    return columns


@dataclass(frozen=True, slots=True)
class _LayerRow:
    """One line of the table of layers."""

    name: str
    kind: str
    weight_bytes: int
    cost: LayerCost

    @property
    def total_s(self) -> float:
        """Forward and backward together."""
        return self.cost.forward.median_s + self.cost.backward.median_s

    def cells(self, longest_s: float) -> dict[str, str]:
        """The text of every column; the bar is as long as the layer's share of the longest one."""
        cost = self.cost
        share = self.total_s / longest_s if longest_s else 0.0
        return {
            "layer": shortened(self.name, 28),
            "kind": shortened(self.kind, 20),
            "forward": seconds_text(cost.forward.median_s),
            "spread": _spread_text(cost.forward),
            "backward": seconds_text(cost.backward.median_s),
            "spread ": _spread_text(cost.backward),
            "bar": "█" * max(1, round(share * _BAR_CELLS)),
            "weights": bytes_text(self.weight_bytes),
            "stash": bytes_text(cost.stash_bytes),
            "workspace": bytes_text(max(cost.forward_workspace_bytes, cost.backward_workspace_bytes)),
            "output": bytes_text(cost.output_bytes),
            "gradient": bytes_text(cost.output_gradient_bytes),
        }


def shortened(name: str, width: int) -> str:
    """A name of at most `width` characters, its middle left out.

    >>> shortened("transformer.encoder.layer.11", 16)
    'transfo…layer.11'
    """
    if len(name) <= width:
        return name
    tail = width // 2
    return f"{name[: width - tail - 1]}…{name[-tail:]}"


def _spread_text(timing: Timing) -> str:
    """Half the distance of the quartiles, as a share of the median."""
    return percent_text((timing.high_s - timing.low_s) / 2 / timing.median_s) if timing.median_s else "–"


def _whole_line(profile: Profile, index: int, size: int) -> str:
    costs = [*(x.costs[index] for x in profile.layers), *([profile.loss[index]] if profile.loss else [])]
    whole = profile.whole[index]
    sums = [
        profile.overhead_s + sum(t.median_s for t in timings)
        for timings in zip(*((x.forward, x.backward) for x in costs), strict=True)
    ]
    pairs = zip(("forward", "backward"), sums, (whole.forward, whole.backward), strict=True)
    parts = [
        f"{name} {seconds_text(total)} against {seconds_text(t.median_s)}, {error_text(prediction_error(total, t.median_s, 'seconds'), 'seconds')}"
        for name, total, t in pairs
    ]
    return f"layers and the overhead of a stage ({seconds_text(profile.overhead_s)}) against the whole model: {', '.join(parts)}"


def _stage_row(plan: Plan, stage: Stage, timeline: Timeline) -> tuple[str, ...]:
    first, last = stage.layer_names[0], stage.layer_names[-1]
    idle_s = sum(x.duration_s for x in idle_pieces(timeline) if x.device == stage.index)
    capacity = plan.memory_limit_bytes
    peak = bytes_text(stage.memory.peak_bytes)
    communication_s = plan.num_microbatches * (stage.cost.activation_s + stage.cost.gradient_s)
    return (
        str(stage.index),
        f"{first} … {last} ({stage.num_layers})" if stage.num_layers > 1 else first,
        seconds_text(stage.cost.forward_s),
        seconds_text(timeline.mean_s(stage=stage.index, kind=ActionKind.BACKWARD)),
        seconds_text(communication_s),
        seconds_text(idle_s),
        f"{peak} of {bytes_text(capacity)}" if capacity else peak,
    )
