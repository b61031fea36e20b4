"""To torchtitan and NeMo Automodel: the modules of every stage as lists of names, with the schedule.

torchtitan: a Python module that amends a `Trainer.Config`. Relies on pytorch/torchtitan 0.3.0:
torchtitan/config/configs.py (`ParallelismConfig.module_fqns_per_model_part`, one list
of fully qualified names per stage; `pipeline_parallel_degree`; `pipeline_parallel_schedule`, a name that torch knows, or
`pipeline_parallel_schedule_csv`, a file with an order; `pipeline_parallel_microbatch_size`, which divides
`training.local_batch_size`), torchtitan/trainer.py (a pipeline needs `training.disable_cuda_graphs`;
`activation_checkpoint`) and torchtitan/distributed/pipeline_parallel.py (`_split_module` keeps children of the model and
entries of a child that is a ModuleList or ModuleDict, not of nested ones; the others become None; stage s goes to rank s
mod K, or, where the schedule is named ZBVZeroBubble, there and back; `_build_pipeline_schedule`: a file overrules the name
but for that). Hugging Face models run by experiments/transformers_modeling_backend, whose splitter calls their modules
tok_embeddings, layers.3, norm, lm_head, and wants rotary_emb in every part. Weights that stages share are refused by
torchtitan/models, plain replicas beside a pipeline by their `parallelize` functions.

Automodel: a `PipelineConfig`, for Hugging Face models. Relies on NVIDIA-NeMo/Automodel: nemo_automodel/components/distributed/pipelining/config.py (`PipelineConfig`) and
components/training/step_scheduler.py (`StepScheduler`), recipes/llm/train_ft.py (`pp_batch_size` is its `local_batch_size`),
functional.py (`split_model_into_stages`: fully qualified names, one list per stage; stage s on rank s mod K, or there and
back where the schedule is named ZBVZeroBubble; `build_pipeline_schedule`: schedules by torch's names, or an order in a
file). Every stage needs `rotary_emb`; attention masks are made on each (hf_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable

from gplan.core import Plan, Profile
from gplan.interop.export.requirements import BY_BLOCK, Written, computed_widths, quoted
from gplan.interop.export.torch_pipelining import CSV_FILE, torch_schedule
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import child_name, decoder_of, modules_of

_LOOP, _THERE_AND_BACK = "PipelineScheduleMulti", "ZBVZeroBubble"  # where stages are, for an order in a file
ROTARY = "rotary_emb"
"""The module of rotary positions in Hugging Face models, which every stage has."""


def to_torchtitan(plan: Plan, profile: Profile | None) -> Written:
    """A module with `planned(config)`, which returns a configuration with what the plan decides."""
    schedule = torch_schedule(plan)
    is_hugging_face = any(x.startswith("model.layers.") for x in plan.layer_names)
    stages = _stage_modules(plan, child_name, everywhere=ROTARY if is_hugging_face else "")
    lists = "".join(f"    {quoted(names)},\n" for names in stages)
    recompute = RECEIVERS["torchtitan"].recompute[plan.recompute]
    order = f'pipeline_parallel_schedule="{schedule.name or _schedule_for_file(plan)}",'
    order += "" if schedule.name else f'\n            pipeline_parallel_schedule_csv="{CSV_FILE}",'
    imports = "from torchtitan.distributed.activation_checkpoint import FullAC\n" if plan.recompute == "always" else ""
    degrees = {
        "tensor": "tensor_parallel_degree", "context": "context_parallel_degree", "expert": "expert_parallel_degree",
        "data": "data_parallel_shard_degree",
    }  # fmt: skip
    split = computed_widths(profile)
    widths = "".join(f"{degrees[x]}={split[x]},\n            " for x in degrees if split)
    widths += "data_parallel_replicate_degree=1,\n            " if split else ""
    length = f"seq_len={split['sequence_length']}, " if split else ""
    local, whole = plan.num_microbatches * plan.microbatch_size, -1  # that of all replicas
    if plan.num_devices == 1:  # a local batch goes through at once, and gradients accumulate up to the whole one
        local, whole = plan.microbatch_size, local * split.get("data", 1)
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
            {widths}{order}
            pipeline_parallel_microbatch_size={plan.microbatch_size},
            module_fqns_per_model_part=MODULES,
        ),
        training=replace(config.training, {length}local_batch_size={local}, global_batch_size={whole}, disable_cuda_graphs=True),
        activation_checkpoint={recompute},
    )
'''
    notes = [
        "pass the Trainer.Config of your model to planned(); torchtitan's own models and its transformers backend can be split",
        f"newer versions of torchtitan use the names pipeline_parallel_module_fqns_per_model_part, num_pp_microbatches = {plan.num_microbatches} and max_context_length",
    ]
    if is_hugging_face:
        notes.append(
            "the names are those of torchtitan's own models and of experiments/transformers_modeling_backend; only the latter has "
            "rotary_emb, the former pass over it"
        )
    if plan.recompute == "always":
        notes.append(f"torchtitan {BY_BLOCK}")
    return text, (*notes, *schedule.notes)


_AUTOMODEL_SIZES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data"}
"""Automodel's names of widths."""


