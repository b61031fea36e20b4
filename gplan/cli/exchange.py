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
    RECEIVERS,
    RUN_FILE,
    memory_option,
    output_option,
    profile_of_plan,
    schedule_named,
)
from gplan.cli.output import json_option, print_result


@click.command()
@click.argument("plan", default=PLAN_FILE, type=PATH)
@click.option("--to", required=True, type=click.Choice([*RECEIVERS, "csv", "json"]), help="The trainer or format.")
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
        json_files.write_bytes(output, made.text.encode())
    text = made.text.removesuffix("\n") if output is None else f"wrote {output}"
    print_result(made, lambda: text, as_json=as_json)
    for note in () if as_json else made.notes:
        click.echo(f"note: {note}", err=True)


@click.command()
@click.argument("config")
@click.option("--pp", "num_devices", type=int, required=True, help="Devices in one pipeline.")
@click.option("--vpp", "num_chunks", type=int, default=1, show_default=True, help="Stages on each device.")
@click.option("--hardware", default="h100", show_default=True, help="A built-in device, or a TOML or JSON file.")
@click.option(
    "--to", "receiver", default="megatron", show_default=True, type=click.Choice(RECEIVERS), help="The trainer."
)
@click.option("--tensor", type=int, default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--expert", type=int, default=1, show_default=True, help="Expert-parallel size.")
@click.option(
    "--data", type=int, default=1, show_default=True, help="Data-parallel size, over which optimizer state is divided."
)
@click.option("--sequence-length", type=int, default=4096, show_default=True, help="Tokens of a sample.")
@click.option("--microbatches", type=int, help="Micro-batches per step and pipeline.  [default: 4 K]")
@click.option("--microbatch-size", type=int, default=1, show_default=True, help="Samples per micro-batch.")
@click.option("--recompute", default="never", show_default=True, type=click.Choice(["never", "always"]),
              help="Whether activations are recomputed in the backward.")  # fmt: skip
@memory_option("that of the hardware")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another value for a key of the configuration."
)
@click.option("--time-limit", type=float, metavar="SECONDS", help="Longest search.  [default: 10]")
@click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="Where to write the profile."
)
@output_option(PLAN_FILE)
@json_option
def layout(
    config: str, num_devices: int, num_chunks: int, hardware: str, receiver: str, tensor: int, expert: int, data: int,
    sequence_length: int, microbatches: int | None, microbatch_size: int, recompute: str, memory_bytes: int | None,
    settings: tuple[str, ...], time_limit: float | None, profile_file: Path, output: Path, as_json: bool,
) -> None:  # fmt: skip
    """Compute a language model's costs from its configuration, and print the best layout for a trainer.

    \b
    CONFIG is llama3-8b, llama3-70b, mixtral-8x7b, qwen3-0.6b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, kimi-k2, or the
    config.json of such a model.
    \b
    Examples:
      gplan layout llama3-70b --pp 8 --vpp 5 --tensor 4 --microbatches 32
      gplan layout deepseek-v3 --pp 16 --vpp 2 --tensor 2 --expert 64 --data 64 --microbatches 128 --hardware h100
      gplan layout config.json --pp 4 --to torchtitan --set num_hidden_layers=40
    """
    from dataclasses import replace

    from gplan.files import json_files
    from gplan.interop.export.exporters import export
    from gplan.interop.planning import best_for_receiver
    from gplan.interop.receivers import RECEIVERS as RECEIVER_RULES
    from gplan.schedules.registry import default_num_microbatches
    from gplan_profiler.analytic.decoder_config import Widths, load_decoder, parse_settings
    from gplan_profiler.analytic.decoder_profile import decoder_profile, num_parameters
    from gplan_profiler.analytic.hardware import load_hardware

    total, active = num_parameters(load_decoder(config, parse_settings(settings)))
    text = f"{config}: {total / 1e9:.2f} billion parameters"
    click.echo(text + (f", {active / 1e9:.2f} billion of them for each token" if active < total else ""), err=True)
    widths = Widths(tensor=tensor, expert=expert, data=data, sequence_length=sequence_length)
    profile = decoder_profile(
        config,
        load_hardware(hardware),
        widths=widths,
        microbatch_sizes=(microbatch_size,),
        settings=parse_settings(settings),
    )
    plan = best_for_receiver(
        profile,
        receiver=receiver,
        num_devices=num_devices,
        num_chunks=num_chunks,
        num_microbatches=default_num_microbatches(num_devices) if microbatches is None else microbatches,
        recompute=recompute,
        memory_bytes=memory_bytes,
        time_limit_s=time_limit,
    )
    has_replicas = RECEIVER_RULES[receiver].replicas
    made = export(replace(plan, num_replicas=data if has_replicas else 1), to=receiver, profile=profile)
    made = replace(made, notes=(*profile.notes, *made.notes))
    json_files.save(profile, profile_file)
    json_files.save(plan, output)
    print_result(made, lambda: made.text.removesuffix("\n"), as_json=as_json)
    for note in () if as_json else (*plan.notes, *made.notes, f"wrote {profile_file} and {output}"):
        click.echo(f"note: {note}", err=True)


