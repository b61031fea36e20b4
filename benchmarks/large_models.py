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

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from suite import ROOT, Rows, markdown, options_of, run_verb, write_report

import gplan
from gplan.core import Plan, Profile
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.schedules.registry import schedule_info

MODEL_FILE = ROOT / "benchmarks" / "large_model_configs.py"
STAGE_COUNTS = (4, 8, 16, 32, 64)
KNOWN_PARAMETERS = {
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "t5-11b": 11_307_321_344,
    "mixtral-8x22b": 140_620_634_112, "deepseek-v3": 671_026_404_352, "qwen3-235b-a22b": 235_093_634_560,
}  # fmt: skip
"""Of the published weights; of DeepSeek-V3 the 61 layers, without the prediction of further tokens and the 58 x 256 biases of
its routers, which no gradient trains."""
NEEDS_MORE = ("llama3-405b", "deepseek-v3", "qwen3-235b-a22b")  # on 64 devices or fewer
SEARCHED = {"llama3-70b": ((16, 64), (64, 256)), "llama3-405b": ((128, 64),)}
"""Devices in all, of which stages and replicas are searched, and the samples of a step."""
MOST_MICROBATCHES = 64  # what crosses the cuts is kept for each until the step ends
KEY = ("model", "devices", "memory")
TIME_WAS_UP = "the time was up"
"""How the note of a search begins that ended by its limit."""


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = options_of(__doc__, "large-models")
    parser.add_argument("--models", nargs="*", choices=KNOWN_PARAMETERS, default=list(KNOWN_PARAMETERS))
    parser.add_argument("--devices", nargs="*", help='only these plans, such as "K = 4"')
    parser.add_argument("--table", action="store_true", help="write the tables only")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.output / "rows.csv", KEY)
    for model in () if options.table else options.models:
        path = options.output / f"{model}.profile.json"
        of_profile = dict(zip(KEY, (model, "", ""), strict=True))
        if not rows.has(of_profile) or not path.exists():
            made = make_profile(model, path)
            if not rows.has(of_profile):
                rows.add(told({**of_profile, **made}))
        for devices, memory, arguments in requests(model):
            key = dict(zip(KEY, (model, devices, memory), strict=True))
            if not rows.has(key) and devices in (options.devices or [devices]):
                searched = ("--schedule", "auto", "--recompute", "auto", "--memory", memory)
                rows.add(told({**key, **planned(path, (*arguments, *searched))[0]}))
    write_report(options.output, report(rows.table(keep_default_na=False)))


def told(row: dict[str, Any]) -> dict[str, Any]:
    """The row, after a line on it."""
    print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
    return row


