"""gplan: plans pipeline-parallel training in PyTorch, runs the plan, and checks its own prediction.

    import gplan

    profile = gplan.profile("model.py", microbatch_sizes=[4])
    plan = gplan.balance(profile, num_devices=2, num_microbatches=8)
    run = gplan.run(plan, num_steps=60, check=True)
    gplan.report(run, "report")

`import gplan` imports neither torch nor matplotlib; the functions that need them do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gplan.api import import_trace, load, pipeline, profile, report, run, save, verify
    from gplan.core import Device, Link, Plan, Profile, Run, Timeline, Verification
    from gplan.core.errors import FileError, GplanError, ModelError, NoPlanError, RunError, UsageError
    from gplan.evaluate.compare import compare
    from gplan.interop.planning import import_plan
    from gplan.schedules.request import PlanRequest
    from gplan.simulation.simulator import simulate
    from gplan.strategy_search.planner import balance, plan

__all__ = [
    "Device",
    "FileError",
    "GplanError",
    "Link",
    "ModelError",
    "NoPlanError",
    "Plan",
    "PlanRequest",
    "Profile",
    "Run",
    "RunError",
    "Timeline",
    "UsageError",
    "Verification",
    "balance",
    "compare",
    "import_plan",
    "import_trace",
    "load",
    "pipeline",
    "plan",
    "profile",
    "report",
    "run",
    "save",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: until then the command line needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'gplan' has no attribute {name!r}")
    home = (
        "gplan.api"
        if name.islower() or name == "PlanRequest"
        else "gplan.core.errors"
        if name.endswith("Error")
        else "gplan.core"
    )
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
