"""A profile as text: a table of layers for each micro-batch size, then the whole model and the machine.

Identical layers are one row. In the model's own order only neighbouring ones are, and those measured as the same layer,
which may alternate with others; their row is at the place of the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import LayerCost, Profile, SharedWeight, StepCost
from gplan.core.host_load import interruption_text
from gplan.core.precision import AS_MADE
from gplan.core.profile import group_equal
from gplan.core.units import (
    bytes_text,
    counted,
    error_text,
    flops_text,
    intensity_text,
    percent_text,
    seconds_text,
)
from gplan.evaluate.compare import prediction_error
from gplan.reporting.text.fitted_table import FittedTable, Line, limited, note_lines, shortened
from gplan.reporting.text.machine import device_text, link_text

Sort: TypeAlias = Literal["cost", "order", "memory"]
"""Which layer comes first: the most expensive one, the model's first, or the one that needs most memory."""

_BAR_CELLS = 8
_LAST_IN_ORDER = 20  # rows at the end that a cut table keeps: the head and the loss
_PASSES = ("forward", "backward")  # their quartiles are shown
_HALVES = ("first backward", "input gradient", "weight gradient")
_SPREADS = tuple(f"spread of {x}" for x in _PASSES)
_SPARE = (
    "kind", *_HALVES, "pending", "gradient", "bar", "output", "workspace", "intensity", *_SPREADS, "slowdown", "rate",
    "stash", "weights", "share",
)  # fmt: skip
_SPARE_BY_MEMORY = (
    "kind", *_SPREADS, *_HALVES, "intensity", "slowdown", "rate", "bar", "gradient", "pending", "output", "backward",
    "forward", "workspace", "share",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer, or several identical ones, or the loss; its costs are those of one layer."""

    names: tuple[str, ...]  # the full text, then shorter forms
    kind: str
    num_layers: int
    weight_bytes: int  # of each of them
    gradient_bytes: int
    cost: LayerCost
    is_sharing: bool = False  # uses a weight that other layers use too, which `weight_bytes` leaves out

    @property
    def time_s(self) -> float:
        """Forward and backward of one micro-batch, of all layers of the row."""
        return self.num_layers * (self.cost.forward.median_s + self.cost.backward.median_s)

    @property
    def held_bytes(self) -> int:
        """Weights, gradients and the stash of one micro-batch, of all layers of the row."""
        return self.num_layers * (self.weight_bytes + self.gradient_bytes + self.cost.stash_bytes)

    @property
    def num_flops(self) -> int:
        """Counted operations of one layer, forward and backward."""
        return sum(x.num_flops for x in (*self.cost.forward_work, *self.cost.backward_work))

    @property
    def work_bytes(self) -> int:
        """Bytes that these operations read and write."""
        return sum(x.num_bytes for x in (*self.cost.forward_work, *self.cost.backward_work))


def layer_table(title: str, rows: Sequence[LayerRow], profile: Profile, *, sort: Sort, is_limited: bool) -> FittedTable:
    """One line per row, sorted; a limited table says how many rows it leaves out.

    A share and a bar are of all layers of the row, the other figures of one. A time whose origin is not the profile's
    is marked with the first letter of its origin. Halves of the backward, slowdown beside others and counted operations have columns
    where the profile has them.
    """

    def amount(row: LayerRow) -> float:
        return row.held_bytes if sort == "memory" else row.time_s

    total, largest = sum(map(amount, rows)), max(map(amount, rows))
    keys = [x for x in (*_PASSES, *_HALVES) if any(x in row.cost.timings for row in rows)]
    with_spread = [x for x in _PASSES if any(row.cost.timings[x].num_samples for row in rows)]
    has_work, has_pending = any(row.num_flops for row in rows), any(row.cost.pending_bytes for row in rows)

    def cells(row: LayerRow) -> dict[str, str]:
        found = {"layer": row.names[0], "kind": shortened(row.kind, 20)}
        for key in keys:
            timing = row.cost.timings.get(key)
            mark = "" if timing is None or timing.origin == profile.origin else f"{timing.origin[0]} "
            found[key] = "–" if timing is None else mark + seconds_text(timing.median_s)
            if key in with_spread and timing is not None:
                spread = (timing.high_s - timing.low_s) / 2 / (timing.median_s or 1.0)
                found[f"spread of {key}"] = percent_text(spread) if timing.median_s else "–"
        if profile.num_neighbours:
            found["slowdown"] = f"× {row.cost.slow_down:.2f}"
        if has_work:
            time_s, flops, num_bytes = row.time_s / row.num_layers, row.num_flops, row.work_bytes
            found["rate"] = f"{flops_text(flops / time_s)}/s" if flops and time_s else "–"
            found["intensity"] = intensity_text(flops / num_bytes) if flops and num_bytes else "–"
        found["share"] = percent_text(amount(row) / total) if total else "–"
        found["bar"] = "█" * max(1, round(_BAR_CELLS * amount(row) / largest)) if amount(row) else ""
        found["weights"] = "shared" if row.is_sharing and not row.weight_bytes else bytes_text(row.weight_bytes)
        found["stash"] = bytes_text(row.cost.stash_bytes)
        if has_pending:
            found["pending"] = bytes_text(row.cost.pending_bytes)
        found["workspace"] = bytes_text(row.cost.workspace_bytes)
        found["output"] = bytes_text(row.cost.output_bytes)
        found["gradient"] = bytes_text(row.cost.output_gradient_bytes)
        return found

    ranked = rows if sort == "order" else sorted(rows, key=amount, reverse=True)
    table = FittedTable(
        title=title,
        lines=tuple(Line(cells=cells(row), shorter=row.names[1:]) for row in ranked),
        left=("kind", "bar"),
        heads={"bar": "", **dict.fromkeys(_SPREADS, "±")},
        spare=_SPARE_BY_MEMORY if sort == "memory" else _SPARE,
        legend={
            _SPREADS[0]: "half the distance of the quartiles",
            "slowdown": f"of times while {counted(profile.num_neighbours, 'other process')} of the host compute{'s' * (profile.num_neighbours == 1)}",
            "rate": "operations per second",
            "share": "of all weights, gradients and stashes"
            if sort == "memory"
            else "of forward and backward of all layers",
            "stash": "what a micro-batch keeps for its backward",
        },
    )
    num_last = _LAST_IN_ORDER if sort == "order" else 0
    return limited(table, num_last=num_last, remedy="gplan show --all") if is_limited else table


def profile_view(
    profile: Profile, *, sort: Sort = "order", microbatch_sizes: Sequence[int] | None = None, is_folded: bool = True
) -> RenderableType:
    """A table for each of `microbatch_sizes` (None: all); below, the sum of the layers against the whole model.

    Folded, identical layers are one row and a long table is cut; else every layer has its own row.
    """
    sizes = profile.microbatch_sizes
    shown = sizes if microbatch_sizes is None else microbatch_sizes
    views: list[RenderableType] = []
    for index, size in enumerate(sizes):
        if size in shown:
            rows = _rows(profile, index, sort=sort, is_folded=is_folded)
            on_device = f", on {profile.device.name}" if profile.device.kind == "cuda" else ""
            title = f"{profile.model.name}, micro-batch size {size}{on_device}: times and bytes per micro-batch"
            views.append(layer_table(title, rows, profile, sort=sort, is_limited=is_folded))
            origins = dict.fromkeys(timing.origin for row in rows for timing in row.cost.timings.values())
            marks = "".join(f"; {x[0]}: {x}" for x in origins if x != profile.origin)
            work = "; operations counted" if any(row.num_flops for row in rows) else ""
            views.append(Text(f"times and bytes {profile.origin}{marks}{work}"))
            views.append(Text(_whole_line(profile, index)))
    for index, size in enumerate(sizes):
        if size not in shown:
            seconds = profile.one_stage_s(index)
            times = f"forward {seconds_text(seconds[0])}, backward {seconds_text(seconds[1])}"
            per_sample = f"{seconds_text(sum(seconds) / size)} per sample"
            views.append(
                Text(f"micro-batch size {size}: {times}, {per_sample}; --microbatch-size {size} shows its layers")
            )
    views.extend(Text(line) for line in _model_lines(profile))
    return Group(*views, *note_lines(profile.all_notes))


def _rows(profile: Profile, index: int, *, sort: Sort, is_folded: bool) -> list[LayerRow]:
    """The layers in the model's order, identical ones folded, and the loss."""
    places = range(len(profile.layers))
    keys: Sequence[Hashable] = places
    if is_folded:
        keys = _keys_in_order(profile) if sort == "order" else [profile.cost_key(i) for i in places]
    rows = [_row(profile, members, index) for members in group_equal(keys)]
    if profile.loss:
        loss = profile.loss[index]
        rows.append(LayerRow(names=("(loss)",), kind="", num_layers=1, weight_bytes=0, gradient_bytes=0, cost=loss))
    return rows


def _keys_in_order(profile: Profile) -> list[Hashable]:
    """Equal keys for neighbouring identical layers, and for layers measured as the same one."""
    figures = [profile.cost_key(i) for i in range(len(profile.layers))]
    keys: list[Hashable] = []
    for i, layer in enumerate(profile.layers):
        if i and figures[i] == figures[i - 1]:
            keys.append(keys[-1])
        else:
            keys.append(i if layer.same_as is None else figures[i])
    return keys


def _row(profile: Profile, members: tuple[int, ...], index: int) -> LayerRow:
    layer = profile.layers[members[0]]
    return LayerRow(
        names=_names(profile, members),
        kind=layer.kind,
        num_layers=len(members),
        weight_bytes=layer.weight_bytes,
        gradient_bytes=layer.gradient_bytes,
        cost=layer.costs[index],
        is_sharing=any(members[0] in weight.layers for weight in profile.tied_weights),
    )


def _names(profile: Profile, members: tuple[int, ...]) -> tuple[str, ...]:
    """The name of a row: the full text, then shorter forms."""
    first, last = (profile.layers[i] for i in (members[0], members[-1]))
    count, ends = len(members), f"{first.name} … {last.name}"
    source = "" if first.same_as is None else profile.layers[first.same_as].name
    if count == 1:
        return (f"{first.name}, like {source}", first.name) if source else (first.name,)
    if source:
        return f"{ends}, {count} layers like {source}", f"{count} layers like {source}", f"{count} like {source}"
    shorter = f"{first.name} and {count - 1} like it", f"{first.name} × {count}"
    return (f"{ends}, {count} layers alike", *shorter) if members[-1] - members[0] == count - 1 else shorter


def _whole_line(profile: Profile, index: int) -> str:
    sums = profile.one_stage_s(index)
    text = f"layers and the overhead of a stage ({seconds_text(profile.overhead_s)})"
    names = ("forward", "backward")
    if not profile.whole_model:
        parts = [f"{name} {seconds_text(total)}" for name, total in zip(names, sums, strict=True)]
        return f"{text}: {', '.join(parts)}; the model was not measured in one piece"
    whole = profile.whole_model[index]
    parts = [
        f"{name} {seconds_text(total)} against {seconds_text(t.median_s)}, "
        f"{error_text(prediction_error(total, t.median_s, 'seconds'), 'seconds')}"
        for name, total, t in zip(names, sums, (whole.forward, whole.backward), strict=True)
    ]
    if whole.allocated_bytes:
        predicted = profile.one_stage_bytes(index)
        parts.append(
            f"peak memory above the weights {bytes_text(predicted)} against {bytes_text(whole.allocated_bytes)}, "
            f"{error_text(prediction_error(predicted, whole.allocated_bytes, 'bytes'), 'bytes')}"
            + (f" ({bytes_text(whole.reserved_bytes)} reserved)" if whole.reserved_bytes else "")
        )
    return f"{text} against the whole model: {', '.join(parts)}"


def _model_lines(profile: Profile) -> Iterator[str]:
    step, found, engine = profile.step, profile.precision, ""
    optimizer = (
        f"optimizer {step.optimizer_name}: {seconds_text(step.optimizer.median_s)} per step, zero_grad "
        f"{seconds_text(step.zero_grad.median_s)} ({step.optimizer.origin}), state {bytes_text(step.state_bytes)}"
    )
    if step == StepCost.none(origin=step.optimizer.origin):
        optimizer = "no optimizer, or nothing to train"
    if profile.engine is not None:
        of_sending = seconds_text(profile.engine.sending.transfer_s(2**20))
        around = f", {seconds_text(profile.engine.step_s)} around a step" if profile.engine.step_s else ""
        after = seconds_text(profile.engine.action_s)
        engine = f"engine: {after} after an action, {of_sending} more to send 1 MiB{around}; "
    yield (
        f"{optimizer}; link: {link_text(profile.link)}; {engine}"
        + (f"the loss is a {profile.loss_reduction} over the samples" if profile.loss else "no loss was measured")
    )
    if found != AS_MADE:
        in_state = f", {bytes_text(step.master_bytes)} of them in the optimizer's state" if step.master_bytes else ""
        yield (
            f"precision {found.name}: parameters in {found.parameters}, computed in {found.compute}, gradients accumulated "
            f"in {found.gradients}" + (f", master weights in float32{in_state}" if found.master_weights else "")
        )
    by_users: dict[tuple[int, ...], list[SharedWeight]] = {}
    for weight in profile.tied_weights:
        by_users.setdefault(weight.layers, []).append(weight)
    for layers, weights in by_users.items():
        users = ", ".join(profile.layers[i].name for i in layers)
        names = weights[0].name if len(weights) == 1 else f"{len(weights)} weights, {weights[0].name} …"
        size = bytes_text(sum(x.weight_bytes for x in weights))
        yield f"shared by {users}: {names}, {size}, not in their weights above"
    num_refused = profile.num_refused
    left_out = f"{num_refused} left out as {interruption_text(profile.host_load)}" if num_refused else "none left out"
    yield (
        f"{profile.num_parameters:,} parameters in {len(profile.layers):,} layers; "
        + (f"{profile.num_samples} samples, {left_out}; " if profile.num_samples else "")
        + device_text(profile.device)
    )
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    yield f"made {profile.created}" + (f" with {versions}" if versions else "")
