"""Starts a run: own processes on this host, as a rank of torchrun, or the virtual engine in this process.

Own processes meet through a file, so no port is needed, and each is pinned to its share of the cores.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch.distributed as dist

from gplan.core import Plan, Run
from gplan.core.errors import GplanError, RunError, UsageError
from gplan.files import json_files
from gplan.runtime.checkpoint.folder import list_checkpoints, locked_directory, newest_complete
from gplan.runtime.model_source import ModelLike, ModelSource, open_source
from gplan.runtime.peers import Peers, explained_by_peers, local_place
from gplan.runtime.pipeline import own_device
from gplan.runtime.process_group import backend_of, init_from_environment
from gplan.runtime.run.loop import train
from gplan.runtime.run.run_options import ReportStep, RunOptions
from gplan.runtime.validation import (
    check_fits_here,
    check_hosts,
    check_runnable,
    notes_on_cores,
    notes_on_machine,
)
from gplan_profiler.host.failure import failure_text, is_lost_connection
from gplan_profiler.host.heartbeat import Heartbeat, heartbeat_file, read_heartbeat
from gplan_profiler.host.host_info import device_share, pin_to_share, usable_cores
from gplan_profiler.host.processes import end_with_parent, print_stack_on_signal, report_error, run_processes
from gplan_profiler.model.given_model import check_nothing_beside
from gplan_profiler.model.model_reference import SettingValue, check_is_there, file_digest

EngineName: TypeAlias = Literal["torch", "virtual"]
ENGINES: tuple[EngineName, ...] = ("torch", "virtual")

_STEP = "gplan-step: "
_WARNING = "gplan-warning: "


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What a process of a run needs: model file, plan, options, and the folder of the run's files."""

    reference: str
    settings: dict[str, SettingValue]
    options: RunOptions
    folder: str


def run_plan(
    plan: Plan,
    model: ModelLike,
    engine: EngineName,
    options: RunOptions,
    *,
    settings: Mapping[str, SettingValue],
    functions: Mapping[str, Callable[..., Any] | None],
    report: ReportStep,
) -> Run:
    """Train with a plan on the given engine; a plan that cannot run is refused before anything starts."""
    check_runnable(plan)
    _check_started(plan, engine)
    if engine == "virtual" and plan.is_sharded:
        raise UsageError(
            f"the virtual engine does not divide {plan.sharding} over replicas, as one process holds the stages of all of "
            "them; use --engine torch, or balance again with --shard none"
        )
    if options.resume is not None and options.must_resume:
        list_checkpoints(Path(options.resume))  # raises before any process starts
    _check_nothing_is_replaced(options)
    if not is_torchrun():
        num_copies, num_processes = (plan.num_replicas, plan.num_ranks) if engine == "torch" else (1, 1)
        check_fits_here(plan, num_copies=num_copies, num_checking=num_processes if options.check else 0)
    if isinstance(model, str):
        check_nothing_beside(model, functions)
        path = Path(model.partition(":")[0])
        if path.suffix == ".py":  # raises before any process starts
            check_is_there(path, named_by="the plan" if model == plan.model.name else "")
    if engine == "torch" and not is_torchrun():
        if not isinstance(model, str):
            kind = type(model).__name__
            raise UsageError(f"the torch engine loads the model from a file in each process; got a {kind} in memory")
        return run_local_processes(model, dict(settings), plan, options, report=report)
    source_of = partial(
        open_source,
        model,
        settings=settings,
        functions=functions,
        seed=options.seed,
        weights=options.weights,
        precision=plan.precision,
    )
    if engine == "virtual":
        return run_virtual_engine(source_of(), plan, options, report=report)
    given = {"--steps": options.num_steps, "--seed": options.seed, "--save-every": options.save_every}
    flags = {"--check": options.check, "--resume": options.resume is not None, "--weights": options.weights is not None}
    words = [f"{name} {x}" for name, x in given.items() if x is not None] + [name for name, x in flags.items() if x]
    facts = {
        "plan": hashlib.sha256(json_files.to_json(plan)).hexdigest()[:12],
        **({"model file": digest} if isinstance(model, str) and (digest := file_digest(model)) else {}),
        "options": " ".join(words),
    }
    return run_torchrun_rank(source_of, plan, options, facts=facts, report=report)


