"""Twenty runs that fail at random, each told, ended, and gone on with.

    python benchmarks/random_kills.py            some 7 minutes on 2 idle cores; writes reports/random-kills/
    python benchmarks/random_kills.py --sharded --kills 10 --output reports/random-kills/sharded

With --sharded, the failing plans have two replicas, which divide the optimizer's state or the weights among them.

`benchmarks/failing_model.py` is trained through the command line: undisturbed once with every plan, then twenty times
with a fault in one rank: SIGKILL or SIGSTOP at any time in a step or while a checkpoint is saved, an exception in a
forward, a backward, the loss, the optimizer, the batches or a save. After each it is seen how long the command went on
after the fault, what it told, what it left, and whether the newest checkpoint is whole; then the run goes on from there
to the end, with the same plan or another, and every loss is compared with that of the undisturbed run. A promise that
is not kept is named in the table.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from suite import ROOT, markdown, options_of, write_report

import gplan
from gplan.core import Link, Plan, Run
from gplan.core.errors import FileError
from gplan.core.units import seconds_text
from gplan.runtime.checkpoint.folder import newest_complete, verify_checksums
from gplan_profiler.host.host_info import processor, software_versions

MODEL = ROOT / "benchmarks" / "failing_model.py"
MARK = "GPLAN_RANDOM_KILLS"  # a variable that every process of a run inherits
NUM_STEPS, SAVE_EVERY = 30, 5
TIMEOUT_S = 10.0
PROMISED_S = 15.0
TOLERANCE = 1e-5  # of a loss, relative, where another plan adds up in another order
FAILED = 5  # the exit code of a run that started and did not finish
AT_ANY_TIME = "batches"  # with a delay
SAVE_S = 0.02  # the longest delay into a save
NUM_BLOCKS = 10  # of the model; the classifier behind them is not told to fail

Row = dict[str, Any]
KINDS = (
    *[("SIGKILL", AT_ANY_TIME)] * 6,
    *[("SIGKILL", "save")] * 2,
    *[("SIGSTOP", AT_ANY_TIME)] * 4,
    *[("SIGSTOP", "save")],
    *[("exception", moment) for moment in ("forward", "forward", "backward", "loss", "optimizer", "batches", "save")],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one rank is told to do, as benchmarks/failing_model.py reads it, and the plans before and after."""

    kind: str
    moment: str
    rank: int
    stage: int  # of that rank
    step: int  # from 0; people read it from 1
    layer: int | None
    visit: int
    delay_s: float | None
    plan: str = ""
    plan_after: str = ""

    @property
    def text(self) -> str:
        """The fault in words."""
        when = "saving after" if self.moment == "save" else "in"
        late = f", {1e3 * self.delay_s:.0f} ms into it" if self.delay_s is not None else f", {self.moment}"
        layer = f" of layer {self.layer}" if self.layer is not None else ""
        return f"{self.kind} of rank {self.rank} {when} step {self.step + 1}{late}{layer}"

    def environment(self, note: Path) -> dict[str, str]:
        """What tells the ranks."""
        told = {
            key: x for key, x in asdict(self).items() if x is not None and key not in ("stage", "plan", "plan_after")
        }
        return {"GPLAN_FAULT": json.dumps({**told, "note": str(note)})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended, and what it left."""

    code: int
    text: str  # of standard error
    at_s: float  # by time.monotonic
    left: tuple[str, ...]  # processes and temporary folders


def main() -> None:
    """Run, then write the table."""
    parser = options_of(__doc__, "random-kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=len(KINDS))
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="random-kills-") as place:
        plans = make_plans(Path(place), sharded=options.sharded)
        undisturbed = {name: undisturbed_run(name, Path(place)) for name in plans}
        faults = draw_faults(plans, undisturbed, seed=options.seed)[: options.kills]
        rows, output = list[Row](), options.output.absolute()
        output.mkdir(parents=True, exist_ok=True)
        for i, fault in enumerate(faults):
            rows.append(kill(fault, undisturbed[fault.plan], Path(place) / f"kill-{i}"))
            pd.DataFrame(rows).to_csv(output / "kills.csv", index=False)
    write_report(output, report(pd.DataFrame(rows), undisturbed))


def make_plans(place: Path, *, sharded: bool) -> dict[str, Plan]:
    """Plans for 1 to 4 stages with equal mini-batches, saved by their names."""
    link = Link(latency_s=2e-5, bytes_per_s=1e9)
    profile = gplan.profile(str(MODEL), microbatch_sizes=[16], budget_s=1.0, contention=0, link=link)
    asked: dict[str, dict[str, Any]] = {
        "K=1 gpipe": {"num_devices": 1},
        "K=2 gpipe": {"num_devices": 2, "recompute": "except-last"},
        "K=3 1f1b": {"num_devices": 3, "schedule": "1f1b"},
    }
    if sharded:
        halves = {"num_devices": 2, "num_microbatches": 2, "num_replicas": 2}
        asked = {
            "K=4": {"num_devices": 4, "schedule": "1f1b"},
            "K=2 R=2 optimizer": {**halves, "sharding": "optimizer"},
            "K=2 R=2 weights": {**halves, "schedule": "1f1b", "sharding": "weights"},
        }
    plans = {name: gplan.balance(profile, **({"num_microbatches": 4} | x)) for name, x in asked.items()}
    for name, plan in plans.items():
        gplan.save(plan, place / f"{name}.json")
    return plans


def undisturbed_run(plan: str, place: Path) -> Run:
    """A run of all steps that nothing happens to."""
    folder = place / f"undisturbed {plan}"
    ended = command(plan, folder)
    if ended.code or ended.left:
        raise SystemExit(f"the undisturbed run with {plan} ended with {ended}")
    return gplan.load(folder / "run.json")


def draw_faults(plans: dict[str, Plan], runs: dict[str, Run], *, seed: int) -> list[Fault]:
    """All kinds of faults in random order, each with a random plan before and after."""
    generator = random.Random(seed)
    class_names = list(KINDS)
    generator.shuffle(class_names)
    sharded = [name for name, plan in plans.items() if plan.sharding != "none"]
    failing = sharded or [name for name, plan in plans.items() if plan.num_devices > 1]
    found = []
    for kind, moment in class_names:
        name = generator.choice(failing)
        fault = draw_fault(kind, moment, plans[name], median_step_s(runs[name]), generator)
        found.append(replace(fault, plan=name, plan_after=generator.choice(list(plans))))
    return found


def draw_fault(kind: str, moment: str, plan: Plan, step_s: float, generator: random.Random) -> Fault:
    """A random step, rank, layer and delay."""
    stage = plan.num_devices - 1 if moment == "loss" else generator.randrange(plan.num_devices)
    replica = generator.randrange(plan.num_replicas) if plan.num_replicas > 1 else 0
    step, delay_s = generator.randrange(NUM_STEPS - SAVE_EVERY), generator.uniform(0.0, step_s)
    if moment == "save":
        step, delay_s = step - step % SAVE_EVERY + SAVE_EVERY - 1, generator.uniform(0.0, SAVE_S)
    first = 1 if moment == "backward" else 0  # what enters the model needs no gradient
    blocks = [int(x) for x in plan.stages[stage].layer_names if first <= int(x) < NUM_BLOCKS]
    return Fault(
        kind=kind,
        moment=moment,
        rank=stage + replica * plan.num_devices,
        stage=stage,
        step=step,
        layer=generator.choice(blocks) if moment in ("forward", "backward") else None,
        visit=generator.randrange(plan.num_microbatches) if moment in ("forward", "backward", "loss") else 0,
        delay_s=None if kind == "exception" else round(delay_s, 4),
    )


def kill(fault: Fault, undisturbed: Run, folder: Path) -> Row:
    """One run with a fault, and the one that goes on from it."""
    ended = command(fault.plan, folder, environment=fault.environment(folder / "note"))
    if not (folder / "note").exists():
        raise SystemExit(f"{fault.text} ({fault.plan}) did not happen; the run ended with {ended}")
    ended_after_s = ended.at_s - float((folder / "note").read_text())
    checkpoint, flaw = newest(folder / "checkpoints", fault)
    shutil.rmtree(folder / "copy", ignore_errors=True)
    after = command(fault.plan_after, folder, options=["--resume"] if checkpoint else [])
    losses = gplan.load(folder / "run.json").losses if after.code == 0 else ()
    difference = largest_difference(undisturbed.losses, losses)
    is_same = fault.plan == fault.plan_after
    checks = {
        f"exit code {ended.code}": ended.code == FAILED,
        f"ended after {ended_after_s:.1f} s": ended_after_s <= PROMISED_S,
        f"left {', '.join(ended.left)}": not ended.left,
        f"does not tell {', '.join(untold(fault, ended.text))}": not untold(fault, ended.text),
        flaw: not flaw,
        f"the resumed run ended with code {after.code}: {after.text}": after.code == 0,
        f"the resumed run left {', '.join(after.left)}": not after.left,
        "losses differ": difference <= (0.0 if is_same else TOLERANCE),
    }
    row = {
        "fault": fault.text, "plan": fault.plan, "exit_code": ended.code, "ended_after_s": ended_after_s,
        "error": ended.text, "checkpoint": checkpoint, "resumed_with": fault.plan_after, "num_compared": len(losses),
        "largest_difference": difference,
        "broken": "; ".join(broken for broken, is_kept in checks.items() if not is_kept),  # promises that were not kept
    }  # fmt: skip
    print(f"{fault.text} ({fault.plan}): {ended_after_s:.1f} s, {ended.text}; {row['broken'] or 'kept'}", flush=True)
    return row


def command(
    plan: str, folder: Path, *, environment: dict[str, str] | None = None, options: Sequence[str] = ()
) -> Ended:
    """`gplan run` with a plan; waits for its end, looks at once for what is left of it."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    arguments = ["run", "--plan", str(folder.parent / f"{plan}.json"), "--steps", str(NUM_STEPS)]
    arguments += ["--save-every", str(SAVE_EVERY), "--checkpoints", str(folder / "checkpoints")]
    arguments += ["--timeout", str(TIMEOUT_S), "--output", str(folder / "run.json"), *options]
    mark = {MARK: str(folder), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-m", "gplan", *arguments], env={**os.environ, **mark, **(environment or {})},
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    at_s = time.monotonic()
    left = (*processes_of(folder), *(path.name for path in temporary.glob("gplan-*")))
    text = done.stderr.strip().replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return Ended(code=done.returncode, text=text, at_s=at_s, left=left)


def processes_of(folder: Path) -> tuple[str, ...]:
    """The processes of a run that are there now, in any group, by the variable that they inherited."""
    mark, found = f"{MARK}={folder}\0".encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in entry.read_bytes():
                found.append(f"process {entry.parent.name}")
    return tuple(found)


def median_step_s(run: Run) -> float:
    """How long a step takes."""
    return sorted(run.step_s)[len(run.step_s) // 2]


def newest(checkpoints: Path, fault: Fault) -> tuple[str, str]:
    """The name of the newest checkpoint, empty where there is none, and what is wrong with it."""
    saved = fault.step - fault.step % SAVE_EVERY
    due, following = f"step-{saved:06d}" if saved else "", f"step-{saved + SAVE_EVERY:06d}"
    if not checkpoints.is_dir() or not list(checkpoints.glob("step-*")):
        return "", "" if not due else "no checkpoint is there"
    path = newest_complete(checkpoints)
    if path is None:
        return "", "no checkpoint is whole"
    try:
        verify_checksums(path)
    except FileError as error:
        return "", str(error)
    return path.name, "" if path.name in (due, following) else f"the newest checkpoint is {path.name}, {due} was due"


def untold(fault: Fault, text: str) -> list[str]:
    """What the error should tell and does not.

    A step is called by its number from 1, and with a delay it may be over.
    """
    number = fault.step + 1
    steps = [number] if fault.delay_s is None else [number, number + 1]
    wanted = {
        f"rank {fault.rank}": rf"rank {fault.rank}\b",
        f"stage {fault.stage}": rf"stage {fault.stage}\b",
        "the step": rf"step ({'|'.join(map(str, steps))})\b",
        "what happened": "as told" if fault.kind == "exception" else fault.kind,
    }
    if fault.moment == "forward":
        wanted["the layer"] = rf"layer {fault.layer}\b"
    told = [name for name, pattern in wanted.items() if not re.search(pattern, text)]
    layers = set(re.findall(r"layer (\w+)", text)) if fault.layer is not None else set()
    return [*told, *(f"the right layer, but {layer}" for layer in layers - {str(fault.layer)})]


def largest_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of the last losses; infinite where there are none."""
    pairs = zip(expected[len(expected) - len(found) :], found, strict=True)
    return max((abs(x - y) / abs(x) for x, y in pairs), default=float("inf"))


def report(rows: pd.DataFrame, undisturbed: dict[str, Run]) -> list[str]:
    """A summary, the table, and what was told."""
    num_kept, is_same = int((rows.broken == "").sum()), rows.plan == rows.resumed_with
    same, other = (float(rows.largest_difference[x].max()) if x.any() else 0.0 for x in (is_same, ~is_same))
    versions = ", ".join(f"{name} {version}" for name, version in software_versions())
    steps = ", ".join(f"{name} {seconds_text(median_step_s(run))}" for name, run in undisturbed.items())
    cells = (
        [
            i, x.fault, x.plan, x.exit_code, seconds_text(x.ended_after_s), x.checkpoint or "none",
            f"{x.resumed_with}{'' if x.checkpoint else ', from the start'}",
            f"{x.num_compared}, {x.largest_difference:.1e}", x.broken or "yes",
        ]
        for i, x in enumerate(rows.itertuples(), 1)
    )  # fmt: skip
    heads = ["#", "fault", "plan", "exit", "ended after", "newest checkpoint", "resumed with"]
    return [
        f"# {len(rows)} runs that fail at random\n",
        f"`python benchmarks/random_kills.py {shlex.join(sys.argv[1:])}`: {MODEL.name}, {NUM_STEPS} steps, a checkpoint after every "
        f"{SAVE_EVERY}, --timeout {TIMEOUT_S:g}; median steps: {steps}. {processor()}, {os.cpu_count()} cores; {versions}.\n",
        f"- {num_kept} of {len(rows)} kept every promise: exit code {FAILED} within {PROMISED_S:g} s of the "
        "fault, an error that names rank, stage and step (and the layer whose forward failed), no process and no temporary folder "
        "left, the newest checkpoint whole to the byte, and the losses of the undisturbed run after going on.",
        f"- The slowest ended {rows.ended_after_s.max():.1f} s after the fault, the median after {rows.ended_after_s.median():.1f} s.",
        f"- Losses after going on with the same plan differ by {same:.1e} at most, with another plan by "
        f"{other:.1e} (relative; another plan adds up in another order).\n",
        *markdown([*heads, "losses compared, largest difference", "kept"], cells),
        "\n## What was told\n",
        *(f"{i}. {x.fault}: `{x.error.replace('`', chr(39))}`" for i, x in enumerate(rows.itertuples(), 1)),
    ]


if __name__ == "__main__":
    main()
