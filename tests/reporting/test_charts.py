"""The three charts, looked at as figures: what is drawn is what the frames say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, StepPatch
from msgspec import structs

from gplan.core import ActionKind, IdleCause, Run
from gplan.core.schedule import moment_text
from gplan.reporting.charts.memory_chart import holdings_chart, memory_chart
from gplan.reporting.charts.partition_chart import partition_chart
from gplan.reporting.charts.pipeline_chart import pipeline_chart
from gplan.reporting.looks import ACTIONS, BEFORE, CAPACITY, IDLE, MEASURED_PEAK, MEMORY, of_chunk
from gplan.simulation.bubble import idle_by_cause
from tests.evaluate.hosts import at_moments
from tests.made import make_profile
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named

MIB = 2**20


def bar_heights(axes: Axes, colour: str) -> list[float]:
    bars = [x for x in axes.containers if isinstance(x, BarContainer) and to_hex(x[0].get_facecolor()) == colour]
    return [bar.get_height() for container in bars for bar in container]


def legend_names(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def boxes_of(axes: Axes, colour: str) -> np.ndarray:
    """[n, 4]: left, bottom, right, top of every box of that colour."""
    paths = [x.get_path() for x in axes.patches if isinstance(x, PathPatch) and to_hex(x.get_facecolor()) == colour]
    corners = [path.vertices.reshape(-1, 5, 2) for path in paths]
    return np.concatenate([np.hstack([x[:, 0], x[:, 2]]) for x in corners]) if corners else np.zeros((0, 4))


def numbers_in(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_partition_chart_has_a_bar_per_layer_and_a_line_per_cut() -> None:
    plan = make_plan(9, num_stages=3)
    above = partition_chart(plan).axes[0]
    forward_ms = bar_heights(above, ACTIONS[ActionKind.FORWARD].colour)
    assert forward_ms == pytest.approx([1e3 * x for stage in plan.stages for x, _ in stage.layer_times_s])
    assert [line.get_xdata()[0] for line in above.lines] == [cut - 0.5 for cut in plan.cuts]


def test_the_stage_bars_end_at_the_load_of_each_stage() -> None:
    plan = make_plan(9, num_stages=3, recompute="always")
    below = partition_chart(plan).axes[1]
    ends = {}
    for bar in (bar for container in below.containers for bar in container):
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0.0), bar.get_x() + bar.get_width())
    assert max(ends.values()) == pytest.approx(1e3 * plan.proof.objective_s)
    assert len(ends) == 3


def test_a_run_has_two_bars_per_stage_and_a_plan_one() -> None:
    run = make_run()
    rows = [
        {bar.get_y() for container in partition_chart(x).axes[1].containers for bar in container}
        for x in (run, run.plan)
    ]
    assert [len(x) for x in rows] == [8, 4]


@pytest.mark.parametrize(("num_layers", "most"), [(3, 3), (26, 26), (60, 60), (100, 60)])
def test_layer_labels_thin_out_where_there_are_many(num_layers: int, most: int) -> None:
    plan = named(make_plan(num_layers, num_stages=3), [f"encoder.blocks.{i}.attention" for i in range(num_layers)])
    labels = partition_chart(plan).axes[0].get_xticklabels()
    assert num_layers / 2 <= len(labels) <= most
    assert all(len(label.get_text()) <= 22 for label in labels)


def test_the_legend_of_the_partition_names_only_what_is_there() -> None:
    plan = make_plan(profile=make_profile([1e-3] * 4), num_stages=2)
    assert legend_names(partition_chart(plan)) == ["forward", "backward"]
    again = make_plan(recompute="always")
    assert legend_names(partition_chart(again)) == ["forward", "backward", "recompute", "communication"]


def test_every_action_of_a_run_is_a_box_in_its_own_panel_and_place() -> None:
    run = make_run(make_plan(num_stages=4, num_microbatches=8))
    panels = pipeline_chart(run).axes
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        assert [len(boxes_of(axes, ACTIONS[kind].colour)) for axes in panels] == [32, 32]
    expected = sorted(1e3 * x.start_s for x in run.timeline.spans if x.action.kind is ActionKind.FORWARD)
    assert sorted(boxes_of(panels[1], ACTIONS[ActionKind.FORWARD].colour)[:, 0]) == pytest.approx(expected)


def test_predicted_and_measured_panels_share_one_time_axis_that_holds_both() -> None:
    run = make_run()
    above, below = pipeline_chart(run).axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] >= 1e3 * max(run.timeline.step_s, run.plan.prediction.step_s)


def test_the_panels_say_where_their_figures_come_from() -> None:
    titles = [axes.get_title(loc="left") for axes in pipeline_chart(make_run(engine="virtual")).axes]
    assert titles == ["Predicted", "Measured (virtual engine): simulated devices"]


def test_a_plan_alone_has_one_panel_and_no_measured_end() -> None:
    figure = pipeline_chart(make_plan())
    assert len(figure.axes) == 1
    assert "predicted end" not in legend_names(figure)


def test_idle_boxes_cover_exactly_the_idle_time_of_the_devices() -> None:
    run = make_run()
    timeline, axes = run.timeline, pipeline_chart(run).axes[1]
    boxes = {cause: boxes_of(axes, look.colour) for cause, look in IDLE.items()}
    seconds = {cause: (x[:, 2] - x[:, 0]).sum() / 1e3 for cause, x in boxes.items()}
    assert sum(seconds.values()) == pytest.approx(sum(map(timeline.idle_s, range(timeline.num_devices))))
    waited_s = seconds[IdleCause.OPTIMIZER]
    assert waited_s == pytest.approx(idle_by_cause(timeline)[IdleCause.OPTIMIZER])
    assert waited_s > 0


def test_device_zero_is_the_top_row() -> None:
    axes = pipeline_chart(make_plan()).axes[0]
    low, high = axes.get_ylim()
    assert low > high
    assert axes.get_yticklabels()[0].get_text() == "device 0"


def test_micro_batch_numbers_stand_in_the_boxes_where_they_fit() -> None:
    wide = pipeline_chart(make_plan(num_stages=4, num_microbatches=4)).axes[0]
    assert sorted(numbers_in(wide)) == sorted(4 * 2 * ["0", "1", "2", "3"])
    narrow = pipeline_chart(make_plan(16, num_stages=8, num_microbatches=64)).axes[0]
    assert numbers_in(narrow) == []


def test_one_outlier_does_not_take_the_numbers_from_the_other_boxes() -> None:
    run = make_run(make_plan(num_stages=2, num_microbatches=20))
    first, *others = run.timeline.spans
    tiny = structs.replace(first, end_s=first.start_s + 1e-9)
    axes = pipeline_chart(replace(run, timeline=replace(run.timeline, spans=(tiny, *others)))).axes[1]
    assert len(numbers_in(axes)) == 79


def test_memory_bars_stack_to_the_predicted_peak_beside_the_measured_one() -> None:
    run = make_run()
    axes = memory_chart(run).axes[0]
    stacks = np.sum([bar_heights(axes, look.colour) for look in MEMORY.values()], axis=0)
    assert list(stacks) == pytest.approx([stage.memory.peak_bytes / MIB for stage in run.plan.stages])
    assert bar_heights(axes, MEASURED_PEAK.colour) == pytest.approx([peak / MIB for peak in run.peak_bytes])


def test_memory_that_was_not_measured_is_not_drawn() -> None:
    run = make_run(make_plan(4, num_stages=2))
    run = replace(run, peak_bytes=(0, 0))
    assert "0 B" not in [x.get_text() for x in memory_chart(run).axes[0].texts]
    for panel in holdings_chart(run).axes:
        assert MEASURED_PEAK.colour not in [line.get_color() for line in panel.lines]


def test_the_capacity_is_a_line_where_it_is_near() -> None:
    axes = memory_chart(make_plan(memory_bytes=100 * MIB)).axes[0]
    lines = [line for line in axes.lines if line.get_color() == CAPACITY.colour]
    assert [line.get_ydata()[0] for line in lines] == [100]
    assert axes.get_ylim()[1] > 100


def test_a_far_capacity_is_written_and_does_not_flatten_the_bars() -> None:
    plan = make_plan()
    plan = replace(plan, device=replace(plan.device, memory_bytes=2**40))
    axes = memory_chart(plan).axes[0]
    assert not axes.lines
    assert axes.get_title(loc="right") == "memory of each device: 1.00 TiB, above this axis"


def test_the_moment_of_the_peak_is_written_in_words() -> None:
    plan = make_plan(num_stages=2)
    moments = ("0F3", "optimizer")
    stages = [replace(x, memory=replace(x.memory, moment=y)) for x, y in zip(plan.stages, moments, strict=True)]
    labels = memory_chart(replace(plan, stages=tuple(stages))).axes[0].get_xticklabels()
    assert [x.get_text() for x in labels] == ["device 0\npeak: forward\nof micro-batch 3", "device 1\npeak: optimizer"]


def test_a_device_with_two_stages_is_one_row_that_names_both_and_shows_them_in_two_shades() -> None:
    axes = pipeline_chart(make_scheduled_plan("zb-v")).axes[0]
    assert [x.get_text() for x in axes.get_yticklabels()] == ["device 0\nstages 0, 3", "device 1\nstages 1, 2"]
    for kind, expected in ((ActionKind.FORWARD, [8, 8]), (ActionKind.WEIGHT_GRADIENT, [8, 8])):
        shades = [of_chunk(ACTIONS[kind], chunk, num_chunks=2).colour for chunk in range(2)]
        assert [len(boxes_of(axes, shade)) for shade in shades] == expected


def test_only_where_devices_have_several_stages_does_the_legend_explain_shades() -> None:
    both, one = (legend_names(pipeline_chart(make_scheduled_plan(x))) for x in ("interleaved-1f1b:2", "zb-h1"))
    assert "first to last stage of a device" in both
    assert "first to last stage of a device" not in one
    assert one[:3] == ["forward", "input gradient", "weight gradient (on stage 0 the whole backward)"]


def test_input_gradients_that_take_no_time_do_not_take_the_numbers_from_the_others() -> None:
    plan = make_scheduled_plan("zb-h1", num_microbatches=3)
    numbers = numbers_in(pipeline_chart(plan).axes[0])
    first, second = 3 * 2, 3 * 3  # F and W of the first stage, F, I and W of the second
    assert len(numbers) == first + second


def test_a_split_backward_is_two_parts_of_a_stages_cost() -> None:
    names = legend_names(partition_chart(make_scheduled_plan("zb-h1", recompute="always")))
    parts = ["forward", "backward", "input gradient", "weight gradient", "recompute", "communication"]
    assert names == parts, "layers have whole backwards"


def test_stages_say_their_device_where_a_device_has_several() -> None:
    labels = partition_chart(make_scheduled_plan("zb-v")).axes[1].get_yticklabels()
    assert labels[2].get_text() == "stage 2, device 1\ne … f (2)"


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:2", "zb-v"])
def test_memory_bars_of_devices_stack_the_peaks_of_their_stages(schedule: str) -> None:
    plan = make_scheduled_plan(schedule)
    axes = memory_chart(plan).axes[0]
    bars = [bar for container in axes.containers for bar in container]
    tops = [max(bar.get_y() + bar.get_height() for bar in bars if round(bar.get_center()[0]) == i) for i in range(2)]
    assert tops == pytest.approx([peak / MIB for peak in plan.device_peak_bytes])
    assert axes.get_xticklabels()[1].get_text().startswith("device 1\nstages 1, ")


def test_of_many_devices_the_memory_chart_names_numbers_alone() -> None:
    axes = memory_chart(make_plan(24, num_stages=12, num_microbatches=2)).axes[0]
    assert [x.get_text() for x in axes.get_xticklabels()] == [str(i) for i in range(12)]
    assert {text.get_rotation() for text in axes.texts} == {90}


def own_areas(axes: Axes, colour: str) -> np.ndarray:
    """[n, 3]: time, low and high of the steps of the area of that colour."""
    area = next(x for x in axes.patches if isinstance(x, StepPatch) and to_hex(x.get_facecolor()) == colour)
    high, edges, low = area.get_data()
    return np.stack([edges[:-1], low, high], axis=1)


def test_memory_over_time_rises_to_the_peak_of_each_device_and_marks_it() -> None:
    plan = make_scheduled_plan("interleaved-1f1b:2", recompute="always")
    panels = holdings_chart(plan).axes
    for axes, device in zip(panels, range(2), strict=True):
        marks = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o"]
        assert marks == pytest.approx([plan.device_peak_bytes[device] / MIB])
        highest = max(own_areas(axes, x.colour)[:, 2].max() for x in MEMORY.values() if x.name == "temporary")
        assert highest == pytest.approx(marks[0])
        moment = moment_text(plan.stages_of(device)[0].memory.moment, with_stage=True)
        assert numbers_in(axes)[0].endswith(f"in {moment}")


def test_memory_over_time_shows_measured_peak_and_limit_as_lines() -> None:
    run = make_run(make_plan(num_stages=2, memory_bytes=200 * MIB))
    axes = holdings_chart(run).axes[1]
    lines = [line.get_ydata()[0] for line in axes.lines if line.get_marker() != "o"]
    assert lines == pytest.approx([run.peak_bytes[1] / MIB, 200])


def test_a_plan_that_does_not_say_what_memory_is_made_of_has_no_chart_over_time() -> None:
    plan = make_plan(num_stages=2)
    assert holdings_chart(replace(plan, stages=tuple(replace(x, parts=None) for x in plan.stages))) is None


def test_of_many_devices_those_that_hold_most_are_shown() -> None:
    plan = make_plan(24, num_stages=12, num_microbatches=2)
    figure = holdings_chart(plan)
    most = sorted(sorted(range(12), key=lambda i: -plan.device_peak_bytes[i])[:8])
    assert [axes.get_ylabel() for axes in figure.axes] == [f"device {i}" for i in most]
    assert "the 8 of 12 devices with the largest peaks" in figure.get_suptitle()


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (8, 32)])
def test_charts_can_be_drawn_at_both_ends_of_the_range(num_stages: int, num_microbatches: int) -> None:
    run: Run = make_run(make_plan(8, num_stages=num_stages, num_microbatches=num_microbatches))
    for chart in (partition_chart, pipeline_chart, memory_chart, holdings_chart):
        figure = chart(run)
        figure.draw_without_rendering()
        assert figure.get_suptitle()


def test_a_model_that_weighs_nothing_and_a_layer_that_takes_no_time_can_be_drawn() -> None:
    plan = make_plan(profile=make_profile([1e-3, 0.0, 0.0]), num_stages=3)
    for chart in (partition_chart, pipeline_chart, memory_chart, holdings_chart):
        chart(make_run(plan)).draw_without_rendering()
    assert memory_chart(plan).axes[0].get_ylim() == (0, 1)


def test_where_backwards_are_in_halves_the_legend_says_that_stage_0_has_no_first() -> None:
    split, whole = (legend_names(pipeline_chart(make_scheduled_plan(x))) for x in ("zb-h1", "1f1b"))
    assert "weight gradient (on stage 0 the whole backward)" in split
    assert not any("stage 0" in name for name in whole)


def test_time_before_the_first_action_is_marked_on_every_device() -> None:
    run = make_run()
    late = replace(run, timeline=at_moments(run.timeline, lambda _, moment_s: moment_s + 0.5))
    figure, _, measured = (found := pipeline_chart(late)), *found.axes
    assert BEFORE.name in legend_names(figure) and BEFORE.name not in legend_names(pipeline_chart(run))
    assert len(boxes_of(measured, BEFORE.colour)) == run.plan.num_devices
    assert not len(boxes_of(figure.axes[0], BEFORE.colour))
