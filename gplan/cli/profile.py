"""`gplan profile`: measure every layer, or compute its costs for hardware that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gplan.cli.arguments import PROFILE_FILE, Advanced, Verb, output_option
from gplan.cli.output import json_option, print_result, progress_bar
from gplan.core.profile import SAMPLING_BUDGET_S

if TYPE_CHECKING:
    from gplan.core import Link


def _settings(_context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    from gplan.core.errors import UsageError

    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--set {pair}: expected key=value, such as --set num_blocks=12")
    if not pairs:
        return {}
    from gplan_profiler.model.model_reference import parse_setting

    return {key: parse_setting(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    from gplan.core.errors import UsageError

    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--microbatch-size {text!r}: expected whole numbers, such as 1,2,4") from error


def _link(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Link | None:
    from gplan.core import Link
    from gplan.core.units import parse_link

    if text is None:
        return None
    bytes_per_s, latency_s = parse_link(text)
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


@click.command(cls=Verb)
@click.argument("model")
@click.option("--set", "settings", multiple=True, callback=_settings, metavar="KEY=VALUE",
              help="An argument of the model's constructor.")  # fmt: skip
@click.option("--microbatch-size", "microbatch_sizes", default="4", callback=_numbers, show_default=True,
              metavar="N[,N...]", help="Samples per micro-batch.")  # fmt: skip
@click.option("--input-shape", "input_shapes", metavar="SHAPE",
              help="Inputs, if the file describes none, such as 8,512:int64.")  # fmt: skip
@click.option("--device", default="auto", show_default=True,
              help="auto (cuda where torch can use a GPU, else cpu), cpu, cuda or cuda:1; meta computes the times for --hardware.")  # fmt: skip
@click.option("--hardware", metavar="NAME|FILE", help="With --device meta: b200, h100, h200, a100, v100, p100, tpu-v2, "
              "tpu-v3, cpu, or a TOML or JSON file.")  # fmt: skip
@click.option("--reduce-slowdown", cls=Advanced, type=float, metavar="FACTOR",
              help="With --device meta: how many times as long backwards take, as replicas reduce gradients beside them, such as "
                   "1.15.")  # fmt: skip
@click.option(
    "--threads", "num_threads", cls=Advanced, default=1, show_default=True, help="CPU cores of one pipeline device."
)
@click.option("--contention", cls=Advanced, type=int, metavar="N",
              help="Processes that do the same work at the same time.  [default: as many as the remaining cores allow, at most 7; on a GPU none]")  # fmt: skip
@click.option("--link", cls=Advanced, callback=_link, metavar="RATE,LATENCY",
              help="The link between devices, such as 25GB/s,5us.  [default: measured]")  # fmt: skip
@click.option("--granularity", cls=Advanced, metavar="SIZE", type=click.Choice(["auto", "layer", "op"]), default="auto", show_default=True,
              help="What counts as a layer: layer: the author's modules; auto: also the parts of large ones; op: one operation.")  # fmt: skip
@click.option("--precision", default="model", show_default=True, metavar="NAME",
              help="What is trained in: model (as the file makes it), float32, bfloat16, mixed (float32 master weights, states "
                   "and gradients beside bfloat16), mixed-bf16-gradients, or autocast.")  # fmt: skip
@click.option("--budget", "budget_s", default=SAMPLING_BUDGET_S, show_default=True, metavar="SECONDS",
              help="When sampling of the layers ends, after at least ten rounds, per micro-batch size; memory, optimizer "
                   "and link come on top.")  # fmt: skip
@click.option("--seed", cls=Advanced, default=0, show_default=True, help="Seed of the weights.")
@output_option(PROFILE_FILE)
@json_option
def profile(model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Measure the layers of MODEL: model.py, model.py:NAME or package.module:NAME.

    \b
    Examples:
      gplan profile model.py
      gplan profile examples/transformer_lm.py --set num_blocks=12 --microbatch-size 1,2,4
      gplan profile package.module:Net --input-shape 8,3,224,224 --link 25GB/s,5us
      gplan profile examples/unet.py --granularity op
      gplan profile model.py --device cuda --precision mixed
      gplan profile big.py --device meta --hardware h100
    """
    from gplan import api
    from gplan.core import Profile
    from gplan.files import json_files
    from gplan.reporting.text.profile import profile_view

    json_files.check_writable(output, Profile)
    shorter = "one --microbatch-size, --contention 0 and a small --budget (ten rounds are the least) take less time"
    with progress_bar(interrupted=f"no profile was written; {shorter}") as progress:
        result = api.profile(model, progress=progress, **options)
    json_files.save(result, output)
    print_result(result, lambda: profile_view(result), as_json=as_json, written=output)
