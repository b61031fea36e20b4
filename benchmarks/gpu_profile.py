"""Profiles on a GPU against plain runs of the same models there: seconds and bytes. One call does all of it.

    python benchmarks/gpu_profile.py [FOLDER]      about 6 minutes on one GPU; writes reports/gpu/, or the folder named

The reference is a plain training loop over the author's model: CUDA events around forward (with loss), backward and
optimizer, one synchronisation a step. Predicted is a plan of one stage and one micro-batch, which is that very step.
No setting of the GPU is changed. Without a GPU the script says so and ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gplan
from gplan.core import Link
from gplan.core.units import bytes_text, percent_text, seconds_text
from profiler.capture.chain import call_arguments
from profiler.host.host_info import gpu_state, software_versions
from profiler.model.load import load_model_file
from profiler.timing.clock import Clock, CudaClock, Samples

ROOT = Path(__file__).parent.parent
LONGEST_S = 420.0  # no further model is begun after that
BUDGET_S = 15.0  # of sampling for one profile
TESTS_AT_MOST_S = 120.0
NUM_STEPS = 30
NO_LINK = Link(latency_s=5e-6, bytes_per_s=25e9)  # one GPU has no neighbour; a plan of one stage sends nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a size that keeps a GPU busy."""

    name: str
    example: str
    microbatch_size: int
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(
        name="GPT-2 medium's dimensions", example="transformer_l", microbatch_size=4,
        settings={"num_layers": 24, "width": 1024, "feed_forward": 4096, "num_heads": 16, "vocabulary": 50257,
                  "sequence_length": 1024},
    ),
    Case(name="transformer_lm", example="transformer_lm", microbatch_size=32, settings={"width": 512, "num_heads": 8}),
    Case(name="resnet", example="resnet", microbatch_size=64, settings={"depth": 50, "width": 64}),
    Case(name="unet", example="unet", microbatch_size=16, settings={"width": 64}),
    Case(name="amoebanet_d", example="amoebanet_d", microbatch_size=64, settings={"num_layers": 6, "num_filters": 128}),
    Case(name="transformer_lm, small", example="transformer_lm", microbatch_size=4),  # bound by launches
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: what the profile says and what the plain loop took."""

    name: str
    num_layers: int
    profile_s: float
    layers_forward_s: float
    layers_backward_s: float
    plain_forward_s: float
    plain_backward_s: float
    predicted_step_s: float
    plain_step_s: float
    predicted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    is_launch_bound: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Medians of the plain loop's steps, and the allocator's peaks in one of them."""

    forward_s: float
    backward_s: float
    step_s: float
    is_launch_bound: bool
    allocated_bytes: int
    reserved_bytes: int


def main() -> None:
    """Measure every model, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "reports" / "gpu")
    folder: Path = parser.parse_args().folder
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: nothing to measure")
        return
    start_s, before = time.monotonic(), gpu_state()
    for name, value in (*before, *software_versions(), ("CUDA", str(torch.version.cuda))):
        print(f"{name}: {value}")
    tests, rows, failures = run_tests(), [], []
    print(tests, flush=True)
    for case in CASES:
        if time.monotonic() - start_s > LONGEST_S:
            failures.append(f"{case.name}: left out, {LONGEST_S:.0f} s had passed")
            continue
        try:
            rows.append(measure(case))
            print(as_line(rows[-1]), flush=True)
        except Exception as error:  # the other models are still worth their time
            traceback.print_exc()
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
        free_memory()
    write(folder, rows, failures, {"before": before, "after": gpu_state()}, tests)


def run_tests() -> str:
    """The tests that need a GPU, and how they ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/profiler", "-k", "gpu or cuda"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_AT_MOST_S)
    except subprocess.TimeoutExpired:
        return f"tests: not finished after {TESTS_AT_MOST_S:.0f} s"
    return "tests: " + " | ".join(done.stdout.strip().splitlines()[-4:])


