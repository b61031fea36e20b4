"""Expected errors of computed predictions: from the committed file, in the plan's notes."""

from __future__ import annotations

import pytest

from gplan.interop.machine_layout import layout_of
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.expected_errors import MIXTURE, ExpectedError, expected_error
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
        ("nanotron", "h100", "(nanotron, dense, h100)"),
        ("Megatron-LM", "mi300x", "(Megatron-LM, dense, all GPUs)"),
        ("mine", "h100", "no published run of a dense model by mine"),
    ],
)
def test_kinds(trainer: str, hardware: str, kind: str) -> None:
    """A GPU without enough runs counts with all of its trainer."""
    assert kind in expected_error(trainer, hardware)


def test_experts_have_fewer_runs_on_a_gpu_than_count() -> None:
    assert "(Megatron-LM, mixture of experts, all GPUs)" in expected_error("Megatron-LM", "h100", kind=MIXTURE)


def test_plan_of_a_computed_profile_says_it() -> None:
    profile = decoder_profile("llama3-8b", hardware="a100", tensor=2, sequence_length=2048)
    plan = balance(profile, num_devices=2, num_microbatches=8, schedule="1f1b")
    assert sum("published runs like this one (Megatron-LM, dense, a100)" in x for x in plan.notes) == 1


@pytest.mark.parametrize(
    ("receiver", "said"),
    [
        ("megatron", "published runs like this one (Megatron-LM, dense, h100)"),
        (
            "torchtitan",
            "no published runs of torchtitan check this plan: its times and memory assume the kernels of Megatron-LM",
        ),
        ("vllm", "no published runs of vLLM check this plan"),
    ],
)
def test_other_trainers_have_no_runs(receiver: str, said: str) -> None:
    found = layout_of("llama3-8b", receiver=receiver, hardware="h100", num_devices=2, settings=["num_hidden_layers=4"])
    assert next(x for x in found.plan.notes if "published run" in x).startswith(said)
