"""Sharded replicas on four processes: losses, gradients, memory by rank, and resuming, beside one process's plain model.

    python benchmarks/sharded_replicas.py            some 10 minutes on 2 idle cores; writes reports/sharded-replicas/
    python benchmarks/sharded_replicas.py --small    without the models of 57 and 124 million parameters

Every run is K = 2 stages by R = 2 replicas unless its row tells otherwise. Gradients and the first loss are those of
`gplan run --check`, losses of later steps those of a loop over the plain model. Memory is the largest of the replicas.
With recompute "selected" a device has as much memory as is halfway between recomputing nothing and everything.
Tables are written after every run, and a run with rows in them is left out; --again runs all, with --small those of the
small model. Runs that are killed are in benchmarks/random_kills.py --sharded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import gplan
from gplan.core import Link, Plan, Profile, RecomputeMode, Run
from gplan.core.checks import SHARDINGS, Sharding
from gplan.core.units import bytes_text
from gplan.runtime.model_source import open_source
from gplan.runtime.run.loop import BatchStream
from gplan.runtime.run.reference import accumulate_gradients
from profiler.host.host_info import processor, software_versions

ROOT = Path(__file__).parent.parent
NUM_STEPS = 5
SMALL_MODEL = "transformer, 0.2 M"
SMALL = (
    "examples/transformer_lm.py",
    {"num_blocks": 4, "width": 64, "num_heads": 4, "sequence_length": 32, "tie_embedding": True},
)
LARGE = ("examples/transformer_lm.py", {**SMALL[1], "num_blocks": 8, "width": 768, "num_heads": 12})
GPT2 = ("benchmarks/real_size_models.py", {"name": "gpt2"})
TABLES = ("runs.csv", "resumed.csv")
BATCH_SIZE = 16  # of the small model

Strategy = tuple[str, int, int, Sharding, RecomputeMode]
"""Schedule, stages, replicas, sharding, recompute."""

STRATEGIES: tuple[Strategy, ...] = (
    ("gpipe", 2, 2, "none", "never"),
    ("gpipe", 2, 2, "optimizer", "never"),
    ("gpipe", 2, 2, "weights", "never"),
    ("1f1b", 2, 2, "weights", "never"),
    ("1f1b", 2, 2, "weights", "always"),
    ("1f1b", 2, 2, "weights", "selected"),
    ("1f1b", 2, 2, "optimizer", "always"),
    ("interleaved-1f1b:2", 2, 2, "optimizer", "never"),
    ("interleaved-1f1b:2", 2, 2, "weights", "never"),
    ("zb-h1", 2, 2, "optimizer", "never"),
    ("gpipe", 1, 4, "weights", "never"),
)
LARGE_STRATEGIES: tuple[Strategy, ...] = (
    *(("1f1b", 2, 2, x, "never") for x in SHARDINGS),
    ("1f1b", 2, 2, "weights", "always"),
    ("1f1b", 2, 2, "weights", "selected"),
    ("gpipe", 2, 2, "weights", "never"),
    ("interleaved-1f1b:2", 2, 2, "weights", "never"),
    ("zb-h1", 2, 2, "optimizer", "never"),
)
UNCHECKED: tuple[tuple[str, str, Mapping[str, Any], tuple[Strategy, ...]], ...] = (
    ("transformer, 57 M", *LARGE, LARGE_STRATEGIES),
    ("GPT-2, 124 M", *GPT2, LARGE_STRATEGIES[1:3]),
    ("GPT-2, 124 M, SGD", GPT2[0], {**GPT2[1], "optimizer_name": "sgd"}, LARGE_STRATEGIES[1:3]),
)
RESUMED: tuple[tuple[Strategy, Strategy], ...] = (
    (("1f1b", 2, 2, "weights", "never"), ("gpipe", 4, 1, "none", "never")),
    (("1f1b", 2, 2, "weights", "never"), ("gpipe", 2, 2, "optimizer", "never")),
    (("gpipe", 2, 2, "optimizer", "never"), ("gpipe", 1, 4, "weights", "never")),
    (("gpipe", 2, 2, "optimizer", "never"), ("gpipe", 2, 2, "none", "never")),
    (("gpipe", 4, 1, "none", "never"), ("interleaved-1f1b:2", 2, 2, "weights", "never")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run, or the stages of one device of it."""

    model: str
    schedule: str
    stages: int  # K, devices of a replica
    replicas: int
    sharding: str
    recompute: str
    device: int
    predicted_bytes: int
    measured_bytes: int
    gradient_error: float | None  # of the first step, relative to the largest of each parameter
    loss_error: float | None  # the largest of all steps, relative

    @property
    def key(self) -> tuple[Any, ...]:
        """The model, and what `Strategy` has."""
        return self.model, self.schedule, self.stages, self.replicas, self.sharding, self.recompute

    @property
    def memory_error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def main() -> None:
    """Run, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "sharded-replicas")
    options = parser.parse_args()
    os.chdir(ROOT)
    options.output.mkdir(parents=True, exist_ok=True)
    rows, resumed = known_rows(options.output)
    if options.again:
        rows, resumed = [x for x in rows if options.small and x.model != SMALL_MODEL], []
    done = {x.key for x in rows} | {(x["saved_by"], x["resumed_by"]) for x in resumed}
    for found in found_rows(done, small=options.small):
        if isinstance(found, list):
            rows += found
        else:
            resumed.append(found)
        pd.DataFrame([{**asdict(x), "memory_error": x.memory_error} for x in rows]).to_csv(
            options.output / "runs.csv", index=False
        )
        pd.DataFrame(resumed).to_csv(options.output / "resumed.csv", index=False)
        (options.output / "README.md").write_text(as_text(rows, resumed))
    print((options.output / "README.md").read_text())


def known_rows(place: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows of an earlier call."""
    if not (place / "runs.csv").exists() or not (place / "resumed.csv").exists():
        return [], []
    runs, resumed = (pd.read_csv(place / x).astype(object).replace(float("nan"), None) for x in TABLES)
    found = [
        {str(key): value for key, value in x.items()} for x in runs.drop(columns="memory_error").to_dict("records")
    ]
    return [Row(**x) for x in found], [{str(k): v for k, v in x.items()} for x in resumed.to_dict("records")]