def notes_at_start(plan: Plan, engine: EngineName) -> tuple[str, ...]:
    """The notes of a run on this host that are known before it, as its `Run` has them too."""
    is_here = not is_torchrun() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if engine == "virtual" or not is_here:
        return ()
    return (*notes_on_cores(plan, len(usable_cores())), *notes_on_machine(plan))


def _check_started(plan: Plan, engine: EngineName) -> None:
    """Raise UsageError if torchrun started processes that the engine does not use, or one where the plan needs more."""
    if not is_torchrun():
        return
    num_started = int(os.environ.get("WORLD_SIZE", "1"))
    if engine == "virtual" and num_started > 1:
        raise UsageError(
            f"the virtual engine computes everything in one process, and torchrun started {num_started}: run it without "
            "torchrun, or with --engine torch"
        )
    if engine == "torch" and num_started == 1 < plan.num_ranks:
        raise UsageError(
            f"torchrun started 1 process, the plan needs {plan.num_ranks}: use --nproc-per-node {plan.num_ranks}, or "
            "--engine virtual without torchrun"
        )


def _check_nothing_is_replaced(options: RunOptions) -> None:
    """Raise UsageError if a run from the start would overwrite another run's checkpoints."""
    if options.save_every is None or options.resume is not None or not Path(options.checkpoints).is_dir():
        return
    newest = newest_complete(Path(options.checkpoints))
    if newest is not None:
        raise UsageError(
            f"{options.checkpoints} holds the checkpoints of another run, the newest {newest.name}: go on from it with "
            "--resume, or name another folder with --checkpoints"
        )


def run_local_processes(
    reference: str, settings: dict[str, SettingValue], plan: Plan, options: RunOptions, *, report: ReportStep
) -> Run:
    """Run a plan with the torch engine, one process per device on this host.

    Raises RunError if a process fails or hangs; all processes have ended by then. Raises FileError before any starts
    if no checkpoint could be written.
    """
    with _checkpoints_locked(options), tempfile.TemporaryDirectory(prefix="gplan-run-") as place:
        json_files.save(plan, Path(place) / "plan.json")
        for rank in range(plan.num_ranks):  # so that a rank that does not start has a stage
            _heartbeat(Path(place), plan, rank)
        job = WorkerJob(reference=reference, settings=settings, options=options, folder=place)
        job_file = Path(place) / "job.json"
        json_files.write_bytes(job_file, msgspec.json.encode(job))

        def on_line(_rank: int, line: str) -> None:
            if line.startswith(_STEP):
                index, loss = msgspec.json.decode(line.removeprefix(_STEP), type=tuple[int, float])
                report(index, loss)
            elif line.startswith(_WARNING):
                warnings.warn(msgspec.json.decode(line.removeprefix(_WARNING), type=str), stacklevel=2)

        run_processes(
            "gplan.runtime.run.launch",
            [str(job_file)],
            num_processes=plan.num_ranks,
            timeout_s=options.timeout_s,
            on_line=on_line,
            status_of=lambda rank: read_heartbeat(heartbeat_file(Path(place), rank), plan.layer_names),
        )
        return json_files.load(Run, Path(place) / "run.json")


def _heartbeat(folder: Path, plan: Plan, rank: int) -> Heartbeat:
    """Begin the heartbeat of a rank, with its stage if it has only one."""
    stages = plan.stages_of(rank % plan.num_devices)
    return Heartbeat(heartbeat_file(folder, rank), stage=stages[0].index if len(stages) == 1 else None)


def is_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_not_torchrun() -> None:
    """Raise UsageError under torchrun, for what runs several plans one after the other."""
    if is_torchrun():
        raise UsageError("gplan verify starts the processes of every run itself; start it without torchrun")


def is_main_process() -> bool:
    """Whether this process prints and writes files for the run: all but torchrun's ranks above 0."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def run_virtual_engine(source: ModelSource, plan: Plan, options: RunOptions, *, report: ReportStep) -> Run:
    """Run all stages of a plan in this process, on one device's share of the cores."""
    with _checkpoints_locked(options), device_share(plan.device.num_threads):
        return train(source, plan, options, report=report)


