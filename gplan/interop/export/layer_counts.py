"""To trainers that count layers along a sequence: DeepSpeed, torchgpipe, and for inference vLLM and SGLang.

DeepSpeed: a PipelineModule with the plan's parts, its arguments and the batch sizes of its configuration. Relies on deepspeedai/DeepSpeed: deepspeed/runtime/pipe/module.py (`PipelineModule._partition_layers` sets `self.parts`,
K+1 boundaries, and calls `_set_bounds`; none of its methods accepts parts, so the export has a subclass;
`activation_checkpoint_interval` layers are recomputed as one, 0 none), deepspeed/runtime/pipe/schedule.py
(`TrainSchedule`: 1F1B, one stage on a device) and docs/_tutorials/pipeline.md (layers are a sequence of callables;
micro-batches by `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`; `TiedLayerSpec`) and
deepspeed/runtime/constants.py (`GRADIENT_CLIPPING_DEFAULT`).

torchgpipe: the call of GPipe with `balance`, `chunks` and `checkpoint`. Relies on kakaobrain/torchgpipe: docs/guide.rst and torchgpipe/gpipe.py (`GPipe`: `balance` is the number of children of
the nn.Sequential in each partition, `chunks` the number of micro-batches, `checkpoint` one of always, except_last and
never; `verify_module`: no child twice, no parameter in two children). torchgpipe runs GPipe's schedule only, one
partition on a device.

vLLM and SGLang: the number of blocks of every stage, as the environment variable that each reads. Relies on vllm/distributed/utils.py and sglang/srt/distributed/utils.py (`get_pp_indices`: integers with commas between
them, one for each rank, whose sum is the number of blocks; the embedding is on the first rank, norm and head on the
last).
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.interop.export.requirements import (
    Written,
    computed_widths,
    skipping_values,
    split_weights,
    stage_comments,
    widths_of_model,
)
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import decoder_of

_AS_WRITTEN = "those in the comments, as the model's author wrote them, each with the operations that follow it"


def to_deepspeed(plan: Plan, profile: Profile | None) -> Written:
    """Python: `PARTS`, a class `PlannedPipelineModule` that uses them, its `ARGUMENTS` and the `CONFIG`."""
    comments = stage_comments(plan, what="stage")
    interval = (
        0 if plan.recompute == "never" else max(x.num_layers for x in plan.stages)
    )  # so stages are recomputed whole
    widths = computed_widths(profile)
    state = ""
    if widths:  # of a computed profile
        state = f'    "bf16": {{"enabled": True}},\n    "zero_optimization": {{"stage": {int(widths["data"] > 1)}}},\n'
    text = f"""from deepspeed.pipe import PipelineModule

{comments}
PARTS = {[0, *(x.end_layer for x in plan.stages)]}


class PlannedPipelineModule(PipelineModule):
    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


ARGUMENTS = {{"num_stages": {plan.num_devices}, "activation_checkpoint_interval": {interval}}}
CONFIG = {{
    "train_batch_size": {plan.batch_size},
    "train_micro_batch_size_per_gpu": {plan.microbatch_size},
    "gradient_accumulation_steps": {plan.num_microbatches},
{state}}}
"""
    num_layers = len(plan.layer_names)
    num_ranks = plan.num_ranks * widths.get("tensor", 1) * widths.get("context", 1)
    notes = [
        f"PlannedPipelineModule(layers, loss_fn=..., **ARGUMENTS) takes {num_layers} layers, {_AS_WRITTEN}; start {num_ranks} ranks",
        "DeepSpeed documents no other way to set the parts; the class overrides a private method",
        "DeepSpeed clips gradients to a norm of 1 unless the configuration has another gradient_clipping; 0.0 clips nothing",
        *widths_of_model(profile, "DeepSpeed"),
    ]
    makers, split = skipping_values(plan, profile), split_weights(plan, profile)
    if makers:
        notes.append(f"what {', '.join(makers)} makes skips layers: the layers between must pass it on in a tuple")
    if split:
        notes.append(f"{', '.join(split)} is used on several stages: its layers must be a TiedLayerSpec")
    return text, notes


def to_torchgpipe(plan: Plan, profile: Profile | None) -> Written:
    """Python: `model`, an nn.Sequential of the plan's layers, wrapped in GPipe."""
    checkpoint = RECEIVERS["torchgpipe"].recompute[plan.recompute]
    comments = stage_comments(plan, what="partition")
    text = f"""from torchgpipe import GPipe

{comments}
model = GPipe(model, balance={[x.num_layers for x in plan.stages]}, chunks={plan.num_microbatches}, checkpoint="{checkpoint}")
"""
    notes = [
        f"model must be an nn.Sequential of {len(plan.layer_names)} children, {_AS_WRITTEN}; "
        f"a batch has {plan.batch_size} samples",
        *widths_of_model(profile, "torchgpipe"),
    ]
    makers = skipping_values(plan, profile)
    if makers:
        notes.append(
            f"what {', '.join(makers)} makes skips layers: the layers between must pass it on in a tuple, or use "
            "torchgpipe.skip"
        )
    return text, notes


def to_inference(plan: Plan, profile: Profile | None, *, variable: str) -> Written:
    """One line for a shell, which sets the variable with the blocks of every stage."""
    decoder = decoder_of(plan.layer_names, "the receiver", profile)  # as was checked
    counts = [decoder.counts(stage.first_layer, stage.end_layer)[0] for stage in plan.stages]
    tensor = f" --tensor-parallel-size {widths['tensor']}" if (widths := computed_widths(profile)) else ""
    notes = (
        f"start with --pipeline-parallel-size {plan.num_devices}{tensor}; the model has {len(decoder.blocks)} blocks",
        "the plan balances training: serving has no backward, so neither its time nor its memory is predicted, which is weights and a "
        "KV cache that is as small on every rank as on the fullest",
    )
    return f"export {variable}={','.join(map(str, counts))}\n", notes