def found_rows(done: Collection[tuple[Any, ...]], *, small: bool) -> Iterator[list[Row] | dict[str, Any]]:
    """The rows of each run that is not done, or the one of a run that was resumed."""
    missing = [x for x in RESUMED if (text_of(x[0]), text_of(x[1])) not in done]
    some = [x for x in STRATEGIES if (SMALL_MODEL, *x) not in done]
    if missing or some:
        reference, settings = SMALL
        profile = profile_of(reference, settings, microbatch_size=2)
        expected = plain_losses(reference, settings, plan_of(profile, ("gpipe", 1, 1, "none", "never")))
        for before, after in missing:
            yield resume(profile, before, after, expected)
        for strategy in some:
            yield measured(plan_of(profile, strategy), SMALL_MODEL, expected)
    for model, reference, large, strategies in () if small else UNCHECKED:
        if some := [x for x in strategies if (model, *x) not in done]:
            profile = profile_of(reference, large, microbatch_size=1)
            for strategy in some:
                yield measured(plan_of(profile, strategy, batch_size=4), model, None)


def profile_of(reference: str, settings: Mapping[str, Any], *, microbatch_size: int) -> Profile:
    """A profile with few samples: memory does not depend on their number, and times do not matter here."""
    link = Link(latency_s=2e-5, bytes_per_s=1e9)
    return gplan.profile(
        reference,
        settings=dict(settings),
        microbatch_sizes=[microbatch_size],
        budget_s=2.0,
        contention=0,
        link=link,
    )


def plan_of(profile: Profile, strategy: Strategy, *, batch_size: int = BATCH_SIZE) -> Plan:
    """The plan of a strategy; all have mini-batches of `batch_size` samples."""
    schedule, num_stages, num_replicas, sharding, recompute = strategy

    def plan(recompute: RecomputeMode, memory_bytes: int | None = None) -> Plan:
        return gplan.balance(
            profile,
            num_devices=num_stages,
            num_microbatches=batch_size // num_replicas // profile.microbatch_sizes[0],
            num_replicas=num_replicas,
            sharding=sharding,
            schedule=schedule,
            recompute=recompute,
            memory_bytes=memory_bytes,
        )

    halfway = sum(plan(x).peak_bytes for x in ("never", "always")) // 2 if recompute == "selected" else None
    return plan(recompute, halfway)


