"""Predicted against measured at the size that people train: models of 26 to 241 million parameters, K = 2, 4 and 8.

    python benchmarks/real_size.py                                  some hours on 2 idle cores; goes on where it stopped
    python benchmarks/real_size.py --models gpt2 llama --k 2        only some of it
    python benchmarks/real_size.py --table                          the tables of what is there, without running

Each model of benchmarks/real_size_models.py, ResNet-50, and two with blocks within blocks (Swin-S; a U-Net of 94
million parameters on small images) are profiled once per optimizer at micro-batch size 1; the
profile is kept beside the rows while the suite runs. Its layers' sum is compared with the whole model. Then every
setting is planned and run: K = 2 on two processes (torch engine), K = 4 and 8 in one (virtual engine), gpipe and 1f1b,
recompute never and always. Rows are written when a run ends, so an interrupt loses at most one. A setting is run again
with a new profile in another folder (--output); its rows can be appended to those that are there. Errors are as they
came: raw, and at equal host speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from suite import REPORTS, ROOT, Rows, error_text, markdown, median_and_worst, options_of, points_text, write_report

import gplan
from gplan.core import Profile
from gplan.core.units import seconds_text
from gplan.evaluate.compare import BACKWARD, BUBBLE, FORWARD, OPTIMIZER, PEAK_MEMORY, STEP_TIME

OUTPUT = REPORTS / "real-size"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("benchmarks/real_size_models.py", {"name": name})
        for name in ("gpt2", "bert", "llama", "t5", "vit", "moe", "whisper")
    },
    "resnet50": ("examples/resnet.py", {"depth": 50, "width": 64, "image_size": 224, "num_classes": 1000}),
    "swin": ("benchmarks/granularity.py", {"kind": "swin"}),
    "unet": ("benchmarks/granularity.py", {"kind": "unet", "image": 64}),
}
_WITH_SGD = ("resnet50", "swin", "unet")  # their file has no other optimizer
OPTIMIZERS = ("adamw", "sgd")
KEY = ("model", "optimizer", "engine", "num_devices", "schedule", "recompute")


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = options_of(__doc__, "real-size")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--k", nargs="*", type=int, choices=(2, 4, 8), default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "1f1b"])
    parser.add_argument("--recompute", nargs="*", default=["never", "always"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of each run; memory grows in some of the first ten")
    parser.add_argument("--table", action="store_true", help="write the tables only")
    options = parser.parse_args()
    rows = Rows(options.output / "rows.csv", KEY)
    pairs = [x for x in product(options.models, options.optimizers) if x[0] not in _WITH_SGD or x[1] == "sgd"]
    settings = product(sorted(options.k), options.schedules, options.recompute)
    runs = [("torch" if k == 2 else "virtual", k, *rest) for k, *rest in settings]
    for pair, run in () if options.table else product(pairs, runs):
        setting = dict(zip(KEY, (*pair, *run), strict=True))
        if not rows.has(setting):
            profile = profile_of(*pair, options.output, rows)
            rows.add(*_run_rows(setting, profile, options))
    write_report(options.output, report(rows.table()))


def profile_of(model: str, optimizer: str = "adamw", folder: Path = OUTPUT, rows: Rows | None = None) -> Profile:
    """The profile of a model at micro-batch size 1; where it is not in the folder it is measured, and its layers' sum
    against the whole model added to the rows."""
    path = folder / f"{model}.{optimizer}.profile.json"
    if path.exists():
        found = gplan.load(path)
        assert isinstance(found, Profile)
        return found
    file, settings = MODELS[model]
    if model not in _WITH_SGD:
        settings = {**settings, "optimizer_name": optimizer}
    print(f"{model}, {optimizer}: profile", flush=True)
    start_s = time.perf_counter()
    found = gplan.profile(str(ROOT / file), settings=settings, microbatch_sizes=[1])
    folder.mkdir(parents=True, exist_ok=True)
    gplan.save(found, path)
    if rows is not None:
        rows.add(*_layer_rows(model, optimizer, found, time.perf_counter() - start_s))
    return found


def _layer_rows(model: str, optimizer: str, profile: Profile, seconds: float) -> Iterator[dict[str, Any]]:
    """The layers' sum against the whole model, with 0 devices."""
    place = dict(zip(KEY, (model, optimizer, "", 0, "", ""), strict=True))
    place |= {"device": profile.device.name, "created": profile.created, "stage": ""}
    whole = profile.whole_model[0]
    forward_s, backward_s = profile.one_stage_s(0)
    for name, one, other in (
        ("layers forward", forward_s, whole.forward.median_s),
        ("layers backward", backward_s, whole.backward.median_s),
        ("layers peak memory", profile.one_stage_bytes(0), whole.allocated_bytes),
    ):
        yield {**place, "quantity": name, "predicted": one, "measured": other, "error": one / other - 1}
    yield {**place, "quantity": "profile seconds", "measured": seconds}


