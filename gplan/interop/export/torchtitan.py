"""To torchtitan: a Python module that amends a `Trainer.Config` by the plan: modules of every stage, schedule, recompute.

Relies on pytorch/torchtitan 0.3.0: torchtitan/config/configs.py (`ParallelismConfig.module_fqns_per_model_part`, one list
of fully qualified names per stage; `pipeline_parallel_degree`; `pipeline_parallel_schedule`, a name that torch knows, or
`pipeline_parallel_schedule_csv`, a file with an order; `pipeline_parallel_microbatch_size`, which divides
`training.local_batch_size`), torchtitan/trainer.py (a pipeline needs `training.disable_cuda_graphs`;
`activation_checkpoint`) and torchtitan/distributed/pipeline_parallel.py (`_split_module` keeps children of the model and
entries of a child that is a ModuleList or ModuleDict, not of nested ones; the others become None; stage s goes to rank s
mod K, or, where the schedule is named ZBVZeroBubble, there and back; `_build_pipeline_schedule`: a file overrules the name
but for that). Hugging Face models run by experiments/transformers_modeling_backend, whose splitter calls their modules
tok_embeddings, layers.3, norm, lm_head, and wants rotary_emb in every part. Weights that stages share are refused by
torchtitan/models, plain replicas beside a pipeline by their `parallelize` functions.
"""

from __future__ import annotations

from collections.abc import Callable

from gplan.core import Plan, Profile
from gplan.interop.export.requirements import Export, quoted
from gplan.interop.export.torch_pipelining import CSV_FILE, TorchSchedule, torch_schedule
from gplan.interop.receivers import RECEIVERS, check_plan, child_name, modules_of

_LOOP, _THERE_AND_BACK = "PipelineScheduleMulti", "ZBVZeroBubble"  # where stages are, for an order in a file
ROTARY = "rotary_emb"
"""The module of rotary positions in Hugging Face models, which every stage has."""


def to_torchtitan(plan: Plan, profile: Profile | None) -> Export:
    """A module with `planned(config)`, which returns a configuration with what the plan decides.

    Raises UsageError for what torchtitan cannot split or run.
    """
    check_plan("torchtitan", plan, profile)
    schedule = torch_schedule(plan)
    stages = stage_modules(plan, child_name, everywhere=ROTARY if _is_hugging_face(plan) else "")
    lists = "".join(f"    {quoted(names)},\n" for names in stages)
    recompute = RECEIVERS["torchtitan"].recompute[plan.recompute]
    imports = "from torchtitan.distributed.activation_checkpoint import FullAC\n" if plan.recompute == "always" else ""
    text = f'''from dataclasses import replace

{imports}from torchtitan.trainer import Trainer

MODULES = [
{lists}]


def planned(config: Trainer.Config) -> Trainer.Config:
    """The configuration with the pipeline of the plan."""
    return replace(
        config,
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree={plan.num_devices},
            {_schedule_lines(plan, schedule)}
            pipeline_parallel_microbatch_size={plan.microbatch_size},
            module_fqns_per_model_part=MODULES,
        ),
        training=replace(config.training, local_batch_size={plan.num_microbatches * plan.microbatch_size}, disable_cuda_graphs=True),
        activation_checkpoint={recompute},
    )
'''
    return Export(format="torchtitan", text=text, notes=_notes(plan) + schedule.notes)


def _schedule_lines(plan: Plan, schedule: TorchSchedule) -> str:
    """The schedule by its name, or its order in a file with the name that puts the stages where they belong."""
    if schedule.name:
        return f'pipeline_parallel_schedule="{schedule.name}",'
    name = schedule_for_file(plan)
    return f'pipeline_parallel_schedule="{name}",\n            pipeline_parallel_schedule_csv="{CSV_FILE}",'


def schedule_for_file(plan: Plan) -> str:
    """The name of a schedule that has its stages where those of an order in a file are."""
    is_loop = all(device == stage % plan.num_devices for stage, device in enumerate(plan.devices))
    return _LOOP if is_loop else _THERE_AND_BACK


def stage_modules(plan: Plan, name: Callable[[str], str] = str, *, everywhere: str = "") -> list[list[str]]:
    """The modules of every stage, renamed, each once; `everywhere` is one without weights that every stage has."""
    stages = []
    for stage in plan.stages:
        modules = dict.fromkeys(name(module) for layer in stage.layer_names for module in modules_of(layer))
        stages.append([x for x in modules if x != everywhere] + ([everywhere] if everywhere else []))
    return stages


def _is_hugging_face(plan: Plan) -> bool:
    return any(x.startswith("model.layers.") for x in plan.layer_names)


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [
        "pass the Trainer.Config of your model to planned(); torchtitan's own models and its transformers backend can be split",
        f"newer versions of torchtitan use the names pipeline_parallel_module_fqns_per_model_part and num_pp_microbatches = {plan.num_microbatches}",
    ]
    if _is_hugging_face(plan):
        notes.append(
            "the names are those of torchtitan's own models and of experiments/transformers_modeling_backend; only the latter has "
            "rotary_emb, the former pass over it"
        )
    if plan.recompute == "always":
        notes.append("torchtitan recomputes block by block, the plan stage by stage: time and memory will differ")
    return tuple(notes)