def to_automodel(plan: Plan, profile: Profile | None) -> Written:
    """Python: `PIPELINE`, a PipelineConfig."""
    schedule = torch_schedule(plan)
    first_block = plan.layer_names[decoder_of(plan.layer_names, RECEIVERS["automodel"].title, profile).blocks.start]
    stages = _stage_modules(plan, str, everywhere=f"{first_block.rpartition('layers.')[0]}{ROTARY}")
    lists = "".join(f"        {quoted(names)},\n" for names in stages)
    order = f'    pp_schedule="{schedule.name or _schedule_for_file(plan)}",\n'
    order += "" if schedule.name else f'    pp_schedule_csv="{CSV_FILE}",\n'
    widths = computed_widths(profile)
    sizes = {"pp": plan.num_devices, **{x: widths.get(y, 1) for x, y in _AUTOMODEL_SIZES.items()}}
    mesh = "DISTRIBUTED = " + repr({"strategy": "fsdp2", **{f"{x}_size": y for x, y in sizes.items()}}).replace(
        "'", '"'
    )
    # A recipe reads the batch of a pipeline here; without one these samples go through at once, and gradients accumulate.
    local = plan.microbatch_size * (plan.num_microbatches if plan.num_devices > 1 else 1)
    batch = plan.num_microbatches * plan.microbatch_size * widths.get("data", plan.num_replicas)
    text = f"""from nemo_automodel.components.distributed.pipelining.config import PipelineConfig

{mesh + chr(10) if widths else ""}STEP_SCHEDULER = {{"global_batch_size": {batch}, "local_batch_size": {local}}}

PIPELINE = PipelineConfig(
{order}    pp_microbatch_size={plan.microbatch_size},
    pp_batch_size={plan.num_microbatches * plan.microbatch_size},
    scale_grads_in_schedule={plan.loss_reduction == "mean"},
    module_fqns_per_model_part=[
{lists}    ],
)
"""
    notes = (
        f"pp_size is {plan.num_devices} in the device mesh; the same keys serve in a YAML recipe under distributed, those of PIPELINE under "
        "distributed.pipeline"
        + (", which is not read with one stage" if plan.num_devices == 1 else "")
        + ", and step_scheduler",
        *([f"the data set makes samples of {widths['sequence_length']} tokens (its seq_length)"] if widths else []),
        *schedule.notes,
    )
    return text, notes


def _schedule_for_file(plan: Plan) -> str:
    """The name of a schedule that has its stages where those of an order in a file are."""
    is_loop = all(device == stage % plan.num_devices for stage, device in enumerate(plan.devices))
    return _LOOP if is_loop else _THERE_AND_BACK


def _stage_modules(plan: Plan, name: Callable[[str], str], *, everywhere: str) -> list[list[str]]:
    """The modules of every stage, renamed, each once; `everywhere` is one without weights that every stage has."""
    stages = []
    for stage in plan.stages:
        modules = dict.fromkeys(name(module) for layer in stage.layer_names for module in modules_of(layer))
        stages.append([x for x in modules if x != everywhere] + ([everywhere] if everywhere else []))
    return stages
