"""The partition as a strip of layers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gplan.reporting.page.figures import strip
from tests.reporting.subjects import make_plan, named


def shares(html: str, tag: str) -> list[float]:
    return [float(x) for x in re.findall(rf'<{tag} style="flex-grow:([\d.]+)"', html)]


def test_a_layer_is_as_wide_as_its_time_and_a_stage_as_its_layers() -> None:
    plan = make_plan(8, num_stages=4)
    times = [f + b for x in plan.stages for f, b in zip(x.layer_forward_s, x.layer_backward_s, strict=True)]
    found = shares(strip(plan), "i")
    assert found == pytest.approx([1000 * x / sum(times) for x in times], abs=0.01)
    assert shares(strip(plan), "li") == pytest.approx(
        [a + b for a, b in zip(found[::2], found[1::2], strict=True)], abs=0.02
    )


def test_layers_and_stages_tell_their_names_times_and_cuts() -> None:
    html = strip(named(make_plan(4, num_stages=2), ["embed", "mlp", "norm", "head"]))
    assert re.search(r'title="embed\nforward [\d.]+ ms, backward [\d.]+ ms\nstage 0"', html)
    assert "cut after mlp: 1.00 MiB forward, 1.00 MiB back" in html
    assert "cut after head" not in html
    assert "<span>embed</span>" in html


def test_hostile_names_stay_text() -> None:
    html = strip(named(make_plan(2, num_stages=2), ['" onmouseover="x', "<b>"]))
    assert "<b>" not in html.replace("<b>0</b>", "").replace("<b>1</b>", "")
    assert 'onmouseover="' not in html


def test_layers_that_take_no_time_are_still_seen() -> None:
    plan = make_plan(2, num_stages=1)
    (stage,) = plan.stages
    plan = replace(plan, stages=(replace(stage, layer_forward_s=(0.0, 0.0), layer_backward_s=(0.0, 0.0)),))
    assert min(shares(strip(plan), "i")) > 0
