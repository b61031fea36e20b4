"""The three charts, looked at as figures: what is drawn is what the frames say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from gplan.nouns import ActionKind, Run
from gplan.reporting.colours import ACTIONS, CAPACITY, IDLE, MEASURED_PEAK, MEMORY
from gplan.reporting.frames import layers_frame
from gplan.reporting.memory_chart import memory_chart
from gplan.reporting.partition_chart import partition_chart
from gplan.reporting.pipeline_chart import pipeline_chart
from tests.made import make_profile
from tests.reporting.subjects import make_plan, make_run, named

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
    assert forward_ms == pytest.approx(list(1e3 * layers_frame(plan)["forward_s"]))
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
    assert titles == ["Predicted (computed)", "Measured (virtual engine): devices exist on the clock only"]


def test_a_plan_alone_has_one_panel_and_no_measured_end() -> None:
    figure = pipeline_chart(make_plan())
    assert len(figure.axes) == 1
    assert "predicted end" not in legend_names(figure)


def test_idle_boxes_cover_exactly_the_bubble() -> None:
    run = make_run()
    timeline, axes = run.timeline, pipeline_chart(run).axes[1]
    boxes = np.concatenate([boxes_of(axes, look.colour) for look in IDLE.values()])
    available_s = timeline.num_devices * (timeline.loop_end_s - timeline.loop_start_s)
    assert (boxes[:, 2] - boxes[:, 0]).sum() == pytest.approx(1e3 * timeline.bubble * available_s)


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
    tiny = replace(first, end_s=first.start_s + 1e-9)
    axes = pipeline_chart(replace(run, timeline=replace(run.timeline, spans=(tiny, *others)))).axes[1]
    assert len(numbers_in(axes)) == 79


def test_memory_bars_stack_to_the_predicted_peak_beside_the_measured_one() -> None:
    run = make_run()
    axes = memory_chart(run).axes[0]
    stacks = np.sum([bar_heights(axes, look.colour) for look in MEMORY.values()], axis=0)
    assert list(stacks) == pytest.approx([stage.memory.peak_bytes / MIB for stage in run.plan.stages])
    assert bar_heights(axes, MEASURED_PEAK.colour) == pytest.approx([peak / MIB for peak in run.peak_bytes])


def test_the_capacity_is_a_line_where_it_is_near() -> None:
    axes = memory_chart(make_plan(memory_bytes=200 * MIB)).axes[0]
    lines = [line for line in axes.lines if line.get_color() == CAPACITY.colour]
    assert [line.get_ydata()[0] for line in lines] == [200]
    assert axes.get_ylim()[1] > 200


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
    assert [x.get_text() for x in labels] == ["stage 0\npeak: forward 3", "stage 1\npeak: optimizer"]


@pytest.mark.parametrize("num_stages", [1, 2, 8])
@pytest.mark.parametrize("num_microbatches", [1, 64])
def test_charts_can_be_drawn_at_both_ends_of_the_range(num_stages: int, num_microbatches: int) -> None:
    run: Run = make_run(make_plan(8, num_stages=num_stages, num_microbatches=num_microbatches))
    for chart in (partition_chart, pipeline_chart, memory_chart):
        figure = chart(run)
        figure.draw_without_rendering()
        assert figure.get_suptitle()


def test_a_model_that_weighs_nothing_and_a_layer_that_takes_no_time_can_be_drawn() -> None:
    plan = make_plan(profile=make_profile([1e-3, 0.0, 0.0]), num_stages=3)
    for chart in (partition_chart, pipeline_chart, memory_chart):
        chart(make_run(plan)).draw_without_rendering()
    assert memory_chart(plan).axes[0].get_ylim() == (0, 1)
