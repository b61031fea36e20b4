"""Sharded replicas on four processes: losses, gradients, memory by rank, and resuming, beside one process's plain model.

    python benchmarks/sharded_replicas.py            some 5 minutes on 2 idle cores; writes reports/sharded-replicas/
    python benchmarks/sharded_replicas.py --small    without the model of 57 million parameters

Every run is K = 2 stages by R = 2 replicas unless its row tells otherwise. Gradients and the first loss are those of
`gplan run --check`, losses of later steps those of a loop over the plain model. Memory is the largest of the replicas.
Runs that are killed are in benchmarks/random_kills.py --sharded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import gplan
from gplan.core import Link, Plan, Profile, Run
from gplan.core.checks import Sharding
from gplan.core.units import bytes_text
from gplan.runtime.model_source import open_source
from gplan.runtime.run.loop import BatchStream
from gplan.runtime.run.reference import accumulate_gradients
from profiler.host.host_info import processor, software_versions

ROOT = Path(__file__).parent.parent
NUM_STEPS = 5
SMALL = (
    "examples/transformer_lm.py",
    {"num_blocks": 4, "width": 64, "num_heads": 4, "sequence_length": 32, "tie_embedding": True},
)
LARGE = ("examples/transformer_lm.py", {**SMALL[1], "num_blocks": 8, "width": 768, "num_heads": 12})
BATCH_SIZE = 16  # of the small model

Strategy = tuple[str, int, int, Sharding]
"""Schedule, stages, replicas, sharding."""

STRATEGIES: tuple[Strategy, ...] = (
    ("gpipe", 2, 2, "none"),
    ("gpipe", 2, 2, "optimizer"),
    ("gpipe", 2, 2, "weights"),
    ("1f1b", 2, 2, "weights"),
    ("interleaved-1f1b:2", 2, 2, "optimizer"),
    ("interleaved-1f1b:2", 2, 2, "weights"),
    ("zb-h1", 2, 2, "optimizer"),
    ("gpipe", 1, 4, "weights"),
)
LARGE_STRATEGIES: tuple[Strategy, ...] = tuple(("1f1b", 2, 2, x) for x in ("none", "optimizer", "weights"))
RESUMED: tuple[tuple[Strategy, Strategy], ...] = (
    (("1f1b", 2, 2, "weights"), ("gpipe", 4, 1, "none")),
    (("gpipe", 2, 2, "optimizer"), ("gpipe", 1, 4, "weights")),
    (("gpipe", 4, 1, "none"), ("interleaved-1f1b:2", 2, 2, "weights")),
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
    def memory_error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def main() -> None:
    """Run, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "sharded-replicas")
    options = parser.parse_args()
    os.chdir(ROOT)
    reference, settings = SMALL
    profile = profile_of(reference, settings, microbatch_size=2)
    expected = plain_losses(reference, settings, plan_of(profile, ("gpipe", 1, 1, "none")))
    rows = [x for strategy in STRATEGIES for x in measured(plan_of(profile, strategy), "transformer, 0.2 M", expected)]
    rows += measured(plan_of(profile, ("1f1b", 2, 2, "weights"), recompute="always"), "transformer, 0.2 M", expected)
    resumed = [resume(profile, before, after, expected) for before, after in RESUMED]
    if not options.small:
        reference, large = LARGE
        profile = profile_of(reference, large, microbatch_size=1)
        for strategy in LARGE_STRATEGIES:
            rows += measured(plan_of(profile, strategy, batch_size=4), "transformer, 57 M", None)
    table = pd.DataFrame([{**asdict(x), "memory_error": x.memory_error} for x in rows])
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "runs.csv", index=False)
    pd.DataFrame(resumed).to_csv(options.output / "resumed.csv", index=False)
    (options.output / "README.md").write_text(as_text(rows, resumed))
    print((options.output / "README.md").read_text())


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


def plan_of(profile: Profile, strategy: Strategy, *, batch_size: int = BATCH_SIZE, **options: Any) -> Plan:
    """The plan of a strategy; all have mini-batches of `batch_size` samples."""
    schedule, num_stages, num_replicas, sharding = strategy
    return gplan.balance(
        profile,
        num_devices=num_stages,
        num_microbatches=batch_size // num_replicas // profile.microbatch_sizes[0],
        num_replicas=num_replicas,
        sharding=sharding,
        schedule=schedule,
        **options,
    )


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
    schedule, num_devices, num_replicas, sharding = strategy
    return f"K={num_devices} R={num_replicas} {sharding} {schedule}"


def as_text(rows: Sequence[Row], resumed: Sequence[Mapping[str, Any]]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Sharded replicas on four processes\n",
        f"`python benchmarks/sharded_replicas.py`: {NUM_STEPS} steps each. {processor()}, {os.cpu_count()} cores; "
        f"{', '.join(f'{name} {version}' for name, version in software_versions())}. Gradients are those of the first "
        "step, relative to the largest entry of each parameter; losses those of all steps, relative, where the plain "
        "model of one process was run. Memory is the largest of the replicas of a stage, by PyTorch's allocator.\n",
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
