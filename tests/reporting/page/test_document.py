"""The HTML page: one file, nothing from outside, every name escaped, honest about what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gplan.core import Run
from gplan.reporting.analysis import PlanAnalysis, analysis_of
from gplan.reporting.charts.canvas import Drawing, chart_style, to_svg
from gplan.reporting.looks import NEUTRALS
from gplan.reporting.page.document import page
from gplan.reporting.page.figures import inline_svg
from gplan.reporting.report_folder import CHARTS
from gplan.reporting.subject import Subject, plan_of
from gplan.strategy_search.planner import balance
from tests.made import SLOW_ENGINE, make_profile
from tests.reporting.subjects import make_plan, make_run, make_scheduled_plan, named

ATTACK = "<script>alert('x')</script>\"'<!--</style>"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Collects tags, ids and text, and notes tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def small_run(engine: str = "torch") -> Run:
    return make_run(make_plan(4, num_stages=2, num_microbatches=2), engine=engine)


def svg_drawings(subject: Subject) -> list[Drawing]:
    """The charts as SVG only: PNG files are not part of a page."""
    choices = analysis_of(plan_of(subject), None)
    drawings = []
    for name, chart in CHARTS.items():
        with chart_style(name):
            figure = chart(subject, choices)
            if figure is not None:
                drawings.append(Drawing(name=name, png=b"", svg=to_svg(figure, name)))
    return drawings


def without_charts(subject: Subject) -> str:
    return page(subject, (), analysis_of(plan_of(subject), None))


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    return svg_drawings(small_run())


@pytest.fixture(scope="module")
def run_page(drawings: list[Drawing]) -> str:
    run = small_run()
    return page(run, drawings, analysis_of(run.plan, None))


def test_names_from_a_file_are_escaped_wherever_they_appear() -> None:
    plan = named(make_plan(4, num_stages=2, num_microbatches=1), [ATTACK, '"><img src=x onerror=y>', "ok", ATTACK])
    hostile = replace(
        plan,
        model=replace(plan.model, name=ATTACK, settings=((ATTACK, ATTACK),)),
        device=replace(plan.device, name=ATTACK),
        notes=(ATTACK,),
    )
    run = replace(make_run(hostile, engine=ATTACK), created=ATTACK, versions=((ATTACK, ATTACK),))
    html = without_charts(run)
    tags = Reader(html).tags
    assert tags.count("script") == 2, "the numbers of the pipeline, and the page's own"
    assert tags.count("style") == 1
    assert "img" not in tags
    assert "&lt;script&gt;" in html
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert ATTACK in data["stages"][0][1], "and is whole again when it is read"


def test_the_page_asks_nothing_of_the_network(run_page: str) -> None:
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", run_page)
    assert not re.search(r"https?://|//cdn|@import|<link|<iframe|src=|fetch\(|XMLHttp|import\(", without_namespaces)
    assert not re.search(r"url\((?!#)", without_namespaces)
    assert "default-src 'none'" in run_page, "nor may it"


def test_the_page_is_well_formed_and_its_ids_are_unique(run_page: str) -> None:
    reader = Reader(run_page)
    assert (reader.open, reader.mismatched) == ([], [])
    assert len(set(reader.ids)) == len(reader.ids) > 100
    assert reader.tags.count("svg") == 6


def test_a_run_page_has_measured_computed_and_the_error(run_page: str) -> None:
    run, words = small_run(), Reader(run_page).text
    for expected in ("measured (torch engine)", "predicted", "How it was measured", "Stages", "The plan"):
        assert expected in words
    assert f"error {100 * (run.plan.prediction.step_s / run.timeline.step_s - 1):+.1f} %" in words


def test_a_plan_page_claims_nothing_measured() -> None:
    plan = make_plan(3, num_stages=2, num_microbatches=1)
    html = page(plan, svg_drawings(plan), analysis_of(plan, None))
    words = Reader(html).text
    assert "predicted" in words
    assert "How it was measured" not in words
    sheet_and_script = re.compile(r"<(style|script)>.*?</\1>", re.DOTALL)
    assert "measured" not in Reader(sheet_and_script.sub("", html)).text


def test_the_virtual_engine_is_labelled_at_the_top_in_the_table_and_in_the_chart(run_page: str) -> None:
    words = Reader(without_charts(small_run("virtual"))).text
    assert words.index("Virtual engine.") < words.index("Pipeline")
    assert "measured (virtual engine)" in words
    assert "Virtual engine." not in Reader(run_page).text


def test_notes_of_the_plan_are_on_the_page() -> None:
    plan = replace(make_plan(3, num_stages=2, num_microbatches=1), notes=("costs are interpolated",))
    assert "costs are interpolated" in Reader(without_charts(plan)).text


def test_neutral_colours_follow_the_screen_and_the_others_stay(run_page: str) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", run_page, flags=re.DOTALL))
    assert not [x.name for x in NEUTRALS if x.light in pictures]
    assert "var(--paper)" in pictures
    assert "#397af2" in pictures
    for neutral in NEUTRALS:
        assert f"--{neutral.name}: {neutral.light};" in run_page
        assert f"--{neutral.name}: {neutral.dark};" in run_page
    assert "#000000" not in pictures, "black would vanish on a dark screen"


def test_a_plan_with_several_stages_on_a_device_tells_stages_and_devices_apart() -> None:
    html = without_charts(make_scheduled_plan("zb-v", num_microbatches=2))
    assert "4 stages on 2 devices, zb-v, 2 micro-batches of 1, recompute never" in Reader(html).text
    assert '<th class="text">device</th><th>stage</th>' in html


def test_a_custom_order_is_not_written_out() -> None:
    order = "custom:0F0 0B0 / 1F0 1B0"
    html = without_charts(make_scheduled_plan(order, num_microbatches=1))
    assert order not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "2 stages, custom order, 1 micro-batch" in Reader(html).text


def test_only_charts_that_were_drawn_have_a_place() -> None:
    run, picture = small_run(), Drawing(name="memory", png=b"", svg=b"<svg></svg>")
    html = page(run, [picture], PlanAnalysis(choices=()))
    assert 'id="memory"' in html
    assert 'class="memory"' in html
    assert 'class="memory-timeline"' not in html
    assert 'id="choices"' not in html, "a section without a chart"


def test_the_contents_lead_to_every_section(run_page: str) -> None:
    sections = re.findall(r'<section id="([^"]*)"', run_page)
    assert re.findall(r'href="#([^"-]*)"><?(?=[A-Z])', run_page) == sections
    assert sections == ["partition", "pipeline", "memory", "accuracy", "stages", "measuring", "plan"]


def test_with_its_profile_the_page_says_why_and_compares() -> None:
    profile = make_profile([1e-3, 2e-3, 3e-3, 2e-3])
    plan = balance(profile, num_devices=2, num_microbatches=4)
    html = page(plan, (), analysis_of(plan, profile))
    words = Reader(html).text
    for expected in ("computes longest", "What would help", "3 devices (one more)"):
        assert expected in words
    sentences = re.findall(r'<div class="words">(.*?)</div>', html)
    assert "&nbsp;%" in sentences[0] and " %" not in sentences[0], "no line begins with a percent sign"


def test_where_the_step_goes_has_the_time_of_the_engine_where_there_is_any() -> None:
    for engine, expected in ((None, False), (SLOW_ENGINE, True)):
        profile = make_profile([1.0, 2.0, 3.0, 2.0], engine=engine)
        plan = balance(profile, num_devices=2, num_microbatches=4)
        words = Reader(page(plan, (), analysis_of(plan, profile))).text
        assert ("idle for engine overhead" in words) is expected


def test_an_inline_chart_has_no_prologue_no_metadata_and_no_fixed_size(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        svg = inline_svg(drawing)
        assert svg.startswith('<svg role="img" aria-label=')
        assert svg.endswith("</svg>")
        opening = svg[: svg.index(">")]
        assert "viewBox" in opening
        assert " width=" not in opening
        assert "metadata" not in svg


def test_a_page_of_eight_stages_and_sixty_four_micro_batches_is_under_a_megabyte(drawings: list[Drawing]) -> None:
    names = [f"transformer.blocks.{i}.attention" for i in range(100)]
    run = make_run(named(make_plan(100, num_stages=8, num_microbatches=64, recompute="always"), names))
    html = page(run, drawings, analysis_of(run.plan, None))
    assert 100_000 < len(html.encode()) < 1_000_000
