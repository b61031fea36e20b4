"""Large language models without their weights: profiles, and plans whose schedule and recompute are searched.

    python benchmarks/large_models.py                          about half an hour; goes on where it stopped
    python benchmarks/large_models.py --models llama3-70b      only some of it
    python benchmarks/large_models.py --table                  the tables of what is there, without running

Each model of benchmarks/large_model_configs.py is profiled for the h100 on the meta device, and planned for K = 4 to 64
devices with 4 K micro-batches, at most 64, 80 GB (141 GB where the weights alone need more) and automatic schedule and recompute;
some also for a number of devices of which K is searched. Every command is a process of its own: seconds are its
processor time, as other work on the host lengthens the rest, and memory is the most that it held. Rows are written when
a command ends, so an interrupt loses at most one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gplan.core import Plan, Profile
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.files import json_files
from gplan.schedules.registry import schedule_info

ROOT = Path(__file__).parent.parent
MODEL_FILE = ROOT / "benchmarks" / "large_model_configs.py"
STAGE_COUNTS = (4, 8, 16, 32, 64)
KNOWN_PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671_026_404_352,
    "qwen3-235b-a22b": 235_093_634_560,
    "t5-11b": 11_307_321_344,
}
"""Of the published weights; of DeepSeek-V3 the 61 layers, without the prediction of further tokens and the 58 x 256 biases of
its routers, which no gradient trains."""
NEEDS_MORE = ("llama3-405b", "deepseek-v3", "qwen3-235b-a22b")  # on 64 devices or fewer
SEARCHED = {"llama3-70b": ((16, 64), (64, 256)), "llama3-405b": ((128, 64),)}
"""Devices in all, of which stages and replicas are searched, and the samples of a step."""
MOST_MICROBATCHES = 64  # what crosses the cuts is kept for each until the step ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that ended."""

    code: int
    errors: str
    processor_s: float
    peak_bytes: int  # the most that the process held


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A plan to be made."""

    model: str
    devices: str  # as it is shown
    memory: str
    arguments: tuple[str, ...]

    @property
    def key(self) -> dict[str, str]:
        """What tells its row from others."""
        return {"model": self.model, "devices": self.devices, "memory": self.memory}


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=KNOWN_PARAMETERS, default=list(KNOWN_PARAMETERS))
    parser.add_argument("--table", action="store_true", help="write the tables only")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "large-models")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    for model in () if options.table else options.models:
        for row in missing_rows(model, rows, options.output):
            print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
            rows = pd.concat([rows.astype(object), pd.DataFrame([row], dtype=object)], ignore_index=True).fillna("")
            rows.to_csv(path, index=False)
    (options.output / "README.md").write_text(as_text(pd.read_csv(path, keep_default_na=False)))


def missing_rows(model: str, rows: pd.DataFrame, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a model that are not there: of its profile, then of each of its plans."""
    profile = folder / f"{model}.profile.json"
    of_profile = {"model": model, "devices": "", "memory": ""}
    if not is_there(rows, of_profile) or not profile.exists():
        row = profiled(model, profile)
        if not is_there(rows, of_profile):
            yield {**of_profile, **row}
    for request in requests(model):
        if not is_there(rows, request.key):
            yield {**request.key, **planned(request, profile)}


def is_there(rows: pd.DataFrame, key: dict[str, str]) -> bool:
    """Whether a row with this key is there."""
    return not rows.empty and bool((rows[list(key)].astype(str) == list(key.values())).all(axis=1).any())


def requests(model: str) -> Iterator[Request]:
    """The plans of a model."""
    memory = "141GB" if model in NEEDS_MORE else "80GB"
    for k in STAGE_COUNTS:
        arguments: tuple[str, ...] = ("--k", str(k), "--microbatches", str(min(4 * k, MOST_MICROBATCHES)))
        yield Request(model=model, devices=f"K = {k}", memory=memory, arguments=arguments)
    for count, batch_size in SEARCHED.get(model, ()):
        arguments = ("--devices", str(count), "--batch-size", str(batch_size), "--microbatches", "auto")
        yield Request(model=model, devices=f"{count} in all, {batch_size} samples", memory="80GB", arguments=arguments)


def profiled(model: str, path: Path) -> dict[str, Any]:
    """The row of a profile, which is written to the path."""
    arguments = ("--set", f"name={model}", "--microbatch-size", "1", "--device", "meta", "--hardware", "h100")
    ended = run(("profile", str(MODEL_FILE), *arguments, "--output", str(path)))
    figures = {"processor_s": round(ended.processor_s, 2), "process_bytes": ended.peak_bytes}
    if ended.code:
        return {**figures, "outcome": ended.errors}
    profile = json_files.load(Profile, path)
    return {
        **figures,
        "outcome": "profile",
        "layers": len(profile.layers),
        "followed": sum(x.same_as is None for x in profile.layers),
        "parameters": profile.num_parameters,
    }


