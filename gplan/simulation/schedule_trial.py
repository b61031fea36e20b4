"""A schedule tried out: what its devices do, wait for and hold with costs that are given, or those of a plan.

Given costs need no profile and have any unit of time. What is given for a device is for one micro-batch through all of
its stages: a chunk takes its share of that, so that schedules with chunks can be held against those without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gplan.core import ActionKind, IdleCause, Plan, RecomputeMode, Schedule, StageCost, Timeline
from gplan.core.errors import UsageError
from gplan.schedules.registry import canonical, make_schedule, schedule_info
from gplan.simulation.bubble import idle_by_device
from gplan.simulation.simulator import equal_bubble, simulate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """Times by hand, each once for all devices, or once a device, or once a stage.

    A backward is the time of its two halves. `link` is what every transfer to another device takes.
    """

    forward: tuple[float, ...] = (1.0,)
    backward: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    link: float = 0.0
    optimizer: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The bubble of equal stages with free transfers in closed form; M, K and v are micro-batches, devices, chunks."""

    formula: str
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrial:
    """One device of a step."""

    device: int
    stages: tuple[int, ...]
    busy_s: float  # forwards and backwards
    update_s: float
    idle_s: Mapping[IdleCause, float]
    most_in_flight: float  # micro-batches between forward and backward, those of one of n chunks for 1/n
    peak_bytes: int | None  # None where no memory is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One step of a schedule with its times, waits and memory; seconds are in the unit of the given costs."""

    name: str
    schedule: str  # its title
    num_devices: int
    num_stages: int
    num_microbatches: int
    recompute: RecomputeMode
    costs: tuple[StageCost, ...]
    step_s: float
    bubble: float
    equal_bubble: float  # with equal stages and free transfers
    law: Law | None  # None where no closed form holds
    devices: tuple[DeviceTrial, ...]
    timeline: Timeline

    @property
    def most_in_flight(self) -> float:
        """Of the device that has most."""
        return max(x.most_in_flight for x in self.devices)

    def idle_s(self, *causes: IdleCause) -> float:
        """Seconds of idle time for these causes, all devices together."""
        return sum(x.idle_s[cause] for x in self.devices for cause in causes)


def given_trial(
    name: str, given: GivenCosts, *, num_devices: int, num_microbatches: int, recompute: RecomputeMode = "never"
) -> Trial:
    """The schedule of that name with costs by hand, for K devices and M micro-batches; a recompute takes a forward.

    Raises UsageError for a name or numbers that cannot be used and for an order that can never finish.

    >>> trial = given_trial("1f1b", GivenCosts(), num_devices=4, num_microbatches=8)
    >>> trial.step_s, trial.law.formula, round(trial.law.bubble, 3), trial.devices[0].most_in_flight
    (33.0, '(K-1)/(M+K-1)', 0.273, 4.0)
    """
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
    forward, optimizer = _spread("forward", given.forward, schedule), _spread("optimizer", given.optimizer, schedule)
    first, second = (_spread("backward", halves, schedule) for halves in zip(*given.backward, strict=True))
    costs = [
        StageCost(
            forward_s=forward_s,
            backward_s=first_s + second_s,
            recompute_s=forward_s,
            optimizer_s=optimizer_s,
            activation_bytes=0,
            gradient_bytes=0,
            activation_s=given.link,
            gradient_s=given.link,
            input_gradient_s=first_s,
            weight_gradient_s=second_s,
        )
        for forward_s, first_s, second_s, optimizer_s in zip(forward, first, second, optimizer, strict=True)
    ]
    return _trial(name, schedule, costs, recompute, peaks=None)


def plan_trial(plan: Plan, *, schedule: str | None = None, num_microbatches: int | None = None) -> Trial:
    """The plan's stages under its own schedule, or another one that has the same stages on the same devices.

    Raises UsageError for a schedule that lays the stages elsewhere, or splits a backward whose halves are not known.
    """
    name, count = schedule or plan.schedule, num_microbatches or plan.num_microbatches
    made = make_schedule(name, num_devices=plan.num_devices, num_microbatches=count)
    if made.devices != plan.devices:
        found = f"{plan.num_stages} stages on {plan.num_devices} devices"
        needed = made.num_stages if made.num_stages != plan.num_stages else "them elsewhere"
        raise UsageError(f"the plan has {found}, {made.name} has {needed}; balance anew with --schedule")
    is_as_planned = (canonical(name), count) == (canonical(plan.schedule), plan.num_microbatches)
    peaks = plan.device_peak_bytes if is_as_planned else None
    return _trial(name, made, plan.stage_costs, plan.recompute, peaks=peaks)


