"""Starting a run: processes of our own on this host, the ranks of torchrun, or the virtual engine in this process.

Processes that gplan starts meet through a file, so that no port is taken; each is pinned to its share of the cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from gplan import files
from gplan.errors import GplanError, RunError, UsageError
from gplan.execute.rank import train_rank
from gplan.execute.train import ReportStep, RunOptions
from gplan.nouns import Plan, Run
from profiler.host.processes import core_shares, end_with_parent, run_processes, say_error
from profiler.host.share import keep_freed_memory
from profiler.model.author import describe, root_cause
from profiler.model.load import ModelFile, load_model_file
from profiler.model.settings import Setting

EngineName: TypeAlias = Literal["torch", "virtual"]
ENGINES: tuple[EngineName, ...] = ("torch", "virtual")

_STEP = "gplan-step: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process of a run is told: which model file and plan, how to run it, and where to meet."""

    reference: str
    settings: dict[str, Setting]
    plan: str
    options: RunOptions
    place: str


def run_processes_here(
    reference: str, settings: dict[str, Setting], plan: Plan, options: RunOptions, *, report: ReportStep
) -> Run:
    """Carry out a plan with the torch engine, in one process per stage on this host.

    Raises RunError where a process fails or hangs; every process has ended by then.
    """
    with tempfile.TemporaryDirectory(prefix="gplan-run-") as place:
        files.save(plan, Path(place) / "plan.json")
        job = Job(
            reference=reference,
            settings=settings,
            plan=str(Path(place) / "plan.json"),
            options=options,
            place=place,
        )
        job_file = Path(place) / "job.json"
        files.write_bytes(job_file, msgspec.json.encode(job))

        def on_line(_rank: int, line: str) -> None:
            if line.startswith(_STEP):
                index, loss = msgspec.json.decode(line.removeprefix(_STEP), type=tuple[int, float])
                report(index, loss)

        run_processes(
            "gplan.execute.launch",
            [str(job_file)],
            num_processes=plan.num_stages,
            timeout_s=options.timeout_s,
            on_line=on_line,
        )
        return files.load(Run, Path(place) / "run.json")


def is_torchrun() -> bool:
    """Whether torchrun started this process as one rank of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks() -> bool:
    """Whether this process prints and writes for the whole run: it does, unless it is a rank of torchrun above 0."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def run_torchrun_rank(file: ModelFile, plan: Plan, options: RunOptions, *, report: ReportStep) -> Run:
    """Carry out a plan as one rank of torchrun; every rank returns the same run."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != plan.num_stages:
        raise UsageError(
            f"torchrun started {world_size} processes; the plan has {plan.num_stages} stages: "
            f"use --nproc-per-node {plan.num_stages} or balance with --k {world_size}"
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local_size != world_size:
        raise UsageError(f"torchrun started {local_size} of {world_size} processes here; a run is of one host for now")
    _take_share(int(os.environ.get("LOCAL_RANK", "0")), plan)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    try:
        return train_rank(file, plan, options, report=report)
    finally:
        dist.destroy_process_group()


def _take_share(local_rank: int, plan: Plan) -> None:
    """Pin this process to its share of the host's cores."""
    torch.set_num_threads(plan.device.num_threads)
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, core_shares(plan.num_stages, num_threads=plan.device.num_threads)[local_rank])


def _work(job: Job) -> None:
    """One process of a run that gplan started."""
    rank, place = int(os.environ["RANK"]), Path(job.place)
    plan = files.load(Plan, Path(job.plan))
    _take_share(rank, plan)
    file = load_model_file(job.reference, settings=job.settings, seed=job.options.seed)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'store'}",
        rank=rank,
        world_size=plan.num_stages,
        timeout=timedelta(seconds=job.options.timeout_s),
    )

    def report(index: int, loss: float) -> None:
        print(_STEP + msgspec.json.encode((index, loss)).decode(), flush=True)

    run = train_rank(file, plan, job.options, report=report)
    if rank == 0:
        files.save(run, place / "run.json")
    dist.destroy_process_group()


def _main(job_file: Path) -> int:
    end_with_parent()
    try:
        _work(msgspec.json.decode(job_file.read_bytes(), type=Job))
    except GplanError as error:
        say_error(error)
    except Exception as error:
        say_error(RunError(describe(root_cause(error))))
    else:
        return 0
    return 5


if __name__ == "__main__":
    os._exit(_main(Path(sys.argv[1])))  # not through interpreter shut-down: a broken process group would hang there
