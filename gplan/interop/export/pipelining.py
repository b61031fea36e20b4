"""To torch.distributed.pipelining: the split points of `pipeline()`.

Relies on pytorch/pytorch: docs/source/distributed.pipelining.md and torch/distributed/pipelining/_IR.py (`pipeline`'s
`split_spec`, a dictionary from the path of a module to a `SplitPoint`; BEGINNING splits before every call of the module).
gplan gives operations between modules to the module before them, so a stage begins where its first module is called.
`pipeline()` traces the model: what skips layers is sent on; a parameter used on several stages is copied to each and its
gradients are not added up. It has no word for recompute.
"""

from __future__ import annotations

from collections import Counter

from gplan.errors import UsageError
from gplan.interop.export import demands
from gplan.interop.export.exported import Export
from gplan.nouns import Plan, Profile

_RECEIVER = "torch.distributed.pipelining"
_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


def to_pytorch(plan: Plan, profile: Profile | None) -> Export:
    """Python: `split_spec`.

    Raises UsageError where a stage does not begin with a call of a module, the only one, and for what `pipeline()` does
    not run.
    """
    demands.check_order(plan, profile, receiver=_RECEIVER)
    demands.check_layers_are_modules(plan, receiver=_RECEIVER)
    demands.check_one_pipeline(plan, receiver=_RECEIVER)
    demands.check_whole_weights(plan, profile, receiver=_RECEIVER)
    demands.recompute_name(plan, {"never": "none"}, receiver=_RECEIVER)
    schedule = demands.schedule_name(plan, _SCHEDULES, receiver=_RECEIVER)
    points = "".join(f"    {demands.quoted([x])[1:-1]}: SplitPoint.BEGINNING,\n" for x in _beginnings(plan))
    comments = "\n".join(demands.stage_comments(plan, what="stage"))
    text = f"""from torch.distributed.pipelining import SplitPoint

{comments}
split_spec = {{
{points}}}
"""
    notes = (
        f"pipe = pipeline(model, mb_args=..., split_spec=split_spec) with inputs of {plan.microbatch_size} samples; "
        f"pipe.num_stages must then be {plan.num_stages}",
        f"{schedule}(pipe.build_stage(rank, device), n_microbatches={plan.num_microbatches}, loss_fn=...)",
    )
    return Export(format="pytorch", text=text, notes=notes)


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
