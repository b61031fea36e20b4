"""Predicted against measured at the size that people train: models of 86 to 241 million parameters, K = 2, 4 and 8.

    python benchmarks/real_size.py                                  some hours on 2 idle cores; goes on where it stopped
    python benchmarks/real_size.py --models gpt2 llama --k 2        only some of it
    python benchmarks/real_size.py --table                          the tables of what is there, without running

Each model of benchmarks/real_size_models.py, and ResNet-50, is profiled once per optimizer at micro-batch size 1; the
profile is kept beside the rows while the suite runs. Its layers' sum is compared with the whole model. Then every
setting is planned and run: K = 2 on two processes (torch engine), K = 4 and 8 in one (virtual engine), gpipe and 1f1b,
recompute never and always. Rows are written when a run ends, so an interrupt loses at most one. A setting is run again
with a new profile in another folder (--output); its rows can be appended to those that are there. Errors are as they
came: raw, and at equal host speed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd
from host_speed import yardstick_of

import gplan
from gplan.core import Profile
from gplan.core.units import percent_text, seconds_text
from gplan.evaluate.compare import BACKWARD, BUBBLE, FORWARD, OPTIMIZER, PEAK_MEMORY, STEP_TIME, compare
from gplan.files.json_files import write_bytes

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "reports" / "real-size"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("benchmarks/real_size_models.py", {"name": name})
        for name in ("gpt2", "bert", "llama", "t5", "vit", "moe", "whisper")
    },
    "resnet50": ("examples/resnet.py", {"depth": 50, "width": 64, "image_size": 224, "num_classes": 1000}),
}
OPTIMIZERS = ("adamw", "sgd")
Numbers = TypeVar("Numbers", float, "pd.Series[float]")
LAYERS = ["", 0, "", ""]  # in place of engine, devices, schedule and recompute: the layers' sum against the whole model


@dataclass(frozen=True, slots=True)
class RealSizeRun:
    """One run of the suite."""

    model: str
    optimizer: str
    engine: Literal["torch", "virtual"]
    num_devices: int
    schedule: str
    recompute: str


KEY = [x.name for x in fields(RealSizeRun)]


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--k", nargs="*", type=int, choices=(2, 4, 8), default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "1f1b"])
    parser.add_argument("--recompute", nargs="*", default=["never", "always"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of each run; memory grows in some of the first ten")
    parser.add_argument("--table", action="store_true", help="write the tables only")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()
    pairs = [x for x in product(options.models, options.optimizers) if x != ("resnet50", "adamw")]  # its own is SGD
    for model, optimizer in () if options.table else pairs:
        for found in _measured(model, optimizer, rows, options):
            rows = pd.concat([rows, pd.DataFrame(found)], ignore_index=True)
            write_bytes(path, rows.to_csv(index=False).encode())
    (options.output / "README.md").write_text(as_text(pd.read_csv(path)))
    print((options.output / "README.md").read_text())


def _measured(
    model: str, optimizer: str, rows: pd.DataFrame, options: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each run that is not there yet, and first those of the layers' sum."""
    runs = product(sorted(options.k), options.schedules, options.recompute)
    wanted = [RealSizeRun(model, optimizer, "torch" if k == 2 else "virtual", k, *rest) for k, *rest in runs]
    missing = [x for x in wanted if not is_there(rows, x)]
    if not missing:
        return
    start_s = time.perf_counter()
    is_new = not profile_path(model, optimizer, options.output).exists()
    profile = profile_of(model, optimizer, options.output)
    if is_new:
        yield _layer_rows(model, optimizer, profile, time.perf_counter() - start_s)
    for each in missing:
        yield list(_run_rows(each, profile, options))


def is_there(rows: pd.DataFrame, run: RealSizeRun) -> bool:
    """Whether the rows of a run are there."""
    return not rows.empty and bool((rows[KEY].astype(str) == [str(x) for x in asdict(run).values()]).all(axis=1).any())


def profile_path(model: str, optimizer: str, folder: Path) -> Path:
    """Where a model's profile is kept while the suite runs."""
    return folder / f"{model}.{optimizer}.profile.json"


