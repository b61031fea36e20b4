"""The real-size suite on one GPU in one call: predicted beside measured, seconds and bytes.

    python benchmarks/gpu_profile.py                       about 10 minutes on one GPU; writes reports/gpu/
    python benchmarks/gpu_profile.py --models gpt2 llama   only some models
    python benchmarks/gpu_profile.py --device cpu --models tiny --runs 2 --steps 2 --budget 0.1 --output /tmp/gpu
                                                           a dry run without a GPU, some seconds

Each model of benchmarks/real_size_models.py, and ResNet-50, is trained in bfloat16 three ways. A plain loop over the
author's model, timed by the device's clock, with the allocator's peaks (allocated and reserved). A profile, whose plan of
one stage and one micro-batch is that very step. And plans on the virtual engine, each compared as `gplan run` does, raw
and at equal speed by the yardstick. The GPU's clocks are read before and after each model. What fails is named in the
report; the other models go on, and the report is written after each. No setting of the GPU is changed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from host_speed import yardstick_of
from suite import ROOT, error_text, markdown, options_of, points_text
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gplan
from gplan.core import Link, Precision, Profile
from gplan.core.checks import RECOMPUTE_MODES
from gplan.core.units import bytes_text, now_text, seconds_text
from gplan.evaluate.compare import BUBBLE, PEAK_MEMORY, STEP_TIME
from profiler.capture.chain import call_arguments
from profiler.host.host_info import gpu_state, software_versions
from profiler.model.load import load_model_file
from profiler.model.precision import in_precision
from profiler.timing.clock import Clock, CpuClock, CudaClock, Samples

TESTS_AT_MOST_S = 120.0
NO_LINK = Link(latency_s=5e-6, bytes_per_s=25e9)  # one device has no neighbour; the virtual engine sends nothing
NUM_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a size that keeps a GPU busy."""

    name: str
    file: str
    microbatch_size: int = 64
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    *(
        Case(name=name, file="benchmarks/real_size_models.py", settings={"name": name})
        for name in ("gpt2", "bert", "llama", "t5", "vit", "moe", "whisper")
    ),
    Case(
        name="resnet50", file="examples/resnet.py",
        settings={"depth": 50, "width": 64, "image_size": 224, "num_classes": 1000},
    ),
    Case(
        name="gpt2-medium", file="examples/transformer_l.py", microbatch_size=4,
        settings={"num_layers": 24, "width": 1024, "feed_forward": 4096, "num_heads": 16, "vocabulary": 50257,
                  "sequence_length": 1024},
    ),
    Case(name="launch-bound", file="examples/transformer_lm.py", microbatch_size=4),
)  # fmt: skip
TINY = Case(
    name="tiny",
    file="examples/transformer_lm.py",
    microbatch_size=1,
    settings={"num_blocks": 1, "width": 16, "sequence_length": 16},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A predicted and a measured quantity of one model."""

    model: str
    num_devices: int  # 1: the plain loop
    quantity: str
    recompute: str = "never"
    predicted: float | None
    measured: float
    equal_speed_error: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is run, and where."""

    models: tuple[str, ...]
    device: str
    precision: Any
    runs: tuple[tuple[int, str], ...]  # stages, and recompute
    num_steps: int
    budget_s: float
    longest_s: float  # no further model is begun after that

    @property
    def on_gpu(self) -> bool:
        """Whether there is an allocator that counts and a clock that is read later."""
        return self.device != "cpu"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model, then write the tables."""
    parser = options_of(__doc__, "gpu")
    names = [x.name for x in CASES]
    parser.add_argument("--models", nargs="*", choices=[*names, TINY.name], default=names)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu for a dry run")
    parser.add_argument("--precision", default="bfloat16", help="as of gplan profile")
    runs = [(2, "never"), (4, "never"), (4, "always")]
    parser.add_argument(
        "--runs", nargs="*", type=as_run, metavar="K[:RECOMPUTE]", default=runs, help="on the virtual engine"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of sampling for a profile")
    parser.add_argument("--longest", type=float, default=1500.0, help="seconds after which no further model is begun")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: nothing to measure")
        return
    suite = Suite(
        device=options.device,
        precision=options.precision,
        models=tuple(options.models),
        runs=tuple(options.runs),
        num_steps=options.steps,
        budget_s=options.budget,
        longest_s=options.longest,
    )
    report = Report(suite=suite)
    print(*report.about, sep="\n", flush=True)
    cases = {x.name: x for x in (*CASES, TINY)}
    run_suite([cases[x] for x in options.models], suite, report, options.output)


def as_run(text: str) -> tuple[int, str]:
    """Stages and recompute: (4, "always") from "4:always", (4, "never") from "4"."""
    num_devices, _, recompute = text.partition(":")
    recompute = recompute or "never"
    if recompute not in RECOMPUTE_MODES:
        raise ValueError(recompute)
    return int(num_devices), recompute


def run_suite(cases: Sequence[Case], suite: Suite, report: Report, folder: Path) -> None:
    """Add the rows of every model to the report, and why a model has none; the report is written after each."""
    start_s = time.monotonic()
    if suite.on_gpu:
        report.notes.append(run_tests())
    for case in cases:
        if time.monotonic() - start_s > suite.longest_s:
            report.notes.append(f"{case.name}: left out, {suite.longest_s:.0f} s had passed")
            report.write(folder)
            continue
        before = gpu_state()
        try:
            for row in rows_of(case, suite):
                report.rows.append(row)
                print(row.model, row.num_devices, row.recompute, row.quantity, row.predicted, row.measured, flush=True)
        except Exception as error:  # the other models are still worth their time
            traceback.print_exc()
            report.notes.append(f"{case.name}: {type(error).__name__}: {error}")
        report.clocks += [(case.name, when, state_text(x)) for when, x in (("before", before), ("after", gpu_state()))]
        report.write(folder)
        free_memory(suite)


def rows_of(case: Case, suite: Suite) -> Iterator[Row]:
    """The plain loop beside the profile, then a run of each plan beside its prediction."""
    plain = run_plain(case, suite)
    free_memory(suite)
    start_s = time.monotonic()
    profile = gplan.profile(
        str(ROOT / case.file),
        settings=case.settings,
        microbatch_sizes=[case.microbatch_size],
        device=suite.device,
        precision=suite.precision,
        link=NO_LINK,
        contention=0,
        budget_s=suite.budget_s,
    )
    yield Row(
        model=case.name, num_devices=1, quantity="profile seconds", predicted=None, measured=time.monotonic() - start_s
    )
    yield from plain_rows(case, profile, plain)
    free_memory(suite)
    for num_devices, recompute in suite.runs:
        if num_devices <= len(profile.layers):
            yield from run_rows(case, profile, num_devices, recompute, suite)
        free_memory(suite)


def plain_rows(case: Case, profile: Profile, plain: Plain) -> Iterator[Row]:
    """Forward, backward and step of the author's model, and the allocator's peak."""
    plan = gplan.balance(profile, num_devices=1, num_microbatches=1)
    forward_s, backward_s = profile.one_stage_s(0)
    pairs = {
        "forward": (forward_s, plain.forward_s),
        "backward": (backward_s, plain.backward_s),
        "step": (plan.prediction.step_s, plain.step_s),
        "allocated bytes": (float(plan.stages[0].memory.peak_bytes), float(plain.allocated_bytes)),
        "reserved bytes": (None, float(plain.reserved_bytes)),
        "share of launch-bound steps": (None, float(plain.is_launch_bound)),
    }
    for name, (predicted, measured) in pairs.items():
        yield Row(model=case.name, num_devices=1, quantity=name, predicted=predicted, measured=measured)


def run_rows(case: Case, profile: Profile, num_devices: int, recompute: str, suite: Suite) -> Iterator[Row]:
    """A 1F1B plan on the virtual engine: what `gplan run` compares, and the yardstick."""
    plan = gplan.balance(
        profile, num_devices=num_devices, num_microbatches=NUM_MICROBATCHES, schedule="1f1b", recompute=recompute
    )
    start_s = time.monotonic()
    run = gplan.run(plan, profile=profile, engine="virtual", num_steps=suite.num_steps)
    row_of = partial(Row, model=case.name, num_devices=num_devices, recompute=recompute)
    for row in gplan.compare(run).rows:
        if row.measured is not None:
            yield row_of(
                quantity=row.quantity if row.stage is None else f"{row.quantity} {row.stage}",
                predicted=row.predicted,
                measured=row.measured,
                equal_speed_error=row.equal_speed_error,
            )
    found = {f"yardstick {name}": ratio for name, ratio in yardstick_of(run).items()}
    found["run seconds"] = time.monotonic() - start_s
    for name, measured in found.items():
        yield row_of(quantity=name, predicted=None, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Medians of the plain loop's steps, and the allocator's peaks in one of them."""

    forward_s: float
    backward_s: float
    step_s: float
    is_launch_bound: bool
    allocated_bytes: int
    reserved_bytes: int


def run_plain(case: Case, suite: Suite) -> Plain:
    """Training steps of the author's model, warmed up, one batch over and over."""
    file = load_model_file(str(ROOT / case.file), settings=case.settings)
    file = in_precision(file, Precision.named(suite.precision))
    model: nn.Module = file.model.to(suite.device).train()
    batch = next(file.batches(case.microbatch_size))
    inputs, target = pytree.tree_map(lambda x: x.to(suite.device) if isinstance(x, Tensor) else x, batch)
    args, kwargs = call_arguments(inputs)
    optimizer = file.optimizer(list(model.parameters()))
    clock: Clock = CudaClock() if suite.on_gpu else CpuClock()
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
    if suite.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(suite.num_steps):
        clock.time(whole, step)
        clock.flush()
    return Plain(
        forward_s=forward.timing().median_s,
        backward_s=backward.timing().median_s,
        step_s=whole.timing().median_s,
        is_launch_bound=whole.is_launch_bound,
        allocated_bytes=torch.cuda.max_memory_allocated() if suite.on_gpu else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if suite.on_gpu else 0,
    )


def warm_up(step: Callable[[], None], clock: Clock) -> None:
    """As long and as often as the clock requires."""
    start_s, rounds = time.monotonic(), 0
    while rounds < clock.warmup_rounds or time.monotonic() - start_s < clock.warmup_s:
        step()
        clock.flush()
        rounds += 1


def free_memory(suite: Suite) -> None:
    """Give back what nothing refers to any more."""
    if suite.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def run_tests() -> str:
    """The tests that need a GPU, and how they ended."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/profiler", "-k", "gpu or cuda"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_AT_MOST_S)
    except subprocess.TimeoutExpired:
        return f"tests: not finished after {TESTS_AT_MOST_S:.0f} s"
    return f"tests (exit status {done.returncode}): " + " | ".join(done.stdout.strip().splitlines()[-4:])


@dataclass(slots=True)
class Report:
    """What was measured so far."""

    suite: Suite
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clocks: list[tuple[str, str, str]] = field(default_factory=list)  # model, when, state of the GPU
    created: str = field(default_factory=now_text)

    @property
    def about(self) -> list[str]:
        """Device, date, versions and options."""
        name = torch.cuda.get_device_name() if self.suite.on_gpu else "cpu (a dry run)"
        versions = dict((*software_versions(), ("CUDA", str(torch.version.cuda))))
        return [
            f"device: {name}",
            f"date: {self.created}",
            "versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()),
            "options: " + ", ".join(f"{key} {value}" for key, value in asdict(self.suite).items()),
        ]

    def write(self, folder: Path) -> None:
        """rows.csv with every figure, README.md with the tables."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = pd.DataFrame([{**asdict(x), "error": x.error} for x in self.rows])
        rows.to_csv(folder / "rows.csv", index=False)
        (folder / "README.md").write_text(self.text())
        print(f"wrote {folder}")

    def text(self) -> str:
        """The report."""
        found = {(x.model, x.num_devices, x.recompute, x.quantity): x for x in self.rows}
        models = dict.fromkeys(x.model for x in self.rows)
        runs = dict.fromkeys((x.model, x.num_devices, x.recompute) for x in self.rows if x.num_devices > 1)
        plain = ([name, *_plain_cells(partial(_found, found, name, 1, "never"))] for name in models)
        lines = [
            "# The real-size suite on a GPU\n",
            "Made by `python benchmarks/gpu_profile.py` with the options below.\n",
            *(f"- {x}" for x in (*self.about, *self.notes)),
            "\n## Layers against the plain model\n",
            *LAUNCH_BOUND,
            "",
            *markdown(["model", *PLAIN, "reserved", "launch-bound"], plain),
            "\n## Runs on the virtual engine\n",
            *markdown(RUN_HEADS, ([*key, *self._run_cells(key)] for key in runs)),
            "\n## The GPU's state\n",
            *(f"- {model}, {when}: {state}" for model, when, state in self.clocks),
        ]
        return "\n".join(lines) + "\n"

    def _run_cells(self, key: tuple[str, int, str]) -> list[str]:
        found = {x.quantity: x for x in self.rows if (x.model, x.num_devices, x.recompute) == key}
        step, bubble = found.get(STEP_TIME), found.get(BUBBLE)
        points = points_text((bubble.predicted or 0.0) - bubble.measured) if bubble else ""
        peaks = [x.error for name, x in found.items() if name.startswith(PEAK_MEMORY) and x.error is not None]
        worst = error_text(max(peaks, key=abs)) if peaks else ""
        return [
            _cell(step),
            error_text(step.equal_speed_error if step else None),
            points.removesuffix(" points"),
            worst,
        ]


def _found(rows: dict[Any, Row], *key: str | int) -> Row | None:
    return rows.get(key)


def _plain_cells(row_of: Callable[[str], Row | None]) -> list[str]:
    bound = row_of("share of launch-bound steps")
    cells = [_cell(row_of(name)) for name in (*PLAIN, "reserved bytes")]
    return [*cells, "yes" if bound and bound.measured else "no"]


RUN_HEADS = ("model", "K", "recompute", "step", "at equal speed", "bubble error, points", "worst peak memory error")
PLAIN = ("forward", "backward", "step", "allocated bytes")
LAUNCH_BOUND = (
    "Each cell: predicted, measured, error. A model is launch-bound if the host takes about as long to launch a step as the",
    "GPU takes to run it. Its times depend on the speed of Python, which differs between processes. Measured bytes",
    "include workspaces of libraries, which the prediction leaves out.",
)


def _cell(row: Row | None) -> str:
    """Predicted, measured and the error."""
    if row is None:
        return ""
    text: Callable[[float], str] = (lambda x: bytes_text(round(x))) if "bytes" in row.quantity else seconds_text
    if row.predicted is None or row.error is None:
        return text(row.measured)
    return f"{text(row.predicted)}, {text(row.measured)}, {error_text(row.error)}"


def state_text(state: Sequence[tuple[str, str]]) -> str:
    """What nvidia-smi says."""
    return ", ".join(f"{name} {value}" for name, value in state) or "no nvidia-smi"


if __name__ == "__main__":
    main()
