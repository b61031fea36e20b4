"""`gplan layout`: from the sizes of a published model to the layout of a trainer, in one command."""

from __future__ import annotations

from pathlib import Path

import click

from gplan.cli.arguments import PATH, PLAN_FILE, PROFILE_FILE, RECEIVERS, memory_option, output_option
from gplan.cli.output import json_option, print_result


@click.command()
@click.argument("config")
@click.option("--pp", "num_devices", type=int, required=True, help="Devices in one pipeline.")
@click.option("--vpp", "num_chunks", type=int, default=1, show_default=True, help="Stages on each device.")
@click.option(
    "--hardware", default="h100", show_default=True, help="A device that gplan has figures of, or a TOML file."
)
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
    from profiler.analytic.decoder_config import Widths, parse_settings
    from profiler.analytic.decoder_profile import decoder_profile
    from profiler.analytic.hardware import load_hardware

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