def law_of(name: str, bubble: float, *, num_devices: int, num_microbatches: int) -> Law | None:
    """What is published of a schedule's bubble with equal stages; None where that is not this bubble."""
    known = _LAWS.get(name.partition(":")[0])
    if known is None:
        return None
    formula, share = known
    law = Law(formula=formula, bubble=share(num_devices, num_microbatches, schedule_info(name).num_chunks))
    return law if abs(law.bubble - bubble) < _SAME else None


_LAWS: dict[str, tuple[str, Callable[[int, int, int], float]]] = {
    **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b"), ("(K-1)/(M+K-1)", lambda k, m, _: (k - 1) / (m + k - 1))),
    **dict.fromkeys(("interleaved-1f1b", "looped-bfs"), ("(K-1)/(vM+K-1)", lambda k, m, v: (k - 1) / (v * m + k - 1))),
    "zb-h1": ("(K-1)/(3M+K-1)", lambda k, m, _: (k - 1) / (3 * m + k - 1)),
    "zb-v": ("(K-1)/(6M+K-1)", lambda k, m, _: (k - 1) / (6 * m + k - 1)),
}
_SAME = 1e-9


def has_whole_backward(timeline: Timeline) -> bool:
    """Whether the weight gradients of stage 0 are its whole backwards: its inputs need no gradient."""
    return any(x.action.stage == 0 and x.action.kind is ActionKind.WEIGHT_GRADIENT for x in timeline.spans)


def _trial(
    name: str, schedule: Schedule, costs: Sequence[StageCost], recompute: RecomputeMode, *, peaks: Sequence[int] | None
) -> Trial:
    try:
        timeline = simulate_schedule(schedule, costs, recompute=recompute)
        equal = equal_bubble(schedule, costs, recompute=recompute)
    except ValueError as error:
        raise UsageError(str(error)) from error
    steps, devices = (
        {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1},
        list[DeviceTrial](),
    )
    for device, idle in enumerate(idle_by_device(timeline)):
        stages, in_flight = (
            schedule.stages_of(device),
            accumulate(steps.get(x.kind, 0) for x in schedule.orders[device]),
        )
        devices.append(
            DeviceTrial(
                device=device,
                stages=stages,
                busy_s=timeline.busy_s(device),
                update_s=timeline.update_s(device),
                idle_s=idle,
                most_in_flight=max(in_flight) / len(stages),
                peak_bytes=peaks[device] if peaks is not None else None,
            )
        )
    return Trial(
        name=canonical(name),
        schedule=schedule.name,
        num_devices=schedule.num_devices,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        recompute=recompute,
        costs=tuple(costs),
        step_s=timeline.step_s,
        bubble=timeline.bubble,
        equal_bubble=equal,
        law=law_of(name, equal, num_devices=schedule.num_devices, num_microbatches=schedule.num_microbatches),
        devices=tuple(devices),
        timeline=timeline,
    )


def _spread(what: str, values: Sequence[float], schedule: Schedule) -> list[float]:
    """For each stage its share of what its device takes, or, with as many values as stages, what it takes itself."""
    counts = [len(schedule.stages_of(device)) for device in range(schedule.num_devices)]
    if len(values) == 1:
        return [values[0] / counts[device] for device in schedule.devices]
    if len(values) == schedule.num_devices:
        return [values[device] / counts[device] for device in schedule.devices]
    if len(values) == schedule.num_stages:
        return list(values)
    devices, stages = schedule.num_devices, schedule.num_stages
    expected = f"1 or {devices}, one a device" + (f", or {stages}, one a stage" if stages != devices else "")
    raise UsageError(f"{what} has {len(values)} values; expected {expected}")
