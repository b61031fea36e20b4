"""Measures the torch engine's own cost per action, per message and per step, with a synthetic pipeline on two
processes.

Each stage computes for some milliseconds over several times a core's caches, so caches are as in real steps; every
second cut sends another number of bytes. In the order `looped-bfs` the first device is ahead of the other in the
forwards and behind it in the backwards. The device that is ahead waits for nothing, so the gap between two of its
actions is the engine's time after the first one plus the cost of sending. Time before the first action and after the
last is taken from the first device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import fmean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gplan.core import Action, ActionKind, EngineCost, Plan, Timeline
from gplan.core.errors import RunError
from gplan.runtime.run.launch import run_local_processes
from gplan.runtime.run.run_options import RunOptions
from gplan.schedules.dependencies import dependencies_of
from gplan.simulation.simulator import sent_bytes
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.computed_profile import ComputeOptions, computed_profile
from gplan_profiler.analytic.hardware import load_hardware
from gplan_profiler.host.links import fit_link
from gplan_profiler.model.load import open_model_file

SENT_BYTES = (2**12, 2**17, 2**21, 2**23, 2**19, 2**15)
"""Over every second cut, from the first one on; the other cuts send as much as the first, so no device waits long."""

NUM_STAGES = 2 * len(SENT_BYTES)
_WIDTH = 512  # floats; the least that a cut sends
_ROWS = 64
_COPIES = 8  # of the rows: 1 MiB


class Relay(nn.Module):
    """Folds the input to one row, works on it, and repeats it to the size of the output."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.repeats = num_bytes // (4 * _WIDTH)
        self.work = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU())
        self.after = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[1, n] -> [1, repeats * width], n a multiple of the width."""
        row = x.view(-1, _WIDTH).mean(0)
        worked = F.dropout(self.work(row.expand(_ROWS, _WIDTH)), 0.1)
        wide = F.gelu(torch.cat([worked] * _COPIES).softmax(1))
        out: Tensor = self.after(wide[:_ROWS]).mean(0) + wide.mean(0)
        return out.repeat(1, self.repeats)


def model() -> nn.Module:
    """One layer per stage."""
    sizes = [SENT_BYTES[i // 2] if i % 2 == 0 else SENT_BYTES[0] for i in range(NUM_STAGES)]
    return nn.Sequential(*map(Relay, sizes))


def batches(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Constant data."""
    while True:
        yield torch.zeros(batch_size, _WIDTH), torch.zeros(batch_size)


def loss(output: Tensor, _target: Tensor) -> Tensor:
    """Any scalar."""
    return output.mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The cheapest optimizer."""
    return torch.optim.SGD(parameters, lr=0.0)


_NUM_STEPS = 15
_NUM_MICROBATCHES = 4
_TIMEOUT_S = 60.0
_QUICK_BYTES = 2**15  # an input of at most this size arrives within one action
_LEAST_S = 1e-9  # lower bound of a message's cost


def measure_engine(*, num_threads: int = 1) -> EngineCost:
    """Measure the engine's cost between two processes of this host with `num_threads` cores each.

    Raises RunError if they cannot communicate or get no time on a core.
    """
    profile = computed_profile(
        open_model_file(__file__).load(),
        ComputeOptions(granularity="layer", hardware=load_hardware("cpu"), microbatch_sizes=(1,)),
    )
    profile = replace(profile, device=replace(profile.device, num_threads=num_threads))
    schedule = f"looped-bfs:{NUM_STAGES // 2}"
    plan = balance(profile, num_devices=2, num_microbatches=_NUM_MICROBATCHES, schedule=schedule)
    options = RunOptions(num_steps=_NUM_STEPS, timeout_s=_TIMEOUT_S, keeps_steps=True)
    try:
        run = run_local_processes(plan.model.name, {}, plan, options, report=lambda _step, _loss: None)
    except RunError as error:
        raise RunError(
            f"the engine's time between two processes could not be measured: {error}; profile when the host is quiet, "
            "or give the link by --link, such as --link 10GB/s,20us: the engine is then not measured"
        ) from error
    return engine_cost_from_steps(plan, run.step_timelines)


def engine_cost_from_steps(plan: Plan, steps: Sequence[Timeline]) -> EngineCost:
    """Return the engine's cost in measured steps, from gaps in which no input was awaited.

    Gaps are taken within a step, as steps differ by more than most gaps. The cost of a message size is the mean,
    over stages and kinds of action, of their median gaps.
    """
    gaps: dict[int, dict[tuple[int, ActionKind], list[float]]] = {}
    for one, gap_s in chain.from_iterable(_gaps(plan, step) for step in steps):
        of_size = gaps.setdefault(sent_bytes(one, plan.stage_costs), {})
        of_size.setdefault((one.stage, one.kind), []).append(gap_s)
    means_s = {num_bytes: fmean(map(median, gaps[num_bytes].values())) for num_bytes in sorted(gaps)}
    action_s = means_s.pop(0)
    seconds = [max(_LEAST_S, mean_s - action_s) for mean_s in means_s.values()]
    around_s = list[float]()  # before the first device's first action and from its last one to its update, by step
    for step in steps:
        updates = [x.start_s for x in step.spans if x.device == 0 and x.action.kind is ActionKind.OPTIMIZER]
        ended_s = max(x.end_s for x in step.loop_spans if x.device == 0)
        around_s.append(step.loop_start_s + max(0.0, min(updates) - ended_s - action_s))
    return EngineCost(action_s=action_s, sending=fit_link([*means_s], seconds), step_s=median(around_s))


def _gaps(plan: Plan, timeline: Timeline) -> Iterator[tuple[Action, float]]:
    """Yield (action, seconds to the device's next action) wherever the next action's input had arrived long before."""
    spans = {span.action: span for span in timeline.loop_spans}
    needs = dependencies_of(list(spans), plan.num_stages)
    for one, other in pairwise(timeline.loop_spans):
        if one.device != other.device:
            continue
        need = needs.get(other.action)
        awaited = None if need is None else spans[need]
        if (
            awaited is None
            or awaited.device == other.device
            or (awaited.end_s <= one.start_s and sent_bytes(awaited.action, plan.stage_costs) <= _QUICK_BYTES)
        ):
            yield one.action, other.start_s - one.end_s
