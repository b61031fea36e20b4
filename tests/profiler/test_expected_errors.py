"""Expected errors of computed predictions: from the committed file, in the plan's notes."""

from __future__ import annotations

import pytest

from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.expected_errors import ExpectedError, expected_error
from tests.decoders import decoder_profile


def test_sentence() -> None:
    known = ExpectedError(
        num_runs=312, step_half=0.07, step_most=0.19, num_memories=100, memory_half=0.02, memory_most=0.1
    )
    assert known.text("a trainer, h100") == (
        "published runs like this one (a trainer, h100): the step was predicted within 7.0 % in half of 312 cases, within "
        "19.0 % in nine of ten; the memory within 2.0 % in half of 100 cases, within 10.0 % in nine of ten"
    )


@pytest.mark.parametrize(
    ("trainer", "hardware", "kind"),
    [
        ("nanotron", "h100", "(nanotron, h100)"),
        ("Megatron-LM", "mi300x", "(Megatron-LM, all GPUs)"),
        ("mine", "h100", "mine"),
    ],
)
def test_kinds(trainer: str, hardware: str, kind: str) -> None:
    """A GPU without enough runs counts with all of its trainer."""
    assert kind in expected_error(trainer, hardware)


def test_plan_of_a_computed_profile_says_it() -> None:
    profile = decoder_profile("llama3-8b", hardware="a100", tensor=2, sequence_length=2048)
    plan = balance(profile, num_devices=2, num_microbatches=8, schedule="1f1b")
    assert sum("published runs like this one (Megatron-LM" in x for x in plan.notes) == 1
