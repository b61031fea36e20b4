"""To NeMo Automodel: a `PipelineConfig` with the modules of every stage, for Hugging Face models.

Relies on NVIDIA-NeMo/Automodel: nemo_automodel/components/distributed/pipelining/config.py (`PipelineConfig`) and
functional.py (`split_model_into_stages`: fully qualified names, one list per stage; stage s on rank s mod K, or there and
back where the schedule is named ZBVZeroBubble; `build_pipeline_schedule`: schedules by torch's names, or an order in a
file). Every stage needs `rotary_emb`; attention masks are made on each (hf_utils.py).
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.interop.export.requirements import Export, quoted
from gplan.interop.export.torch_pipelining import CSV_FILE, torch_schedule
from gplan.interop.export.torchtitan import ROTARY, schedule_for_file, stage_modules
from gplan.interop.receivers import RECEIVERS, check_plan, decoder_of


def to_automodel(plan: Plan, profile: Profile | None) -> Export:
    """Python: `PIPELINE`, a PipelineConfig; raises UsageError for what Automodel cannot split or run."""
    check_plan("automodel", plan, profile)
    schedule = torch_schedule(plan)
    stages = stage_modules(plan, everywhere=f"{_prefix(plan)}{ROTARY}")
    lists = "".join(f"        {quoted(names)},\n" for names in stages)
    order = f'    pp_schedule="{schedule.name or schedule_for_file(plan)}",\n'
    order += "" if schedule.name else f'    pp_schedule_csv="{CSV_FILE}",\n'
    text = f"""from nemo_automodel.components.distributed.pipelining.config import PipelineConfig

PIPELINE = PipelineConfig(
{order}    pp_microbatch_size={plan.microbatch_size},
    pp_batch_size={plan.num_microbatches * plan.microbatch_size},
    scale_grads_in_schedule={plan.loss_reduction == "mean"},
    module_fqns_per_model_part=[
{lists}    ],
)
"""
    notes = (
        f"pp_size is {plan.num_devices} in the device mesh; the same keys serve in a YAML recipe under distributed.pipeline",
        *schedule.notes,
    )
    return Export(format="automodel", text=text, notes=notes)


def _prefix(plan: Plan) -> str:
    """The path of the module that holds the blocks, such as "model."."""
    decoder = decoder_of(plan.layer_names, RECEIVERS["automodel"].title)
    return plan.layer_names[decoder.blocks.start].rpartition("layers.")[0]