def profile_of(model: str, optimizer: str = "adamw", folder: Path = OUTPUT) -> Profile:
    """The profile of a model at micro-batch size 1; measured where it is not in the folder."""
    path = profile_path(model, optimizer, folder)
    if path.exists():
        found = gplan.load(path)
        assert isinstance(found, Profile)
        return found
    file, settings = MODELS[model]
    if file.startswith("benchmarks"):
        settings = {**settings, "optimizer_name": optimizer}
    print(f"{model}, {optimizer}: profile", flush=True)
    found = gplan.profile(str(ROOT / file), settings=settings, microbatch_sizes=[1])
    gplan.save(found, path)
    return found


def _made(profile: Profile, created: str) -> dict[str, str]:
    return {"device": profile.device.name, "created": created}


def _layer_rows(model: str, optimizer: str, profile: Profile, seconds: float) -> list[dict[str, Any]]:
    """The layers' sum against the whole model."""
    place = dict(zip(KEY, [model, optimizer, *LAYERS], strict=True)) | _made(profile, profile.created) | {"stage": ""}
    whole = profile.whole_model[0]
    forward_s, backward_s = profile.one_stage_s(0)
    pairs = {
        "layers forward": (forward_s, whole.forward.median_s),
        "layers backward": (backward_s, whole.backward.median_s),
        "layers peak memory": (profile.one_stage_bytes(0), whole.allocated_bytes),
    }
    rows = [
        {**place, "quantity": name, "predicted": one, "measured": other, "error": one / other - 1}
        for name, (one, other) in pairs.items()
    ]
    return [*rows, {**place, "quantity": "profile seconds", "measured": seconds}]