def plain_losses(reference: str, settings: Mapping[str, Any], plan: Plan) -> list[float]:
    """The losses of a loop over the plain model on the same data."""
    file = open_source(reference, settings=dict(settings)).build_whole().file
    data, found = BatchStream(file, plan.batch_size, seed=0), list[float]()
    optimizer = file.optimizer(list(file.model.parameters()))
    for _ in range(NUM_STEPS):
        inputs, target = data.take()
        found.append(accumulate_gradients(file, plan, inputs, target, range(plan.num_microbatches)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def measured(plan: Plan, model: str, expected: Sequence[float] | None) -> list[Row]:
    """Run a plan; returns a row for each device. With expected losses, gradients are compared too."""
    run = gplan.run(plan, num_steps=NUM_STEPS if expected else 2, check=expected is not None)
    rows = [
        Row(
            model=model,
            schedule=plan.schedule,
            stages=plan.num_devices,
            replicas=plan.num_replicas,
            sharding=plan.sharding,
            recompute=plan.recompute,
            device=device,
            predicted_bytes=sum(x.memory.peak_bytes for x in plan.stages_of(device)),
            measured_bytes=num_bytes,
            gradient_error=None if run.check is None else run.check.max_relative_error,
            loss_error=None if expected is None else largest_error(run.losses, expected),
        )
        for device, num_bytes in enumerate(run.peak_bytes)
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def resume(profile: Profile, before: Strategy, after: Strategy, expected: Sequence[float]) -> dict[str, Any]:
    """Half of the steps with one strategy, the others with another."""
    with tempfile.TemporaryDirectory(prefix="sharded-replicas-") as place:
        half = NUM_STEPS // 2
        gplan.run(plan_of(profile, before), num_steps=half, save_every=half, checkpoints=place)
        run: Run = gplan.run(plan_of(profile, after), num_steps=NUM_STEPS, checkpoints=place, resume=True)
    error = largest_error(run.losses, expected[half:])
    row = {
        "saved_by": text_of(before),
        "resumed_by": text_of(after),
        "num_losses": len(run.losses),
        "loss_error": error,
    }
    print(row, flush=True)
    return row


def largest_error(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True))


def text_of(strategy: Strategy) -> str:
    """A strategy in words."""
    schedule, num_devices, num_replicas, sharding, _ = strategy
    return f"K={num_devices} R={num_replicas} {sharding} {schedule}"


def as_text(rows: Sequence[Row], resumed: Sequence[Mapping[str, Any]]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Sharded replicas on four processes\n",
        f"`python benchmarks/sharded_replicas.py`: {NUM_STEPS} steps each. {processor()}, {os.cpu_count()} cores; "
        f"{', '.join(f'{name} {version}' for name, version in software_versions())}. Gradients are those of the first "
        "step, relative to the largest entry of all of the same module; losses those of all steps, relative, where the plain "
        "model of one process was run. Memory is the largest of the replicas of a stage, by PyTorch's allocator.\n",
        "Runs that were killed: [kills](kills/README.md).\n",
        "| model | schedule | K x R | sharding | recompute | stage | gradients | losses | predicted | measured | error |",
        "|" + "---|" * 11,
    ]
    lines += [
        f"| {x.model} | {x.schedule} | {x.stages} x {x.replicas} | {x.sharding} | {x.recompute} | {x.device} | "
        f"{_error_text(x.gradient_error)} | {_error_text(x.loss_error)} | {bytes_text(x.predicted_bytes)} | "
        f"{bytes_text(x.measured_bytes)} | {x.memory_error:+.2%} |"
        for x in rows
    ]
    lines += ["\n## Resumed\n", "| saved by | resumed by | losses compared | largest difference |", "|---|---|---|---|"]
    lines += [f"| {x['saved_by']} | {x['resumed_by']} | {x['num_losses']} | {x['loss_error']:.1e} |" for x in resumed]
    return "\n".join([*lines, ""])


def _error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


if __name__ == "__main__":
    main()
