"""Launches that `gplan layout --to megatron` writes, through the argument parser of a checkout of Megatron-LM itself.

    pip install 'gplan[receivers]'
    python benchmarks/receivers/launches.py /path/to/Megatron-LM          some minutes; writes reports/receivers/launches.md

Each launch is parsed by `add_megatron_arguments` without abbreviations, so that an unknown or misspelt argument fails, and
every value is compared with the plan's. The layout itself is parsed by Megatron-core in `check.py`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

sys.path.insert(0, str(Path(__file__).parent.parent))

from suite import REPORTS, markdown

from gplan.interop.export.exporters import export
from gplan.interop.machine_layout import layout_of
from gplan.interop.width_search import ChosenWidths
from gplan_profiler.analytic.decoder_config import ORDER

LAUNCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"num_devices": 4}),
    ("llama3-8b", {"num_devices": 1, "data": 8, "microbatch_size": 2}),
    ("llama3-70b", {"num_devices": 4, "num_chunks": 5, "tensor": 4, "context": 2, "data": 2}),
    ("llama3-70b", {"num_devices": 8, "tensor": 8, "recompute": "always"}),
    ("llama3-405b", {"num_devices": 16, "tensor": 8, "data": 4}),
    ("mixtral-8x7b", {"num_devices": 2, "expert": 8, "data": 8}),
    ("qwen3-30b-a3b", {"num_devices": 4, "expert": 8, "data": 8, "tensor": 2}),
    ("gpt-oss-120b", {"num_devices": 4, "expert": 16, "data": 16}),
    ("glm-4.5-air", {"num_devices": 4, "expert": 8, "data": 8}),
    ("llama3-70b", {"num_devices": 8, "tensor": 4, "data": 2, "order": "tp-cp-ep-pp-dp"}),
    ("deepseek-v3", {"num_devices": 16, "expert": 64, "data": 64, "tensor": 2, "expert_tensor": 1}),
)


def parser_of(checkout: Path) -> argparse.ArgumentParser:
    """Megatron-LM's own."""
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.12's, which it imports
    sys.path.insert(0, str(checkout))
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))


def found_otherwise(parsed: argparse.Namespace, made: ChosenWidths) -> list[str]:
    """The arguments that are not the plan's."""
    choice, split = made.best.choice, made.best.choice.widths
    expected = {
        "tensor_model_parallel_size": split.tensor, "pipeline_model_parallel_size": split.pipeline,
        "context_parallel_size": split.context, "expert_model_parallel_size": split.expert,
        "micro_batch_size": choice.microbatch_size, "seq_length": split.sequence_length,
        "global_batch_size": choice.num_microbatches * choice.microbatch_size * split.data,
        "sequence_parallel": split.tensor > 1, "use_distributed_optimizer": split.replicas > 1,
        "overlap_grad_reduce": split.replicas > 1, "overlap_param_gather": split.replicas > 1,
        "moe_grouped_gemm": split.expert > 1, "use_tp_pp_dp_mapping": split.order != ORDER,
        "recompute_granularity": "full" if choice.recompute == "always" else None,
    }  # fmt: skip
    return [name for name, value in expected.items() if getattr(parsed, name) != value]


def main() -> None:
    """Parse the launches, and write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkout", type=Path)
    checkout = options.parse_args().checkout
    rows = []
    for model, given in LAUNCHES:
        made = layout_of(model, receiver="megatron", hardware="h200", time_limit=2.0, memory_bytes=10**13, **given)
        text = export(made.plan, to="megatron", profile=made.profile).text
        words = shlex.split(text.replace("\\\n", " "))
        try:
            parsed, problem = parser_of(checkout).parse_args(words), ""
            problem = ", ".join(found_otherwise(parsed, made))
        except argparse.ArgumentError as error:
            problem = str(error)
        rows.append((model, str(made.best.choice), sum(x.startswith("--") for x in words), problem or "as planned"))
        print(*rows[-1], sep=" | ", flush=True)
    version = subprocess.run(
        ["git", "log", "-1", "--format=%h of %as"], cwd=checkout, capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        "# Launches through Megatron-LM's own argument parser",
        "",
        f"Made by `python benchmarks/receivers/launches.py` with a checkout of NVIDIA/Megatron-LM{f' ({version})' if version else ''}: every",
        "argument is known to its parser, and every value is the plan's.",
        "",
        *markdown(("model", "setting", "arguments", "parsed"), rows),
    ]
    (REPORTS / "receivers" / "launches.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
