"""To torch.distributed.pipelining: the split points of `pipeline()`, and the schedule over the stages of a rank.

Relies on pytorch/pytorch: docs/source/distributed.pipelining.md and torch/distributed/pipelining/_IR.py (`pipeline`'s
`split_spec`, a dictionary from the path of a module to a `SplitPoint`; BEGINNING splits before every call of the
module). gplan gives operations between modules to the module before them, so a stage begins where its first module is
called. `pipeline()` traces the model: what skips layers is sent straight on, which the schedules of several stages a
rank refuse (`PipelineScheduleMulti._validate_adjacent_stage_communication`); a parameter used on several stages is
copied to each and its gradients are not added up. It has no word for recompute. Its stages greet their neighbours with
messages, which a rank cannot send to itself (`_PipelineStageBase._get_init_p2p_neighbors_ops`; with gloo the first step
of ZBVZeroBubble raises).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from gplan.errors import UsageError
from gplan.interop.export import demands
from gplan.interop.export.exported import Export
from gplan.interop.export.torch_schedules import CSV_FILE, TorchSchedule, torch_schedule
from gplan.nouns import Plan, Profile
from gplan.schedules import named

_RECEIVER = "torch.distributed.pipelining"


def to_pytorch(plan: Plan, profile: Profile | None) -> Export:
    """Python: `split_spec`, the `STAGES` of every rank, and `make_schedule`, a function of what `pipeline()` returns.

    Raises UsageError where a stage does not begin with a call of a module, the only one, and for what `pipeline()` and
    its schedules do not run.
    """
    demands.check_order(plan, profile, receiver=_RECEIVER)
    demands.check_layers_are_modules(plan, receiver=_RECEIVER)
    demands.check_one_pipeline(plan, receiver=_RECEIVER)
    demands.check_whole_weights(plan, profile, receiver=_RECEIVER)
    demands.recompute_name(plan, {"never": "none"}, receiver=_RECEIVER)
    schedule = torch_schedule(plan)
    _check_apart(plan)
    if not schedule.is_single:
        _check_neighbours(plan, profile, schedule)
    points = "".join(f"    {demands.quoted([x])[1:-1]}: SplitPoint.BEGINNING,\n" for x in _beginnings(plan))
    comments = "\n".join(demands.stage_comments(plan, what="stage"))
    text = f"""{_imports(schedule)}

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
        *schedule.notes,
    )
    return Export(format="pytorch", text=text, notes=notes)


def _imports(schedule: TorchSchedule) -> str:
    package = "from torch.distributed.pipelining"
    if schedule.name:
        return f"{package} import {schedule.class_name}, SplitPoint"
    return f"{package} import SplitPoint\n{package}.schedules import {schedule.class_name}"


def _made(plan: Plan, schedule: TorchSchedule) -> str:
    """The end of `make_schedule`; torch divides the gradients of a mean over the micro-batches by their number."""
    stages = "stages[0]" if schedule.is_single else "stages"
    numbers = f"n_microbatches={plan.num_microbatches}, loss_fn=loss_fn, scale_grads={plan.loss_reduction == 'mean'}"
    call = f"{schedule.class_name}({stages}, {numbers})"
    if schedule.name:
        return f"    return {call}\n"
    return f'    schedule = {call}\n    schedule._load_csv("{CSV_FILE}")\n    return schedule\n'


def _check_apart(plan: Plan) -> None:
    """No stage is on the device of the next."""
    for stage, (device, following) in enumerate(pairwise(plan.devices)):
        if device == following:
            raise UsageError(
                f"stages {stage} and {stage + 1} are neighbours on device {device} ({named(plan.schedule).title}); the stages that "
                "torch's pipeline() makes cannot hand over within a rank; plan again with a --schedule that sets them apart"
            )


def _check_neighbours(plan: Plan, profile: Profile | None, schedule: TorchSchedule) -> None:
    """Values go to the next stage only."""
    home = {i: stage.index for stage in plan.stages for i in range(stage.first_layer, stage.end_layer)}
    for value in profile.values if profile is not None else ():
        readers = [home[x] for x in value.consumers if x in home]
        if value.producer is not None and not value.is_gradient and max(readers, default=0) > home[value.producer] + 1:
            name = plan.layer_names[value.producer]
            raise UsageError(
                f"the output of {name} is read on stage {max(readers)}, beyond the next; torch's {schedule.class_name} "
                "sends to the next stage only; keep its readers near it (--keep-together), or plan with --schedule gpipe or 1f1b"
            )


def _beginnings(plan: Plan) -> tuple[str, ...]:
    """The module that each stage but the first begins with."""
    calls = Counter(module for layer in plan.layer_names for module in demands.modules_of(layer))
    beginnings = tuple(demands.modules_of(stage.layer_names[0])[0] for stage in plan.stages[1:])
    for module in beginnings:
        if calls[module] > 1:
            raise UsageError(
                f"a stage begins with a call of {module}, which is called {calls[module]} times; a split point splits at "
                "every call; move the cut with --cut-after or --keep-together, or use a module for each call"
            )
    return beginnings
