"""The memory model against the formulas it should equal, and against a replay that knows nothing of moments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.memory import StageBytes, stage_memory, stage_moments
from gplan.nouns import ActionKind, RecomputeMode
from gplan.schedules import make_schedule

sizes = st.integers(0, 100)
parts = st.builds(
    StageBytes,
    weight=sizes, gradient=sizes, optimizer=sizes, stash=sizes, checkpoint=sizes, pending=sizes, sent=sizes, forward_workspace=sizes,
    backward_workspace=sizes, recompute_workspace=sizes, optimizer_workspace=sizes, buffer=sizes,
)  # fmt: skip
names = st.sampled_from(["gpipe", "1f1b"])
modes = st.sampled_from(["never", "always", "except-last"])


def peak(name: str, k: int, m: int, stage: int, mode: RecomputeMode, held: StageBytes[int]) -> int:
    moments = stage_moments(name, num_devices=k, num_microbatches=m, stage=stage, recompute=mode)
    return stage_memory(moments, held).peak_bytes


def replayed_peak(name: str, k: int, m: int, stage: int, mode: RecomputeMode, held: StageBytes[int]) -> int:
    """The same rules, told as a story of blocks that come and go."""
    blocks: dict[object, int] = {"w": held.weight, "o": held.optimizer, "r": held.buffer}
    most = 0
    for action in make_schedule(name, num_devices=k, num_microbatches=m).orders[stage]:
        i = action.microbatch
        again = mode == "always" or (mode == "except-last" and i < m - 1)
        if action.kind is ActionKind.FORWARD:
            blocks["kept", i] = held.checkpoint if again else held.stash
            workspaces = [held.recompute_workspace if again else held.forward_workspace]
        else:
            if again:
                blocks["recomputed"] = held.stash
            workspaces = [held.backward_workspace, held.forward_workspace if again else 0]
        most = max(most, sum(blocks.values()) + max(workspaces))
        if action.kind is ActionKind.BACKWARD:
            blocks.pop("recomputed", None)
            del blocks["kept", i]
            blocks["g"], blocks["sent", i] = held.gradient, held.sent
            most = max(most, sum(blocks.values()))
    return max(most, held.weight + held.optimizer + held.buffer + held.gradient + held.optimizer_workspace)


@given(names, st.integers(1, 6), st.integers(1, 10), st.data(), modes, parts)
def test_the_peak_is_that_of_a_replay(
    name: str, k: int, m: int, data: st.DataObject, mode: RecomputeMode, held: StageBytes[int]
) -> None:
    stage = data.draw(st.integers(0, k - 1))
    assert peak(name, k, m, stage, mode, held) == replayed_peak(name, k, m, stage, mode, held)


@given(
    names, st.integers(1, 6), st.integers(2, 10), st.data(), st.integers(1, 99), st.integers(0, 99), st.integers(0, 99)
)
def test_without_recompute_the_peak_is_the_formula(
    name: str, k: int, m: int, data: st.DataObject, stash: int, workspace: int, gradient: int
) -> None:
    stage = data.draw(st.integers(0, k - 1))
    held = StageBytes(
        weight=7, gradient=gradient, optimizer=14, stash=stash, pending=0, checkpoint=0, sent=0, forward_workspace=workspace,
        backward_workspace=workspace, recompute_workspace=0, optimizer_workspace=0, buffer=0,
    )  # fmt: skip
    n = m if name == "gpipe" else min(m, k - stage)
    later = n if name == "1f1b" and m > n else m - 1
    formula = 7 + 14 + max(n * stash + workspace, later * stash + workspace + gradient)
    assert peak(name, k, m, stage, "never", held) == formula


def test_recompute_trades_stashes_for_checkpoints() -> None:
    held = StageBytes(
        weight=0, gradient=0, optimizer=0, stash=100, pending=0, checkpoint=1, sent=0, forward_workspace=0, backward_workspace=0,
        recompute_workspace=0, optimizer_workspace=0, buffer=0,
    )  # fmt: skip
    peaks = {mode: peak("gpipe", 2, 8, 0, mode, held) for mode in ("never", "always", "except-last")}
    assert peaks == {"never": 800, "always": 108, "except-last": 107}


@given(names, st.integers(1, 4), st.integers(1, 6), modes, parts)
def test_the_categories_add_up_to_the_peak(
    name: str, k: int, m: int, mode: RecomputeMode, held: StageBytes[int]
) -> None:
    memory = stage_memory(stage_moments(name, num_devices=k, num_microbatches=m, stage=0, recompute=mode), held)
    categories = [getattr(memory, x) for x in memory.__slots__ if x.endswith("_bytes")]
    assert sum(categories) == memory.peak_bytes
    assert memory.peak_bytes >= held.weight + held.optimizer + held.buffer


def test_the_moment_of_the_peak_is_named() -> None:
    held = StageBytes(
        weight=1, gradient=0, optimizer=0, stash=10, pending=0, checkpoint=1, sent=0, forward_workspace=5, backward_workspace=0,
        recompute_workspace=0, optimizer_workspace=0, buffer=0,
    )  # fmt: skip
    moments = stage_moments("gpipe", num_devices=2, num_microbatches=4, stage=1, recompute="never")
    assert stage_memory(moments, held).moment == "1F3"
    assert stage_memory(moments, held).peak_bytes == pytest.approx(1 + 40 + 5)
