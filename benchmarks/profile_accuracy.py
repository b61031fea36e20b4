"""Can a profile be trusted? Held against the author's whole model, against other profiles, against what it costs.

    python benchmarks/profile_accuracy.py                                  about 15 minutes; writes reports/profile/
    python benchmarks/profile_accuracy.py --quick --models unet --output DIR    the mechanics only: its figures are none

Eight models, three profiles each, every one in a process of its own, one after the other. With each profile comes a
reference from the same process, see benchmarks/profile_reference.py.

- sums: the layers, the loss and the overhead of one stage, forward and backward, against the median of the plain
  model's clean runs, a few after each of the profile's rounds; `drift` is their second half over their first;
- plans: each profile's best cuts for K = 2 and 4 (gpipe, M = 4 K). Regret: what the worst of them costs on the first
  profile, over the first one's own. Noise: half of what the first plan's step changes between all timings at their
  lower and all at their upper quartile;
- cost: seconds of sampling (from the end of the first round of all layers to the end of the last), and of the whole
  profile, capture, record of memory and link included, over one plain training step of as many samples;
- memory: the peak of one forward and backward above what was there before, from the layers' bytes, against
  torch.distributed's MemTracker (tensors only) and the allocator's record (with the scratch space of kernels), both of
  the author's whole model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from profile_reference import FEWEST_CLEAN, MICROBATCH_SIZE, MODELS, ROOT, Reference, paths

import gplan
from gplan.core import LayerCost, Plan, Profile, Timing
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.cost.stage_table import StageTable
from gplan.partition.plan_evaluation import stages_of, step_s
from gplan.partition.problem import Problem

NUM_PROFILES = 3
STAGES = (2, 4)
ERRORS = ("forward", "backward", "both")


def main() -> None:
    """Measure every model, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="check the mechanics; the figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "profile")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    plan_rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in options.models:
        try:
            measured = measure(name, quick=options.quick)
        except subprocess.CalledProcessError as error:
            words = (error.stderr.strip() or "nothing was said").splitlines()[-1]
            failures.append(f"{name} failed with code {error.returncode}: {words}")
            continue
        rows.extend(profile_row(name, *pair) for pair in measured)
        plan_rows.extend(plan_row(name, [profile for profile, _ in measured], k) for k in STAGES)
        print(name, *(percent_text(x["both_error"], signed=True) for x in rows[-NUM_PROFILES:]), flush=True)
    if not rows:
        raise SystemExit("\n".join(failures))
    write_report(options, measured[0][0], pd.DataFrame(rows), pd.DataFrame(plan_rows), failures)


def measure(name: str, *, quick: bool) -> list[tuple[Profile, Reference]]:
    """The model's profiles with their references, one after the other, each from a new process."""
    script, measured = Path(__file__).with_name("profile_reference.py"), []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(NUM_PROFILES):
            path = Path(folder) / str(index)
            command = [sys.executable, str(script), name, str(path), *(["--quick"] if quick else [])]
            subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
            profile_path, reference_path = paths(path)
            profile = gplan.load(profile_path)
            assert isinstance(profile, Profile)
            measured.append((profile, Reference(**json.loads(reference_path.read_text()))))
    return measured


# From profiles and references to rows


def profile_row(name: str, profile: Profile, reference: Reference) -> dict[str, Any]:
    """One profile against its reference; every error is the profile's figure over the other, less 1."""
    forward_s, backward_s = whole_s(profile)
    predicted_bytes, tracker_bytes = profile.row_parts(0), reference.tracker_bytes
    return {
        "model": name,
        "num_layers": len(profile.layers),
        "forward_error": forward_s / reference.forward_s - 1,
        "backward_error": backward_s / reference.backward_s - 1,
        "both_error": (forward_s + backward_s) / (reference.forward_s + reference.backward_s) - 1,
        "layers_forward_s": forward_s,
        "layers_backward_s": backward_s,
        **asdict(reference),
        "num_samples": profile.num_samples,
        "num_refused": profile.num_refused,
        "sampling_over_step": reference.sampling_s / reference.step_s,
        "profile_over_step": reference.profile_s / reference.step_s,
        "predicted_bytes": predicted_bytes,
        "tracker_error": predicted_bytes / tracker_bytes - 1 if tracker_bytes else float("nan"),
        "allocator_error": predicted_bytes / reference.allocator_bytes - 1,
    }


def whole_s(profile: Profile) -> tuple[float, float]:
    """Forward and backward of all layers and the loss as one stage, from the profile's parts."""
    costs = costs_of(profile)
    forward_s = profile.overhead_s + sum(x.forward.median_s for x in costs)
    return forward_s, profile.overhead_s + sum(x.backward.median_s for x in costs)


