"""To DeepSpeed: a PipelineModule with the plan's parts, its arguments and the batch sizes of its configuration.

Relies on deepspeedai/DeepSpeed: deepspeed/runtime/pipe/module.py (`PipelineModule._partition_layers` sets `self.parts`,
K+1 boundaries, and calls `_set_bounds`; none of its methods accepts parts, so the export has a subclass;
`activation_checkpoint_interval` layers are recomputed as one, 0 none), deepspeed/runtime/pipe/schedule.py
(`TrainSchedule`: 1F1B, one stage on a device) and docs/_tutorials/pipeline.md (layers are a sequence of callables;
micro-batches by `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`; `TiedLayerSpec`) and
deepspeed/runtime/constants.py (`GRADIENT_CLIPPING_DEFAULT`).
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.interop.export import requirements
from gplan.interop.export.requirements import Export
from gplan.interop.receivers import check_plan


def to_deepspeed(plan: Plan, profile: Profile | None) -> Export:
    """Python: `PARTS`, a class `PlannedPipelineModule` that uses them, its `ARGUMENTS` and the `CONFIG`.

    Raises UsageError if the layers are not a sequence of modules, or DeepSpeed cannot run the schedule.
    """
    check_plan("deepspeed", plan, profile)
    comments = "\n".join(requirements.stage_comments(plan, what="stage"))
    text = f"""from deepspeed.pipe import PipelineModule

{comments}
PARTS = {list(requirements.boundaries(plan))}


class PlannedPipelineModule(PipelineModule):
    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


ARGUMENTS = {{"num_stages": {plan.num_devices}, "activation_checkpoint_interval": {_interval(plan)}}}
CONFIG = {{
    "train_batch_size": {plan.batch_size},
    "train_micro_batch_size_per_gpu": {plan.microbatch_size},
    "gradient_accumulation_steps": {plan.num_microbatches},
}}
"""
    return Export(format="deepspeed", text=text, notes=_notes(plan, profile))


def _interval(plan: Plan) -> int:
    """The number of layers of the largest stage, so that each stage is recomputed as a whole."""
    return 0 if plan.recompute == "never" else max(requirements.balance(plan))


def _notes(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    num_layers, num_ranks = len(plan.layer_names), plan.num_ranks
    notes = [
        f"PlannedPipelineModule(layers, loss_fn=..., **ARGUMENTS) takes {num_layers} layers, those of the plan in its order, "
        f"each with the operations that follow it; start {num_ranks} ranks",
        "DeepSpeed documents no other way to set the parts; the class overrides a private method",
        "DeepSpeed clips gradients to a norm of 1 unless the configuration has another gradient_clipping; 0.0 clips nothing",
    ]
    makers, split = requirements.skipping_values(plan, profile), requirements.split_weights(plan, profile)
    if makers:
        notes.append(f"what {', '.join(makers)} makes skips layers: the layers between must pass it on in a tuple")
    if split:
        notes.append(f"{', '.join(split)} is used on several stages: its layers must be a TiedLayerSpec")
    return tuple(notes)
