"""An explanation in words: each sentence where it is true, numbers whole in any width."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gplan.core import Constraints, Profile
from gplan.evaluate.bottleneck import CutCost
from gplan.evaluate.explain import Explanation, explain
from gplan.reporting.text.explanation import explanation_view, headline
from gplan.reporting.text.fitted_table import note_lines
from tests.evaluate.explain.settings import ONE_GB_PER_S, cut_bound, memory_bound, plan_of, uneven
from tests.made import make_profile
from tests.reporting.text.printed import printed


@cache
def explained(profile: Profile, **given: object) -> Explanation:
    return explain(plan_of(profile, **given), profile)


def told(profile: Profile, **given: object) -> str:
    """The headline."""
    return " ".join(headline(explained(profile, **given)))


def line_of(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_the_headline_names_the_stage_its_dearest_layers_and_what_would_help() -> None:
    assert headline(explained(make_profile([1.0, 1.0, 1.0, 5.0, 1.0]), num_microbatches=8)) == (
        "Stage 1 computes longest: for 94.1 % of the predicted step of 153 s; of the 2 layers of stage 1, d takes 83.3 % of their time.",
        "Compute limits the step: of the step, filling and draining take 5.9 %, exposed transfers nothing; there is no memory limit.",
        "What would help most: on the same devices, schedule interleaved-1f1b:2: +4.1 % samples/s; with a larger batch, "
        "16 micro-batches of 1 (twice the batch): +3.0 % samples/s; with other hardware, 3 devices (one more): +15.9 % samples/s.",
    )


def test_one_device_that_is_faster_is_in_the_headline() -> None:
    profile = make_profile([1.0, 1.0], [1.0, 1.0], output_bytes=10**10, link=ONE_GB_PER_S)
    assert "with less hardware, 1 device (one fewer), schedule 1f1b: +" in told(profile)


def test_what_binds_is_said_with_what_it_costs() -> None:
    assert "Memory limits the step: without the limit of 60 B a device the step would be 14.3 % shorter." in told(
        memory_bound(), memory_bytes=60
    )
    assert "Transfers limit the step: if they took no time, it would be 16.7 % shorter" in told(cut_bound())
    assert "with 1 micro-batch in 2 stages, stage 0 is idle for it during 50.0 % of the step" in told(
        make_profile([1.0, 1.0]), num_microbatches=1
    )
    assert "Gradient sync and optimizer limit the step: 52.0 % of it is after the last backward." in told(
        make_profile([1.0, 1.0], weight_bytes=8, optimizer_s=13.0), num_devices=1, num_microbatches=2
    )


def test_the_dearest_of_several_cuts_is_named() -> None:
    found = explained(cut_bound())
    cuts = (*found.bottleneck.cuts, CutCost(stage=1, layer="worse", transfer_s=2.0, exposed_s=6.0))
    text = " ".join(headline(replace(found, bottleneck=replace(found.bottleneck, cuts=cuts))))
    assert "the cut after worse alone accounts for 50.0 %" in text
    assert "the only cut is after a" in told(cut_bound())


def test_memory_that_recompute_saves_is_said_to_bind_with_nothing_recomputed() -> None:
    text = told(make_profile([1.0, 1.0], stash_bytes=10), memory_bytes=25, recompute="always")
    assert "without the limit of 25 B a device, with nothing recomputed, the step would be 25.0 % shorter" in text


def test_a_memory_limit_that_costs_nothing_or_nothing_known_is_said_so() -> None:
    found = explained(make_profile([1.0, 1.0], weight_bytes=1), memory_bytes=60)
    assert "the memory limit costs nothing" in " ".join(headline(found))
    unknown = replace(found, bottleneck=replace(found.bottleneck, memory_gain_s=None))
    assert "what the memory limit costs is not known" in " ".join(headline(unknown))


def test_stages_that_are_alike_are_named_together() -> None:
    assert "All 2 stages compute equally long" in told(make_profile([1.0, 1.0]))
    assert "Stages 1 and 2 compute longest" in told(make_profile([1.0, 3.0, 3.0]), num_devices=3)


@pytest.mark.parametrize(
    ("profile", "num_stages", "sentence"),
    [
        (
            make_profile([1.0, 2.0]),
            1,
            "One stage holds the whole model and computes for 100.0 % of the predicted step of 36.0 s",
        ),
        (
            make_profile([1.0, 2.0]),
            1,
            "Compute limits the step: one stage neither waits nor sends; there is no memory limit.",
        ),
        (make_profile([1.0, 2.0]), 2, "b is the only layer of stage 1"),
        (make_profile([0.0, 0.0], weight_bytes=8, optimizer_s=1.0), 2, "No stage takes any time to compute"),
    ],
)
def test_odd_plans_have_sentences_of_their_own(profile: Profile, num_stages: int, sentence: str) -> None:
    assert sentence in told(profile, num_devices=num_stages)


def test_where_nothing_helps_it_is_said() -> None:
    assert "None of the options below trains more samples per second." in told(make_profile([1.0]), num_devices=1)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = printed(explanation_view(explained(uneven(), num_devices=3, memory_bytes=2**40)), width=width)
    assert max(map(len, lines)) <= width


def test_every_option_has_its_step_its_change_its_rate_and_its_peak() -> None:
    lines = printed(explanation_view(explained(memory_bound(), memory_bytes=60)))
    assert line_of(lines, "no memory limit").split()[3:] == ["54.0", "s", "-14.3", "%", "0.07", "+16.7", "%", "80", "B"]
    assert line_of(lines, "as it is").split()[-8:-2] == ["s", "0.0", "%", "0.06", "0.0", "%"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_two_columns_of_the_options_have_one_name(width: int) -> None:
    lines = printed(explanation_view(explained(uneven(), num_devices=3, memory_bytes=2**40)), width=width)
    heading = line_of(lines, "option ").replace("rate change", "rate-change").replace("step change", "step-change")
    assert "rate-change" in heading and len(set(heading.split())) == len(heading.split())


def test_constraints_may_be_taken_back() -> None:
    found = explained(make_profile([1.0, 1.0, 2.0]), constraints=Constraints(cut_after=("a",)))
    lines = printed(explanation_view(found))
    assert line_of(lines, "without the constraints").split()[3:7] == ["30.0", "s", "-23.1", "%"]
    assert "without the constraints: +30.0 % samples/s" in " ".join(headline(found))


def test_what_cannot_be_is_listed_with_its_reason() -> None:
    lines = printed(explanation_view(explained(make_profile([1.0, 2.0]))), width=200)
    assert "left out: more memory: the plan has no memory limit" in lines
    assert line_of(lines, "left out: 3 devices (one more): asked for 3 stages of a model with 2 layers")


def test_a_custom_order_is_neither_written_out_nor_said_to_have_other_devices() -> None:
    own = "custom:0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"
    lines = printed(explanation_view(explained(make_profile([1.0] * 3), schedule=own, num_microbatches=2)), width=200)
    assert "left out: one device more: the custom order has 2 devices" in lines
    assert "left out: one device fewer: the custom order has 2 devices" in lines
    assert "0F0" not in " ".join(lines)


def test_what_a_reader_must_know_comes_last() -> None:
    found = replace(explained(make_profile([1.0, 1.0])), notes=("measured again",))
    assert printed(explanation_view(found))[-1] == note_lines(found.notes)[0].plain
