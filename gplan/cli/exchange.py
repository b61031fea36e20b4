"""Plans, layouts and traces of other trainers: `gplan export`, `layout`, `import-plan` and `import-trace`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import (
    PATH,
    PLAN_FILE,
    PROFILE_FILE,
    RUN_FILE,
    TrainerChoice,
    Verb,
    memory_option,
    output_option,
    profile_of_plan,
    schedule_named,
)
from gplan.cli.output import json_option, print_result
from gplan.interop.receiver_table import RECEIVERS


@click.command(cls=Verb)
@click.argument("plan", default=PLAN_FILE, type=PATH)
@click.option("--to", required=True, type=TrainerChoice([*RECEIVERS, "csv", "json"]), help="The trainer or format.")
@click.option("-o", "--output", type=PATH, help="The file to write.  [default: print it]")
@click.option(
    "--profile", "profile_file", type=PATH, metavar="FILE",
    help="The profile that the plan was made from; with it the export also checks skip connections and shared weights.  "
    f"[default: {PROFILE_FILE} if it is of this model]",
)  # fmt: skip
@json_option
def export(plan: Path, to: str, output: Path | None, profile_file: Path | None, as_json: bool) -> None:
    """Write a plan in the format of another trainer, or explain why it cannot run the plan.

    \b
    Examples:
      gplan export --to torchgpipe
      gplan export --to megatron > arguments.sh
      gplan export plan.json --to torchtitan --output pipeline_plan.py
    """
    from gplan.core import Plan
    from gplan.files import json_files
    from gplan.interop.export.exporters import export as export_plan

    chosen = json_files.load(Plan, plan)
    profile, _ = profile_of_plan(chosen, profile_file)
    made = export_plan(chosen, to=to, profile=profile)
    if output is not None:
        json_files.check_writable(output)
        json_files.write_bytes(output, made.text.encode())
    text = made.text.removesuffix("\n") if output is None else f"wrote {output}"
    print_result(made, lambda: text, as_json=as_json)
    for note in () if as_json else made.notes:
        click.echo(f"note: {note}", err=True)


@click.command(cls=Verb)
@click.argument("config")
@click.option("--gpus", "num_gpus", type=int, help="Devices of the machine: every width that is not given is chosen.")
@click.option("--gpus-per-node", type=int, help="Devices that fast links connect.  [default: that of the hardware]")
@click.option("--hardware", default="h100", show_default=True, help="A built-in device, or a TOML or JSON file.")
@click.option(
    "--network",
    help="To other nodes, such as 400Gb/s*8,5us (8 cards a node).  [default: the hardware's]",
)
@click.option("--pp", "num_devices", type=int, help="Devices in one pipeline.  [default with --gpus: chosen]")
@click.option("--vpp", "num_chunks", type=int, help="Stages on each device.  [default: 1; with --gpus: chosen]")
@click.option("--tensor", "--tp", type=int, help="Tensor-parallel size.  [default: 1; with --gpus: chosen]")
@click.option("--context", "--cp", type=int, help="Context-parallel size.  [default: 1; with --gpus: chosen]")
@click.option("--expert", "--ep", type=int, help="Expert-parallel size.  [default: 1; with --gpus: chosen]")
@click.option(
    "--expert-tensor", "--etp", type=int, default=0, help="Ranks that divide each expert.  [default: the tensor size]"
)
@click.option("--data", "--dp", type=int, help="Data-parallel size, over which optimizer state is divided.")
@click.option("--order", default="tp-cp-ep-dp-pp", show_default=True, help="Placing of groups, neighbours first.")
@click.option("--batch-size", "--gbs", type=int, help="Samples of a step on all devices.  [default with --gpus: 1024]")
@click.option("--microbatches", type=int, help="Without --gpus: micro-batches per step and pipeline.  [default: 4 K]")
@click.option(
    "--microbatch-size", "--mbs", type=int, help="Samples per micro-batch.  [default: 1; with --gpus: chosen]"
)
@click.option("--recompute", type=click.Choice(["never", "always"]),
              help="Recompute activations.  [default: never; with --gpus: chosen]")  # fmt: skip
@click.option(
    "--sequence-length", "--seq-length", type=int, default=4096, show_default=True, help="Tokens of a sample."
)
@click.option(
    "--to", "receiver", default="megatron", show_default=True, type=TrainerChoice(RECEIVERS), help="The trainer."
)
@memory_option("that of the hardware")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another value for a key of the configuration."
)
@click.option(
    "--time-limit",
    type=float,
    metavar="SECONDS",
    help="Longest search.  [default: 10; --gpus: 20, 60 above 64, 120 above 1024]",
)
@click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="Where to write the profile."
)
@output_option(PLAN_FILE)
@json_option
def layout(config: str, profile_file: Path, output: Path, as_json: bool, **dials: Any) -> None:
    """Choose how a language model is split over a machine, from its configuration alone, and print a trainer's arguments.

    \b
    CONFIG is the config.json of a language model, or a name such as llama3-70b, mixtral-8x7b, qwen3-235b-a22b, deepseek-v3,
    kimi-k2, gpt-oss-120b, glm-4.5, llama4-scout-17b-16e or gemma-3-27b. Keys that are not understood are refused.
    \b
    Examples:
      gplan layout llama-3-70b --gpus 64 --hardware h100 --batch-size 1024
      gplan layout config.json --gpus 16 --hardware a100 --tp 4
      gplan layout llama3-70b --pp 8 --vpp 5 --tp 4 --microbatches 32
      gplan layout deepseek-v3 --pp 16 --vpp 2 --tp 2 --ep 64 --etp 1 --dp 64 --microbatches 128
      gplan layout config.json --pp 4 --to torchtitan --set num_hidden_layers=40
    """
    from gplan.core import Plan, Profile
    from gplan.files import json_files
    from gplan.interop.export.exporters import export
    from gplan.interop.machine_layout import layout_of
    from gplan.reporting.text.widths import LayoutResult, widths_text

    json_files.check_writable(profile_file, Profile)
    json_files.check_writable(output, Plan)
    found = layout_of(config, on_start=lambda text: click.echo(text, err=True), **dials)
    made = export(found.plan, to=dials["receiver"], profile=found.profile)
    notes = (*found.plan.notes, *found.profile.notes, *made.notes, f"wrote {profile_file} and {output}")
    json_files.save(found.profile, profile_file)
    json_files.save(found.plan, output)
    for line in () if as_json else widths_text(found):
        click.echo(line, err=True)
    result = LayoutResult.of(found, format=made.format, text=made.text, notes=notes)
    print_result(result, lambda: made.text.removesuffix("\n"), as_json=as_json)
    for note in () if as_json else notes:
        click.echo(f"note: {note}", err=True)


@click.command(cls=Verb, name="import-plan")
@click.argument("layout")
@click.option("--from", "receiver", required=True, help="The trainer.",
              type=TrainerChoice([x for x, trainer in RECEIVERS.items() if trainer.cuts != "own"]))  # fmt: skip
@click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="The profile of the model."
)
@click.option(
    "--k", "num_devices", type=int, help="Devices in one pipeline.  [default: as the file says, or one a stage]"
)
@click.option(
    "--microbatches", "num_microbatches", type=int, help="Micro-batches per step.  [default: as the file says, or 4 K]"
)
@click.option(
    "--microbatch-size", type=int, help="Samples per micro-batch.  [default: as the file says, or the largest profiled]"
)
@click.option(
    "--schedule", metavar="NAME|FILE", help="The schedule.  [default: 1f1b, interleaved with several stages a device]"
)
@click.option("--recompute", type=click.Choice(["never", "always", "except-last"]),
              help="What the trainer recomputes.  [default: as the file says, or never]")  # fmt: skip
@memory_option("that of the profile")
@output_option(PLAN_FILE)
@json_option
def import_plan(
    layout: str, profile_file: Path, schedule: str | None, output: Path, as_json: bool, **options: Any
) -> None:
    """Price the layout of another trainer by a profile, and compare it with the best one.

    \b
    LAYOUT is what the trainer reads, or a file that holds it: Megatron's string, torchtitan's or Automodel's lists of modules,
    DeepSpeed's boundaries, the counts of vLLM, SGLang or torchgpipe, torch's split points.
    \b
    Examples:
      gplan import-plan 'Ettt|tt|tt|tL' --from megatron
      gplan import-plan pretrain.sh --from megatron --k 4 --microbatches 32 --memory 80GiB
      gplan import-plan pipeline_plan.py --from torchtitan
      gplan import-plan 0,5,11 --from deepspeed --recompute always
      gplan import-plan 6,5 --from torchgpipe
    """
    from gplan.core import Plan, Profile
    from gplan.files import json_files
    from gplan.interop.planning import import_plan as imported
    from gplan.reporting.text.plan import plan_view

    json_files.check_writable(output, Plan)
    profile = json_files.load(Profile, profile_file)
    name = schedule_named(schedule) if schedule is not None else None
    plan = imported(_text(layout), profile, schedule=name, **options)
    json_files.save(plan, output)
    print_result(plan, lambda: plan_view(plan), as_json=as_json, written=output)


def _text(layout: str) -> str:
    """The text of a file, if there is one of this name, else the argument itself."""
    from gplan.core.errors import FileError

    path = Path(layout)
    try:
        if (layout and path.is_dir()) or (
            path.suffix in (".py", ".sh", ".json", ".yaml", ".toml", ".txt") and not path.exists()
        ):
            raise FileError(f"{layout} is no file; expected a layout, or a file with one")
        return path.read_text() if path.is_file() else layout
    except (OSError, ValueError) as error:
        too_long = errno.ENAMETOOLONG
        if not isinstance(error, UnicodeDecodeError) and getattr(error, "errno", too_long) == too_long:  # a layout
            return layout
        raise FileError(f"{layout} cannot be read: {error}; expected a text with the layout") from error


@click.command(cls=Verb, name="import-trace")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=PATH)
@click.option("--plan", "plan_file", type=PATH, help="The plan that was run.")
@click.option("--run", "run_file", type=PATH, help=f"With --plan: where to write the run.  [default: {RUN_FILE}]")
@click.option("--profile", "profile_file", type=PATH,
              help="The profile that the plan was made from: write a copy with the measured times to --output.")  # fmt: skip
@click.option("-o", "--output", type=PATH, help="With --profile: where to write the new profile.")
@json_option
def import_trace(
    traces: tuple[Path, ...], plan_file: Path | None, run_file: Path | None, profile_file: Path | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a pipeline by its torch.profiler traces; with the plan that was run, compare it with
    the prediction.

    \b
    TRACE is a file that prof.export_chrome_trace wrote, .json or .json.gz: one for every rank of one pipeline.
    \b
    Examples:
      gplan import-trace rank0.json rank1.json
      gplan import-trace rank*.json --plan gplan.plan.json         -> gplan.run.json
      gplan report gplan.run.json
      gplan import-trace rank*.json --plan gplan.plan.json --profile gplan.profile.json --output new.profile.json
      gplan balance new.profile.json --k 4
    """
    from rich.console import Group
    from rich.text import Text

    from gplan.core import Plan, Profile, Run
    from gplan.evaluate.retiming import retime_profile
    from gplan.files import json_files
    from gplan.interop.traces.measured_run import read_traced, traced_run
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.steps import traced_view

    _check_options(plan_file, run_file, profile_file, output)
    plan = json_files.load(Plan, plan_file) if plan_file is not None else None
    profile = json_files.load(Profile, profile_file) if profile_file is not None else None
    run_file = run_file or Path(RUN_FILE)
    for path, kind in ((run_file, Run), (output, Profile)):
        if plan is not None and path is not None:
            json_files.check_writable(path, kind)
    traced = read_traced(traces)
    view = traced_view(traced)
    if plan is None:
        print_result(traced, lambda: view, as_json=as_json)
        return
    run = traced_run(traced, plan)
    retimed = retime_profile(profile, run=run) if profile is not None else None
    json_files.save(run, run_file)
    if retimed is not None and output is not None:
        json_files.save(retimed, output)
    views = [view, "", run_view(run), *([Text(f"wrote {output}")] if retimed is not None else [])]
    print_result(run, lambda: Group(*views), as_json=as_json, written=run_file)


def _check_options(
    plan_file: Path | None, run_file: Path | None, profile_file: Path | None, output: Path | None
) -> None:
    """A new profile needs the plan and another file than the old one."""
    from gplan.core.errors import UsageError

    for option, path in (("--run", run_file), ("--profile", profile_file)):
        if path is not None and plan_file is None:
            raise UsageError(f"{option} needs the plan that was run: give --plan gplan.plan.json")
    if (profile_file is None) != (output is None):
        given, missing = ("--output", "--profile") if profile_file is None else ("--profile", "--output")
        raise UsageError(f"{given} goes with {missing}: give --profile gplan.profile.json --output new.profile.json")
    if profile_file is not None and output is not None and profile_file.resolve() == output.resolve():
        raise UsageError(f"--output {output} would overwrite the profile; give another file: --output new.profile.json")
