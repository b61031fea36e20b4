"""The torch engine: the order of sends and receives, and what a step computes, records and keeps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gplan.core import Action, ActionKind, Schedule
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.pass_state import EnginePass
from gplan.runtime.random_streams import RandomStreams
from gplan.runtime.stage_module import LayerInfo, StageModule, StagePass
from gplan.runtime.torch_engine import Receive, Send, Step, TorchEngine, advance_receives, device_steps
from gplan.schedules.dependencies import dependencies_of
from gplan.schedules.registry import make_schedule
from gplan_profiler.capture.capture import capture
from gplan_profiler.host.heartbeat import Heartbeat
from tests.runtime.ranks import on_ranks

NAMES = ("gpipe", "1f1b", "looped-bfs:2", "interleaved-1f1b:2", "zb-h1", "zb-v")
schedules = st.builds(
    lambda name, devices, count: make_schedule(name, num_devices=devices, num_microbatches=count * devices),
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 4),
)


class Double(nn.Module):
    """y = w x, w being 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def alone(name: str, *, num_stages: int) -> tuple[list[float], list[float], list[str], int]:
    """Losses, gradients, actions and receive buffers of a step on one rank: y = w1 w2 .. x, all w 2, x = 1, 2, 3."""
    module = nn.Sequential(*(Double() for _ in range(num_stages)))
    chain = capture(module, torch.ones(1))
    cpu = torch.device("cpu")
    notes = tuple(LayerInfo(str(i), i, None) for i in range(num_stages))
    stages = list[StageModule]()
    for i in range(num_stages):
        stage = StageModule(i, module[i].parameters(), RandomStreams(0, cpu), Heartbeat())
        stage.begin(StagePass(segments=(chain.stage(i, i + 1),), layers=notes, num_microbatches=3, recompute="never"))
        stages.append(stage)
    assert dist.group.WORLD is not None
    engine = TorchEngine(stages, device=cpu, group=dist.group.WORLD)
    work = EnginePass(
        captured=CapturedModel(chain, tuple(range(num_stages + 1)), notes),
        schedule=make_schedule(name, num_devices=1, num_microbatches=3),
        inputs=(torch.tensor([1.0, 2.0, 3.0]),),
        loss_fn=lambda outputs, _: outputs[0].sum(),
    )
    losses = [float(x) for x in engine.run(work)]
    gradients = [float(x.grad) for x in module.parameters() if x.grad is not None]
    num_buffers = sum(len(engine.buffers(i)) for i in range(num_stages))
    return losses, gradients, [str(x.action) for x in engine.recorder.take()], num_buffers


def awaited_in(schedule: Schedule) -> dict[Action, Action]:
    return dependencies_of([x for order in schedule.orders for x in order], schedule.num_stages)


def forwards_of(schedule: Schedule) -> Schedule:
    orders = tuple(tuple(x for x in order if x.kind is ActionKind.FORWARD) for order in schedule.orders)
    return Schedule(
        name="forward",
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        orders=orders,
    )


def source(step: Send | Receive, schedule: Schedule) -> int:
    return schedule.devices[step.made.stage]


def target(step: Send | Receive, schedule: Schedule) -> int:
    return schedule.devices[step.made.receiver]


@given(schedules, st.booleans())
def test_actions_keep_their_order(schedule: Schedule, trains: bool) -> None:
    schedule = schedule if trains else forwards_of(schedule)
    for steps, order in zip(device_steps(schedule), schedule.orders, strict=True):
        assert tuple(x for x in steps if isinstance(x, Action)) == order
        early = advance_receives(steps, awaited_in(schedule))
        assert [x for x in early if not isinstance(x, Receive)] == [x for x in steps if not isinstance(x, Receive)]


@given(schedules, st.sampled_from((0, 1, 12)))
def test_what_is_sent_is_received_in_that_order(schedule: Schedule, ahead: int) -> None:
    lists = device_steps(schedule)
    early = [advance_receives(x, awaited_in(schedule), ahead=ahead) for x in lists]
    for a in range(schedule.num_devices):
        for b in range(schedule.num_devices):
            sent = [x.made for x in lists[a] if isinstance(x, Send) and target(x, schedule) == b]
            for steps in (lists[b], early[b]):
                assert [x.made for x in steps if isinstance(x, Receive) and source(x, schedule) == a] == sent