def run_torchrun_rank(
    source_of: Callable[[], ModelSource],
    plan: Plan,
    options: RunOptions,
    *,
    facts: Mapping[str, str],
    report: ReportStep,
) -> Run:
    """Run a plan as one rank of torchrun; every rank returns the same run. `facts` must be the same on all ranks."""
    local_rank, local_size = local_place()
    pin_to_share(local_rank, num_shares=local_size, num_threads=plan.device.num_threads)
    try:
        peers: Peers | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            backend = backend_of(own_device(plan, None).type)
            peers = init_from_environment(backend, timeout_s=options.timeout_s, facts=facts)
            with explained_by_peers(peers):
                check_hosts(plan, [x.host for x in peers.peers])
        with explained_by_peers(peers), _checkpoints_locked(options) if is_main_process() else nullcontext():
            return train(source_of(), plan, options, report=report)
    except GplanError as error:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and not is_lost_connection(str(error)):  # for torchrun's summary, in the format of torch's ErrorHandler
            # torchrun compares whole seconds: a second less puts this rank before those that only lost it.
            extra = {"py_callstack": str(error), "timestamp": str(int(time.time()) - 1)}
            message = {"message": {"message": str(error), "extraInfo": extra}}
            json_files.write_bytes(Path(path), msgspec.json.encode(message))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _checkpoints_locked(options: RunOptions) -> Iterator[None]:
    """Lock the folder that a run saves checkpoints to, if it does; an interrupt names the newest one."""
    if options.save_every is None:
        yield
        return
    directory = Path(options.checkpoints)
    with locked_directory(directory):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            newest = newest_complete(directory)
            text = "no checkpoint was saved yet" if newest is None else f"go on with --resume {newest}"
            raise KeyboardInterrupt(text) from interrupt


def _work(job: WorkerJob, plan: Plan, heartbeat: Heartbeat) -> None:
    """Run one process of a run on this host."""
    rank, place = int(os.environ["RANK"]), Path(job.folder)
    pin_to_share(rank, num_shares=plan.num_ranks, num_threads=plan.device.num_threads)
    # A rank's timeout is longer than its supervisor's, which can better tell the rank at fault.
    options = replace(job.options, timeout_s=10 * job.options.timeout_s)
    heartbeat.enter_action("loading")
    source = open_source(
        job.reference, settings=job.settings, seed=options.seed, weights=options.weights, precision=plan.precision
    )
    heartbeat.enter_action("meeting")
    with heartbeat.waiting("ranks"):
        dist.init_process_group(
            backend_of(own_device(plan, None).type),
            init_method=f"file://{place / 'store'}",
            rank=rank,
            world_size=plan.num_ranks,
            timeout=timedelta(seconds=options.timeout_s),
        )

    def report(index: int, loss: float) -> None:
        if rank == 0:
            print(_STEP + msgspec.json.encode((index, loss)).decode(), flush=True)

    run = train(source, plan, options, report=report, heartbeat=heartbeat)
    heartbeat.enter_action("ending")
    if rank == 0:
        json_files.save(run, place / "run.json")
    dist.destroy_process_group()


def _forward_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any) -> None:
    """Print a warning of gplan's for the parent process to show; others are dropped."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[2]):
        print(_WARNING + msgspec.json.encode(str(message)).decode(), flush=True)


def _main(job_file: Path) -> int:
    end_with_parent()
    print_stack_on_signal()
    if os.environ["RANK"] == "0":
        warnings.showwarning = _forward_warning  # type: ignore[assignment]
    job = msgspec.json.decode(job_file.read_bytes(), type=WorkerJob)
    plan, rank = json_files.load(Plan, Path(job.folder) / "plan.json"), int(os.environ["RANK"])
    heartbeat = _heartbeat(Path(job.folder), plan, rank)
    try:
        _work(job, plan, heartbeat)
    except GplanError as error:
        report_error(error)
    except (Exception, SystemExit) as error:
        report_error(RunError(f"{heartbeat.read(plan.layer_names).place}: {failure_text(error)}"))
    else:
        return 0
    return 5


if __name__ == "__main__":
    os._exit(_main(Path(sys.argv[1])))  # skips interpreter shutdown, in which a broken process group hangs
