"""The Python API: profile -> balance -> simulate -> run -> report, each a function from values to a value.

torch and matplotlib are imported only by the functions that need them, so planning stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gplan.core import (
    EngineCost,
    Granularity,
    Link,
    LossReduction,
    Machine,
    Plan,
    Precision,
    PrecisionName,
    Profile,
    Run,
    Verification,
)
from gplan.core.errors import UsageError, needs_torch
from gplan.core.profile import SAMPLING_BUDGET_S
from gplan.core.progress import Progress, no_progress
from gplan.corrections.gradient_reduction import beside_reduction
from gplan.evaluate.compare import compare as compare
from gplan.evaluate.compare import with_equal_speed
from gplan.evaluate.replanning import for_one_process
from gplan.evaluate.verify import NUM_ROUNDS, NUM_STEPS
from gplan.evaluate.verify import verify as verify_by
from gplan.files import json_files
from gplan.interop.planning import import_plan as import_plan
from gplan.schedules.request import PlanRequest as PlanRequest
from gplan.simulation.simulator import simulate as simulate
from gplan.strategy_search.planner import balance as balance
from gplan.strategy_search.planner import plan as plan

if TYPE_CHECKING:
    from torch import nn

    from gplan.runtime.model_source import ModelLike
    from gplan.runtime.pipeline import Pipeline
    from gplan.runtime.validation import Loss
    from gplan_profiler.model.model_reference import SettingValue


@needs_torch("gplan.profile")
def profile(
    model: str | nn.Module | Sequence[nn.Module],
    *,
    microbatch_sizes: Sequence[int] = (4,),
    settings: Mapping[str, SettingValue] | None = None,
    input_shapes: str | None = None,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    loss_reduction: LossReduction | None = None,
    device: str = "auto",
    hardware: str | Path | None = None,
    reduce_slowdown: float | None = None,
    num_threads: int = 1,
    contention: int | None = None,
    link: Link | None = None,
    granularity: Granularity = "auto",
    precision: PrecisionName = "model",
    budget_s: float = SAMPLING_BUDGET_S,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Profile:
    """Measure every layer of a model on this host, or compute it for hardware that is not here.

    `model` is a reference such as "model.py:NAME", an nn.Module or a list of modules; with a module, `inputs` (tensors
    or a function of the batch size), `loss(output, target)`, `optimizer(parameters)`, `batches(batch_size)` and
    `loss_reduction` stand for what a model file would define. A model that does not fit in memory, or is on the meta
    device, is measured layer by layer.

    `device` is "auto" (CUDA where torch can use it, else the CPU), "cpu", "cuda", "cuda:1", or "meta": then seconds are computed for `hardware` (a name such as "h100", or
    a TOML or JSON file), and bytes come from a run on fake tensors.
    `reduce_slowdown` is the factor on backwards beside which replicas reduce gradients.

    `contention` processes do the same work beside (by default as many as the remaining cores of a CPU allow, at most 7).
    The link, and on a CPU what the engine itself takes, are measured between two processes where `link` is not given.
    `granularity` "layer" takes the blocks and children that the author wrote as layers; "auto" divides those that take
    more than 1/32 of the model, so that cuts balance; "op" makes every operation a layer, which needs a model that
    torch.export can trace.

    `precision` is that of the training, by default as the model is made: "float32", "bfloat16" (all in one type), "mixed"
    (bfloat16 parameters and activations, float32 master weights, optimizer states and gradients), "mixed-bf16-gradients"
    (the same with gradients accumulated in bfloat16) or "autocast" (torch.autocast in bfloat16).

    `progress` is called with a text and the share done. The model's parameters, gradients, buffers and the random state
    are left as they were.

    Raises ModelError for a model that cannot be loaded, captured or run, UsageError for options that cannot be used.
    """
    from gplan_profiler.analytic.computed_profile import ComputeOptions, computed_profile
    from gplan_profiler.analytic.hardware import hardware_table, load_hardware
    from gplan_profiler.host.host_info import default_device, usable_cores
    from gplan_profiler.measure import ProfileOptions, measure_profile
    from gplan_profiler.model.given_model import GivenModel
    from gplan_profiler.torch_compat import start_autograd

    functions = {"inputs": inputs, "loss": loss, "optimizer": optimizer, "batches": batches}
    functions["loss_reduction"] = loss_reduction
    given = GivenModel(
        model=model,
        settings=settings or {},
        input_shapes=input_shapes,
        seed=seed,
        functions=functions,
        precision=Precision.named(precision),
    )
    if device == "meta":
        if hardware is None:
            raise UsageError(
                f"device 'meta' computes for hardware that is not here; name it: {', '.join(hardware_table())} or a TOML or JSON file "
                "(--hardware h100)"
            )
        to_compute = ComputeOptions(
            hardware=load_hardware(str(hardware)),
            microbatch_sizes=tuple(microbatch_sizes),
            link=link,
            granularity=granularity,
        )
        computed = computed_profile(given.load(), to_compute, progress=progress)
        return computed if reduce_slowdown is None else beside_reduction(computed, reduce_slowdown)
    device = default_device() if device == "auto" else device
    if device == "cpu":
        start_autograd()
    for option, value in (("--hardware", hardware), ("--reduce-slowdown", reduce_slowdown)):
        if value is not None:
            raise UsageError(
                f"{option} goes with device 'meta', which computes a profile; device {device!r} is measured: use --device meta or "
                f"leave out {option}"
            )
    options = ProfileOptions(
        microbatch_sizes=tuple(microbatch_sizes),
        device=device,
        num_threads=num_threads,
        contention=contention,
        link=link,
        granularity=granularity,
        budget_s=budget_s,
    )

    def measured_engine() -> EngineCost:
        from gplan.runtime.overhead import measure_engine

        return measure_engine(num_threads=num_threads)

    has_cores = device == "cpu" and len(usable_cores()) >= 2 * num_threads  # for two processes
    file = given.load_for_measuring(
        batch_size=options.microbatch_sizes[-1], device=device, num_copies=1 + options.num_neighbours
    )
    measure = measured_engine if has_cores and link is None else None
    return measure_profile(file, options, progress=progress, measure_engine=measure)


@needs_torch("gplan.pipeline")
def pipeline(
    model: ModelLike,
    plan: Plan,
    *,
    loss: Loss | None = None,
    inputs: Any = None,
    seed: int | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
    precision: PrecisionName | None = None,
    timeout_s: float = 120.0,
    broadcast_batches: bool = False,
) -> Pipeline:
    """The stages of `plan` that this process holds, ready to train: `loss = pipe.step(inputs, targets)`.

    Under torchrun each process holds the stages of one device of one replica; a process alone computes all of them (the
    virtual engine). `model` is an nn.Module, a reference such as "model.py:NAME", or, where no process should hold it
    whole, the function that builds it: each process then holds only its own stages, with the values that
    `torch.manual_seed(seed); model()` would give (Python's `random` and numpy are seeded too), or those of `weights` (a safetensors or torch file, or a folder of
    them). `loss(output, target)` is for a micro-batch, a mean or a sum over its samples as the plan says; a model
    file's own by default. `inputs` of any number of samples show what the model is called with, where the plan does not
    say. `device` is by default this process's GPU if the plan was made for one, else the CPU. A process that waits
    longer than `timeout_s` for another gives up. `seed`, by default the one that `torch.manual_seed` set last, is also that of
    random numbers in training, such as dropout's; all ranks use that of rank 0.
    `precision` must equal the plan's, if given. With "mixed" the pipeline's parameters are the float32 master weights,
    and stages compute with bfloat16 copies that each step begins with. With `broadcast_batches` rank 0 sends its batches
    to the ranks that use them; what other ranks pass does not count. Without it every rank draws the same ones itself.

    Raises FileError where the plan was made for another model, UsageError for what cannot be run so, ModelError for a
    model that cannot be built or captured.
    """
    import torch

    from gplan.runtime.pipeline import open_pipeline
    from gplan.runtime.validation import check_options, check_runnable

    seed = torch.initial_seed() % 2**63 if seed is None else seed  # negative ones are unsigned numbers in torch
    check_options(plan, loss=loss, seed=seed, timeout_s=timeout_s, precision=precision)
    check_runnable(plan)
    return open_pipeline(
        model,
        plan,
        loss=loss,
        inputs=inputs,
        settings=plan_settings(plan) if isinstance(model, str) else {},
        seed=seed,
        weights=weights,
        device=device,
        timeout_s=timeout_s,
        broadcast_batches=broadcast_batches,
    )


@needs_torch("gplan.run")
def run(
    plan: Plan,
    *,
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    engine: Literal["torch", "virtual"] = "torch",
    profile: Profile | None = None,
    num_steps: int = 20,
    check: bool = False,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    save_every: int | None = None,
    checkpoints: str | Path = "gplan-checkpoints",
    resume: str | Path | Literal[True] | None = None,
    timeout_s: float = 120.0,
    progress: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Run:
    """Train with a plan for `num_steps` steps and measure every action.

    `model` is by default the model file that the plan was made for; a module in memory (with `loss`, `optimizer` and
    `batches`) can be run by the virtual engine only, as processes cannot share it. `check` compares the first step's
    gradients with the plain model's. With `profile`, the one that the plan was made from, the run also has its step
    predicted at the speed that the host had in it, and a run by the virtual engine is compared with the times of one
    process alone. `weights` (a safetensors or torch file, or a folder) replaces the values that the seed gives. A checkpoint is written to the folder `checkpoints` after every `save_every` steps; `resume` (a
    checkpoint, or a folder, whose newest whole one is meant; True: `checkpoints`, if it has one yet) goes on from one,
    also one that was saved under another plan, to `num_steps` in all. Nothing may stand still for longer than
    `timeout_s`. `progress` is called with each step's number and loss.

    Raises FileError where the plan was made for another model or there is no checkpoint, UsageError for a plan of
    another planner's profile, which has no model to run, RunError where a process fails or hangs.
    """
    from gplan.runtime.run import launch
    from gplan.runtime.run.run_options import RunOptions

    if engine not in launch.ENGINES:
        raise UsageError(f"engine {engine!r} is not known; expected one of {', '.join(launch.ENGINES)}")
    if engine == "virtual":
        plan = for_one_process(plan, profile)
    options = RunOptions(
        num_steps=num_steps,
        check=check,
        seed=seed,
        timeout_s=timeout_s,
        weights=None if weights is None else str(weights),
        save_every=save_every,
        checkpoints=str(checkpoints),
        resume=None if resume is None else str(checkpoints if resume is True else resume),
        must_resume=resume is not True,
    )
    if model is None and plan.model.in_memory:
        raise UsageError(f"the plan was made for a {plan.model.name} in memory; pass it as model=..., engine='virtual'")
    model = plan.model.name if model is None else model
    settings = plan_settings(plan) if isinstance(model, str) else {}
    functions = {"loss": loss, "optimizer": optimizer, "batches": batches}
    found = launch.run_plan(plan, model, engine, options, settings=settings, functions=functions, report=progress)
    return found if profile is None else with_equal_speed(found, profile)


@needs_torch("gplan.cluster")
def cluster(
    *,
    device: str | None = None,
    timeout_s: float = 120.0,
    progress: Progress = no_progress,
) -> Machine:
    """Measure the devices, links and collectives of all processes that torchrun started, on one host or several.

    Every process returns the same machine. `device` is "cpu" or "cuda", by default "cuda" where each process has a GPU.
    `progress` is called with a text and the share done. Raises UsageError outside of torchrun, with one process or with
    versions that differ, RunError where a process does not answer for `timeout_s`.
    """
    from gplan.runtime.cluster import measure_cluster

    return measure_cluster(device_kind=device, timeout_s=timeout_s, progress=progress)


def report(
    subject: Run | Plan,
    directory: str | Path = "gplan-report",
    *,
    profile: Profile | None = None,
    progress: Progress = no_progress,
) -> tuple[Path, ...]:
    """Draw a plan, or a run beside its prediction: one offline HTML page, its charts as PNG and SVG, a Chrome trace.

    With the profile that the plan was made from, the page also says why the plan is as it is, and compares it with
    other numbers of devices and other settings, which takes up to some 20 s; `progress` is called with a text and the
    share done of each. Returns the paths written, the page first. Raises FileError where the directory cannot be
    written, or where profile and plan do not belong together.
    """
    from gplan.reporting.analysis import analysis_of
    from gplan.reporting.report_folder import write_report

    return write_report(subject, Path(directory), analysis=analysis_of(subject, profile, progress=progress))


@needs_torch("gplan.verify")
def verify(
    plan: Plan,
    profile: Profile,
    *,
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    engine: Literal["torch", "virtual"] = "torch",
    num_steps: int = NUM_STEPS,
    num_rounds: int = NUM_ROUNDS,
    num_rivals: int | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    timeout_s: float = 120.0,
    progress: Progress = no_progress,
) -> Verification:
    """Run the plan and at most `num_rivals` others (None: all) in turns, and compare each with its prediction.

    `profile` is the one that the plan was made from. Every plan is run once a round for `num_steps` steps, as
    `gplan.run` does with the same model, engine and functions; a model in memory is trained by all of them. An interrupt, or a failure of the plan itself
    after the first round, ends it with the rounds so far.

    Raises UsageError under torchrun, FileError where plan and profile do not belong together, and what `gplan.run`
    raises for the plan itself in the first round; a rival that cannot be run is left out and named.
    """
    from gplan.runtime.run.launch import check_not_torchrun

    check_not_torchrun()
    runner = partial(
        run,
        model=model,
        engine=engine,
        profile=profile,
        num_steps=num_steps,
        loss=loss,
        optimizer=optimizer,
        batches=batches,
        timeout_s=timeout_s,
    )
    return verify_by(
        plan,
        profile,
        runner,
        engine=engine,
        num_rounds=num_rounds,
        num_steps=num_steps,
        num_rivals=num_rivals,
        progress=progress,
    )


def import_trace(traces: Sequence[str | Path], *, plan: Plan) -> Run:
    """The run of `plan` that a pipeline's torch.profiler traces measured, one file of every rank, .json or .json.gz.

    Any torch.distributed.pipelining run will do; what the traces lack, such as losses and memory, the run's notes say.
    `gplan.interop.traces.measured_run` has the same without a plan.

    Raises FileError for files that are no such traces, not those of one pipeline, or of another plan's.
    """
    from gplan.interop.traces.measured_run import read_traced, traced_run

    return traced_run(read_traced([Path(path) for path in traces]), plan)


def load(path: str | Path) -> json_files.Value:
    """Read the profile, plan, run or verification that a file holds; raises FileError for anything else."""
    return json_files.load_any(Path(path))


def save(value: json_files.Value, path: str | Path) -> None:
    """Write a profile, plan, run or verification; the file is either whole or not there."""
    json_files.save(value, Path(path))


def plan_settings(plan: Plan) -> dict[str, SettingValue]:
    """The settings that the plan's model was built with."""
    from gplan_profiler.model.model_reference import parse_setting

    return {key: parse_setting(text) for key, text in plan.model.settings}
