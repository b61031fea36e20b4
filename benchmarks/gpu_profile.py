"""The real-size suite on one GPU in one call: predicted beside measured, seconds and bytes.

    python benchmarks/gpu_profile.py                       about 10 minutes on one GPU; writes reports/gpu/
    python benchmarks/gpu_profile.py --models gpt2 llama   only some models
    python benchmarks/gpu_profile.py --dry --output /tmp/gpu  the same on a CPU with a tiny model, some seconds

Each of eight models is trained in two precisions and three ways:

1. a plain loop over the author's model, timed by the device's clock, with the allocator's peaks (allocated and reserved);
2. a profile, whose plan of one stage and one micro-batch predicts that step;
3. plans on the virtual engine, each compared as `gplan run` does, raw and at equal speed by the yardstick.

Last, two ranks of one process group try the torch engine on the one GPU, which NCCL may refuse. The GPU's clocks are read
before and after each model. What fails is named in the report; the other models go on, and the report is written after each.
No setting of the GPU is changed.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from real_size import MODELS
from suite import ROOT, error_text, markdown, options_of, points_text, write_report
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gplan
from gplan.core import Link, Plan, Precision, Profile
from gplan.core.checks import RECOMPUTE_MODES
from gplan.core.units import bytes_text, now_text, seconds_text
from gplan.evaluate.compare import BUBBLE, PEAK_MEMORY, STEP_TIME
from gplan.files.json_files import load, save
from gplan_profiler.capture.chain import call_arguments
from gplan_profiler.host.host_info import gpu_state, software_versions
from gplan_profiler.model.load import open_model_file
from gplan_profiler.model.precision import in_precision
from gplan_profiler.timing.clock import Clock, CpuClock, CudaClock, Samples

NO_LINK = Link(latency_s=5e-6, bytes_per_s=25e9)  # one device has no neighbour; the virtual engine sends nothing
NUM_MICROBATCHES = 8
RANK_0 = "rank 0:"
PLAIN = ("forward", "backward", "step", "allocated bytes", "reserved bytes")
RUN_HEADS = ("model", "K", "recompute", "step", "at equal speed", "bubble error, points", "worst peak memory error")
HOST_BOUND = (
    "Each cell: predicted, measured, error. A model is host-bound if its host takes longer to enqueue a step than the GPU",
    "to run it. Its times depend on the speed of Python, which differs between processes. Measured bytes",
    "include workspaces of libraries, which the prediction leaves out.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a size that keeps a GPU busy."""

    file: str
    microbatch_size: int = 64
    settings: dict[str, Any] = field(default_factory=dict)


MEDIUM = {"num_layers": 24, "width": 1024, "feed_forward": 4096, "num_heads": 16, "vocabulary": 50257, "sequence_length": 1024}  # fmt: skip
CASES = {
    **{name: Case(file=file, settings=settings) for name, (file, settings) in MODELS.items()},
    "gpt2-medium": Case(file="examples/transformer_l.py", microbatch_size=4, settings=MEDIUM),
    "launch-bound": Case(file="examples/transformer_lm.py", microbatch_size=4),
    "tiny": Case(
        file="examples/transformer_lm.py", microbatch_size=1, settings={"num_blocks": 1, "width": 16, "sequence_length": 16}
    ),
}  # fmt: skip
EIGHT = ("llama", "t5", "moe", "resnet50", "gpt2", "gpt2-medium", "vit", "whisper")
"""In this order, as time may not suffice for all."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model; the report is written after each, and says why a model has no rows."""
    parser = options_of(__doc__, "gpu")
    parser.add_argument("--models", nargs="*", choices=CASES, default=EIGHT)
    parser.add_argument("--dry", action="store_true", help="all of it on a CPU, with a tiny model and few steps")
    parser.add_argument("--precision", nargs="*", default=["bfloat16", "float32"], help="as of gplan profile")
    runs = [(2, "never"), (4, "never"), (8, "never")]
    parser.add_argument("--runs", nargs="*", type=as_run, metavar="K[:RECOMPUTE]", default=runs, help="on the virtual engine")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of sampling for a profile")
    parser.add_argument("--longest", type=float, default=500.0, help="seconds after which no further model is begun")
    parser.add_argument("--rank-of", type=Path, metavar="PLAN", help=argparse.SUPPRESS)  # one of two ranks
    options = parser.parse_args(arguments)
    options.device = "cpu" if options.dry else "cuda"
    if options.dry:
        options.models, options.runs, options.steps, options.budget = ["tiny"], [(2, "never")], 4, 0.05
    if options.rank_of:
        run_rank(options.rank_of, options)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: nothing to measure")
        return
    start_s, rows, clocks, notes = time.monotonic(), list[Row](), list[str](), about(options)
    options.output.mkdir(parents=True, exist_ok=True)
    for precision, name in product(options.precision, options.models):
        subject = f"{name}, {precision}"
        if time.monotonic() - start_s > options.longest:
            notes.append(f"{subject}: left out, {options.longest:.0f} s had passed")
        else:
            clocks.append(f"{subject}, before: {state_text()}")
            try:
                for row in rows_of(CASES[name], precision, options):
                    rows.append({"model": subject, "recompute": "never", **row})
                    print(*rows[-1].values(), flush=True)
            except Exception as error:  # the other models are still worth their time
                traceback.print_exc()
                notes.append(f"{subject}: {type(error).__name__}: {error}")
            clocks.append(f"{subject}, after: {state_text()}")
            free_memory()
        if (precision, name) == (options.precision[-1], options.models[-1]):
            notes.append(two_ranks(options))
        columns = ("model", "num_devices", "quantity", "recompute", "predicted", "measured", "equal_speed_error")
        table = pd.DataFrame(rows, columns=list(columns)).astype({"predicted": float, "measured": float})
        table["error"] = table.predicted / table.measured.where(table.measured != 0) - 1
        table.to_csv(options.output / "rows.csv", index=False)
        write_report(options.output, report(table, notes, clocks))