def _run_rows(setting: dict[str, Any], profile: Profile, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    asked = {name: setting[name] for name in ("num_devices", "schedule", "recompute")}
    plan = gplan.balance(profile, num_microbatches=options.microbatches, **asked)
    run = gplan.run(plan, profile=profile, engine=setting["engine"], num_steps=options.steps)
    comparison, made = gplan.compare(run), {**setting, "device": profile.device.name, "created": run.created}
    for row in comparison.rows:
        figures = {x: getattr(row, x) for x in ("quantity", "predicted", "measured", "error", "equal_speed_error")}
        yield {**made, "stage": "" if row.stage is None else row.stage, **figures}
    if run.equal_speed is not None:
        ratio = run.equal_speed.ratio
        yield {**made, "stage": "", "quantity": "yardstick's ratio", "predicted": 1.0, "measured": ratio}
    print(*setting.values(), error_text(comparison.row(STEP_TIME).error), flush=True)


def report(rows: pd.DataFrame) -> list[str]:
    """The layers' sums, then one line a run, also where a setting was run several times."""
    rows = rows.assign(made=rows.created.str[:16].str.replace("T", " "))
    runs, sums = rows[rows.num_devices > 0], rows[rows.num_devices == 0]
    days = runs.created.str[:10]
    heads = ["model", "optimizer", "engine", "K", "schedule", "recompute", "step", "error", "at equal speed"]
    heads += ["bubble, points", "at equal speed", "forward", "backward", "optimizer", "peak memory", "device", "made"]
    return [
        "# Predicted against measured at the size that people train\n",
        "Made by `python benchmarks/real_size.py`, which goes on where it was; every figure of every run is in "
        "[rows.csv](rows.csv). Micro-batch size 1, tokens over the whole vocabulary, float32, two cores. Errors are "
        "predicted over measured, less 1: first as they came, then at equal host speed.\n",
        "## Runs\n",
        "Forward, backward, optimizer and peak memory have the raw error of the stage where it is largest.\n",
        *(f"- {device}, {day}, {_summary(part)}" for (device, day), part in runs.groupby(["device", days], sort=False)),
        "",
        *markdown(heads, (_run_cells(*x) for x in runs.groupby([*KEY, "device", "made"], sort=False))),
        "\n## The layers' sum against the whole model\n",
        *markdown(
            ["model", "optimizer", "forward", "backward", "peak memory", "profile", "device", "made"],
            (_layer_cells(*x) for x in sums.groupby([*KEY[:2], "device", "made"], sort=False)),
        ),
    ]


def _summary(runs: pd.DataFrame) -> str:
    """The median of the size of each error, and the worst error."""
    by_name = {name: runs[runs.quantity == name] for name in (STEP_TIME, BUBBLE, OPTIMIZER, PEAK_MEMORY)}
    steps, bubbles = by_name[STEP_TIME], by_name[BUBBLE]
    errors = {
        "step": steps.error,
        "at equal speed": steps.equal_speed_error,
        "optimizer of every stage at equal speed": by_name[OPTIMIZER].equal_speed_error,
        "peak memory of every stage": by_name[PEAK_MEMORY].error,
        "bubble": bubbles.predicted - bubbles.measured,
        "bubble at equal speed": bubbles.equal_speed_error,
    }
    found = {name: median_and_worst(x, points=name.startswith("bubble")) for name, x in errors.items()}
    texts = [f"{name}: median {middle}, worst {worst}" for name, (middle, worst) in found.items() if middle]
    return f"{len(steps)} runs: {'; '.join(texts)}."


def _layer_cells(key: tuple[object, ...], part: pd.DataFrame) -> list[object]:
    by_name = part.set_index("quantity")
    errors = [error_text(by_name.error[f"layers {x}"]) for x in ("forward", "backward", "peak memory")]
    return [*key[:2], *errors, f"{by_name.measured['profile seconds']:.0f} s", *key[2:]]


def _run_cells(key: tuple[object, ...], part: pd.DataFrame) -> list[object]:
    step, bubble = (part[part.quantity == name].iloc[0] for name in (STEP_TIME, BUBBLE))
    return [
        *key[:-2],
        seconds_text(step.measured),
        error_text(step.error),
        error_text(step.equal_speed_error),
        points_text(bubble.predicted - bubble.measured).removesuffix(" points"),
        points_text(bubble.equal_speed_error).removesuffix(" points"),
        *(median_and_worst(part[part.quantity == x].error)[1] for x in (FORWARD, BACKWARD, OPTIMIZER, PEAK_MEMORY)),
        *key[-2:],
    ]


if __name__ == "__main__":
    main()
