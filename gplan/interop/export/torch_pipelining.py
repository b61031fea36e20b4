"""To torch.distributed.pipelining: the split points of `pipeline()`, and the schedule over the stages of a rank.

Relies on pytorch/pytorch: docs/source/distributed.pipelining.md and torch/distributed/pipelining/_IR.py (`pipeline`'s
`split_spec`, a dictionary from the path of a module to a `SplitPoint`; BEGINNING splits before every call of the
module). gplan gives operations between modules to the module before them, so a stage begins where its first module is
called. `pipeline()` traces the model: what skips layers is sent straight on, which the schedules of several stages a
rank refuse (`PipelineScheduleMulti._validate_adjacent_stage_communication`); a parameter used on several stages is
copied to each and its gradients are not added up. It has no option for recompute. Its stages exchange messages with
their neighbours at the start, which a rank cannot send to itself (`_PipelineStageBase._get_init_p2p_neighbors_ops`;
with gloo the first step of ZBVZeroBubble raises).
"""

from __future__ import annotations

from dataclasses import dataclass

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.interop.export.requirements import Written, quoted, stage_comments, widths_of_model
from gplan.interop.receivers import modules_of, plain_schedule
from gplan.schedules.registry import schedule_info
from gplan.simulation.simulator import schedule_of


def to_csv(plan: Plan, profile: Profile | None) -> Written:
    """The order of actions of every device as CSV, for torch's schedule runtime and gplan; exists for every plan.

    A row for each device, a column for each action: `3F0` is stage 3, forward, micro-batch 0; B is a backward, I and W
    its halves. Relies on pytorch/pytorch: torch/distributed/pipelining/schedules.py
    (`_PipelineScheduleRuntime._load_csv` with format "compute_only", `_Action.from_str`), which adds sends and receives.
    """
    rows = (",".join(map(str, order)) for order in schedule_of(plan).orders)
    return "".join(f"{row}\n" for row in rows), ()


CSV_FILE = "gplan.schedule.csv"
"""The file with the order of a schedule that torch has no name for."""

RUNTIME = "_PipelineScheduleRuntime"
"""torch's class that runs orders from a file."""

_SINGLE = ("GPipe", "1F1B")
_DIFFERENCES = {
    "GPipe": "runs the backwards starting with the first micro-batch, the plan with the last; step and memory are equal",
    "ZBVZeroBubble": "orders the last weight gradients of a device differently; the step is equally long",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """How torch runs a schedule: by name, or, if that is empty, by its order in a file."""

    name: str
    notes: tuple[str, ...]

    @property
    def is_single(self) -> bool:
        """Whether its class takes one stage, not a list of them."""
        return self.name in _SINGLE

    @property
    def class_name(self) -> str:
        """The class in torch.distributed.pipelining, or, for an order in a file, in its module `schedules`."""
        return f"Schedule{self.name}" if self.name else RUNTIME


def torch_schedule(plan: Plan) -> TorchSchedule:
    """torch's schedule with the plan's order of actions; its notes name the differences.

    Relies on pytorch/pytorch: torch/distributed/pipelining/schedules.py, compared action by action at torch 2.13
    (`get_schedule_class`: the names; `Schedule1F1B`: no fewer micro-batches than stages; `ScheduleInterleaved1F1B` and
    `ScheduleInterleavedZeroBubble`: M in max(1, M // K) equal rounds; `_PipelineScheduleRuntime._load_csv`: any order).
    torch recomputes a checkpointed forward for every gradient that a split backward needs (pytorch/torchtitan#773), and
    cannot split the backward of a compiled module (pytorch/pytorch#161904).
    """
    name, notes = _name_of(plan), list[str]()
    if not name:
        notes.append(
            f"torch has no schedule with this order: write it with `gplan export --to csv --output {CSV_FILE}`"
        )
    if name in _DIFFERENCES:
        notes.append(f"torch's {name} {_DIFFERENCES[name]}")
    if schedule_info(plan.schedule).splits_backward:
        notes.append("the backward is split, which torch cannot do for modules compiled by torch.compile")
    return TorchSchedule(name=name, notes=tuple(notes))


def _name_of(plan: Plan) -> str:
    num_devices, num_microbatches = plan.num_devices, plan.num_microbatches
    is_in_rounds = num_microbatches % max(1, num_microbatches // num_devices) == 0
    match plain_schedule(plan.schedule).partition(":")[0]:
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


def to_pytorch(plan: Plan, profile: Profile | None) -> Written:
    """Python: `split_spec`, the `STAGES` of every rank, and `make_schedule`, which takes the result of `pipeline()`.

    Raises UsageError for a value that is used beyond the next stage, where torch's schedule cannot send it.
    """
    schedule = torch_schedule(plan)
    if not schedule.is_single:
        _check_neighbours(plan, profile, schedule)
    beginnings = [modules_of(stage.layer_names[0])[0] for stage in plan.stages[1:]]
    points = "".join(f"    {quoted([x])[1:-1]}: SplitPoint.BEGINNING,\n" for x in beginnings)
    comments, package = stage_comments(plan, what="stage"), "from torch.distributed.pipelining"
    imports = f"{package} import {schedule.class_name}, SplitPoint"
    if not schedule.name:
        imports = f"{package} import SplitPoint\n{package}.schedules import {schedule.class_name}"
    text = f"""{imports}

{comments}
split_spec = {{
{points}}}
STAGES = {[[stage.index for stage in plan.stages_of(rank)] for rank in range(plan.num_devices)]}


def make_schedule(pipe, rank, device, loss_fn):
    stages = [pipe.build_stage(index, device) for index in STAGES[rank]]
{_made(plan, schedule)}"""
    notes = (
        f"pipe = pipeline(model, mb_args=..., split_spec=split_spec) with inputs of {plan.microbatch_size} samples; "
        f"pipe.num_stages must then be {plan.num_stages}",
        f"make_schedule(pipe, rank, device, loss_fn).step(...) on each of {plan.num_devices} ranks trains a batch of "
        f"{plan.batch_size} samples",
        *widths_of_model(profile, "torch.distributed.pipelining"),
        *schedule.notes,
    )
    return text, notes


def _made(plan: Plan, schedule: TorchSchedule) -> str:
    """The end of `make_schedule`; torch divides the gradients of a mean over the micro-batches by their number."""
    stages = "stages[0]" if schedule.is_single else "stages"
    numbers = f"n_microbatches={plan.num_microbatches}, loss_fn=loss_fn, scale_grads={plan.loss_reduction == 'mean'}"
    call = f"{schedule.class_name}({stages}, {numbers})"
    if schedule.name:
        return f"    return {call}\n"
    return f'    schedule = {call}\n    schedule._load_csv("{CSV_FILE}")\n    return schedule\n'


def _check_neighbours(plan: Plan, profile: Profile | None, schedule: TorchSchedule) -> None:
    """Raise UsageError if a value is used beyond the next stage."""
    home = {i: stage.index for stage in plan.stages for i in range(stage.first_layer, stage.end_layer)}
    for value in profile.values if profile is not None else ():
        readers = [home[x] for x in value.consumers if x in home]
        if value.producer is not None and max(readers, default=0) > home[value.producer] + 1:
            name = plan.layer_names[value.producer]
            raise UsageError(
                f"the output of {name} is read on stage {max(readers)}, beyond the next; torch's {schedule.class_name} "
                "sends to the next stage only; keep its readers near it (--keep-together), or plan with --schedule gpipe or 1f1b"
            )