def as_run(text: str) -> tuple[int, str]:
    """Stages and recompute: (4, "always") from "4:always", (4, "never") from "4"."""
    num_devices, _, recompute = text.partition(":")
    recompute = recompute or "never"
    if recompute not in RECOMPUTE_MODES:
        raise ValueError(recompute)
    return int(num_devices), recompute


def about(options: argparse.Namespace) -> list[str]:
    """Device, date, versions and options."""
    name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu (a dry run)"
    versions = dict((*software_versions(), ("CUDA", str(torch.version.cuda))))
    return [
        f"device: {name}",
        f"date: {now_text()}",
        "versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()),
        "options: " + ", ".join(f"{key} {value}" for key, value in vars(options).items() if key != "output"),
    ]


def rows_of(case: Case, precision: str, options: argparse.Namespace) -> Iterator[Row]:
    """The plain loop beside the profile, then a run of each 1F1B plan beside its prediction, and the yardstick."""
    plain = run_plain(case, precision, options)
    free_memory()
    start_s = time.monotonic()
    profile = gplan.profile(
        str(ROOT / case.file),
        settings=case.settings,
        microbatch_sizes=[case.microbatch_size],
        device=options.device,
        precision=precision,
        link=NO_LINK,
        contention=0,
        budget_s=options.budget,
    )
    yield {"num_devices": 1, "quantity": "profile seconds", "measured": time.monotonic() - start_s}
    yield from plain_rows(profile, plain)
    free_memory()
    for num_devices, recompute in options.runs:
        if num_devices > len(profile.layers):
            continue
        plan = gplan.balance(
            profile, num_devices=num_devices, num_microbatches=NUM_MICROBATCHES, schedule="1f1b", recompute=recompute
        )
        start_s = time.monotonic()
        run = gplan.run(plan, profile=profile, engine="virtual", num_steps=options.steps)
        found = {} if run.equal_speed is None else {"yardstick ratio": run.equal_speed.ratio}
        found["run seconds"] = time.monotonic() - start_s
        of_run = {"num_devices": num_devices, "recompute": recompute}
        for x in gplan.compare(run).rows:
            if x.measured is not None:
                name = x.quantity if x.stage is None else f"{x.quantity} {x.stage}"
                figures = {"predicted": x.predicted, "measured": x.measured, "equal_speed_error": x.equal_speed_error}
                yield {**of_run, "quantity": name, **figures}
        for name, measured in found.items():
            yield {**of_run, "quantity": name, "measured": measured}
        free_memory()


