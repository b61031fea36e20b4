"""Paper and pens: names that fit, boxes as one path, and SVG files that can share a page."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gplan.core.units import counted
from gplan.reporting.charts.canvas import blank_figure, boxes, chart_style, end_of_name, short_names, to_svg, tooltip
from gplan.reporting.charts.pipeline_chart import pipeline_chart
from gplan.reporting.looks import Look
from tests.reporting.subjects import make_plan


@given(st.text(max_size=60), st.integers(2, 30))
def test_a_shortened_name_fits_and_keeps_its_end(name: str, longest: int) -> None:
    short = end_of_name(name, longest)
    assert len(short) <= longest
    assert name.endswith(short.removeprefix("…")) or name == short


@given(st.lists(st.text("ab.0", min_size=1, max_size=30), unique=True, max_size=30), st.integers(10, 22))
def test_layers_with_different_names_have_different_labels(names: list[str], longest: int) -> None:
    labels = short_names(names, longest)
    assert len(set(labels)) == len(names)
    assert all(len(x) <= longest for x in labels)


def test_labels_keep_the_numbers_of_blocks() -> None:
    names = [f"encoder.block.{i}.layer.0.SelfAttention.{x}" for i in range(12) for x in "qkv"]
    assert short_names(names, 15)[-1] == "11.0.v"
    assert short_names([*names, "decoder.block.0.layer.0.SelfAttention.q"], 15)[-1] == "decoder.0.0"


def test_counts_agree_with_their_noun() -> None:
    assert [counted(1, "layer"), counted(2, "layer"), counted(0, "micro-batch")] == [
        "1 layer",
        "2 layers",
        "0 micro-batches",
    ]


def test_boxes_without_data_draw_nothing() -> None:
    axes = blank_figure(2).subplots()
    nothing = np.zeros(0)
    boxes(axes, Look(name="x", colour="#123456"), left=nothing, right=nothing, bottom=nothing, height=1.0)
    assert not axes.patches


def test_many_boxes_are_one_path() -> None:
    axes = blank_figure(2).subplots()
    left = np.arange(1000.0)
    boxes(axes, Look(name="x", colour="#123456"), left=left, right=left + 0.5, bottom=0 * left, height=1.0)
    assert len(axes.patches) == 1
    assert axes.patches[0].get_path().vertices.max() == 999.5


def test_ids_and_their_references_carry_the_name_of_the_chart() -> None:
    with chart_style("mine"):
        figure = blank_figure(2)
        axes = figure.subplots()
        axes.bar([0, 1], [1, 2], hatch="//")
        axes.set_title('id="x" url(#x) 1.23456')
        svg = to_svg(figure, "mine").decode()
    ids = re.findall(r'<[^>]* id="([^"]*)"', svg)
    references = re.findall(r'(?:href="#|url\(#)([^")]*)', re.sub(r">[^<]*<", "><", svg))
    assert ids and all(x.startswith("mine-") for x in ids)
    assert references and set(references) <= set(ids)
    assert 'id="x" url(#x) 1.23456' in svg, "text is left as it is"


def test_a_dollar_in_a_name_is_no_formula() -> None:
    with chart_style("mine"):
        figure = blank_figure(2)
        figure.subplots().set_title("a$b_1$")
        assert "a$b_1$" in to_svg(figure, "mine").decode()


def test_a_mark_that_tells_has_its_words_in_the_svg_and_no_id() -> None:
    with chart_style("one"):
        figure = blank_figure(2)
        (mark,) = figure.subplots().plot([1], [1], marker="o")
        tooltip(mark, "<b> & 'c'", "second")
        svg = to_svg(figure, "one").decode()
    assert "<title>&lt;b&gt; &amp; 'c'&#10;second</title>" in svg
    assert "tooltip:" not in svg


def test_thousands_of_boxes_stay_small() -> None:
    sizes = []
    for num_microbatches in (64, 128):
        plan = make_plan(16, num_stages=8, num_microbatches=num_microbatches)
        with chart_style("pipeline"):
            sizes.append(len(to_svg(pipeline_chart(plan), "pipeline")))
    assert 100 < sizes[1] - sizes[0] < 120 * 2 * 8 * 64, "of each action: its box, its wait and its transfer"