def requests(model: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The plans of a model: devices in words, memory, arguments."""
    memory = "141GB" if model in NEEDS_MORE else "80GB"
    for k in STAGE_COUNTS:
        yield f"K = {k}", memory, ("--k", str(k), "--microbatches", str(min(4 * k, MOST_MICROBATCHES)))
    for count, batch_size in SEARCHED.get(model, ()):
        arguments = ("--devices", str(count), "--batch-size", str(batch_size), "--microbatches", "auto")
        yield f"{count} in all, {batch_size} samples", "80GB", arguments


def make_profile(model: str, path: Path, *options: str) -> dict[str, Any]:
    """The row of a profile for the h100, which is written to the path."""
    arguments = ("--set", f"name={model}", "--microbatch-size", "1", "--device", "meta", "--hardware", "h100")
    ended = run_verb(("profile", str(MODEL_FILE), *arguments, *options, "--output", str(path)))
    if ended.code:
        return {**ended.figures, "outcome": ended.errors}
    profile = gplan.load(path)
    assert isinstance(profile, Profile)
    return {
        **ended.figures,
        "outcome": "profile",
        "layers": len(profile.layers),
        "followed": sum(x.same_as is None for x in profile.layers),
        "parameters": profile.num_parameters,
    }


def planned(profile: Path, arguments: tuple[str, ...]) -> tuple[dict[str, Any], Plan | None]:
    """The row of a plan by `gplan balance`, and the plan, None where there is none."""
    path = profile.with_name("made.plan.json")
    ended = run_verb(("balance", str(profile), *arguments, "--output", str(path)))
    if ended.code:
        return {**ended.figures, "outcome": ended.errors}, None
    plan = gplan.load(path)
    assert isinstance(plan, Plan)
    path.unlink()
    first, last = plan.stages[0], plan.stages[-1]
    return {
        **ended.figures,
        "outcome": "plan", "stages": plan.num_stages, "replicas": plan.num_replicas, "microbatches": plan.num_microbatches,
        "schedule": plan.schedule, "recompute": plan.recompute, "step_s": plan.prediction.step_s, "gap": plan.proof.gap,
        "bubble": plan.prediction.bubble, "peak_bytes": plan.peak_bytes,
        "first_stage": f"{first.layer_names[0]} and {first.num_layers - 1} more",
        "last_stage": f"{last.num_layers - 1} more and {last.layer_names[-1]}",
        "note": next((x for x in plan.notes if x.startswith(("the best of", TIME_WAS_UP))), ""),
    }, plan  # fmt: skip


def report(rows: pd.DataFrame) -> list[str]:
    """Profiles, then plans."""
    profiles = ["model", "layers", "of which followed", "parameters", "difference", "profile", "most memory"]
    plans = ["model", "devices", "memory", "plan in", "stages x replicas, micro-batches", "schedule", "recompute"]
    plans += ["step", "bubble", "peak", "first stage", "last stage", "gap", "search"]
    return [
        "# Large models without weights\n",
        "Made by `python benchmarks/large_models.py`, which goes on where it was; every figure is in [rows.csv](rows.csv). "
        "The models are those of `benchmarks/large_model_configs.py`: public configurations, bfloat16, AdamW, 4096 tokens "
        "a sample (T5: 512 and 512), for the h100 of `gplan profile --device meta`. Seconds are processor time; a search ends after 18 s by the clock, so "
        "other work beside it makes gaps larger.\n",
        "## Profiles\n",
        "Difference: parameters of the profile less those of the published weights.\n",
        *markdown(profiles, (_profile_cells(x) for x in rows[rows.devices == ""].itertuples())),
        "\n## Plans\n",
        "`--schedule auto --recompute auto`, micro-batch size 1, 4 K micro-batches and at most 64; where K is searched, "
        "`--microbatches auto` with as many samples as stand behind the devices. The peak is that of the fullest device. The gap is over all settings of the search.\n",
        *markdown(plans, (_plan_cells(x) for x in rows[rows.devices != ""].itertuples())),
    ]


def _profile_cells(row: Any) -> list[object]:
    taken = [f"{float(row.processor_s):.0f} s", bytes_text(int(float(row.process_bytes)))]
    if row.outcome != "profile":
        return [row.model, row.outcome, "", "", "", *taken]
    parameters = int(float(row.parameters))
    difference = parameters - KNOWN_PARAMETERS[row.model]
    return [row.model, int(float(row.layers)), int(float(row.followed)), f"{parameters:,}", f"{difference:,}", *taken]


def _plan_cells(row: Any) -> list[object]:
    start = [row.model, row.devices, row.memory, f"{float(row.processor_s):.1f} s"]
    if row.outcome != "plan":
        return [*start, row.outcome, *[""] * 9]
    return [
        *start, *setting_cells(row), seconds_text(float(row.step_s)), percent_text(float(row.bubble)),
        bytes_text(int(float(row.peak_bytes))), row.first_stage, row.last_stage, percent_text(float(row.gap)), row.note,
    ]  # fmt: skip


def setting_cells(row: Any) -> list[object]:
    """Stages, replicas and micro-batches, the schedule's title, and recompute."""
    counts = f"{int(float(row.stages))} x {int(float(row.replicas))}, {int(float(row.microbatches))}"
    return [counts, schedule_info(row.schedule).title, row.recompute]


if __name__ == "__main__":
    main()
