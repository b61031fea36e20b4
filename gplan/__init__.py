"""gplan: plans pipeline-parallel training in PyTorch, runs the plan, and checks its own prediction.

    import gplan

    profile = gplan.profile("model.py", microbatch_sizes=[4])
    plan = gplan.balance(profile, num_stages=2, num_microbatches=8)
    run = gplan.run(plan, num_steps=60, check=True)
    gplan.report(run, "report")

`import gplan` imports neither torch nor matplotlib; the functions that need them do.
"""

from gplan.api import (
    balance,
    calibrate,
    calibrated,
    import_trace,
    load,
    pipeline,
    profile,
    report,
    run,
    save,
    search,
    simulate,
    verify,
)
from gplan.errors import FileError, GplanError, ModelError, NoPlanError, RunError, UsageError
from gplan.nouns import Calibration, Device, Link, Plan, Profile, Run, Timeline, Verification

__all__ = [
    "Calibration",
    "Device",
    "FileError",
    "GplanError",
    "Link",
    "ModelError",
    "NoPlanError",
    "Plan",
    "Profile",
    "Run",
    "RunError",
    "Timeline",
    "UsageError",
    "Verification",
    "balance",
    "calibrate",
    "calibrated",
    "import_trace",
    "load",
    "pipeline",
    "profile",
    "report",
    "run",
    "save",
    "search",
    "simulate",
    "verify",
]