def costs_of(profile: Profile) -> list[LayerCost]:
    """The costs of every layer and, last, of the loss."""
    return [*(layer.costs[0] for layer in profile.layers), profile.loss[0]]


def plan_row(name: str, profiles: Sequence[Profile], num_devices: int) -> dict[str, Any]:
    """The plans that the profiles lead to, all priced on the first profile."""
    plans = [gplan.balance(x, num_devices=num_devices, num_microbatches=4 * num_devices) for x in profiles]
    first = plans[0]
    steps_s = [step_on(profiles[0], plan) for plan in plans]
    low_s, high_s = (step_on(at_quartile(profiles[0], quartile), first) for quartile in ("low_s", "high_s"))
    own_s = [plan.prediction.step_s for plan in plans]
    return {
        "model": name,
        "num_devices": num_devices,
        "num_microbatches": first.num_microbatches,
        "cuts": " / ".join(",".join(map(str, plan.cuts)) for plan in plans),
        "same_cuts": len({plan.cuts for plan in plans}) == 1,
        "regret": max(steps_s) / steps_s[0] - 1,
        "noise": (high_s - low_s) / 2 / steps_s[0],
        "step_s": steps_s[0],
        "step_spread": (max(own_s) - min(own_s)) / statistics.median(own_s),
        "is_proven": all(plan.proof.is_proven for plan in plans),
    }


def step_on(profile: Profile, plan: Plan) -> float:
    """Seconds of a step with this plan's cuts and a profile's costs, which need not be those it was made from."""
    problem = Problem(
        costs=StageTable(profile, plan.microbatch_size, plan.num_microbatches),
        num_stages=plan.num_stages,
        schedule=plan.schedule,
        recompute=plan.recompute,
        minimize=plan.minimize,
    )
    return step_s(problem, stages_of(problem, plan.cuts))


def at_quartile(profile: Profile, quartile: str) -> Profile:
    """The profile with every timing at its lower ("low_s") or upper ("high_s") quartile."""

    def moved(timing: Timing) -> Timing:
        return Timing.exactly(getattr(timing, quartile), origin=timing.origin)

    def cost(x: LayerCost) -> LayerCost:
        first = moved(x.first_backward) if x.first_backward else None
        return replace(x, forward=moved(x.forward), backward=moved(x.backward), first_backward=first)

    step = profile.step
    return replace(
        profile,
        layers=tuple(replace(x, costs=tuple(map(cost, x.costs))) for x in profile.layers),
        loss=tuple(map(cost, profile.loss)),
        step=replace(step, optimizer=moved(step.optimizer), zero_grad=moved(step.zero_grad)),
    )


# The report


def write_report(
    options: argparse.Namespace, profile: Profile, rows: pd.DataFrame, plans: pd.DataFrame, failures: Sequence[str]
) -> None:
    """README.md with the tables, and what they are made from as CSV."""
    options.output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(options.output / "profiles.csv", index=False)
    plans.to_csv(options.output / "plans.csv", index=False)
    parts = [
        heading(profile, quick=options.quick),
        [*summary(rows, plans), *notes(rows, failures)],
        ["## Layers' sums against the whole model", "", *sums_table(rows)],
        ["## Plans from three profiles", "", *plans_table(plans)],
        ["## What a profile costs", "", *cost_table(rows)],
        ["## Memory of one forward and backward", "", *memory_table(rows)],
    ]
    text = "\n\n".join("\n".join(part) for part in parts)
    (options.output / "README.md").write_text(text + "\n")
    print(text)


def heading(profile: Profile, *, quick: bool) -> list[str]:
    """What was run, on what, with what, when."""
    command = shlex.join(["python", "benchmarks/profile_accuracy.py", *sys.argv[1:]])
    versions = [*profile.versions, ("transformers", importlib.metadata.version("transformers"))]
    warning = "**Made with --quick, to check the mechanics: no figure below means anything.** " if quick else ""
    return [
        "# Can a profile be trusted?",
        "",
        f"{warning}`{command}`: {NUM_PROFILES} profiles of each model, micro-batches of {MICROBATCH_SIZE}, one core, as it "
        f"came. {profile.device.name}, {os.cpu_count()} cores; {', '.join(map(' '.join, versions))}; "
        f"{profile.created[:10]}. What the columns hold is said at the top of `benchmarks/profile_accuracy.py`.",
    ]


