"""A profile as text: a table of layers for each micro-batch size, then the whole model and the machine.

Identical layers are one row. In the model's own order only neighbouring ones are, and those measured as the same layer,
which may alternate with others; their row is at the place of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.core import LayerCost, Origin, Profile, SharedWeight, StepCost
from gplan.core.host_load import interruption_text
from gplan.core.precision import AS_MADE
from gplan.core.profile import group_equal
from gplan.core.units import (
    bytes_text,
    error_text,
    flops_text,
    intensity_text,
    percent_text,
    seconds_text,
)
from gplan.evaluate.compare import prediction_error
from gplan.evaluate.profile_difference import LOSS
from gplan.reporting.text.fitted_table import Column, FittedTable, Line, limited, names_of_equal, note_lines, shortened
from gplan.reporting.text.machine import device_text, link_text

Sort: TypeAlias = Literal["cost", "order", "memory"]
"""Which layer comes first: the most expensive one, the model's first, or the one that needs most memory."""

_BAR_CELLS = 8
_LAST_IN_ORDER = 20  # rows at the end that a cut table keeps: the head and the loss
_PASSES = ("forward", "backward")  # their quartiles are shown
_HALVES = ("first backward", "input gradient", "weight gradient")
_SPARE = (
    "kind", *_HALVES, "pending", "gradient", "bar", "output", "workspace", "intensity", "spread", "contention", "rate",
    "stash", "weights", "share",
)  # fmt: skip
_SPARE_BY_MEMORY = (
    "kind", "spread", *_HALVES, "intensity", "contention", "rate", "bar", "gradient", "pending", "output", "backward",
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


_Shown: TypeAlias = tuple[Column, Callable[[LayerRow], str]]
"""A column and its text for a row."""


def layer_table(title: str, rows: Sequence[LayerRow], profile: Profile, *, sort: Sort, is_limited: bool) -> FittedTable:
    """One line per row, sorted; a limited table says how many rows it leaves out.

    A share and a bar are of all layers of the row, the other figures of one. A time whose origin is not the profile's
    is marked with the first letter of its origin.
    """

    def amount(row: LayerRow) -> float:
        return row.held_bytes if sort == "memory" else row.time_s

    shown: list[_Shown] = [
        (Column(key="layer", is_left=True, is_flexible=True), lambda row: row.names[0]),
        (Column(key="kind", is_left=True), lambda row: shortened(row.kind, 20)),
        *_time_columns(rows, profile),
        *_share_columns(rows, amount),
        *_byte_columns(rows),
    ]
    ranked = rows if sort == "order" else sorted(rows, key=amount, reverse=True)
    table = FittedTable(
        title=title,
        columns=tuple(column for column, _ in shown),
        lines=tuple(Line(cells=tuple(text(row) for _, text in shown), shorter=row.names[1:]) for row in ranked),
        spare=_SPARE_BY_MEMORY if sort == "memory" else _SPARE,
    )
    num_last = _LAST_IN_ORDER if sort == "order" else 0
    return limited(table, num_last=num_last, remedy="gplan show --all") if is_limited else table


def marked_origins(rows: Sequence[LayerRow], profile: Profile) -> tuple[Origin, ...]:
    """The origins that times in the table are marked with."""
    timings = [timing for row in rows for timing in row.cost.timings.values()]
    return tuple(dict.fromkeys(x.origin for x in timings if x.origin != profile.origin))


def _time_columns(rows: Sequence[LayerRow], profile: Profile) -> Iterator[_Shown]:
    """Times with their spread; if the profile has them, halves of the backward, contention and counted operations."""
    for key in (*_PASSES, *_HALVES):
        if any(key in row.cost.timings for row in rows):
            yield Column(key=key), partial(_time_text, key=key, usual=profile.origin)
        if key in _PASSES and any(row.cost.timings[key].num_samples for row in rows):
            yield Column(key="spread", title="±"), partial(_spread_text, key=key)
    if profile.num_neighbours:
        yield Column(key="contention"), lambda row: f"× {row.cost.contention:.2f}"
    if any(row.num_flops for row in rows):
        yield Column(key="rate"), _rate_text
        yield Column(key="intensity"), _intensity_text


def _share_columns(rows: Sequence[LayerRow], amount: Callable[[LayerRow], float]) -> Iterator[_Shown]:
    """The share of the model as a number, and that of the largest row as a bar."""
    total, largest = sum(map(amount, rows)), max(map(amount, rows))
    yield Column(key="share"), lambda row: percent_text(amount(row) / total) if total else "–"
    yield (
        Column(key="bar", title="", is_left=True),
        lambda row: "█" * max(1, round(_BAR_CELLS * amount(row) / largest)) if amount(row) else "",
    )


def _byte_columns(rows: Sequence[LayerRow]) -> Iterator[_Shown]:
    yield (
        Column(key="weights"),
        lambda row: "shared" if row.is_sharing and not row.weight_bytes else bytes_text(row.weight_bytes),
    )
    yield Column(key="stash"), lambda row: bytes_text(row.cost.stash_bytes)
    if any(row.cost.pending_bytes for row in rows):
        yield Column(key="pending"), lambda row: bytes_text(row.cost.pending_bytes)
    yield Column(key="workspace"), lambda row: bytes_text(row.cost.workspace_bytes)
    yield Column(key="output"), lambda row: bytes_text(row.cost.output_bytes)
    yield Column(key="gradient"), lambda row: bytes_text(row.cost.output_gradient_bytes)


def _time_text(row: LayerRow, *, key: str, usual: Origin) -> str:
    timing = row.cost.timings.get(key)
    if timing is None:
        return "–"
    text = seconds_text(timing.median_s)
    return text if timing.origin == usual else f"{timing.origin[0]} {text}"


def _spread_text(row: LayerRow, *, key: str) -> str:
    """Half the distance between the quartiles, as a share of the median."""
    timing = row.cost.timings[key]
    return percent_text((timing.high_s - timing.low_s) / 2 / timing.median_s) if timing.median_s else "–"


def _rate_text(row: LayerRow) -> str:
    """Counted operations over the time of one layer."""
    time_s = row.time_s / row.num_layers
    return f"{flops_text(row.num_flops / time_s)}/s" if row.num_flops and time_s else "–"


def _intensity_text(row: LayerRow) -> str:
    return intensity_text(row.num_flops / row.work_bytes) if row.num_flops and row.work_bytes else "–"


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
            title = f"{profile.model.name}, micro-batch size {size}: times and bytes per micro-batch"
            views.append(layer_table(title, rows, profile, sort=sort, is_limited=is_folded))
            views.extend(Text(line) for line in (*_origin_lines(profile, rows), _whole_line(profile, index)))
    views.extend(Text(_size_line(profile, index)) for index, size in enumerate(sizes) if size not in shown)
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
        rows.append(LayerRow(names=(LOSS,), kind="", num_layers=1, weight_bytes=0, gradient_bytes=0, cost=loss))
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
        is_sharing=any(members[0] in weight.layers for weight in profile.shared_weights),
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
    shorter = names_of_equal(first.name, count)
    return (f"{ends}, {count} layers alike", *shorter) if members[-1] - members[0] == count - 1 else shorter


def _origin_lines(profile: Profile, rows: Sequence[LayerRow]) -> Iterator[str]:
    """Where the figures of the table come from."""
    marks = "".join(f"; {x[0]}: {x}" for x in marked_origins(rows, profile))
    work = "; operations counted" if any(row.num_flops for row in rows) else ""
    yield f"times and bytes {profile.origin}{marks}{work}"
    if profile.num_neighbours:
        yield (
            "contention: the factor on the times while other processes compute on the host "
            f"({profile.num_neighbours} during the measurement)"
        )


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


def _size_line(profile: Profile, index: int) -> str:
    """The costs of a micro-batch size without a table."""
    size, (forward_s, backward_s) = profile.microbatch_sizes[index], profile.one_stage_s(index)
    return (
        f"micro-batch size {size}: forward {seconds_text(forward_s)}, backward {seconds_text(backward_s)}, "
        f"{seconds_text((forward_s + backward_s) / size)} per sample; --microbatch-size {size} shows its layers"
    )


def _optimizer_text(step: StepCost) -> str:
    if step == StepCost.none(origin=step.optimizer.origin):
        return "no optimizer, or nothing to train"
    return (
        f"optimizer {step.optimizer_name}: {seconds_text(step.optimizer.median_s)} per step, zero_grad "
        f"{seconds_text(step.zero_grad.median_s)} ({step.optimizer.origin}), state {bytes_text(step.state_bytes)}"
    )


def _model_lines(profile: Profile) -> Iterator[str]:
    yield (
        f"{_optimizer_text(profile.step)}; link: {link_text(profile.link)}; {_engine_text(profile)}"
        + (f"the loss is a {profile.loss_reduction} over the samples" if profile.loss else "no loss was measured")
    )
    if profile.precision != AS_MADE:
        yield _precision_text(profile)
    by_users: dict[tuple[int, ...], list[SharedWeight]] = {}
    for weight in profile.shared_weights:
        by_users.setdefault(weight.layers, []).append(weight)
    for layers, weights in by_users.items():
        users = ", ".join(profile.layers[i].name for i in layers)
        names = weights[0].name if len(weights) == 1 else f"{len(weights)} weights, {weights[0].name} …"
        size = bytes_text(sum(x.weight_bytes for x in weights))
        yield f"shared by {users}: {names}, {size}, not in their weights above"
    yield (
        f"{profile.num_parameters:,} parameters in {len(profile.layers):,} layers; "
        + (f"{profile.num_samples} samples, {_left_out_text(profile)}; " if profile.num_samples else "")
        + device_text(profile.device)
    )
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions)
    yield f"made {profile.created}" + (f" with {versions}" if versions else "")


def _precision_text(profile: Profile) -> str:
    """What is stored and computed in what; the bytes of master weights."""
    found, masters = profile.precision, profile.step.master_bytes
    in_state = f", {bytes_text(masters)} of them in the optimizer's state" if masters else ""
    return (
        f"precision {found.name}: parameters in {found.parameters}, computed in {found.compute}, gradients accumulated in "
        f"{found.gradients}" + (f", master weights in float32{in_state}" if found.master_weights else "")
    )


def _left_out_text(profile: Profile) -> str:
    if not profile.num_refused:
        return "none left out"
    return f"{profile.num_refused} left out as {interruption_text(profile.host_load)}"


def _engine_text(profile: Profile) -> str:
    """The overhead of the engine, if it was measured."""
    if profile.engine is None:
        return ""
    of_sending = seconds_text(profile.engine.sending.transfer_s(2**20))
    around = f", {seconds_text(profile.engine.step_s)} around a step" if profile.engine.step_s else ""
    return f"engine: {seconds_text(profile.engine.action_s)} after an action, {of_sending} more to send 1 MiB{around}; "
