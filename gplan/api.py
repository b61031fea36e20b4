"""The Python API: profile -> balance -> simulate -> run -> report, each a function from values to a value.

torch and matplotlib are imported only by the functions that need them, so planning stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gplan import files
from gplan.balancer import balance
from gplan.errors import UsageError
from gplan.nouns import Link, Plan, Profile, Run
from gplan.schedules import make_schedule
from gplan.simulator import simulate

if TYPE_CHECKING:
    from torch import nn

    from profiler.load import ModelFile
    from profiler.settings import Setting

__all__ = ["balance", "load", "profile", "report", "run", "save", "simulate"]


def profile(
    model: str | nn.Module | Sequence[nn.Module],
    *,
    microbatch_sizes: Sequence[int] = (4,),
    settings: Mapping[str, Setting] | None = None,
    input_shapes: str | None = None,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    num_threads: int = 1,
    link: Link | None = None,
    budget_s: float = 10.0,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _text, _share: None,
) -> Profile:
    """Measure every layer of a model on this host: seconds, bytes, and what crosses each cut.

    `model` is a reference such as "model.py:NAME", an nn.Module or a list of modules; with a module, `inputs` (tensors
    or a function of the batch size), `loss(output, target)`, `optimizer(parameters)` and `batches(batch_size)` stand for
    what a model file would define. `link` is measured between two processes where it is not given. `progress` is called
    with a text and the share done. The model's parameters, gradients, buffers and the random state are left as they were.

    Raises ModelError for a model that cannot be loaded, captured or run, UsageError for options that cannot be used.
    """
    from profiler.measure import ProfileOptions, measure_profile

    given = {"inputs": inputs, "loss": loss, "optimizer": optimizer, "batches": batches}
    file = _model_file(model, settings=settings, input_shapes=input_shapes, seed=seed, given=given)
    options = ProfileOptions(
        microbatch_sizes=tuple(microbatch_sizes), num_threads=num_threads, link=link, budget_s=budget_s
    )
    return measure_profile(file, options, progress=progress)


def run(
    plan: Plan,
    *,
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    engine: Literal["torch", "virtual"] = "torch",
    num_steps: int = 20,
    check: bool = False,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
    progress: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Run:
    """Train with a plan for `num_steps` steps and measure every action.

    `model` is by default the model file that the plan was made for; a module in memory (with `loss`, `optimizer` and
    `batches`) can be run by the virtual engine only, as processes cannot share it. `check` compares the first step's
    gradients with the plain model's. `progress` is called with each step's number and loss.

    Raises FileError where the plan was made for another model, RunError where a process fails or hangs.
    """
    from gplan.execute import launch
    from gplan.execute.local import train_virtual
    from gplan.execute.train import RunOptions
    from profiler.load import check_is_there

    if engine not in launch.ENGINES:
        raise UsageError(f"engine {engine!r} is not known; expected one of {', '.join(launch.ENGINES)}")
    make_schedule(plan.schedule, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
    options = RunOptions(num_steps=num_steps, check=check, seed=seed, timeout_s=timeout_s)
    if model is None and plan.model.in_memory:
        raise UsageError(f"the plan was made for a {plan.model.name} in memory; pass it as model=..., engine='virtual'")
    model = plan.model.name if model is None else model
    settings = plan_settings(plan) if isinstance(model, str) else {}
    given = {"inputs": None, "loss": loss, "optimizer": optimizer, "batches": batches}
    _check_given(model, given)
    if engine == "torch" and not launch.is_torchrun():
        if not isinstance(model, str):
            kind = type(model).__name__
            raise UsageError(f"the torch engine loads the model from a file in each process; got a {kind} in memory")
        place = Path(model.partition(":")[0])
        if place.suffix == ".py":
            check_is_there(place)  # before processes start that would say the same
        return launch.run_processes_here(model, settings, plan, options, report=progress)
    file = _model_file(model, settings=settings, input_shapes=None, seed=seed, given=given)
    carry_out = train_virtual if engine == "virtual" else launch.run_torchrun_rank
    return carry_out(file, plan, options, report=progress)


def report(subject: Run | Plan, directory: str | Path = "gplan-report") -> tuple[Path, ...]:
    """Draw a plan, or a run beside its prediction: PNG, SVG, one offline HTML page and a Chrome trace.

    Returns the paths written. Raises FileError where the directory cannot be written.
    """
    from gplan.reporting import write_report

    return write_report(subject, Path(directory))


def load(path: str | Path) -> Profile | Plan | Run:
    """Read whichever of the three a file holds; raises FileError for anything else."""
    return files.load_any(Path(path))


def save(value: Profile | Plan | Run, path: str | Path) -> None:
    """Write a profile, plan or run; the file is either whole or not there."""
    files.save(value, Path(path))


def speaks() -> bool:
    """Whether this process prints and writes for a run; ranks of torchrun above 0 do not."""
    from gplan.execute import launch

    return launch.speaks()


def plan_settings(plan: Plan) -> dict[str, Setting]:
    """The settings that the plan's model was built with."""
    from profiler.settings import parse_setting

    return {key: parse_setting(text) for key, text in plan.model.settings}


def _model_file(
    model: str | nn.Module | Sequence[nn.Module],
    *,
    settings: Mapping[str, Setting] | None,
    input_shapes: str | None,
    seed: int,
    given: Mapping[str, Any],
) -> ModelFile:
    from torch.nn import Module

    from profiler.load import load_model_file, model_in_memory
    from profiler.sequence import as_sequential

    _check_given(model, given)
    if isinstance(model, str):
        return load_model_file(model, settings=settings, input_shapes=input_shapes, seed=seed)
    if settings:
        raise UsageError(f"settings {sorted(settings)} were given with a model in memory; build it with them instead")
    module = model if isinstance(model, Module) else as_sequential(list(model))
    return model_in_memory(module, **given)


def _check_given(model: object, given: Mapping[str, Any]) -> None:
    """A model file brings its own functions; none may be given beside it."""
    named = [name for name, value in given.items() if value is not None]
    if isinstance(model, str) and named:
        raise UsageError(f"{named[0]} was given beside the model file {model}; define it in the file instead")