def summary(rows: pd.DataFrame, plans: pd.DataFrame) -> list[str]:
    """The usual and the worst case of each question, one line each."""
    sizes = {name: rows[f"{name}_error"].abs() for name in ERRORS}
    errors = (f"{name} {percent_text(x.median())} (worst {percent_text(x.max())})" for name, x in sizes.items())
    worst = plans.sort_values("regret").iloc[-1]
    return [
        f"- layers' sums against the whole model, median error: {', '.join(errors)}",
        f"- plans: the same cuts from all profiles in {plans.same_cuts.sum()} of {len(plans)} cases; largest regret "
        f"{percent_text(worst.regret)} ({worst.model}, K = {worst.num_devices}; noise {percent_text(worst.noise)}), above "
        f"the noise in {(plans.regret > plans.noise).sum()} cases",
        f"- cost: sampling takes {rows.sampling_over_step.median():.0f} training steps (most "
        f"{rows.sampling_over_step.max():.0f}), all of the profile {rows.profile_over_step.median():.0f} (most "
        f"{rows.profile_over_step.max():.0f})",
        f"- memory, worst error: against MemTracker {percent_text(rows.tracker_error.abs().max())}, against the "
        f"allocator's record {percent_text(rows.allocator_error.abs().max())}",
    ]


def notes(rows: pd.DataFrame, failures: Sequence[str]) -> list[str]:
    """Models that failed, those that the tracker refused, and references that other work disturbed."""
    refused = rows[rows.tracker_refusal != ""].drop_duplicates("model")
    disturbed = rows[rows.num_clean < FEWEST_CLEAN]
    found = [
        *failures,
        *(f"MemTracker refused {x.model}: {x.tracker_refusal}" for x in refused.itertuples()),
        *(f"{x.model}: {x.num_clean} of {x.num_runs} plain runs were clean; all count" for x in disturbed.itertuples()),
    ]
    return [f"- note: {text}" for text in found]


def sums_table(rows: pd.DataFrame) -> list[str]:
    """Of a model's profiles the median and, in brackets, the least and the most."""
    return table(
        ("model", "layers", "whole model", "forward", "backward", "both", "drift", "clean runs"),
        (
            (
                name,
                x.num_layers.iloc[0],
                seconds_text((x.forward_s + x.backward_s).median()),
                *(errors_text(x[f"{error}_error"]) for error in ERRORS),
                errors_text(x.drift),
                f"{x.num_clean.sum()} of {x.num_runs.sum()}",
            )
            for name, x in rows.groupby("model", sort=False)
        ),
    )


def plans_table(plans: pd.DataFrame) -> list[str]:
    """One row for each model and K."""
    return table(
        ("model", "K", "M", "cuts", "same", "regret", "noise", "predicted step", "its spread"),
        (
            (
                *(x.model, x.num_devices, x.num_microbatches, x.cuts, "yes" if x.same_cuts else "no"),
                *(percent_text(x.regret), percent_text(x.noise), seconds_text(x.step_s), percent_text(x.step_spread)),
            )
            for x in plans.itertuples()
        ),
    )


def cost_table(rows: pd.DataFrame) -> list[str]:
    """Medians over a model's profiles; samples of all of them."""
    return table(
        ("model", "training step", "sampling", "in steps", "all of the profile", "in steps", "samples", "refused"),
        (
            (
                name,
                *(seconds_text(x.step_s.median()), seconds_text(x.sampling_s.median())),
                *(f"{x.sampling_over_step.median():.0f}", seconds_text(x.profile_s.median())),
                *(f"{x.profile_over_step.median():.0f}", x.num_samples.sum(), x.num_refused.sum()),
            )
            for name, x in rows.groupby("model", sort=False)
        ),
    )


def memory_table(rows: pd.DataFrame) -> list[str]:
    """Medians over a model's profiles, and their errors."""
    return table(
        ("model", "from the layers", "MemTracker", "error", "allocator", "error"),
        (
            (
                *(name, bytes_text(x.predicted_bytes.median())),
                bytes_text(x.tracker_bytes.median()) if x.tracker_bytes.notna().any() else "–",
                errors_text(x.tracker_error),
                bytes_text(x.allocator_bytes.median()),
                errors_text(x.allocator_error),
            )
            for name, x in rows.groupby("model", sort=False)
        ),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def errors_text(errors: pd.Series[float]) -> str:
    """The median, and the least and the most where they differ; "–" for what was not measured."""
    if errors.isna().all():
        return "–"
    low, middle, high = (percent_text(x, signed=True) for x in (errors.min(), errors.median(), errors.max()))
    return middle if low == high else f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
