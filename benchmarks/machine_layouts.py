"""Widths chosen for a machine beside the ones that people published for the same model and machine, priced alike.

    python benchmarks/machine_layouts.py                 some 6 minutes on 2 idle cores
    python benchmarks/machine_layouts.py --table         the table of what is there, without running
    python benchmarks/machine_layouts.py --only 1b       one row

A row is one search by `gplan layout` and the best plan with the published widths, both priced by the same computed profile.
What is not published (stages a device, recompute) is chosen; where no such plan fits the memory, the limit is left out.
`--times 3` gives each search three times as long, for a host with other work; its processor seconds are in the row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from suite import Rows, markdown, options_of, write_report

from gplan.core.errors import NoPlanError
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.interop.width_search import ChosenWidths, WidthSearch, default_time_limit_s
from gplan_profiler.analytic.decoder_config import load_decoder
from gplan_profiler.analytic.hardware import load_hardware

NO_LIMIT = 10**13


@dataclass(frozen=True)
class Case:
    """A model on a machine, and the widths that were published."""

    model: str
    hardware: str
    num_devices: int
    batch_size: int
    sequence_length: int
    published: dict[str, int | str | None]
    source: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "70b": Case(
        "llama3-70b", "h100", 64, 128, 8192,
        {"tensor": 4, "context": 2, "pipeline": 4, "num_chunks": 5, "data": 2, "microbatch_size": 1},
        "NVIDIA/dgxc-benchmarking, llama3.1/README.md: 64 H100 in bf16, 14.66 s measured",
    ),
    "405b": Case(
        "llama3-405b", "h100", 1024, 2048, 8192,
        {"tensor": 8, "pipeline": 16, "data": 8, "microbatch_size": 1},
        "The Llama 3 Herd of Models, table 4: tensor 8 and pipeline 16, there with data 128 on 16,384 H100",
    ),
    "405b-16k": Case(
        "llama3-405b", "h100", 16384, 2048, 8192,
        {"tensor": 8, "pipeline": 16, "data": 128, "microbatch_size": 1},
        "The Llama 3 Herd of Models, table 4",
    ),
    "deepseek": Case(
        "deepseek-v3", "h800", 2048, 15360, 4096,
        {"tensor": 1, "pipeline": 16, "expert": 64, "data": 128, "microbatch_size": 1},
        "DeepSeek-V3 Technical Report, 3.2: pipeline 16, experts over 64, ZeRO-1 on 2,048 H800; there with DualPipe",
    ),
    "kimi": Case(
        "kimi-k2", "h800", 1024, 16384, 4096,
        {"tensor": 1, "pipeline": 16, "expert": 16, "data": 64, "microbatch_size": 1},
        "Kimi K2 Technical Report, 2.4: pipeline 16 with virtual stages, experts over 16, ZeRO-1, for small and large numbers of nodes alike; 128 of them are assumed here",
    ),
    "mixtral": Case(
        "mixtral-8x7b", "a100", 32, 256, 4096,
        {"tensor": 1, "pipeline": 4, "expert": 8, "data": 8, "microbatch_size": 1},
        "NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh: pipeline 4, experts over 8, batch 256 x 4096",
    ),
    "1b": Case(
        "llama3-8b", "h100", 8, 512, 4096, {"tensor": 1, "pipeline": 1, "data": 8, "microbatch_size": 4},
        "a rule of thumb, not published: data parallel alone, for the sizes of meta-llama/Llama-3.2-1B",
        {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def search_of(case: Case, **fields: Any) -> WidthSearch:
    """The search of a case."""
    return WidthSearch(
        name=case.model, decoder=load_decoder(case.model, case.settings), hardware=load_hardware(case.hardware),
        num_devices=case.num_devices, batch_size=case.batch_size, sequence_length=case.sequence_length,
        receiver="megatron", **fields,
    )  # fmt: skip


def published_best(case: Case) -> ChosenWidths:
    """The published widths, with the faster of recompute and none that fits; without a memory limit where neither does."""
    limits: tuple[int | None, ...] = (None, NO_LIMIT)
    for memory_bytes in limits:
        try:
            return search_of(case, fixed=case.published, memory_bytes=memory_bytes, time_limit_s=20.0).run()
        except NoPlanError:
            continue
    raise AssertionError("without a limit everything fits")


def run(name: str, case: Case, times: float) -> dict[str, Any]:
    """The row of a case."""
    started_s, processor_s = time.perf_counter(), time.process_time()
    chosen = search_of(case, time_limit_s=times * default_time_limit_s(case.num_devices)).run()
    took = {"clock_s": time.perf_counter() - started_s, "processor_s": time.process_time() - processor_s}
    other = published_best(case)
    fits = other.plan.memory_limit_bytes != NO_LIMIT
    return {
        "case": name, "model": case.model, "hardware": case.hardware, "devices": case.num_devices,
        "batch": case.batch_size, "sequence": case.sequence_length, "chosen": str(chosen.best.choice),
        "step_s": chosen.best.step_s, "gap": chosen.gap, "peak_bytes": chosen.best.peak_bytes,
        "settings": chosen.num_choices, **took, "published": str(other.best.choice), "published_fits": fits,
        "published_step_s": other.best.step_s, "published_peak_bytes": other.best.peak_bytes,
    }  # fmt: skip


def report(rows: Any) -> list[str]:
    """The table."""
    heads = ("model", "machine", "chosen", "step", "gap", "peak", "search", "published", "step", "peak", "published is")
    table = [
        (
            f"{x.model} ({x.case})", f"{x.devices} {x.hardware}, batch {x.batch} x {x.sequence}", x.chosen, seconds_text(x.step_s),
            percent_text(x.gap), bytes_text(x.peak_bytes), f"{seconds_text(x.processor_s)} of a core, {x.settings} settings",
            x.published, seconds_text(x.published_step_s), bytes_text(x.published_peak_bytes) + ("" if x.published_fits else ", above the limit"),
            percent_text(x.published_step_s / x.step_s - 1, signed=True),
        )
        for x in rows.itertuples()
    ]  # fmt: skip
    return [
        "# Widths for a machine",
        "",
        "What `gplan layout MODEL --gpus N` chooses, beside published widths for the same model, machine and batch, priced by the same",
        "computed profile: predictions, not runs. Made by `python benchmarks/machine_layouts.py`. A search ends by the clock: beside other",
        "work it has fewer seconds of a core, and its gap is larger than on an idle host.",
        "",
        *markdown(heads, table),
        "",
        "The gap is by how much any setting may be faster at most. Attention over few tokens of a context rank is priced at the share of",
        "whole sequences, which leaves out some 3 % of its time at 1,024 tokens. Published widths:",
        "",
        *(f"- {name}: {case.source}" for name, case in CASES.items() if name in set(rows.case)),
    ]


def main() -> None:
    """Run what is missing, and write the report."""
    parser = options_of(__doc__, "machine-layouts")
    parser.add_argument("--table", action="store_true", help="the table of what is there, without running")
    parser.add_argument("--again", action="store_true", help="run rows that are there too")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--times", type=float, default=1.0)
    options = parser.parse_args()
    rows = Rows(options.output / "rows.csv", key=("case",))
    for name, case in CASES.items():
        if options.only in (None, name) and not options.table and (options.again or not rows.has({"case": name})):
            rows.add(run(name, case, options.times), replace=True)
    write_report(options.output, report(rows.table()))


if __name__ == "__main__":
    main()
