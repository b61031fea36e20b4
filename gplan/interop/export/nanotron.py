"""To nanotron: the part of its YAML that a plan decides.

Relies on huggingface/nanotron: src/nanotron/config/parallelism_config.py (`ParallelismArgs`; `pp_engine` is 1f1b or afab),
config.py (`TokensArgs`; dp replicas, each with `batch_accumulation_per_replica` micro-batches; `zero_stage` and
`accumulate_grad_in_fp32` of `OptimizerArgs`) and models/base.py (`build_model` cuts the blocks itself).
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.core.profile import NANOTRON_NAME
from gplan.interop.export.requirements import BY_BLOCK, Written, computed_widths
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import decoder_of, plain_schedule


def to_nanotron(plan: Plan, profile: Profile | None) -> Written:
    """Sections of the configuration."""
    receiver, widths = RECEIVERS["nanotron"], computed_widths(profile)
    schedules = receiver.schedules or {}
    tensor, length = widths.get("tensor", 1), widths.get("sequence_length")
    text = f"""parallelism:
  dp: {plan.num_replicas}
  pp: {plan.num_devices}
  tp: {tensor}
  pp_engine: {schedules[plain_schedule(plan.schedule)]}
  tp_mode: REDUCE_SCATTER
  tp_linear_async_communication: {str(tensor > 1).lower()}
  recompute_layer: {receiver.recompute[plan.recompute]}
  expert_parallel_size: {widths.get("expert", 1)}
  context_parallel_size: {widths.get("context", 1)}
tokens:
{f"  sequence_length: {length}{chr(10)}" if length else ""}  micro_batch_size: {plan.microbatch_size}
  batch_accumulation_per_replica: {plan.num_microbatches}
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: {int(plan.num_replicas > 1)}
"""
    is_own = profile is not None and NANOTRON_NAME in dict(profile.versions)  # planned with its cut
    decoder = decoder_of(plan.layer_names, receiver.title)
    counts = ", ".join(str(decoder.counts(x.first_layer, x.end_layer)[0]) for x in plan.stages)
    notes = [
        f"nanotron takes no cut: it gives stages equal shares of the products' cost, the head's among them; the plan has {counts} blocks"
        + ("" if is_own else ", and gplan layout --to nanotron makes plans with nanotron's own cut"),
        "tokens and optimizer need further keys of yours, such as train_steps and learning_rate_scheduler",
    ]
    if plan.recompute == "always":
        notes.append(f"nanotron {BY_BLOCK}")
    return text, notes
