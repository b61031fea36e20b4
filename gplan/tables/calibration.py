"""A calibration as text: what was learned of the profile, and what that did for plans that taught nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gplan.nouns import Calibration, HeldOut, KindDrift
from gplan.tables.fitting import Column, FittedTable, Line
from gplan.units import error_text, seconds_text


def calibration_view(calibration: Calibration) -> RenderableType:
    """The factors, and the errors without and with them of the plans that were held out."""
    return Group(
        _drift_table(calibration),
        *_other_lines(calibration),
        Text(),
        *_checks(calibration.held_out, is_helpful=calibration.helps),
    )


def _drift_table(calibration: Calibration) -> FittedTable:
    return FittedTable(
        title="learned: the times of the profile, by kind of layer",
        columns=(Column(key="kind", is_left=True, is_flexible=True), Column(key="forward"), Column(key="backward")),
        lines=tuple(_drift_line(x) for x in calibration.kinds),
    )


def _drift_line(drift: KindDrift) -> Line:
    return Line(cells=(drift.kind, _factor_text(drift.forward), _factor_text(drift.backward)))


def _other_lines(calibration: Calibration) -> Iterator[Text]:
    factors = {
        f"contention of {calibration.num_devices} devices": calibration.contention,
        "optimizer": calibration.optimizer,
        "transfers": calibration.link,
    }
    said = ", ".join(f"{name} {_factor_text(factor)}" for name, factor in factors.items())
    yield Text(f"{said}; the engine takes {seconds_text(calibration.action_s)} after every action")
    learned = calibration.learned_from
    yield Text(f"learned with the {calibration.engine} engine from: {', '.join(learned)}", style="dim")


def _checks(held_out: tuple[HeldOut, ...], *, is_helpful: bool) -> Iterator[RenderableType]:
    if not held_out:
        yield Text("no plan was left to check it by, so `gplan balance` uses it only where it is named", style="yellow")
        return
    yield FittedTable(
        title="the step of plans that taught nothing, predicted without and with the calibration",
        columns=(
            Column(key="plan", is_left=True, is_flexible=True),
            *(Column(key=x) for x in ("measured", "without", "error without", "with", "error with")),
        ),
        lines=tuple(_check_line(x) for x in held_out),
        spare=("without", "with"),
    )
    if not is_helpful:
        yield Text("on average it does not help, so `gplan balance` uses it only where it is named", style="yellow")


def _check_line(check: HeldOut) -> Line:
    cells = (
        check.label,
        seconds_text(check.measured_s),
        seconds_text(check.before_s),
        error_text(check.error_before, "seconds"),
        seconds_text(check.after_s),
        error_text(check.error_after, "seconds"),
    )
    return Line(cells=cells)


def _factor_text(factor: float) -> str:
    return f"× {factor:.3f}"
