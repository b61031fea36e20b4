"""To torchgpipe: the call of GPipe with `balance`, `chunks` and `checkpoint`.

Relies on kakaobrain/torchgpipe: docs/guide.rst and torchgpipe/gpipe.py (`GPipe`: `balance` is the number of children of
the nn.Sequential in each partition, `chunks` the number of micro-batches, `checkpoint` one of always, except_last and
never; `verify_module`: no child twice, no parameter in two children). torchgpipe runs GPipe's schedule only, one
partition on a device.
"""

from __future__ import annotations

from gplan.core import Plan, Profile
from gplan.interop.export import requirements
from gplan.interop.export.requirements import Export
from gplan.interop.receivers import RECEIVERS, check_plan


def to_torchgpipe(plan: Plan, profile: Profile | None) -> Export:
    """Python: `model`, an nn.Sequential of the plan's layers, wrapped in GPipe.

    Raises UsageError if the layers cannot be the children of a Sequential, or torchgpipe cannot run the schedule.
    """
    check_plan("torchgpipe", plan, profile)
    checkpoint = RECEIVERS["torchgpipe"].recompute[plan.recompute]
    comments = "\n".join(requirements.stage_comments(plan, what="partition"))
    text = f"""from torchgpipe import GPipe

{comments}
model = GPipe(model, balance={list(requirements.balance(plan))}, chunks={plan.num_microbatches}, checkpoint="{checkpoint}")
"""
    return Export(format="torchgpipe", text=text, notes=_notes(plan, profile))


def _notes(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    notes = [
        f"model must be an nn.Sequential of {len(plan.layer_names)} children, the plan's layers in its order, each with the "
        f"operations that follow it; a batch has {plan.batch_size} samples"
    ]
    makers = requirements.skipping_values(plan, profile)
    if makers:
        notes.append(
            f"what {', '.join(makers)} makes skips layers: the layers between must pass it on in a tuple, or use "
            "torchgpipe.skip"
        )
    return tuple(notes)