@click.command(name="import-plan")
@click.argument("layout")
@click.option("--from", "receiver", required=True, type=click.Choice(RECEIVERS), help="The trainer.")
@click.option(
    "--profile", "profile_file", default=PROFILE_FILE, show_default=True, type=PATH, help="The profile of the model."
)
@click.option(
    "--k", "num_devices", type=int, help="Devices in one pipeline.  [default: as the file says, or one a stage]"
)
@click.option("--microbatches", type=int, help="Micro-batches per step.  [default: 4 K]")
@click.option("--microbatch-size", type=int, help="Samples per micro-batch.  [default: the largest profiled]")
@click.option(
    "--schedule", metavar="NAME|FILE", help="The schedule.  [default: 1f1b, interleaved with several stages a device]"
)
@click.option("--recompute", default="never", show_default=True, type=click.Choice(["never", "always", "except-last"]),
              help="What the trainer recomputes.")  # fmt: skip
@memory_option("that of the profile")
@output_option(PLAN_FILE)
@json_option
def import_plan(
    layout: str, receiver: str, profile_file: Path, num_devices: int | None, microbatches: int | None,
    microbatch_size: int | None, schedule: str | None, recompute: Any, memory_bytes: int | None, output: Path, as_json: bool,
) -> None:  # fmt: skip
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
    from gplan.core import Profile
    from gplan.files import json_files
    from gplan.interop.planning import import_plan as imported
    from gplan.reporting.text.plan import plan_view

    profile = json_files.load(Profile, profile_file)
    plan = imported(
        _text(layout),
        profile,
        receiver=receiver,
        num_devices=num_devices,
        num_microbatches=microbatches,
        schedule=schedule_named(schedule) if schedule is not None else None,
        microbatch_size=microbatch_size,
        recompute=recompute,
        memory_bytes=memory_bytes,
    )
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


@click.command(name="import-trace")
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

    from gplan.core import Plan, Profile
    from gplan.evaluate.retiming import retime_profile
    from gplan.files import json_files
    from gplan.interop.traces.measured_run import read_traced, traced_run
    from gplan.reporting.text.run import run_view
    from gplan.reporting.text.steps import traced_view

    _check_options(plan_file, run_file, profile_file, output)
    plan = json_files.load(Plan, plan_file) if plan_file is not None else None
    profile = json_files.load(Profile, profile_file) if profile_file is not None else None
    traced = read_traced(traces)
    view = traced_view(traced)
    if plan is None:
        print_result(traced, lambda: view, as_json=as_json)
        return
    run = traced_run(traced, plan)
    retimed = retime_profile(profile, run=run) if profile is not None else None
    run_file = run_file or Path(RUN_FILE)
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
