"""The command line: arguments -> one call -> print. Heavy imports happen inside the verbs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan import api, files
from gplan.errors import GplanError, RunError, UsageError
from gplan.nouns import OBJECTIVES, RECOMPUTE_MODES, Link, Plan, Profile, Run
from gplan.schedules import SCHEDULES
from gplan.units import parse_bytes, parse_link

if TYPE_CHECKING:
    from rich.console import RenderableType

PROFILE_FILE, PLAN_FILE, RUN_FILE = "gplan.profile.json", "gplan.plan.json", "gplan.run.json"
REPORT_FOLDER = "gplan-report"
_WIDTH_OF_FILES = 120  # of tables that go to a file or a pipe

_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
_EXAMPLES = {
    "profile": """
\b
Examples:
  gplan profile model.py
  gplan profile examples/transformer_lm.py --set num_blocks=12 --microbatch-size 1,2,4
  gplan profile package.module:Net --input-shape 8,3,224,224 --link 25GB/s,5us
  gplan profile model.py --device cuda
  gplan profile big.py --device meta --hardware h100""",
    "balance": """
\b
Examples:
  gplan balance --k 2
  gplan balance --k 4 --microbatches 16 --schedule 1f1b --memory 16GiB --recompute always
  gplan balance --k 4 --minimize max-stage --solver milp""",
    "run": """
\b
Examples:
  gplan run --steps 60 --check
  gplan run --engine virtual
  torchrun --nproc-per-node 2 -m gplan run --steps 60""",
    "report": """
\b
Examples:
  gplan report
  gplan report gplan.plan.json --output charts""",
    "show": """
\b
Examples:
  gplan show
  gplan show --sort memory --all
  gplan show gplan.run.json""",
    "diff": """
