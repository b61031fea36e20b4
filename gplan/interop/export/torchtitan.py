"""To torchtitan: the modules of every pipeline stage and the settings beside them, as a part of its TOML configuration.

Relies on pytorch/torchtitan: torchtitan/config/job_config.py (`Parallelism.module_fqns_per_model_part`, one list of
fully qualified names per stage; `pipeline_parallel_degree`, `pipeline_parallel_schedule`, a name that torch knows, or
`pipeline_parallel_schedule_csv`, a file with an order; `pipeline_parallel_microbatch_size`, which divides
`training.local_batch_size`; `activation_checkpoint.mode`) and torchtitan/distributed/pipeline_parallel.py
(`pipeline_module_split`: keeps children of the model and entries of a child that is a ModuleList or ModuleDict, "does
not support nested" ones; the others become None; stage s goes to rank s mod K, or, where the schedule is named
ZBVZeroBubble, there and back; `build_pipeline_schedule`: a file overrules the name but for that). Weights that stages
share are refused by torchtitan/models, plain replicas beside a pipeline by their `parallelize` functions.
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.core.errors import UsageError
from gplan.interop.export import requirements
from gplan.interop.export.requirements import Export
from gplan.interop.export.torch_pipelining import CSV_FILE, TorchSchedule, check_recomputes_once, torch_schedule
from gplan.schedules.registry import schedule_info

_RECEIVER = "torchtitan"
_LOOP, _THERE_AND_BACK = "PipelineScheduleMulti", "ZBVZeroBubble"  # where stages are, for an order in a file
_MODES = {"never": "none", "always": "full"}
_DEEPEST = 2  # names in a path: a child of the model, or an entry of a child


def to_torchtitan(plan: Plan, profile: Profile | None) -> Export:
    """The tables `parallelism`, `training` and `activation_checkpoint`, as far as the plan decides them.

    Raises UsageError for what torchtitan cannot split or run.
    """
    requirements.check_order(plan, profile, receiver=_RECEIVER)
    requirements.check_layers_are_modules(plan, receiver=_RECEIVER)
    requirements.check_one_pipeline(plan, receiver=_RECEIVER)
    requirements.check_whole_weights(plan, profile, receiver=_RECEIVER)
    _check_no_skips(plan, profile)
    check_recomputes_once(plan, receiver=_RECEIVER)
    schedule = torch_schedule(plan)
    parts = ",\n".join(f"    {requirements.quoted(names)}" for names in _parts(plan))
    text = f"""[parallelism]
pipeline_parallel_degree = {plan.num_devices}
{_schedule_lines(plan, schedule)}
pipeline_parallel_microbatch_size = {plan.microbatch_size}
module_fqns_per_model_part = [
{parts},
]

[training]
local_batch_size = {plan.num_microbatches * plan.microbatch_size}

[activation_checkpoint]
mode = "{requirements.recompute_name(plan, _MODES, receiver=_RECEIVER)}"
"""
    return Export(format="torchtitan", text=text, notes=_notes(plan) + schedule.notes)


def _schedule_lines(plan: Plan, schedule: TorchSchedule) -> str:
    """The schedule by its name, or its order in a file with the name that puts the stages where they belong."""
    if schedule.name:
        return f'pipeline_parallel_schedule = "{schedule.name}"'
    num_devices, num_stages = plan.num_devices, plan.num_stages
    loop = tuple(stage % num_devices for stage in range(num_stages))
    there_and_back = (*range(num_devices), *reversed(range(num_devices)))
    if plan.devices not in (loop, there_and_back) or num_stages % num_devices:
        raise UsageError(
            f"{schedule_info(plan.schedule).title} has stages on devices {', '.join(map(str, plan.devices))}; torchtitan puts as many on "
            "each, stage s on rank s mod K, or two on each there and back; plan again with another --schedule"
        )
    name = _LOOP if plan.devices == loop else _THERE_AND_BACK
    return f'pipeline_parallel_schedule = "{name}"\npipeline_parallel_schedule_csv = "{CSV_FILE}"'


def _parts(plan: Plan) -> list[list[str]]:
    """The modules of every stage, each on one stage only."""
    home: dict[str, int] = {}
    for stage in plan.stages:
        for module in (x for layer in stage.layer_names for x in requirements.modules_of(layer)):
            _check_path(module)
            if home.setdefault(module, stage.index) != stage.index:
                raise UsageError(
                    f"{module} is called on stages {home[module]} and {stage.index}; torchtitan puts a module on one stage; "
                    "keep its calls together with --keep-together, or use a module for each call"
                )
    return [[module for module in home if home[module] == stage.index] for stage in plan.stages]


def _check_path(module: str) -> None:
    if module.isdigit():
        raise UsageError(
            f"layer {module} is a child of an nn.Sequential; torchtitan takes modules away and leaves None, which a Sequential "
            "cannot pass over; give gplan a module whose forward can"
        )
    if len(module.split(".")) > _DEEPEST:
        raise UsageError(
            f"{module} is too deep in the model; torchtitan splits a model at its children, such as norm, and at the entries "
            "of a child that is a list, such as layers.3; move the layers up to the model"
        )


def _check_no_skips(plan: Plan, profile: Profile | None) -> None:
    makers = requirements.skipping_values(plan, profile)
    if makers:
        raise UsageError(
            f"the output of {makers[0]} skips layers across a cut; a stage of torchtitan gets only what the layer before it "
            "returns; keep its readers with it (--keep-together), or let each layer make it anew"
        )


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [
        "the model's forward must pass over children that are None, and its lists of layers be a ModuleDict or ModuleList, "
        "as in torchtitan's own models",
        "versions that are configured in Python have the same names in ParallelismConfig; the latest say "
        f"pipeline_parallel_module_fqns_per_model_part and num_pp_microbatches = {plan.num_microbatches}",
    ]
    if plan.recompute == "always":
        notes.append("torchtitan recomputes block by block, the plan stage by stage: time and memory will differ")
    return tuple(notes)