def plain_rows(profile: Profile, plain: Plain) -> Iterator[Row]:
    """Forward, backward and step of the author's model, and the allocator's peak."""
    plan = gplan.balance(profile, num_devices=1, num_microbatches=1)
    bound = plan.prediction.host_bound
    forward_s, backward_s = profile.one_stage_s(0)
    for name, predicted, measured in (
        ("forward", forward_s, plain.forward_s),
        ("backward", backward_s, plain.backward_s),
        ("step", plan.prediction.step_s, plain.step_s),
        ("allocated bytes", plan.stages[0].memory.peak_bytes, plain.allocated_bytes),
        ("reserved bytes", max(plan.reserved_bytes, default=None), plain.reserved_bytes),
        ("share of host-bound steps", None, plain.is_host_bound),
        ("step if the host took no time", bound.device_step_s if bound else None, plain.step_s),
        ("step with CUDA graphs", bound.graphs_step_s if bound else None, plain.step_s),
    ):
        yield {"num_devices": 1, "quantity": name, "predicted": predicted, "measured": float(measured)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Medians of the plain loop's steps, and the allocator's peaks in one of them."""

    forward_s: float
    backward_s: float
    step_s: float
    is_host_bound: bool
    allocated_bytes: int
    reserved_bytes: int


def run_plain(case: Case, precision: str, options: argparse.Namespace) -> Plain:
    """Training steps of the author's model, warmed up, one batch over and over."""
    file = open_model_file(str(ROOT / case.file), settings=case.settings).load()
    file = in_precision(file, Precision.named(precision))
    model: nn.Module = file.model.to(options.device).train()
    batch = next(file.batches(case.microbatch_size))
    inputs, target = pytree.tree_map(lambda x: x.to(options.device) if isinstance(x, Tensor) else x, batch)
    args, kwargs = call_arguments(inputs)
    on_gpu, optimizer = options.device != "cpu", file.optimizer(list(model.parameters()))
    clock: Clock = CudaClock() if on_gpu else CpuClock()
    forward, backward, whole = Samples(), Samples(), Samples()

    def step() -> None:
        optimizer.zero_grad()
        loss = clock.time(forward, lambda: file.loss(model(*args, **kwargs), target))
        clock.time(backward, loss.backward)
        optimizer.step()

    warm_up(step, clock)
    for part in (forward, backward):
        part.clean_s.clear()
        part.host_s.clear()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        clock.time(whole, step)
        clock.flush()
    return Plain(
        forward_s=forward.timing().median_s,
        backward_s=backward.timing().median_s,
        step_s=whole.timing().median_s,
        is_host_bound=whole.is_host_bound,
        allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else 0,
    )


def warm_up(step: Callable[[], None], clock: Clock) -> None:
    """As long and as often as the clock requires."""
    start_s, rounds = time.monotonic(), 0
    while rounds < clock.warmup_rounds or time.monotonic() - start_s < clock.warmup_s:
        step()
        clock.flush()
        rounds += 1


def two_ranks(options: argparse.Namespace) -> str:
    """Whether the torch engine trains the smallest model with two ranks on the one device, in a sentence."""
    case = CASES["tiny"]
    profile = gplan.profile(
        str(ROOT / case.file), settings=case.settings, microbatch_sizes=[1], device=options.device, link=NO_LINK,
        contention=0, budget_s=0.1,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        save(gplan.balance(profile, num_devices=2, num_microbatches=2), path)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        found = subprocess.run(
            [*launch, "--rank-of", str(path), *(["--dry"] if options.dry else [])],
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    said = [x for x in f"{found.stderr}\n{found.stdout}".splitlines() if "Error" in x or x.startswith(RANK_0)]
    return f"two ranks on one device: {said[-1].strip() if said else f'ended with code {found.returncode}'}"


def run_rank(path: Path, options: argparse.Namespace) -> None:
    """One of the two ranks: some steps of the torch engine on the one device."""
    plan = load(Plan, path)
    case = CASES["tiny"]
    pipe = gplan.pipeline(str(ROOT / case.file), plan, device="cpu" if options.dry else "cuda:0")
    file = open_model_file(str(ROOT / case.file), settings=case.settings).load()
    losses = [float(pipe.step(*batch)) for batch in islice(file.batches(plan.num_microbatches), 2)]
    if os.environ["RANK"] == "0":
        print(f"{RANK_0} losses {losses[0]:.4f} and {losses[1]:.4f} by the torch engine")


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(table: pd.DataFrame, notes: Sequence[str], clocks: Sequence[str]) -> list[str]:
    """The options, the plain models, the runs, and the GPU's clocks."""
    plain, runs = table[table.num_devices == 1], table[table.num_devices > 1]
    return [
        "# The real-size suite on a GPU\n",
        "Made by `python benchmarks/gpu_profile.py` with the options below.\n",
        *(f"- {x}" for x in notes),
        "\n## Layers against the plain model\n",
        *HOST_BOUND,
        "",
        *markdown(
            ["model", *PLAIN, "host-bound"],
            (_plain_cells(*x) for x in plain.groupby("model", sort=False)),
        ),
        "\n## Runs on the virtual engine\n",
        *markdown(RUN_HEADS, (_run_cells(*x) for x in runs.groupby(["model", "num_devices", "recompute"], sort=False))),
        "\n## The GPU's state\n",
        *(f"- {x}" for x in clocks),
    ]


def _plain_cells(model: str, part: pd.DataFrame) -> list[object]:
    found = part.set_index("quantity")
    is_bound = "yes" if found.measured.get("share of host-bound steps") else "no"
    return [model, *(_cell(found, name) for name in PLAIN), is_bound]


def _run_cells(key: tuple[object, ...], part: pd.DataFrame) -> list[object]:
    found = part.set_index("quantity")
    bubble, peaks = found.loc[BUBBLE], found.error[found.index.str.startswith(PEAK_MEMORY)].dropna()
    return [
        *key,
        _cell(found, STEP_TIME),
        error_text(found.equal_speed_error[STEP_TIME]),
        points_text(bubble.predicted - bubble.measured).removesuffix(" points"),
        error_text(max(peaks, key=abs)) if len(peaks) else "",
    ]


def _cell(found: pd.DataFrame, name: str) -> str:
    """Predicted, measured and the error."""
    if name not in found.index:
        return ""
    row = found.loc[name]
    text: Callable[[float], str] = (lambda x: bytes_text(round(x))) if "bytes" in name else seconds_text
    if pd.isna(row.error):
        return text(row.measured)
    return f"{text(row.predicted)}, {text(row.measured)}, {error_text(row.error)}"


def state_text() -> str:
    """The GPU's clocks by nvidia-smi."""
    return ", ".join(f"{name} {value}" for name, value in gpu_state()) or "no nvidia-smi"


if __name__ == "__main__":
    main()