@given(schedules)
def test_pairs_issue_transfers_in_one_order(schedule: Schedule) -> None:
    """NCCL runs the transfers between two ranks one after the other, in the order in which each rank issues them."""
    lists = device_steps(schedule)
    for a in range(schedule.num_devices):
        for b in range(a):

            def between(steps: list[Step], a: int = a, b: int = b) -> list[Action]:
                found = (x for x in steps if not isinstance(x, Action))
                return [x.made for x in found if {source(x, schedule), target(x, schedule)} == {a, b}]

            assert between(lists[a]) == between(lists[b])


@given(schedules, st.sampled_from((0, 2, 12)))
def test_input_is_received_before_it_is_used(schedule: Schedule, ahead: int) -> None:
    awaited = awaited_in(schedule)
    for steps in device_steps(schedule):
        for order in (steps, advance_receives(steps, awaited, ahead=ahead)):
            begun = set[Action]()
            for step in order:
                if isinstance(step, Receive):
                    begun.add(step.made)
                elif isinstance(step, Action) and step in awaited:
                    made = awaited[step]
                    assert made in begun or schedule.devices[made.stage] == schedule.devices[step.stage]


def test_steps_of_1f1b() -> None:
    first, second = device_steps(make_schedule("1f1b", num_devices=2, num_microbatches=2))
    assert " ".join(map(str, first)) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert " ".join(map(str, second)) == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_receives_outstanding() -> None:
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=20)
    order = advance_receives(device_steps(schedule)[1], awaited_in(schedule))
    assert [isinstance(x, Receive) for x in order[:14]] == [True] * 13 + [False]


def test_unneeded_receive_is_kept() -> None:
    order = [Receive(Action.parse("0F0")), Action.parse("1F0"), Receive(Action.parse("2B7"))]
    assert advance_receives(order, {Action.parse("1F0"): Action.parse("0F0")}) == order


def test_no_sends_within_a_rank() -> None:
    schedule = make_schedule("zb-v", num_devices=2, num_microbatches=2)
    assert schedule.devices == (0, 1, 1, 0)
    sent = {str(x)[:-1] for x in device_steps(schedule)[1] if isinstance(x, Send)}
    assert sent == {"1SEND_B", "2SEND_F"}


def test_single_stage_loss_and_gradient() -> None:
    ((losses, gradients, actions, num_buffers),) = on_ranks(1, lambda _rank: alone("gpipe", num_stages=1))
    assert (losses, gradients, num_buffers) == ([2.0, 4.0, 6.0], [6.0], 0)
    assert actions == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]


def test_same_rank_stages_have_no_buffers() -> None:
    order = "0F2 1F2 0F0 0F1 1F1 1F0 1I0 1B2 0I0 1I1 0B2 0B1 1W1 1W0 0W0"
    ((losses, gradients, actions, num_buffers),) = on_ranks(1, lambda _rank: alone(f"custom:{order}", num_stages=2))
    assert (losses, gradients, num_buffers) == ([4.0, 8.0, 12.0], [12.0, 12.0], 0)
    assert " ".join(actions) == order


def named_actions(_rank: int) -> list[str]:
    """The ranges of actions in a profile of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        alone("gpipe", num_stages=1)
    return [x.name for x in profile.events() or () if x.name.startswith("PP:")]


def test_actions_named_for_profiler() -> None:
    (named,) = on_ranks(1, named_actions)
    assert sorted(named) == ["PP:0B0", "PP:0B1", "PP:0B2", "PP:0F0", "PP:0F1", "PP:0F2"]


@pytest.mark.parametrize("kind", ["F", "B", "I"])
def test_names_of_transfers_are_torchs(kind: str) -> None:
    made = Action.parse(f"2{kind}5")
    letter = "F" if kind == "F" else "B"
    assert str(Send(made)) == f"2SEND_{letter}5"
    assert str(Receive(made)) == (f"3RECV_{letter}5" if kind == "F" else f"1RECV_{letter}5")