\b
Examples:
  gplan diff before.json gplan.profile.json
  gplan diff before.json gplan.profile.json --microbatch-size 4 --all""",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gplan")
def cli() -> None:
    """Plan pipeline-parallel training in PyTorch, run the plan, and see how far the prediction was off.

    \b
      gplan profile model.py     measure every layer            -> gplan.profile.json
      gplan balance --k 8        the best partition, proven     -> gplan.plan.json
      gplan run                  train with it, measure it      -> gplan.run.json
      gplan report               charts and one offline page    -> gplan-report/
      gplan show                 any of these files, as text
      gplan diff OLD NEW         two profiles: what became slower, beyond the noise

    Each verb reads what the one before it wrote; only the model needs naming.
    """


@cli.command(
    help="Measure the layers of MODEL: model.py, model.py:NAME or package.module:NAME.\n" + _EXAMPLES["profile"]
)
@click.argument("model")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model file.")
@click.option("--microbatch-size", default="4", show_default=True, metavar="N[,N...]", help="Samples in a micro-batch.")
@click.option("--input-shape", metavar="SHAPE", help="Inputs where the file describes none, such as 8,512:int64.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1; meta computes for --hardware.")
@click.option("--hardware", metavar="NAME|FILE", help="With --device meta: h100, h200, a100, v100, p100, tpu-v2, tpu-v3, "
              "cpu, or a TOML file.")  # fmt: skip
@click.option("--calibrate", metavar="PROFILE", type=click.Path(path_type=Path),
              help="With --device meta: a measured profile that corrects the hardware's efficiencies.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, help="Cores that one pipeline device has.")
@click.option("--contention", type=int, metavar="N",
              help="Processes that do the same work beside.  [default: one on every other core; on a GPU none]")  # fmt: skip
@click.option("--split-backward", is_flag=True, help="Measure input and weight gradients apart too.")
@click.option("--link", metavar="RATE,LATENCY", help="The link between devices, such as 25GB/s,5us; else measured.")
@click.option("--budget", default=10.0, show_default=True, help="Longest sampling, in seconds a micro-batch size.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--output", default=PROFILE_FILE, show_default=True, type=click.Path(path_type=Path))
@_json
def profile(
    model: str, settings: tuple[str, ...], microbatch_size: str, input_shape: str | None, device: str,
    hardware: str | None, calibrate: Path | None, threads: int, contention: int | None, split_backward: bool,
    link: str | None, budget: float, seed: int, output: Path, as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import profile_view

    files.check_writable(output)
    with _progress() as (show, _):
        result = api.profile(
            model,
            microbatch_sizes=_numbers(microbatch_size),
            settings=_settings(settings),
            input_shapes=input_shape,
            device=device,
            hardware=hardware,
            calibrate=files.load(Profile, calibrate) if calibrate is not None else None,
            num_threads=threads,
            contention=contention,
            split_backward=split_backward,
            link=_link(link),
            budget_s=budget,
            seed=seed,
            journal=output.with_name(f"{output.name}.journal"),
            progress=show,
        )
    files.save(result, output)
    _print(result, lambda: profile_view(result), output, as_json=as_json)


@cli.command(help="Find the best partition of the layers into K stages, and prove it.\n" + _EXAMPLES["balance"])
@click.argument("profile", default=PROFILE_FILE, type=click.Path(path_type=Path))
@click.option("--k", "num_stages", type=int, required=True, help="Stages: how many devices the model is cut over.")
@click.option("--microbatches", type=int, help="Micro-batches a step.  [default: 4 K]")
@click.option("--microbatch-size", type=int, help="Samples in a micro-batch.  [default: the largest profiled]")
@click.option("--batch-size", type=int, help="Samples a step, instead of --microbatch-size.")
@click.option("--schedule", default="gpipe", show_default=True, type=click.Choice(list(SCHEDULES)))
@click.option("--recompute", default="never", show_default=True, type=click.Choice(RECOMPUTE_MODES))
@click.option("--memory", metavar="SIZE", help="Memory of each device, such as 16GiB.  [default: no limit]")
@click.option("--minimize", default="step-time", show_default=True, type=click.Choice(OBJECTIVES))
@click.option("--solver", default="dp", show_default=True, type=click.Choice(["dp", "milp"]))
@click.option("--output", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@_json
def balance(
    profile: Path, num_stages: int, microbatches: int | None, microbatch_size: int | None, batch_size: int | None,
    schedule: str, recompute: Any, memory: str | None, minimize: Any, solver: Any, output: Path, as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import plan_view

    num_microbatches = 4 * num_stages if microbatches is None else microbatches
    result = api.balance(
        files.load(Profile, profile),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        microbatch_size=_microbatch_size(microbatch_size, batch_size, num_microbatches),
        schedule=schedule,
        recompute=recompute,
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        minimize=minimize,
        solver=solver,
    )
    files.save(result, output)
    _print(result, lambda: plan_view(result), output, as_json=as_json)


@cli.command(help="Train with a plan and hold what happens against the prediction.\n" + _EXAMPLES["run"])
@click.argument("model", required=False)
@click.option("--plan", "plan_file", default=PLAN_FILE, show_default=True, type=click.Path(path_type=Path))
@click.option("--engine", default="torch", show_default=True, type=click.Choice(["torch", "virtual"]),
              help="torch: one process per stage; virtual: all stages in this process, devices on the clock only.")  # fmt: skip
@click.option("--steps", default=20, show_default=True, help="Training steps.")
@click.option("--check", is_flag=True, help="Compare the first gradients with the plain model's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--timeout", default=120.0, show_default=True, help="Longest silence of the processes, in seconds.")
@click.option("--output", default=RUN_FILE, show_default=True, type=click.Path(path_type=Path))
@_json
def run(
    model: str | None, plan_file: Path, engine: Any, steps: int, check: bool, seed: int, timeout: float, output: Path,
    as_json: bool,
) -> None:  # fmt: skip
    from gplan.tables import run_view

    plan = files.load(Plan, plan_file)
    files.check_writable(output)
    with _progress(num_steps=steps) as (_, step):
        result = api.run(
            plan,
            model=model,
            engine=engine,
            num_steps=steps,
            check=check,
            seed=seed,
            timeout_s=timeout,
            progress=step,
        )
    if not api.speaks():
        return
    files.save(result, output)
    _print(result, lambda: run_view(result), output, as_json=as_json)
    if result.check is not None and not result.check.passed:
        raise RunError(
            f"gradients differ from the plain model's by {result.check.max_relative_error:.1e} in "
            f"{result.check.worst_parameter}; expected at most {result.check.tolerance:.0e}; {output} holds the run"
        )


@cli.command(help="Draw a run beside its prediction, or a plan alone.\n" + _EXAMPLES["report"])
@click.argument("subject", required=False, type=click.Path(path_type=Path))
@click.option("--output", default=REPORT_FOLDER, show_default=True, type=click.Path(path_type=Path))
@_json
def report(subject: Path | None, output: Path, as_json: bool) -> None:
    source = subject or _newest_subject()
    value = api.load(source)
    if isinstance(value, Profile):
        raise UsageError(f"{subject} is a profile; expected a run or a plan: make one with `gplan balance --k 2`")
    paths = api.report(value, output)
    with _reader_may_leave():
        if as_json:
            click.echo(json.dumps([str(path) for path in paths]))
            return
        click.echo(f"read {source}")
        for path in paths:
            click.echo(f"wrote {path}")


@cli.command(help="Print a profile, plan or run that was written before.\n" + _EXAMPLES["show"])
@click.argument("file", default=PROFILE_FILE, type=click.Path(path_type=Path))
@click.option("--sort", type=click.Choice(["cost", "order", "memory"]), help="Layers of a profile.  [default: cost]")
@click.option("--microbatch-size", type=int, help="Of a profile.  [default: the largest, as `gplan balance` takes]")
@click.option("--all", "show_all", is_flag=True, help="A row for every layer, alike or not, however many.")
@_json
def show(file: Path, sort: Any, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    from gplan.tables import noun_view

    value = files.load_any(file)
    view = noun_view(value, name=str(file), sort=sort, microbatch_size=microbatch_size, show_all=show_all)
    _print_only(lambda: files.to_json(value).decode(), lambda: view, as_json=as_json)


@cli.command(help="What became slower or faster from one profile to another, beyond the noise.\n" + _EXAMPLES["diff"])
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--microbatch-size", type=int, help="Samples in a micro-batch.  [default: every size that both have]")
@click.option("--all", "show_all", is_flag=True, help="Also what did not change, however many rows.")
@_json
def diff(old: Path, new: Path, microbatch_size: int | None, show_all: bool, as_json: bool) -> None:
    import msgspec

    from gplan.difference import difference, profile_in
    from gplan.tables import difference_view

    profiles = [profile_in(files.load_any(path), name=str(path)) for path in (old, new)]
    result = difference(*profiles, microbatch_size=microbatch_size)
    _print_only(
        lambda: json.dumps(msgspec.to_builtins(result), indent=1, ensure_ascii=False) + "\n",
        lambda: difference_view(result, only_changed=not show_all),
        as_json=as_json,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; every error that a user can mend is one message and an exit code, see gplan.errors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except GplanError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        said = str(error.__cause__ or error)  # click raises Abort from the interrupt
        click.echo(f"interrupted; {said or 'every file that was written is whole'}", err=True)
        return 130
    except Exception as error:
        if os.environ.get("GPLAN_DEBUG"):
            raise
        click.echo(f"error: a bug in gplan: {type(error).__name__}: {error}; set GPLAN_DEBUG=1 to see where", err=True)
        return 1
    return code if isinstance(code, int) else 0


def _print(value: Profile | Plan | Run, view: Callable[[], RenderableType], output: Path, *, as_json: bool) -> None:
    """The result of a verb, which is also in the file that it wrote."""
    _print_only(lambda: files.to_json(value).decode(), view, as_json=as_json, written=output)


def _print_only(
    json_text: Callable[[], str], view: Callable[[], RenderableType], *, as_json: bool, written: Path | None = None
) -> None:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # not rich's own exit with code 1

    console = Output(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    with _reader_may_leave():
        if as_json:
            click.echo(json_text(), nl=False)
            return
        console.print(view())
        if written is not None:
            console.print(f"wrote {written}", style="dim")


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Printing into a pipe whose reader has gone (`| head -1`) is no failure: the rest is not printed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for whatever is flushed at the end


@contextmanager
def _progress(*, num_steps: int = 1) -> Iterator[tuple[Callable[[str, float], None], Callable[[int, float], None]]]:
    """A bar on standard error while something long runs: one function to show text and share, one for a step's loss."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(text: str, share: float) -> None:
            progress.update(task, description=text, completed=share)

        def step(index: int, loss: float) -> None:
            show(f"step {index + 1} of {num_steps}, loss {loss:.4f}", (index + 1) / num_steps)

        yield show, step


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    from profiler.model.settings import parse_setting

    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--set {pair}: expected key=value, such as --set num_blocks=12")
    return {key: parse_setting(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--microbatch-size {text!r}: expected whole numbers, such as 1,2,4") from error


def _link(text: str | None) -> Link | None:
    if text is None:
        return None
    bytes_per_s, latency_s = parse_link(text)
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def _microbatch_size(microbatch_size: int | None, batch_size: int | None, num_microbatches: int) -> int | None:
    for option, value in (("--microbatch-size", microbatch_size), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: expected at least 1 sample")
    if batch_size is None:
        return microbatch_size
    if microbatch_size is not None:
        raise UsageError(f"got --batch-size {batch_size} and --microbatch-size {microbatch_size}; give one of them")
    if num_microbatches < 1 or batch_size % num_microbatches:
        fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
        raise UsageError(
            f"a batch of {batch_size} cannot be cut into {num_microbatches} equal micro-batches; "
            f"--microbatches {' or '.join(map(str, fitting[-6:]))} would do"
        )
    return batch_size // num_microbatches


def _newest_subject() -> Path:
    found = [Path(name) for name in (RUN_FILE, PLAN_FILE) if Path(name).exists()]
    if not found:
        raise UsageError(f"there is neither {RUN_FILE} nor {PLAN_FILE} here; run `gplan balance` or `gplan run` first")
    return max(found, key=lambda path: path.stat().st_mtime)