def _run_rows(each: RealSizeRun, profile: Profile, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plan = gplan.balance(
        profile,
        num_devices=each.num_devices,
        num_microbatches=options.microbatches,
        schedule=each.schedule,
        recompute=each.recompute,
    )
    run = gplan.run(plan, engine=each.engine, num_steps=options.steps)
    comparison, made = compare(run), asdict(each) | _made(profile, run.created)
    for row in comparison.rows:
        yield {
            **made,
            "stage": "" if row.stage is None else row.stage,
            "quantity": row.quantity,
            "predicted": row.predicted,
            "measured": row.measured,
            "error": row.error,
            "equal_speed_error": row.equal_speed_error,
        }
    for part, ratio in yardstick_of(run).items():
        yield {**made, "stage": "", "quantity": f"yardstick's {part}", "predicted": 1.0, "measured": ratio}
    step = comparison.row(STEP_TIME)
    print(*asdict(each).values(), percent_text(step.error or 0.0, signed=True), flush=True)


def as_text(rows: pd.DataFrame) -> str:
    """The report: the layers' sums, then one line a run, also where a setting was run several times."""
    rows = rows.assign(made=rows.created.str[:16].str.replace("T", " "))
    runs, sums = rows[rows.num_devices > 0], rows[rows.num_devices == 0]
    days = runs.created.str[:10]
    lines = [
        "# Predicted against measured at the size that people train",
        "",
        "Made by `python benchmarks/real_size.py`, which goes on where it was; every figure of every run is in "
        "[rows.csv](rows.csv). Micro-batch size 1, tokens over the whole vocabulary, float32, two cores. Errors are "
        "predicted over measured, less 1: first as they came, then at equal host speed.",
        "",
        "## Runs",
        "",
        "Forward, backward, optimizer and peak memory have the raw error of the stage where it is largest.",
        "",
        *(f"- {device}, {day}, {_summary(part)}" for (device, day), part in runs.groupby(["device", days], sort=False)),
        "",
        "By how much the host was faster or slower in the run than in the profile:",
        "",
        *_by_change_of_speed(runs),
        "",
        *_run_table(runs),
        "",
        "## The layers' sum against the whole model",
        "",
        "| model | optimizer | forward | backward | peak memory | profile | device | made |",
        "|---|---|---|---|---|---|---|---|",
        *(_layer_line(key, part) for key, part in sums.groupby([*KEY[:2], "device", "made"], sort=False)),
        "",
    ]
    return "\n".join(lines)


def _run_table(runs: pd.DataFrame) -> list[str]:
    return [
        "| model | optimizer | engine | K | schedule | recompute | step | error | at equal speed | bubble, points | at equal speed | "
        "forward | backward | optimizer | peak memory | device | made |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_run_line(key, part) for key, part in runs.groupby([*KEY, "device", "made"], sort=False)),
    ]


def _summary(runs: pd.DataFrame) -> str:
    """The median of the size of each error, and the worst error."""
    by_name = {name: runs[runs.quantity == name] for name in (STEP_TIME, BUBBLE, OPTIMIZER, PEAK_MEMORY)}
    steps, bubbles = by_name[STEP_TIME], by_name[BUBBLE]
    shown = {
        "step": steps.error,
        "at equal speed": steps.equal_speed_error,
        "optimizer of every stage at equal speed": by_name[OPTIMIZER].equal_speed_error,
        "peak memory of every stage": by_name[PEAK_MEMORY].error,
    }
    texts = [_median_and_worst(name, errors.dropna()) for name, errors in shown.items() if len(errors.dropna())]
    for name, points in (
        ("bubble", 100 * (bubbles.predicted - bubbles.measured)),
        ("bubble at equal speed", 100 * bubbles.equal_speed_error.dropna()),
    ):
        if len(points):
            texts.append(f"{name}: median {points.abs().median():.1f}, worst {max(points, key=abs):+.1f} points")
    return f"{len(steps)} runs: {'; '.join(texts)}."


def _by_change_of_speed(runs: pd.DataFrame) -> Iterator[str]:
    """For each range of the change of the host's speed between profile and run: the errors at equal speed."""
    steps = runs[runs.quantity == STEP_TIME].dropna(subset="equal_speed_error")
    changes = (slowdown(steps.error, steps.equal_speed_error) - 1).abs()
    for low, high, words in ((0, 0.05, "up to 5 %"), (0.05, 0.1, "5 to 10 %"), (0.1, math.inf, "more than 10 %")):
        part = steps[(low <= changes) & (changes < high)]
        if len(part):
            yield f"- {words}, {len(part)} runs: {_median_and_worst('step at equal speed', part.equal_speed_error)}."


def slowdown(error: Numbers, equal_speed_error: Numbers) -> Numbers:
    """By a step's two errors: how many times longer than in the profile it takes because the host is slower."""
    return (1 + equal_speed_error) / (1 + error)


def _median_and_worst(name: str, errors: pd.Series) -> str:
    return (
        f"{name}: median {percent_text(errors.abs().median())}, worst {percent_text(max(errors, key=abs), signed=True)}"
    )


def _layer_line(key: tuple[object, ...], part: pd.DataFrame) -> str:
    by_name = part.set_index("quantity")
    errors = [percent_text(by_name.error[f"layers {x}"], signed=True) for x in ("forward", "backward", "peak memory")]
    cells = [*map(str, key[:2]), *errors, f"{by_name.measured['profile seconds']:.0f} s", *map(str, key[2:])]
    return f"| {' | '.join(cells)} |"


def _run_line(key: tuple[object, ...], part: pd.DataFrame) -> str:
    step = part[part.quantity == STEP_TIME].iloc[0]
    bubble = part[part.quantity == BUBBLE].iloc[0]

    def worst(name: str) -> str:
        errors = part[part.quantity == name].error.dropna()
        return percent_text(max(errors, key=abs), signed=True) if len(errors) else ""

    equal = "" if pd.isna(step.equal_speed_error) else percent_text(step.equal_speed_error, signed=True)
    cells = [
        *map(str, key[:-2]),
        seconds_text(step.measured),
        percent_text(step.error, signed=True),
        equal,
        f"{100 * (bubble.predicted - bubble.measured):+.1f}",
        "" if pd.isna(bubble.equal_speed_error) else f"{100 * bubble.equal_speed_error:+.1f}",
        *map(worst, (FORWARD, BACKWARD, OPTIMIZER, PEAK_MEMORY)),
        *map(str, key[-2:]),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
