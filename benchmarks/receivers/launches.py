"""Launches that `gplan layout` writes for Megatron-LM and nanotron, through the code of checkouts that reads them.

    pip install 'gplan[receivers]' dacite
    python benchmarks/receivers/launches.py /path/to/Megatron-LM /path/to/nanotron     some minutes; writes reports/receivers/launches.md

Megatron-LM's launches are parsed by `add_megatron_arguments` without abbreviations, so that an unknown or misspelt argument
fails; nanotron's sections are read by its dataclasses, with packages replaced that it imports for GPUs and data. Every value
is compared with the plan's. The layout itself is parsed by Megatron-core in `check.py`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import typing_extensions
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from suite import REPORTS, markdown

from gplan.interop.export.exporters import export
from gplan.interop.machine_layout import layout_of
from gplan.interop.width_search import ChosenWidths
from gplan_profiler.analytic.decoder_config import ORDER

Row = tuple[str, str, int, str]
MEGATRON: tuple[tuple[str, dict[str, Any]], ...] = (
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
NANOTRON: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"num_devices": 4, "tensor": 2, "data": 2}),
    ("llama3-8b", {"num_devices": 1, "data": 8, "microbatch_size": 2}),
    ("llama3-70b", {"num_devices": 8, "tensor": 8, "recompute": "always"}),
)


def megatron_problem(text: str, made: ChosenWidths, checkout: Path) -> str:
    """What Megatron-LM's parser refuses, or the arguments that are not the plan's."""
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.12's, which it imports
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    try:
        parsed = parser.parse_args(shlex.split(text.replace("\\\n", " ")))
    except argparse.ArgumentError as error:
        return str(error)
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
    return ", ".join(name for name, value in expected.items() if getattr(parsed, name) != value)


REPLACED = ("datasets", "flash_attn", "grouped_gemm", "functorch")


class Replaced:
    """Finds packages that are not needed to read a configuration, each with any name in it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The specification of a package or module in one."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in REPLACED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        """A module with every attribute."""
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name, __version__="9.9.9")

    def exec_module(self, module: Any) -> None:
        """Nothing is run."""


def nanotron_problem(text: str, made: ChosenWidths, checkout: Path) -> str:
    """What nanotron's dataclasses refuse, or read otherwise than the plan has it."""
    import dacite

    if str(checkout / "src") not in sys.path:
        sys.path.insert(0, str(checkout / "src"))
        sys.meta_path.append(Replaced())  # type: ignore[arg-type]
    from nanotron.config.config import OptimizerArgs, TokensArgs
    from nanotron.config.parallelism_config import ParallelismArgs

    sections, strict = yaml.safe_load(text), dacite.Config(strict=True, check_types=False)
    parallel = dacite.from_dict(ParallelismArgs, sections["parallelism"], config=strict)
    tokens = dacite.from_dict(TokensArgs, {**sections["tokens"], "train_steps": 1}, config=strict)
    choice, split = made.best.choice, made.best.choice.widths
    pairs = {
        "dp": (parallel.dp, split.data), "pp": (parallel.pp, split.pipeline), "tp": (parallel.tp, split.tensor),
        "engine": (type(parallel.pp_engine).__name__, "OneForwardOneBackwardPipelineEngine"),
        "recompute_layer": (parallel.recompute_layer, choice.recompute == "always"),
        "sequence_length": (tokens.sequence_length, split.sequence_length),
        "micro_batch_size": (tokens.micro_batch_size, choice.microbatch_size),
        "batch_accumulation_per_replica": (tokens.batch_accumulation_per_replica, choice.num_microbatches),
        "optimizer": (set(sections["optimizer"]) - set(OptimizerArgs.__dataclass_fields__), set()),
    }  # fmt: skip
    return ", ".join(name for name, (found, planned) in pairs.items() if found != planned)


def checked(
    launches: tuple[tuple[str, dict[str, Any]], ...], receiver: str, checkout: Path, sign: str
) -> Iterator[Row]:
    """The model, the setting, how many keys there are, and what its own code found, of each launch."""
    problem_of = megatron_problem if receiver == "megatron" else nanotron_problem
    for model, given in launches:
        made = layout_of(model, receiver=receiver, hardware="h200", time_limit=2.0, memory_bytes=10**13, **given)
        text = export(made.plan, to=receiver, profile=made.profile).text
        yield model, str(made.best.choice), text.count(sign), problem_of(text, made, checkout) or "as planned"


def version_of(checkout: Path) -> str:
    """The commit of a checkout, in parentheses."""
    command = ["git", "log", "-1", "--format=%h of %as"]
    found = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()
    return f" ({found})" if found else ""


def main() -> None:
    """Parse the launches, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megatron", type=Path)
    parser.add_argument("nanotron", type=Path)
    options = parser.parse_args()
    lines = [
        "# Launches through the code that reads them\n",
        f"Made by `python benchmarks/receivers/launches.py` with a checkout of NVIDIA/Megatron-LM{version_of(options.megatron)}: every",
        "argument is known to its parser, and every value is the plan's.\n",
        *markdown(("model", "setting", "arguments", "parsed"), checked(MEGATRON, "megatron", options.megatron, "--")),
        f"\nThe sections for huggingface/nanotron{version_of(options.nanotron)}, read by its own dataclasses:\n",
        *markdown(("model", "setting", "keys", "read"), checked(NANOTRON, "nanotron", options.nanotron, ":")),
    ]
    (REPORTS / "receivers" / "launches.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