def measure(case: Case) -> Row:
    """The plain loop, then the profile and the plan of one stage that is the same step."""
    plain = run_plain(case)
    free_memory()
    start_s = time.monotonic()
    profile = gplan.profile(
        str(ROOT / "examples" / f"{case.example}.py"),
        settings=case.settings,
        microbatch_sizes=[case.microbatch_size],
        device="cuda",
        link=NO_LINK,
        budget_s=BUDGET_S,
    )
    profile_s = time.monotonic() - start_s
    plan = gplan.balance(profile, num_devices=1, num_microbatches=1)
    forward_s, backward_s = profile.one_stage_s(0)
    return Row(
        name=case.name,
        num_layers=len(profile.layers),
        profile_s=profile_s,
        layers_forward_s=forward_s,
        layers_backward_s=backward_s,
        plain_forward_s=plain.forward_s,
        plain_backward_s=plain.backward_s,
        predicted_step_s=plan.prediction.step_s,
        plain_step_s=plain.step_s,
        predicted_bytes=plan.stages[0].memory.peak_bytes,
        allocated_bytes=plain.allocated_bytes,
        reserved_bytes=plain.reserved_bytes,
        is_launch_bound=plain.is_launch_bound,
        notes=profile.notes,
    )


def run_plain(case: Case) -> Plain:
    """Training steps of the author's model, warmed up, one batch over and over."""
    file = load_model_file(str(ROOT / "examples" / f"{case.example}.py"), settings=case.settings)
    model: nn.Module = file.model.cuda().train()
    batch = next(file.batches(case.microbatch_size))
    inputs, target = pytree.tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, batch)
    args, kwargs = call_arguments(inputs)
    optimizer, clock = file.optimizer(list(model.parameters())), CudaClock()
    forward, backward, whole = Samples(), Samples(), Samples()

    def step() -> None:
        optimizer.zero_grad()
        loss = clock.time(forward, lambda: file.loss(model(*args, **kwargs), target))
        clock.time(backward, loss.backward)
        optimizer.step()

    warm_up(step, clock)
    for part in (forward, backward):
        part.clean_s.clear()
        part.launch_s.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(NUM_STEPS):
        clock.time(whole, step)
        clock.flush()
    return Plain(
        forward_s=forward.timing().median_s,
        backward_s=backward.timing().median_s,
        step_s=whole.timing().median_s,
        is_launch_bound=whole.is_launch_bound,
        allocated_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
    )


def warm_up(step: Any, clock: Clock) -> None:
    """As long and as often as the clock asks for."""
    start_s, rounds = time.monotonic(), 0
    while rounds < clock.warmup_rounds or time.monotonic() - start_s < clock.warmup_s:
        step()
        clock.flush()
        rounds += 1


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def write(folder: Path, rows: list[Row], failures: list[str], states: dict[str, Any], tests: str) -> None:
    """results.json with every figure, README.md with the table."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = dict((*software_versions(), ("CUDA", str(torch.version.cuda))))
    content = {
        "gpu": states,
        "versions": versions,
        "tests": tests,
        "rows": [asdict(x) for x in rows],
        "failures": failures,
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# Profiles on a GPU",
        "",
        f"`python benchmarks/gpu_profile.py`; {torch.cuda.get_device_name()}, "
        + ", ".join(f"{name} {value}" for name, value in versions.items()),
        "",
        *(
            f"- {when}: " + (", ".join(f"{name} {value}" for name, value in state) or "no nvidia-smi")
            for when, state in states.items()
        ),
        f"- {tests}",
        "",
        "| model | layers | forward: layers, plain, error | backward | step: predicted, plain, error "
        "| peak: predicted, allocated, error | reserved | bound by |",
        "|---|---|---|---|---|---|---|---|",
        *(as_line(row) for row in rows),
        *(["", *(f"- {x}" for x in failures)] if failures else []),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
    print(f"wrote {folder}")


def as_line(row: Row) -> str:
    """A row of the Markdown table."""
    cells = (
        row.name,
        str(row.num_layers),
        compared(row.layers_forward_s, row.plain_forward_s, seconds_text),
        compared(row.layers_backward_s, row.plain_backward_s, seconds_text),
        compared(row.predicted_step_s, row.plain_step_s, seconds_text),
        compared(row.predicted_bytes, row.allocated_bytes, bytes_text),
        bytes_text(row.reserved_bytes),
        "launches" if row.is_launch_bound else "kernels",
    )
    return f"| {' | '.join(cells)} |"


def compared(predicted: float, measured: float, text: Any) -> str:
    """Both, and the error of the first."""
    return f"{text(predicted)}, {text(measured)}, {percent_text(predicted / measured - 1, signed=True)}"


if __name__ == "__main__":
    main()
