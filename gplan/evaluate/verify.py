"""Whether a plan's prediction is to be believed: the plan and its rivals run in turns, and the error explained.

`rivals.py` says whom the plan is held against, `rounds.py` how they are run, `standing.py` how the plan stands among
them, `attribution.py` where the error of a step comes from, `calibration.py` what the runs teach about the profile, and
`calibrated.py` applies that; `retiming.py` gives a profile the times of one run. How a plan is carried out is the
caller's to say, so this room knows no engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime

from gplan.core import Plan, Profile, Verification
from gplan.core.errors import UsageError
from gplan.core.units import counted
from gplan.evaluate.rival_rounds import Measured, Runner, measured
from gplan.evaluate.rivals import Field, field_of

NUM_ROUNDS = 4
NUM_STEPS = 8
LEAST_STEPS = 6
"""Of every run: below that, hardly a step is left after the warm-up."""


def verify(
    plan: Plan,
    profile: Profile,
    runner: Runner,
    *,
    engine: str,
    num_rounds: int = NUM_ROUNDS,
    num_steps: int = NUM_STEPS,
    num_rivals: int | None = None,
    num_cores: int | None = None,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Verification:
    """Run the plan and at most `num_rivals` others (None: all) in turns, by a runner that takes `num_steps` steps.

    Where the engine has a process for every device and the host has fewer cores (`num_cores`, by default this host's),
    no run is refused, as all of them wait for the processor. An interrupt, or a failure of the plan itself after the
    first round, ends it with the whole rounds so far.

    Raises FileError where plan and profile do not belong together, UsageError for counts that cannot be used, and what
    the runner raises for the plan itself in the first round.
    """
    check_counts(num_rounds, num_steps, num_rivals)
    field = field_of(plan, profile, num_rivals=num_rivals)
    is_crowded = engine == "torch" and _num_wanted(plan) > (num_cores or os.cpu_count() or 1)
    found = measured(field.rivals, runner, num_rounds=num_rounds, refuses=not is_crowded, progress=progress)
    return Verification(
        engine=engine,
        contenders=found.contenders,
        left_out=(*field.left_out, *found.left_out),
        num_steps=num_steps,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=_notes(field, found, is_crowded=is_crowded),
    )


def check_counts(num_rounds: int, num_steps: int, num_rivals: int | None) -> None:
    """Raise UsageError for counts that `verify` cannot use."""
    if num_rounds < 1:
        raise UsageError(f"asked for {num_rounds} rounds; expected at least 1")
    if num_steps < LEAST_STEPS:
        raise UsageError(f"asked for {num_steps} steps a run; expected at least {LEAST_STEPS}, of which 3 warm up")
    if num_rivals is not None and num_rivals < 0:
        raise UsageError(f"asked for {num_rivals} rivals; expected 0 or more")


def _num_wanted(plan: Plan) -> int:
    """Cores that the plan's processes want."""
    return plan.num_devices * plan.num_replicas * plan.device.num_threads


def _notes(field: Field, found: Measured, *, is_crowded: bool) -> tuple[str, ...]:
    notes = [*field.notes]
    chosen = found.contenders[0]
    if is_crowded:
        notes.append("there are fewer cores than the devices want, so no run was refused as disturbed")
    whole = "the whole rounds so far" if len(chosen.steps_s) > 1 else "the first round"
    if found.is_interrupted:
        notes.append(f"interrupted: what is shown is of {whole}")
    if found.failure:
        notes.append(f"the plan failed in a later round, so what is shown is of {whole}: {found.failure}")
    num_disturbed = sum(x.num_disturbed for x in found.contenders)
    if num_disturbed:
        notes.append(
            f"{counted(num_disturbed, 'run')} counted although other work disturbed more than half of the steps: no more were "
            "repeated; verify again when the machine is quiet"
        )
    return tuple(dict.fromkeys((*notes, *chosen.run.notes)))
