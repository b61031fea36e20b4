"""gplan beside its peers: the pure parts of benchmarks/peers.py, and what its report says."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations, pairwise
from multiprocessing import Pipe
from pathlib import Path

import pandas as pd
import peers
import pytest
import torch
from beside import contenders, lines, models, quality, text, turns
from torch import nn

from gplan.core import Profile
from tests.made import make_profile

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "reports" / "gpipe-paper"
FORWARD_S = (5.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 4.0, 1.0)
NUM_LAYERS = len(FORWARD_S)


@pytest.fixture
def profile() -> Profile:
    return make_profile(FORWARD_S)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4 + i) if i % 2 else nn.ReLU() for i in range(NUM_LAYERS)))


def largest_s(cuts: tuple[int, ...]) -> float:
    return max(3 * sum(FORWARD_S[i:j]) for i, j in pairwise((0, *cuts, NUM_LAYERS)))


# Partitions


def test_every_cut_is_rated_by_its_largest_stage_over_the_smallest_possible(
    profile: Profile, model: nn.Sequential
) -> None:
    given = {("one after the other", k): tuple(range(1, k)) for k in quality.DEVICE_COUNTS}
    rows = list(quality.rated(profile, quality.cut_rules(profile, model, "Linear"), given=given))
    assert {x["rule"] for x in rows} >= {"one after the other", "DeepSpeed, by type", "gplan, for the step"}
    for row in rows:
        k = row["k"]
        assert isinstance(k, int)
        least_s = min(largest_s(cuts) for cuts in combinations(range(1, NUM_LAYERS), k - 1))
        assert row["optimum_s"] == pytest.approx(least_s)
        if "no_plan" not in row:
            assert row["ratio"] == pytest.approx(largest_s(tuple(row["cuts"])) / least_s)  # type: ignore[arg-type]


def test_gplan_s_largest_stage_is_the_smallest_possible(profile: Profile, model: nn.Sequential) -> None:
    rows = list(quality.rated(profile, {}, given={}))
    assert [x["ratio"] for x in rows if x["rule"] == "gplan, for the largest stage"] == [1.0, 1.0, 1.0]


def test_a_rule_without_a_plan_says_why(profile: Profile) -> None:
    rules = quality.cut_rules(profile, nn.Sequential(*(nn.ReLU() for _ in range(NUM_LAYERS))), "Linear")
    reasons = [x["no_plan"] for x in quality.rated(profile, rules, given={}) if x["rule"] == "DeepSpeed, by parameters"]
    assert len(reasons) == 3 and all("all weights are 0" in str(x) for x in reasons)


def test_a_rule_without_a_plan_for_two_devices_is_left_out(profile: Profile) -> None:
    rules = quality.cut_rules(profile, nn.Sequential(*(nn.ReLU() for _ in range(NUM_LAYERS))), "Linear")
    cuts = peers.cuts_in_two(rules)
    assert cuts["equal layer counts"] == (NUM_LAYERS // 2,)
    assert "DeepSpeed, by parameters" in rules and "DeepSpeed, by parameters" not in cuts


def test_the_threads_are_as_before_where_measuring_with_one_fails() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), peers.one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)


def test_deepspeed_counts_the_layers_of_one_class(profile: Profile, model: nn.Sequential) -> None:
    cut = quality.cut_rules(profile, model, "Linear")["DeepSpeed, by type"](2)
    classes = [type(x).__name__ for x in model]
    assert classes[: cut[0]].count("Linear") == classes[cut[0] :].count("Linear") == 2


def test_plans_are_cut_where_they_are_told_to(profile: Profile) -> None:
    plan = quality.plan_with(profile, (2, 7), schedule="1f1b", recompute="always")
    assert (plan.cuts, plan.schedule, plan.recompute) == ((2, 7), "1f1b", "always")


def test_counts_and_cuts_say_the_same() -> None:
    for cuts in combinations(range(1, 7), 3):
        assert contenders.cuts_of(contenders.counts_of(cuts, 7)) == cuts


@pytest.mark.parametrize("k", (2, 3, 4, 5))
def test_the_hand_written_loop_is_cut_by_equal_layer_counts(profile: Profile, model: nn.Sequential, k: int) -> None:
    bounds = [NUM_LAYERS * i // k for i in range(k + 1)]  # as in beside/written/by_hand.py
    assert quality.cut_rules(profile, model, "Linear")["equal layer counts"](k) == tuple(bounds[1:-1])


# Models


@pytest.mark.parametrize("name", models.SUBJECTS)
def test_a_model_is_a_sequence_with_the_same_weights_every_time(name: str) -> None:
    subject = models.SUBJECTS[name]
    one, other = subject.model(), subject.model()
    assert isinstance(one, nn.Sequential) and len(one) >= max(quality.DEVICE_COUNTS)
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
    assert any(type(layer).__name__ == subject.block for layer in one)
    inputs, targets = (x[:1] for x in subject.sample())
    classes = one(inputs).shape[-1]
    assert models.loss(one(inputs), targets).item() == pytest.approx(math.log(classes), rel=0.2)


# Turns


def test_turns_give_the_batch_when_told_to_and_end_when_told_to() -> None:
    here, there = Pipe()
    batch = (torch.zeros(1), torch.ones(1))
    for message in ("step", "step", None):
        here.send(message)
    found = turns.Turns(there, batch)
    assert [x is batch for x in found] == [True, True]
    assert here.recv() == "ready" and found.before_bytes > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_growth_is_that_of_the_highest_point() -> None:
    before = turns.settled_bytes()
    block = torch.ones(2**23)
    del block
    assert turns.resident_bytes("VmHWM") - before >= 0.95 * 4 * 2**23


@pytest.mark.parametrize("num_teams", (1, 2, 5))
def test_everybody_has_a_turn_in_every_round_and_is_first_as_often_as_others(num_teams: int) -> None:
    orders = [turns.order_of(turn, num_teams) for turn in range(2 * num_teams)]
    assert all(sorted(order) == list(range(num_teams)) for order in orders)
    assert [order[0] for order in orders] == [*range(num_teams), *range(num_teams)]


def test_a_contender_that_does_other_work_is_an_error() -> None:
    contender = contenders.CONTENDERS[1]
    peers.check_alike(contender, [2.0, 1.0], [2.001, 1.0])
    for losses in ([2.0, 1.01], [2.0, math.nan]):
        with pytest.raises(ValueError, match="in step 1 .* expected the same work of all"):
            peers.check_alike(contender, [2.0, 1.0], losses)


def test_ratios_are_to_gplan_with_the_same_schedule_and_recompute() -> None:
    entries = [turns.Entry(contender=x, plan_file="", cuts=(1,)) for x in contenders.CONTENDERS]
    found = [
        turns.Measured(step_s=(i + 1.0,) * 3, losses=(1.0,), growth_bytes=(10, 20 * (i + 1)))
        for i in range(len(entries))
    ]
    rows = list(peers.measured_rows(entries, found))
    firsts = {(x["schedule"], x["recompute"]): x["step_s"] for x in rows if x["executor"] == x["cut"] == "gplan"}
    assert len(firsts) == 3
    for row in rows:
        assert row["step_ratio"] == pytest.approx(row["step_s"] / firsts[row["schedule"], row["recompute"]])
        assert row["largest_growth_bytes"] == row["growth_bytes"] - 10


# Lines


def test_lines_are_those_that_are_neither_empty_nor_comment_nor_docstring() -> None:
    source = '"""What it\n\ndoes."""\n\n# why\ndef f(x):\n    """Twice."""\n    return (\n        2 * x  # not thrice\n    )\n'
    assert lines.code_lines(source) == 4


def test_the_files_that_are_counted_are_those_that_are_run() -> None:
    source = (ROOT / "benchmarks" / "beside" / "contenders.py").read_text()
    imported = {
        x.names[0].name
        for x in ast.walk(ast.parse(source))
        if isinstance(x, ast.ImportFrom) and x.module == "beside.written"
    }
    assert {f"{x}.py" for x in imported} == {name for name, _ in lines.WRITTEN.values()}


def test_lines_to_plan_are_among_all_lines() -> None:
    for row in lines.line_rows():
        assert 0 <= row["num_plan_lines"] < row["num_lines"]


# The section


def made_table() -> pd.DataFrame:
    def steps() -> Iterator[dict[str, object]]:
        for contender, ratio in (
            (contenders.CONTENDERS[0], 1.0),
            (contenders.CONTENDERS[1], 0.5),
            (contenders.CONTENDERS[2], 2.0),
        ):
            sizes = {"growth_bytes": 2**20 * ratio, "growth_ratio": ratio}
            ratios = {"step_s": 0.1 * ratio, "step_ratio": ratio, "lower": ratio * 0.99, "upper": ratio * 1.01}
            yield {"table": "step", "model": "even", **asdict(contender), **sizes, **ratios}

    partitions = [
        {"table": "partition", "model": "even", "k": 2, "rule": "some rule", "ratio": 1.25},
        {"table": "partition", "model": "even", "k": 4, "rule": "some rule", "no_plan": "why"},
    ]
    return pd.DataFrame([*partitions, *steps(), *lines.line_rows()])


def test_the_section_says_where_a_peer_is_better() -> None:
    found = text.as_text(made_table(), how="How.\n")
    assert found.startswith("## Beside its peers\n\nHow.\n")
    assert "| some rule | 1.25 | no plan |" in found
    assert "| by hand, GPipe | 50.0 ms, 0.50, 512 KiB |" in found
    assert "- Faster than gplan (the upper quartile of the ratio is below 1): by hand, GPipe on even." in found
    assert "- Slower (the lower quartile is above 1): cut of torchgpipe in gplan's engine, GPipe on even." in found
    assert "- Less memory than gplan, by more than 5 %: by hand, GPipe on even." in found


@pytest.mark.skipif(not (REPORT / "peers.md").exists(), reason="not measured yet")
def test_the_section_says_what_its_table_says() -> None:
    written = (REPORT / "peers.md").read_text()
    how = written.split("\n\n")[1] + "\n"
    assert text.as_text(pd.read_csv(REPORT / "peers.csv"), how=how) == written
