"""Reserved bytes of plans: tensors of a computed profile replayed in the order of a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gplan.core import ActionKind, Profile, RecomputeMode
from gplan.core.errors import NoPlanError
from gplan.core.layer_cost import LayerCost, Lifetime, Timing
from gplan.cost.caching_allocator import CachingAllocator
from gplan.cost.reserved_bytes import CONTEXT_BYTES, StageTensors, beside_bytes, device_reserved_bytes, replay, replayed
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import load_hardware
from gplan_profiler.analytic.trainers import LEGACY, MEGATRON, NANOTRON, Trainer

MIB = 2**20


def computed(trainer: Trainer = MEGATRON, *, num_layers: int = 8, name: str = "llama3-8b") -> Profile:
    decoder = load_decoder(name, {"num_hidden_layers": num_layers})
    made = DecoderProfile(
        name=name, decoder=decoder, widths=Widths(tensor=2, sequence_length=2048), hardware=load_hardware("h100"),
        trainer=trainer,
    )  # fmt: skip
    return made.profile((1,))


def layer(*tensors: tuple[int, int, int], num_forward_times: int) -> LayerCost:
    second = Timing.exactly(1.0)
    return LayerCost(
        microbatch_size=1, forward=second, backward=second, stash_bytes=0, forward_workspace_bytes=0,
        backward_workspace_bytes=0, output_bytes=0, output_gradient_bytes=0, output_unsaved_bytes=0,
        tensors=tuple(Lifetime(*x) for x in tensors), num_forward_times=num_forward_times,
    )  # fmt: skip


def test_small_replay_by_hand() -> None:
    """Two micro-batches in flight keep 12 MiB each; a transient of 30 MiB and the state of 14 have segments of their own."""
    one = layer((12 * MIB, 0, 3), (30 * MIB, 1, 1), num_forward_times=2)
    stage = StageTensors(layers=(one,), buffers=(100 * MIB,), states=(14 * MIB,))
    order = [
        (0, ActionKind.FORWARD, 0),
        (0, ActionKind.FORWARD, 1),
        (0, ActionKind.BACKWARD, 0),
        (0, ActionKind.BACKWARD, 1),
    ]
    first = CachingAllocator()
    replay(first, {0: stage}, order, num_steps=1)
    # 100; 12 and 30; the second micro-batch's 12 are taken from the free 30, so its transient is new
    # the update's state takes 14 of the free 30
    assert first.reserved_bytes == (100 + 12 + 30 + 30) * MIB
    two, three = CachingAllocator(), CachingAllocator()
    replay(two, {0: stage}, order)
    replay(three, {0: stage}, order, num_steps=3)
    assert two.reserved_bytes == three.reserved_bytes  # a steady loop adds nothing


@pytest.mark.parametrize("trainer", [MEGATRON, LEGACY, replace(NANOTRON, frees_late=False)])
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_tensors_add_up_to_stash(trainer: Trainer, name: str) -> None:
    for one in computed(trainer, num_layers=2, name=name).layers:
        cost = one.costs[0]
        border = cost.num_forward_times
        assert sum(x.num_bytes for x in cost.tensors if x.made < border <= x.freed) == cost.stash_bytes, one.name
        assert all(0 <= x.made <= x.freed for x in cost.tensors)


def test_small_replay_of_layers_recomputed_together() -> None:
    """Two layers keep 8 MiB and hand on 12; recomputed together, a micro-batch in flight keeps the last 12 alone."""
    one = replace(layer((8 * MIB, 0, 3), (12 * MIB, 1, 2), num_forward_times=2), output_bytes=12 * MIB)
    forwards, backwards = ([(1, way, i) for i in (0, 1)] for way in (ActionKind.FORWARD, ActionKind.BACKWARD))
    kept = {(): 2 * 40, (range(2),): 12 + 40, (range(1), range(1, 2)): 2 * 24 + 8, (range(1, 2),): 2 * 32 + 8}
    for recomputed, most in kept.items():
        stage = StageTensors(layers=(one, one), buffers=(), received=14 * MIB, recomputed=recomputed)
        allocator = CachingAllocator()
        replay(allocator, {1: stage}, [*forwards, *backwards], again=[True, True])
        assert allocator.most_allocated_bytes == (28 + most) * MIB, recomputed
        assert allocator.allocated_bytes == 0
    stage = StageTensors(layers=(one, one), buffers=(), recomputed=(range(2),))
    allocator = CachingAllocator()
    replay(allocator, {1: stage}, [*forwards, *backwards], again=[True, False])
    assert allocator.most_allocated_bytes == (40 + 40) * MIB


@pytest.mark.parametrize(
    ("schedule", "recompute", "share"),
    [
        ("1f1b", "never", 1.0),
        ("1f1b", "always", 1.0),
        ("1f1b", "except-last", 1.0),
        ("gpipe", "selected", 0.85),
        ("interleaved-1f1b:2", "always", 1.0),
        ("zb-h1", "always", 1.0),
        ("zb-h1", "except-last", 1.0),
    ],
)
@pytest.mark.parametrize("trainer", [MEGATRON, LEGACY, NANOTRON])
def test_plan_says_what_is_reserved(trainer: Trainer, schedule: str, recompute: RecomputeMode, share: float) -> None:
    """`share` of the memory that the plan without a limit takes is there. Tensors are those that the plan counts."""
    profile = computed(trainer)
    given: dict[str, Any] = {"num_devices": 4, "num_microbatches": 8, "schedule": schedule, "recompute": recompute}
    plan = balance(profile, **given)
    if share < 1:
        plan = balance(profile, **given, memory_bytes=int(share * plan.device_total_bytes))
        assert any(x.recompute_layers for x in plan.stages)
    assert len(plan.reserved_bytes) == 4 and plan.context_bytes == CONTEXT_BYTES
    for reserved, allocated in zip(plan.reserved_bytes, plan.device_peak_bytes, strict=True):
        assert allocated <= reserved < 1.4 * allocated  # copies of gradients for an update get segments of their own
    for allocator, allocated in zip(replayed(plan, profile, CachingAllocator), plan.device_peak_bytes, strict=True):
        assert allocator.most_allocated_bytes == pytest.approx(allocated, rel=0.12 if schedule == "gpipe" else 0.05)
    assert plan.device_total_bytes == max(plan.reserved_bytes) + CONTEXT_BYTES


def test_the_workspace_of_products_is_counted_once_a_process() -> None:
    """Also on a device with several stages."""
    profile = computed()
    plan = balance(profile, num_devices=2, num_microbatches=4, schedule="interleaved-1f1b:2")
    for device, allocator in enumerate(replayed(plan, profile, CachingAllocator)):
        excess = plan.reserved_bytes[device] - plan.device_peak_bytes[device]
        assert excess == allocator.reserved_bytes - allocator.most_allocated_bytes + 32 * MIB


def test_limit_counts_reserved_bytes() -> None:
    """A plan whose tensors alone would fit is cut again; without room for any cut the limit is refused."""
    profile = computed()
    free = balance(profile, num_devices=4, num_microbatches=16, schedule="1f1b")
    limit = free.device_total_bytes - 1
    assert free.peak_bytes < limit
    tight = balance(profile, num_devices=4, num_microbatches=16, schedule="1f1b", memory_bytes=limit)
    assert tight.device_total_bytes <= tight.memory_limit_bytes == limit
    searched = balance(profile, num_devices=4, num_microbatches=16, schedule="auto", memory_bytes=limit)
    assert searched.device_total_bytes <= searched.memory_limit_bytes == limit
    with pytest.raises(NoPlanError, match="these are bytes of tensors: CUDA, NCCL"):
        balance(profile, num_devices=4, num_microbatches=16, schedule="1f1b", memory_bytes=limit // 4)


@pytest.mark.parametrize(("schedule", "recompute", "num_devices"), [("1f1b", "always", 12), ("zb-h1", "never", 4)])
def test_plan_that_fits_is_found_beside_one_that_lacks_memory(schedule: str, recompute: str, num_devices: int) -> None:
    """No plan fits without what the first one lacks; another one lacks nothing, with nearly as many bytes of tensors."""
    profile = computed(LEGACY, num_layers=24)
    given: dict[str, Any] = {
        "num_devices": num_devices, "num_microbatches": 16, "schedule": schedule, "recompute": recompute
    }  # fmt: skip
    limit = balance(profile, **given, memory_bytes=int(20.5 * 2**30)).device_total_bytes
    assert limit <= 20.5 * 2**30
    for searched in ({}, {"total_devices": num_devices, "batch_size": 16}):
        assert balance(profile, **given, **searched, memory_bytes=limit).device_total_bytes <= limit


@pytest.mark.parametrize("searched", [{}, {"total_devices": 4, "batch_size": 16}])
def test_less_memory_for_tensors_proves_no_plan_best(searched: dict[str, int]) -> None:
    """A plan that was found after a faster one reserved too much was called proven best."""
    profile = computed(LEGACY, num_layers=24)
    given: dict[str, Any] = {
        "num_devices": 4,
        "num_microbatches": 16,
        "schedule": "zb-h1",
        "recompute": "never",
    } | searched
    limit = balance(profile, **given, memory_bytes=int(20.5 * 2**30)).device_total_bytes
    within = limit - beside_bytes(profile)
    plan, faster = (
        balance(profile, **given, memory_bytes=limit),
        balance(without_tensors(profile), **given, memory_bytes=within),
    )
    assert plan.prediction.step_s > faster.prediction.step_s * (1 + 1e-6)
    assert plan.proof.lower_bound_s <= faster.prediction.step_s * (1 + 1e-9)


def without_tensors(profile: Profile) -> Profile:
    layers = (replace(x, costs=tuple(replace(y, num_forward_times=0) for y in x.costs)) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def test_profile_without_tensors_has_no_reserved_bytes() -> None:
    bare = without_tensors(computed(num_layers=4))
    plan = balance(bare, num_devices=2, num_microbatches=8, schedule="1f1b")
    assert plan.reserved_bytes == () and device_reserved_bytes(plan, bare) == ()
