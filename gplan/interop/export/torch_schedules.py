"""What torch.distributed.pipelining calls a plan's schedule, how its schedule of that name differs,
and when it has none.

Relies on pytorch/pytorch: torch/distributed/pipelining/schedules.py, read and compared action by action at torch 2.13
(`get_schedule_class`: the names; `Schedule1F1B`: no fewer micro-batches than stages; `ScheduleInterleaved1F1B` and
`ScheduleInterleavedZeroBubble`: M in max(1, M // K) equal rounds; `_PipelineScheduleRuntime._load_csv`: any order, a
row of actions for each rank). torch runs a checkpointed forward again for every gradient that a split backward asks for
(pytorch/torchtitan#773), and cannot split the backward of a compiled module (pytorch/pytorch#161904).
"""

from __future__ import annotations

from dataclasses import dataclass

from gplan.errors import UsageError
from gplan.interop.export import demands
from gplan.nouns import Plan
from gplan.schedules import named

CSV_FILE = "gplan.schedule.csv"
"""Where the order of a schedule is expected that torch has no name for."""

RUNTIME = "_PipelineScheduleRuntime"
"""torch's class that runs orders from a file."""

_SINGLE = ("GPipe", "1F1B")
_DIFFERENCES = {
    "GPipe": "runs the backwards from the first micro-batch on, the plan from the last; step and memory are the same",
    "ZBVZeroBubble": "orders the last weight gradients of a device otherwise than the plan; its step is as long",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """How torch runs a schedule: by name, or, where that is empty, by its order in a file."""

    name: str
    notes: tuple[str, ...]

    @property
    def is_single(self) -> bool:
        """Whether its class takes one stage, not a list of them."""
        return self.name in _SINGLE

    @property
    def class_name(self) -> str:
        """In torch.distributed.pipelining, or, for an order in a file, in its module `schedules`."""
        return f"Schedule{self.name}" if self.name else RUNTIME


def torch_schedule(plan: Plan) -> TorchSchedule:
    """torch's schedule with the actions of the plan's in their order, but for what its notes say."""
    name, notes = _name_of(plan), list[str]()
    if not name:
        notes.append(
            f"torch has no schedule with this order: write it with `gplan export --to csv --output {CSV_FILE}`"
        )
    if name in _DIFFERENCES:
        notes.append(f"torch's {name} {_DIFFERENCES[name]}")
    if named(plan.schedule).splits_backward:
        notes.append("the backward is split, which torch cannot do in modules that torch.compile made")
    return TorchSchedule(name=name, notes=tuple(notes))


def check_recomputes_once(plan: Plan, *, receiver: str) -> None:
    """Raise UsageError where a recompute meets a split backward."""
    if plan.recompute != "never" and named(plan.schedule).splits_backward:
        title = named(plan.schedule).title
        raise UsageError(
            f"the plan recomputes and {title} splits the backward; {receiver} would recompute many times for each micro-batch, "
            "the plan once; plan again with --recompute never, or with another --schedule"
        )


def _name_of(plan: Plan) -> str:
    num_devices, num_microbatches = plan.num_devices, plan.num_microbatches
    is_in_rounds = num_microbatches % max(1, num_microbatches // num_devices) == 0
    match demands.plain_schedule(plan).partition(":")[0]:
        case "gpipe":
            return "GPipe"
        case "1f1b" if num_microbatches >= num_devices:
            return "1F1B"
        case "interleaved-1f1b" if num_microbatches % num_devices == 0 or num_microbatches < num_devices:
            return "Interleaved1F1B"
        case "looped-bfs":
            return "LoopedBFS"
        case "zb-h1" if is_in_rounds:
            return "InterleavedZeroBubble"
        case "zb-v":
            return "ZBVZeroBubble"
    return ""
