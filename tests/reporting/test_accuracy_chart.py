"""Predicted over measured, and every error: a mark for all that is compared."""

from __future__ import annotations

from dataclasses import replace

from gplan.evaluate.compare import THROUGHPUT, compare
from gplan.reporting.charts.accuracy_chart import accuracy_chart, errors_chart
from gplan.reporting.charts.canvas import chart_style, to_svg
from gplan.reporting.text.run import quantity_name
from tests.reporting.subjects import make_plan, make_run


def test_every_time_and_every_peak_has_a_mark_at_its_two_values() -> None:
    run = make_run(make_plan(4, num_stages=2))
    figure = accuracy_chart(run)
    assert figure is not None
    times, memory = figure.axes
    rows = [x for x in compare(run).rows if x.predicted > 0 and x.measured > 0]
    marks = [line for line in times.lines if line.get_gid()]
    assert len(marks) == sum(x.unit == "seconds" for x in rows)
    peaks = [(float(x.get_xdata()[0]), float(x.get_ydata()[0])) for x in memory.lines if x.get_gid()]  # type: ignore[arg-type,index]
    mib = 2**20
    assert peaks == [(m / mib, p / mib) for p, m in zip(run.plan.device_peak_bytes, run.peak_bytes, strict=True)]


def test_every_error_is_on_the_line_of_its_quantity() -> None:
    run = make_run(make_plan(4, num_stages=2))
    figure = errors_chart(run)
    assert figure is not None
    (axes,) = figure.axes
    names = [x.get_text() for x in axes.get_yticklabels()]
    found = sorted((names[int(x.get_ydata()[0])], float(x.get_xdata()[0])) for x in axes.lines if x.get_gid())  # type: ignore[arg-type,index]
    rows = (x for x in compare(run).rows if x.error is not None and x.measured and x.quantity != THROUGHPUT)
    assert found == sorted((quantity_name(x.quantity), x.error) for x in rows)


def test_an_error_beyond_the_axis_stands_at_its_end_in_words() -> None:
    run = make_run(make_plan(2, num_stages=1))
    far = replace(run, peak_bytes=(run.plan.peak_bytes // 5,))
    figure = errors_chart(far)
    assert figure is not None
    assert "+400.0 %" in [x.get_text() for x in figure.axes[0].texts]


def test_marks_tell_their_quantity_and_both_values_in_the_svg() -> None:
    with chart_style("accuracy"):
        figure = accuracy_chart(make_run(make_plan(2, num_stages=2)))
        assert figure is not None
        svg = to_svg(figure, "accuracy").decode()
    assert '<g class="point"><title>peak memory of stage 1&#10;predicted ' in svg


def test_a_plan_alone_has_neither_chart() -> None:
    assert accuracy_chart(make_plan()) is None
    assert errors_chart(make_plan()) is None
