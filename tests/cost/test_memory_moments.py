"""The memory model against the formulas it should equal, and against a replay that knows nothing of moments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gplan.core import Action, RecomputeMode, Schedule
from gplan.core.plan import StageBytes
from gplan.cost.memory_moments import (
    device_memory,
    device_moments,
    memory_at,
    peak_moments,
    stage_memory,
)
from gplan.cost.part_table import rows_of
from gplan.schedules.registry import make_schedule, schedule_info
from gplan.schedules.transfers import receives, sends
from tests.schedules.made import FORWARD, INPUT, NAMES, WEIGHT, most_in_flight

OWN = "custom:0F0 0F1 2F0 2B0 2F1 2I1 0B0 0I1 2W1 0W1 / 1F0 1F1 1I0 1B1 1W0"
"""Three stages on two devices, whole and split backwards mixed."""

names, devices, microbatches = st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12)
modes = st.sampled_from(["never", "always", "except-last", "selected"])
seeds = st.integers(0, 9999)
NONE = StageBytes(**dict.fromkeys(StageBytes.__struct_fields__, 0))


def some_parts(rng: random.Random) -> StageBytes[int]:
    """Any sizes; often some are nothing, and pending is less than nothing."""
    found = StageBytes(**{x: rng.choice([0, rng.randrange(100)]) for x in StageBytes.__struct_fields__})
    return replace(found, pending=found.pending - rng.choice([0, rng.randint(0, found.stash)]))


def told(
    schedule: Schedule, device: int, parts: Mapping[int, StageBytes[int]], mode: RecomputeMode
) -> Iterator[tuple[str, int]]:
    """What a device holds of these stages during and after every action of theirs: a story of blocks that come and go."""
    blocks = {("always", s): p.weight + p.optimizer for s, p in parts.items()}
    num_kept = {"never": schedule.num_microbatches, "except-last": 1}.get(mode, 0)
    received, sent = receives(schedule, device), [x for x in sends(schedule, device) if x.made.kind is not FORWARD]
    for place, action in enumerate(schedule.orders[device]):
        for x in received:
            if x.start == place and x.made.receiver in parts:
                own, key = parts[x.made.receiver], ("received", x.made.kind is FORWARD, x.made.receiver)
                blocks[(*key, x.made.microbatch)] = (
                    own.received_activation if x.made.kind is FORWARD else own.received_gradient
                )
        for x in sent:
            if x.end == place:
                blocks.pop(("sent", x.made.stage, x.made.microbatch), None)
        if action.stage not in parts:
            continue
        own, micro = parts[action.stage], (action.stage, action.microbatch)
        again = action.microbatch < schedule.num_microbatches - num_kept
        begins_backward = action.kind not in (FORWARD, WEIGHT) if action.stage else action.kind not in (FORWARD, INPUT)
        workspace = 0
        if action.kind is FORWARD:
            blocks[("checkpoint" if again else "stash", *micro)] = own.checkpoint if again else own.stash
            workspace = own.recompute_workspace if again else own.forward_workspace
        elif action.kind is INPUT and begins_backward:
            blocks[("stash", *micro)] = own.stash
            workspace = max(own.input_workspace, own.forward_workspace if again else 0)
        elif begins_backward and again:
            del blocks[("checkpoint", *micro)]
            blocks[("again", *micro)] = own.recomputed_stash
            workspace = own.recomputing_workspace
        elif begins_backward or action.kind is WEIGHT:
            workspace = own.backward_workspace if begins_backward else own.weight_workspace
        yield str(action), sum(blocks.values()) + workspace
        if begins_backward:
            blocks.pop(("checkpoint", *micro), None)
            blocks.pop(("again", *micro), None)
            blocks[("stash", *micro)], blocks[("pending", *micro)] = own.stash, own.pending
        if action.kind not in (FORWARD, INPUT):
            del blocks[("stash", *micro)], blocks[("pending", *micro)]
            blocks["gradients", action.stage] = own.gradient
            for is_activation in (True, False):
                blocks.pop(("received", is_activation, *micro), None)
        if any(x.made == action for x in sent):
            blocks[("sent", *micro)] = own.sent
        yield str(action), sum(blocks.values())
    yield (
        "optimizer",
        sum(p.weight + p.optimizer + p.gradient + p.optimizer_workspace for p in parts.values()),
    )


@given(st.sampled_from([*NAMES, OWN]), devices, microbatches, modes, seeds)
def test_a_device_holds_what_a_replay_of_its_blocks_holds(
    name: str, k: int, m: int, mode: RecomputeMode, seed: int
) -> None:
    k, m = (2, min(m, 2)) if name == OWN else (k, m)
    schedule, rng = make_schedule(name, num_devices=k, num_microbatches=m), random.Random(seed)
    for device in range(k):
        parts = {stage: some_parts(rng) for stage in schedule.stages_of(device)}
        story = list(told(schedule, device, parts, mode))
        moments = device_moments(schedule, device, recompute=mode)
        held = moments.held([rows_of(x, (1,)) for x in parts.values()])[:, 0].tolist()
        assert max(held) == max(num_bytes for _, num_bytes in story)
        for action in {name for name, _ in story}:
            found = [x for x, name in zip(held, moments.actions, strict=True) if name == action]
            expected = [num_bytes for name, num_bytes in story if name == action]
            assert (max(found), found[-1]) == (max(expected), expected[-1])


@given(st.sampled_from([*NAMES, OWN]), devices, microbatches, modes, seeds)
def test_the_stages_of_a_device_together_hold_its_peak_at_one_action(
    name: str, k: int, m: int, mode: RecomputeMode, seed: int
) -> None:
    k, m = (2, min(m, 2)) if name == OWN else (k, m)
    schedule, rng = make_schedule(name, num_devices=k, num_microbatches=m), random.Random(seed)
    parts = {stage: some_parts(rng) for stage in schedule.stages_of(0)}
    found = device_memory(schedule, 0, parts, recompute=mode)
    moments = device_moments(schedule, 0, recompute=mode)
    held = moments.held([rows_of(x, (1,)) for x in parts.values()])[:, 0]
    assert sum(x.peak_bytes for x in found.values()) == held.max()
    assert {x.moment for x in found.values()} == {moments.actions[int(held.argmax())]}
    for counts, num_bytes in zip(moments.counts, held, strict=True):
        pairs = zip(counts, parts.values(), strict=True)
        assert sum(memory_at(one, own, action="").peak_bytes for one, own in pairs) == num_bytes


@given(st.sampled_from([*NAMES, OWN]), devices, microbatches, modes, seeds)
@settings(max_examples=200)
def test_no_moment_that_was_left_out_is_ever_the_peak_of_a_stage(
    name: str, k: int, m: int, mode: RecomputeMode, seed: int
) -> None:
    k, m = (2, min(m, 2)) if name == OWN else (k, m)
    schedule, rng = make_schedule(name, num_devices=k, num_microbatches=m), random.Random(seed)
    stage = rng.randrange(schedule.num_stages)
    held = some_parts(rng)
    moments = peak_moments(name, num_devices=k, num_microbatches=m, stages=(stage,), recompute=mode)
    expected = max(num_bytes for _, num_bytes in told(schedule, schedule.devices[stage], {stage: held}, mode))
    assert stage_memory(moments, held).peak_bytes == expected
    assert moments.peak([rows_of(held, (1,))]).tolist() == [expected]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["never", "always", "except-last"])
def test_a_few_moments_are_left_however_many_devices_there_are(name: str, mode: RecomputeMode) -> None:
    """Every candidate stage of a plan is priced at each of them; a device has 96 actions or more."""
    for stage in (0, 5, 15):
        moments = peak_moments(name, num_devices=16, num_microbatches=48, stages=(stage,), recompute=mode)
        assert len(moments.actions) <= 60


@given(names, devices, microbatches)
def test_stashes_alone_are_what_the_laws_say_is_in_flight(name: str, k: int, m: int) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    for device in range(k):
        parts = dict.fromkeys(schedule.stages_of(device), replace(NONE, stash=5))
        found = device_memory(schedule, device, parts, recompute="never")
        assert sum(x.activation_bytes for x in found.values()) == 5 * most_in_flight(schedule, device)


@given(names, devices, microbatches, modes)
def test_pending_are_micro_batches_between_their_halves_but_on_the_first_stage(
    name: str, k: int, m: int, mode: RecomputeMode
) -> None:
    schedule = make_schedule(name, num_devices=k, num_microbatches=m)
    for device in range(k):
        parts = dict.fromkeys(schedule.stages_of(device), replace(NONE, pending=5))
        found = device_memory(schedule, device, parts, recompute=mode)
        assert sum(x.activation_bytes for x in found.values()) == 5 * most_pending(schedule.orders[device])


def most_pending(order: tuple[Action, ...]) -> int:
    level = peak = 0
    for action in (x for x in order if x.stage > 0):
        level += {INPUT: 1, WEIGHT: -1}.get(action.kind, 0)
        peak = max(peak, level)
    return peak


@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), devices, st.integers(2, 10), st.data(), st.integers(1, 99),
    st.integers(0, 99), st.integers(0, 99),
)  # fmt: skip
def test_without_recompute_the_peak_is_the_formula(
    name: str, k: int, m: int, data: st.DataObject, stash: int, workspace: int, gradient: int
) -> None:
    stage = data.draw(st.integers(0, k - 1))
    held = replace(
        NONE, weight=7, gradient=gradient, optimizer=14, stash=stash, forward_workspace=workspace, backward_workspace=workspace
    )  # fmt: skip
    n = {"gpipe": m, "1f1b": min(m, k - stage), "eager-1f1b": min(m, 2 * (k - stage) - 1)}[name]
    later = n if m > n else m - 1
    formula = 7 + 14 + max(n * stash + workspace, later * stash + workspace + gradient)
    moments = peak_moments(name, num_devices=k, num_microbatches=m, stages=(stage,), recompute="never")
    assert stage_memory(moments, held).peak_bytes == formula


def test_recompute_trades_stashes_for_checkpoints() -> None:
    held = replace(NONE, stash=100, checkpoint=1, recomputed_stash=101)
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=8)
    peaks = {mode: peak_bytes(schedule, held, mode) for mode in ("never", "always", "except-last")}
    assert peaks == {"never": 800, "always": 108, "except-last": 107}


def peak_bytes(schedule: Schedule, held: StageBytes[int], mode: RecomputeMode) -> int:
    """Of the last device, all its stages alike."""
    parts = dict.fromkeys(schedule.stages_of(schedule.num_devices - 1), held)
    memory = device_memory(schedule, schedule.num_devices - 1, parts, recompute=mode)
    return sum(x.peak_bytes for x in memory.values())


def test_what_was_recomputed_stays_until_the_second_half() -> None:
    """On the last of two devices a W follows its I at once or one micro-batch later, so two stashes are made again."""
    held = replace(NONE, stash=100, checkpoint=1, recomputed_stash=101)
    schedule = make_schedule("zb-h1", num_devices=2, num_microbatches=4)
    assert [str(x) for x in schedule.orders[1]][:5] == ["1F0", "1I0", "1F1", "1I1", "1W0"]
    assert peak_bytes(schedule, held, "always") == 2 * 100 + 1


@given(names, devices, microbatches, modes, seeds)
def test_the_categories_add_up_to_the_peak(name: str, k: int, m: int, mode: RecomputeMode, seed: int) -> None:
    moments = peak_moments(name, num_devices=k, num_microbatches=m, stages=(0,), recompute=mode)
    held = some_parts(random.Random(seed))
    memory = stage_memory(moments, held)
    categories = [getattr(memory, x) for x in memory.__slots__ if x.endswith("_bytes")]
    assert sum(categories) == memory.peak_bytes == moments.peak([rows_of(held, (1,))])[0]
    assert memory.peak_bytes >= held.weight + held.optimizer


def test_the_moment_of_the_peak_is_named() -> None:
    held = replace(NONE, weight=1, stash=10, checkpoint=1, forward_workspace=5)
    moments = peak_moments("gpipe", num_devices=2, num_microbatches=4, stages=(1,), recompute="never")
    assert stage_memory(moments, held).moment == "1F3"
    assert stage_memory(moments, held).peak_bytes == pytest.approx(1 + 40 + 5)


def test_the_peak_of_a_device_may_lie_where_no_stage_has_its_own() -> None:
    """Chunks of a device hold most at different times; what one holds when the other works counts."""
    name = "interleaved-1f1b:2"
    schedule = make_schedule(name, num_devices=2, num_microbatches=4)
    parts = dict.fromkeys(schedule.stages_of(0), replace(NONE, stash=10))
    alone = [
        stage_memory(
            peak_moments(name, num_devices=2, num_microbatches=4, stages=(s,), recompute="never"), p
        ).peak_bytes
        for s, p in parts.items()
    ]
    together = sum(x.peak_bytes for x in device_memory(schedule, 0, parts, recompute="never").values())
    assert max(alone) < together < sum(alone)
    assert schedule_info(name).num_chunks == len(parts)


@pytest.mark.parametrize(("name", "activations", "gradients"), [("gpipe", 8, 4), ("1f1b", 5, 3)])
def test_receives_are_held_from_some_passes_before_they_are_needed(name: str, activations: int, gradients: int) -> None:
    """Of the second of four devices: in 1F1B three activations are in flight and two more receives posted."""
    moments = device_moments(make_schedule(name, num_devices=4, num_microbatches=8), 1, recompute="never")
    most = {part: int(moments.of(part).max()) for part in ("received_activation", "received_gradient", "sent")}
    assert most["received_activation"] == activations
    assert most["received_gradient"] == gradients
    assert moments.of("received_activation")[-1] == moments.of("sent")[-1] == 0, "at the update nothing is left"


def test_other_trainers_receive_what_the_next_action_needs() -> None:
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    moments = device_moments(schedule, 1, recompute="never", receives_ahead=0)
    assert int(moments.of("received_activation").max()) == int(moments.of("stash").max()) == 3
    assert int(moments.of("received_gradient").max()) == 1
