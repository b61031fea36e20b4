"""`gplan cluster`: measure the devices and links of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gplan.cli.arguments import MACHINE_FILE, Verb, output_option, timeout_option
from gplan.cli.output import json_option, print_result, progress_bar


@click.command(cls=Verb)
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="What the processes send from: gloo on CPUs, nccl on GPUs.  [default: cuda where each has a GPU]")  # fmt: skip
@timeout_option
@output_option(MACHINE_FILE)
@json_option
def cluster(output: Path, as_json: bool, **options: Any) -> None:
    """Measure the devices of several hosts, the links within and between hosts, and collectives. Started by torchrun on
    all hosts at once; rank 0 writes the file that `gplan balance --machine` reads.

    \b
    Examples:
      torchrun --nproc-per-node 2 -m gplan cluster --device cpu -o here.toml
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host-a:29500 -m gplan cluster
    """
    from gplan import api
    from gplan.files.json_files import check_writable
    from gplan.files.machine_file import save_machine
    from gplan.reporting.text.machine import machine_view
    from gplan.runtime.run.launch import is_main_process

    if is_main_process():
        check_writable(output)
    with progress_bar() as progress:
        machine = api.cluster(**options, progress=progress)
    if is_main_process():
        save_machine(machine, output)
        print_result(machine, lambda: machine_view(machine), as_json=as_json, written=output)
