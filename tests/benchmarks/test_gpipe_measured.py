"""GPipe's tables measured with scaled-down models: benchmarks/gpipe_measured.py on made-up runs and a tiny real one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Literal

import gpipe_measured
import pandas as pd
import pytest
from paper import measured, measured_chart, measured_figures, measured_parts, measured_text

import gplan
from gplan.core import Link, Plan, Profile, Run, Span, StageCost, Timeline
from gplan.core.errors import UsageError
from gplan.schedules.registry import make_schedule
from gplan.simulation.simulator import simulate_schedule

SMALL = {"num_layers": 2, "width": 16, "feed_forward": 32, "num_heads": 2, "sequence_length": 8}


def stage(forward_s: float, *, transfer_s: float = 0.0, optimizer_s: float = 0.0) -> StageCost:
    return StageCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        recompute_s=forward_s,
        optimizer_s=optimizer_s,
        activation_bytes=1,
        gradient_bytes=1,
        activation_s=transfer_s,
        gradient_s=transfer_s,
    )


def timeline(*costs: StageCost, num_microbatches: int) -> Timeline:
    schedule = make_schedule("gpipe", num_devices=len(costs), num_microbatches=num_microbatches)
    return simulate_schedule(schedule, costs, recompute="always")


# Parts of a step


@pytest.mark.parametrize(("k", "m"), [(2, 4), (4, 32), (8, 32)])
def test_equal_stages_have_the_closed_form_s_bubble_and_nothing_else_idle(k: int, m: int) -> None:
    parts = measured_parts.parts_of(timeline(*[stage(1.0)] * k, num_microbatches=m))
    assert parts["bubble"] == pytest.approx((k - 1) / (m + k - 1))
    assert parts["forward"] == pytest.approx(parts["backward"] / 3)
    assert parts["imbalance"] == parts["passing"] == parts["optimizer"] == parts["setup"] == 0.0


def test_parts_of_any_step_add_up_to_all_of_it() -> None:
    costs = [stage(1.0, transfer_s=0.3, optimizer_s=0.5), stage(1.7, transfer_s=0.2), stage(0.6, optimizer_s=2.0)]
    parts = measured_parts.parts_of(timeline(*costs, num_microbatches=5))
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["imbalance"] > 0 and parts["passing"] > 0 and parts["optimizer"] > 0


def test_a_wait_before_the_first_forward_is_set_up() -> None:
    plain = timeline(stage(1.0), stage(1.0), num_microbatches=2)
    late = replace(plain, transfers=(), spans=tuple(_shifted(x, plain.step_s) for x in plain.spans))
    assert measured_parts.parts_of(late)["setup"] == pytest.approx(0.5)


def _shifted(span: Span, by_s: float) -> Span:
    return Span(device=span.device, action=span.action, start_s=span.start_s + by_s, end_s=span.end_s + by_s)


# Figures


def made_row(**given: object) -> dict[str, object]:
    """A row as `measured_rows` yields it: K devices twice as fast as one, half of a backward recomputed."""
    parts = {"forward": 0.2, "backward": 0.4, "bubble": 0.2, "imbalance": 0.1, "passing": 0.05, "optimizer": 0.05}
    row: dict[str, object] = {
        "way": "best",
        "engine": "virtual",
        "recompute": "always",
        "round": 0,
        "cuts": "1",
        "predicted_step_s": 1.0,
        "measured_step_s": 1.0,
        "predicted_recompute": 0.1,
        "num_counted": 2,
        "num_disturbed": 1,
        "num_timed": 3,
        "device": "a processor",
        "created": "2024-01-01",
        "torch": "2.13.0",
        "num_steps": 6,
        "num_rounds": 2,
    }
    row |= {f"{x}_{part}": share for x in ("predicted", "measured") for part, share in {**parts, "setup": 0.0}.items()}
    return row | given


def made_table(*, rule_at_8: bool = True) -> pd.DataFrame:
    """Both subjects; the host is half as fast in the second round, and a step takes 4 / K seconds with M = 32."""
    rows = []
    for subject, number in itertools.product(measured.SUBJECTS, (0, 1)):
        slower = 1.0 + number
        for m, k in itertools.product((1, 4, 32), (2, 4, 8)):
            seconds = {"predicted_step_s": 4.0 / k, "measured_step_s": slower * (4.0 / k if m > 1 else 2.0)}
            place = {"model": subject.title, "round": number, "k": k, "m": m, **seconds}
            rows.append(made_row(**place))
            if k == 2:
                rows.append(made_row(**{**place, "engine": "torch"}))
            if m > 1 and (k < 8 or rule_at_8):
                rows.append(made_row(**{**place, "way": "rule", "measured_step_s": 1.25 * seconds["measured_step_s"]}))
        whole_s = slower * 2.0
        rows.append(
            made_row(
                model=subject.title,
                round=number,
                k=2,
                m=32,
                recompute="never",
                measured_step_s=whole_s,
                measured_backward=0.3,
            )
        )
    return pd.DataFrame(rows)


def test_throughput_is_that_of_the_round_so_a_slower_host_changes_nothing() -> None:
    found = measured_figures.throughputs(made_table()).set_index(["model", "way", "engine", "k", "m"])
    at = found.loc[measured.SUBJECTS[0].title]
    assert at.loc[("best", "virtual", 2, 1)].measured == 1.0
    assert at.loc[("best", "virtual", 8, 32)].measured == pytest.approx(4.0)
    assert at.loc[("rule", "virtual", 8, 32)].measured == pytest.approx(3.2)
    assert found.spread.max() == pytest.approx(0.0)


def test_even_cost_takes_out_what_samples_cost_more_in_small_microbatches() -> None:
    table = made_table()
    table.loc[(table.m == 32) & (table.recompute == "always"), "measured_step_s"] *= 3
    found = measured_figures.throughputs(table)
    cell = found[(found.m == 32) & (found.k == 4) & (found.way == "best")].iloc[0]
    assert cell.measured == pytest.approx(2 / 3) and cell.cost == pytest.approx(3.0)
    assert cell.even == pytest.approx(2.0)


def test_recompute_is_what_a_backward_without_it_does_not_take() -> None:
    shares = measured_figures.recompute_of_backward(made_table())
    assert len(shares) == 4
    assert list(shares.values()) == pytest.approx([0.25] * 4)
    parts = measured_figures.breakdowns(made_table())
    assert parts.measured_recompute.tolist() == pytest.approx([0.1] * len(parts))
    assert parts.measured_backward.tolist() == pytest.approx([0.3] * len(parts))
    for origin in ("predicted", "measured"):
        total = sum(parts[f"{origin}_{part}"] for part in measured_figures.BREAKDOWN)
        assert total.tolist() == pytest.approx([1.0] * len(parts))


# The section


def test_the_section_has_a_row_for_each_way_beside_the_paper_s() -> None:
    text = measured_text.section(made_table())
    assert text.startswith("## Measured here, scaled down\n")
    assert "| 32 | paper | 1.21 | 1.84 | 3.48 |" in text
    assert "|  | gplan's best, measured | 1.00 (0.83) | 2.00 (1.09) | 4.00 (1.15) |" in text
    assert "|  | gplan's best, two processes, measured | 1.00 (0.83) |  |  |" in text
    assert "| Transformer-24 | paper | 1 | 1.8 | 3.3 |" in text
    assert "other work disturbed 33.3 % of the timed steps" in text
    assert "nan" not in text


def test_sizes_of_micro_batches_and_the_paper_s_single_one_are_those_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_text, "MICROBATCH_COUNTS", (1, 2, 16, 32))
    table = made_table()
    titles = set(table.model)
    published = [f"{x.published[1][-1]:g}" for x in measured.SUBJECTS if x.title in titles]
    text = measured_text.section(table)
    assert "so a micro-batch is 32, 16, 2 or 1." in text
    assert f"The paper's rises to {' and '.join(published)}; it recomputes" in text
    text = measured_text.section(table[table.model == measured.SUBJECTS[0].title])
    assert "The paper's rises to 1.38; it recomputes" in text


def test_a_rule_that_leaves_a_stage_empty_has_no_plan_in_the_section() -> None:
    text = measured_text.section(made_table(rule_at_8=False))
    assert "| GPipe's rule, measured | 0.80 (0.66) | 1.60 (0.87) | no plan |" in text
    assert "nan" not in text


def test_files_are_written_whole_and_together(tmp_path: Path) -> None:
    gpipe_measured.write(made_table(), tmp_path / "report")
    assert {x.name for x in (tmp_path / "report").iterdir()} == {"measured.csv", "measured.md", "measured.png"}
    kept = pd.read_csv(tmp_path / "report" / "measured.csv")
    assert measured_text.section(kept) == (tmp_path / "report" / "measured.md").read_text()


def test_the_chart_has_two_panels_for_each_model() -> None:
    assert len(measured_chart.chart(made_table()).axes) == 4


# A real run


@pytest.fixture(scope="module")
def profile() -> Profile:
    return gplan.profile(
        measured.SUBJECTS[1].reference,
        settings=SMALL,
        microbatch_sizes=[1, 4],
        contention=0,
        link=Link(latency_s=1e-4, bytes_per_s=1e9),
        budget_s=0.2,
    )


def test_cases_are_both_ways_on_both_engines_and_one_without_recompute(profile: Profile) -> None:
    cases = measured.cases_of(profile, batch_size=4, device_counts=(2, 3), microbatch_counts=(1, 4))
    found = [(x.way, x.engine, x.plan.num_devices, x.plan.num_microbatches) for x in cases]
    assert found[:3] == [("best", "virtual", 2, 1), ("best", "torch", 2, 1), ("best", "virtual", 3, 1)]
    assert {("rule", "virtual", 2, 4), ("rule", "virtual", 3, 4), ("best", "torch", 2, 4)} <= set(found[3:])
    assert {x.plan.batch_size for x in cases} == {4}
    (without,) = [x.plan for x in cases if x.plan.recompute == "never"]
    (with_it,) = [x.plan for x in cases if x.work == ("virtual", without.cuts, 4, "always") and x.way == "best"]
    assert without.num_microbatches == with_it.num_microbatches == 4


def test_a_batch_that_does_not_divide_into_microbatches_is_refused(profile: Profile) -> None:
    with pytest.raises(UsageError, match="4 samples do not make 3 equal micro-batches"):
        measured.cases_of(profile, batch_size=4, device_counts=(2,), microbatch_counts=(3,))


def test_rounds_run_every_case_and_equal_work_once(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = measured.cases_of(profile, batch_size=4, device_counts=(2,), microbatch_counts=(4,))
    best, without = (x for x in cases if x.engine == "virtual" and x.way == "best")
    run, ran = gplan.run, list[str]()

    def counted(plan: Plan, *, engine: Literal["torch", "virtual"], num_steps: int) -> Run:
        ran.append(plan.recompute)
        return run(plan, engine=engine, num_steps=num_steps)

    monkeypatch.setattr(gplan, "run", counted)
    rows = list(measured.measured_rows([best, replace(best, way="rule"), without], num_steps=2, num_rounds=2))
    assert [(x["round"], x["way"]) for x in rows[:3]] == [(0, "best"), (0, "rule"), (0, "best")]
    assert [(x["round"], x["way"], x["recompute"]) for x in rows[3:5]] == [(1, "best", "never"), (1, "rule", "always")]
    assert ran == ["always", "never", "never", "always"]
    for row in rows:
        assert sum(row[f"measured_{part}"] for part in measured_parts.PARTS) == pytest.approx(1.0)
        assert (0 < row["predicted_recompute"] < row["predicted_backward"]) == (row["recompute"] == "always")
        assert row["measured_step_s"] > 0 and row["num_timed"] == 2