def planned(request: Request, profile: Path) -> dict[str, Any]:
    """The row of a plan."""
    path = profile.with_name(f"{request.model}.plan.json")
    searched = ("--schedule", "auto", "--recompute", "auto", "--memory", request.memory)
    ended = run(("balance", str(profile), *request.arguments, *searched, "--output", str(path)))
    figures = {"processor_s": round(ended.processor_s, 2), "process_bytes": ended.peak_bytes}
    if ended.code:
        return {**figures, "outcome": ended.errors}
    plan = json_files.load(Plan, path)
    path.unlink()
    first, last = plan.stages[0], plan.stages[-1]
    return {
        **figures,
        "outcome": "plan",
        "stages": plan.num_stages,
        "replicas": plan.num_replicas,
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "step_s": plan.prediction.step_s,
        "gap": plan.proof.gap,
        "bubble": plan.prediction.bubble,
        "peak_bytes": plan.peak_bytes,
        "first_stage": f"{first.layer_names[0]} and {first.num_layers - 1} more",
        "last_stage": f"{last.num_layers - 1} more and {last.layer_names[-1]}",
        "weight_bytes": sum(stage.memory.weight_bytes for stage in plan.stages),
        "note": next((x for x in plan.notes if x.startswith(("the best of", "the time was up"))), ""),
    }


def run(arguments: Sequence[str]) -> Ended:
    """Run a verb of gplan in a process of its own."""
    command = [sys.executable, "-m", "gplan", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)  # of this child alone
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(
        code=process.returncode,
        errors=" ".join(errors.split()),
        processor_s=used.ru_utime + used.ru_stime,
        peak_bytes=1024 * used.ru_maxrss,
    )


def as_text(rows: pd.DataFrame) -> str:
    """The report: profiles, then plans."""
    is_profile = rows.devices == ""
    lines = [
        "# Large models without weights",
        "",
        "Made by `python benchmarks/large_models.py`, which goes on where it was; every figure is in [rows.csv](rows.csv). "
        "The models are those of `benchmarks/large_model_configs.py`: public configurations, bfloat16, AdamW, 4096 tokens "
        "a sample (T5: 512 and 512), for the h100 of `gplan profile --device meta`. Seconds are processor time; a search ends after 18 s by the clock, so "
        "other work beside it makes gaps larger.",
        "",
        "## Profiles",
        "",
        "Difference: parameters of the profile less those of the published weights.",
        "",
        "| model | layers | of which followed | parameters | difference | profile | most memory |",
        "|---|---|---|---|---|---|---|",
        *(_profile_line(row, KNOWN_PARAMETERS[str(row.model)]) for row in rows[is_profile].itertuples()),
        "",
        "## Plans",
        "",
        "`--schedule auto --recompute auto`, micro-batch size 1, 4 K micro-batches and at most 64; where K is searched, "
        "`--microbatches auto` with as many samples as stand behind the devices. The peak is that of the fullest device. The gap is over all settings of the search.",
        "",
        "| model | devices | memory | plan in | stages x replicas, micro-batches | schedule | recompute | step | bubble | "
        "peak | first stage | last stage | gap | search |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_plan_line(row) for row in rows[~is_profile].itertuples()),
        "",
    ]
    return "\n".join(lines)


def _profile_line(row: Any, known: int) -> str:
    if row.outcome != "profile":
        return (
            f"| {row.model} | {row.outcome} | | | | {row.processor_s} s | {bytes_text(int(float(row.process_bytes)))} |"
        )
    parameters = int(float(row.parameters))
    cells = (
        row.model, int(float(row.layers)), int(float(row.followed)), f"{parameters:,}", f"{parameters - known:,}",
        f"{float(row.processor_s):.0f} s", bytes_text(int(float(row.process_bytes))),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _plan_line(row: Any) -> str:
    seconds = f"{float(row.processor_s):.1f} s"
    if row.outcome != "plan":
        return f"| {row.model} | {row.devices} | {row.memory} | {seconds} | {row.outcome} {'| ' * 9}|"
    cells = (
        row.model, row.devices, row.memory, seconds,
        f"{int(float(row.stages))} x {int(float(row.replicas))}, {int(float(row.microbatches))}", schedule_info(row.schedule).title,
        row.recompute, seconds_text(float(row.step_s)), percent_text(float(row.bubble)),
        bytes_text(int(float(row.peak_bytes))), row.first_stage, row.last_stage, percent_text(float(row.gap)), row.note,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
