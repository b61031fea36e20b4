"""One profile of an example, and what it is held against, in one process:
`benchmarks/profile_accuracy.py` starts these.

    python benchmarks/profile_reference.py unet /tmp/unet        writes /tmp/unet.profile.json and /tmp/unet.json

The reference is a plain loop over the author's model: one thread on one core, gradients added to buffers that exist. It
takes turns with the profile, a few runs after each of its rounds, as the speed of a host changes within seconds; its
time is not the profile's. After that come one forward and backward under two records of memory, and whole training
steps. A run is clean if the thread had the processor for all but 5 % (or 0.2 ms) of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree

import gplan
from gplan.core import Profile
from profiler.host.host_info import keep_freed_memory
from profiler.memory.allocations import traced_allocations
from profiler.model.load import ModelFile, load_model_file
from profiler.model.model_reference import SettingValue

ROOT = Path(__file__).parent.parent
MODELS: dict[str, dict[str, SettingValue]] = {  # a training step of each takes 50 to 300 ms on one core
    "transformer_lm": {},
    "amoebanet_d": {"num_filters": 64},
    "unet": {"width": 24},
    "resnet": {"depth": 34, "width": 48},
    "gpt2_hf": {"num_blocks": 8, "width": 192},
    "bert_hf": {"num_blocks": 8, "width": 192, "feed_forward": 768},
    "llama_hf": {"num_blocks": 8, "width": 192, "feed_forward": 512},
    "t5_hf": {"num_blocks": 4, "width": 192, "feed_forward": 768},
}
MICROBATCH_SIZE = 4
NUM_WARMUP = 3
FEWEST_CLEAN = 5  # below it all runs are used, and the tables say so

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure."""

    num_runs: int  # of the plain model, after each round of the profile; the first warms the caches and does not count
    num_steps: int
    profiling: Mapping[str, Any]  # options of gplan.profile that are not as they come


FULL = Effort(num_runs=3, num_steps=15, profiling={"budget_s": 30.0})  # the plain runs are paid from the budget too
QUICK = Effort(num_runs=2, num_steps=3, profiling={"budget_s": 2.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one profile is held against, and how long it took."""

    forward_s: float
    backward_s: float
    drift: float  # the second half of the plain runs over the first, less 1
    num_clean: int
    num_runs: int
    step_s: float  # zero_grad, forward, loss, backward, optimizer
    sampling_s: float
    profile_s: float
    allocator_bytes: int
    tracker_bytes: int | None  # None: the tracker refused the model
    tracker_refusal: str


def main() -> None:
    """Measure one model once and write both values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("path", type=Path, help="of the two files, without their endings")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    profile, reference = measure(options.model, QUICK if options.quick else FULL)
    profile_path, reference_path = paths(options.path)
    gplan.save(profile, profile_path)
    reference_path.write_text(json.dumps(asdict(reference)))


def paths(path: Path) -> tuple[Path, Path]:
    """Where the profile is written, and where its reference."""
    return path.with_suffix(".profile.json"), path.with_suffix(".json")


def measure(name: str, effort: Effort) -> tuple[Profile, Reference]:
    """A profile in turns with plain runs; the records of memory and whole training steps."""
    keep_freed_memory()  # as in profiles and runs; page faults would come and go from one run to the next
    plain = PlainModel.of_example(name)
    turns = Turns(plain, effort.num_runs)
    start_s = time.perf_counter()
    profile = gplan.profile(
        model_file(name),
        settings=MODELS[name],
        microbatch_sizes=[MICROBATCH_SIZE],
        progress=turns.after_round,
        **effort.profiling,
    )
    profile_s = time.perf_counter() - start_s - turns.plain_s
    with one_core():
        tracker_bytes, tracker_refusal = plain.tracked_rise()
        allocator_bytes = plain.recorded_rise()
        plain_step_s = plain.training_step_s(effort.num_steps)
    runs, half = undisturbed(turns.runs), len(turns.runs) // 2
    return profile, Reference(
        forward_s=statistics.median(x.forward_s for x in runs),
        backward_s=statistics.median(x.backward_s for x in runs),
        drift=median_total_s(turns.runs[half:]) / median_total_s(turns.runs[:half]) - 1,
        num_clean=sum(x.is_clean for x in turns.runs),
        num_runs=len(turns.runs),
        step_s=plain_step_s,
        sampling_s=turns.sampling_s,
        profile_s=profile_s,
        allocator_bytes=allocator_bytes,
        tracker_bytes=tracker_bytes,
        tracker_refusal=tracker_refusal,
    )


class Turns:
    """Plain runs after each round of a profile, and the seconds that each side took."""

    def __init__(self, plain: PlainModel, num_runs: int) -> None:
        self.runs: list[PlainRun] = []
        self.plain_s = 0.0
        self.sampling_s = 0.0  # from the first round's end to the last's, without the plain runs
        self._plain, self._num_runs = plain, num_runs
        self._back_s: float | None = None  # when the profile went on

    def after_round(self, text: str, _share: float) -> None:
        """What the profile calls with its progress."""
        if "round" not in text:
            return
        start_s = time.perf_counter()
        if self._back_s is not None:
            self.sampling_s += start_s - self._back_s
        with one_core():
            self.runs += self._plain.runs(self._num_runs, num_warmup=NUM_WARMUP if self._back_s is None else 1)
        self._back_s = time.perf_counter()
        self.plain_s += self._back_s - start_s


def model_file(name: str) -> str:
    """The model file of an example."""
    return str(ROOT / "examples" / f"{name}.py")


@contextmanager
def one_core() -> Iterator[None]:
    """One thread on the first of this process's cores, the one that a profile with one thread is measured on."""
    num_threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """One forward, with its loss, and one backward of the author's model."""

    forward_s: float
    backward_s: float
    is_clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModel:
    """The author's model with a micro-batch of its data, run as its author would run it."""

    file: ModelFile
    inputs: Any
    target: Any

    @classmethod
    def of_example(cls, name: str) -> PlainModel:
        """An example in training mode, at its size of this benchmark."""
        file = load_model_file(model_file(name), settings=MODELS[name])
        file.model.train()
        inputs, target = next(file.batches(MICROBATCH_SIZE))
        return cls(file=file, inputs=inputs, target=target)

    def loss(self) -> Tensor:
        """A forward and its loss."""
        by_name = isinstance(self.inputs, dict)
        output = self.file.model(**self.inputs) if by_name else self.file.model(self.inputs)
        return self.file.loss(output, self.target)

    def backward(self) -> None:
        """A forward, its loss and a backward."""
        self.loss().backward()  # type: ignore[no-untyped-call]

    def runs(self, num_runs: int, *, num_warmup: int) -> list[PlainRun]:
        """Some runs, warm-up included and left out; gradients are never cleared, so they are added to what is there."""
        return [self._run() for _ in range(num_runs)][min(num_warmup, num_runs - 1) :]

    def _run(self) -> PlainRun:
        loss, forward_s, forward_is_clean = timed(self.loss)
        _, backward_s, backward_is_clean = timed(loss.backward)
        return PlainRun(forward_s=forward_s, backward_s=backward_s, is_clean=forward_is_clean and backward_is_clean)

    def training_step_s(self, num_steps: int) -> float:
        """Median seconds of zero_grad, forward, loss, backward and the optimizer's step."""
        optimizer = self.file.optimizer(list(self.file.model.parameters()))

        def step() -> None:
            optimizer.zero_grad()
            self.backward()
            optimizer.step()

        steps = [timed(step) for _ in range(NUM_WARMUP + num_steps)][NUM_WARMUP:]
        clean_s = [wall_s for _, wall_s, is_clean in steps if is_clean]
        return statistics.median(clean_s if len(clean_s) >= FEWEST_CLEAN else [wall_s for _, wall_s, _ in steps])

    def recorded_rise(self) -> int:
        """Most bytes of a forward and backward above those before, by the allocator's record."""
        with traced_allocations() as trace:
            self.backward()
        return trace.peak_bytes()

    def tracked_rise(self) -> tuple[int | None, str]:
        """The same by MemTracker, or None and why it refused; it does not see what kernels take for themselves."""
        tracker = MemTracker()
        tensors = [x for x in pytree.tree_leaves((self.inputs, self.target)) if isinstance(x, Tensor)]
        try:
            tracker.track_external(self.file.model, *tensors)
            with tracker:
                before_bytes = snapshot_bytes(tracker, "current")
                self.backward()
            return snapshot_bytes(tracker, "peak") - before_bytes, ""
        except Exception as error:  # it hooks into every operation of a model that it does not know
            return None, f"{type(error).__name__}: {str(error)[:200]}"


def timed(work: Callable[[], Result]) -> tuple[Result, float, bool]:
    """What the work gives, its seconds, and whether this thread had the processor for (nearly) all of them."""
    busy_s, start_s = time.thread_time(), time.perf_counter()
    result = work()
    wall_s = time.perf_counter() - start_s
    waited_s = wall_s - (time.thread_time() - busy_s)
    return result, wall_s, waited_s <= max(0.05 * wall_s, 2e-4)


def undisturbed(runs: list[PlainRun]) -> list[PlainRun]:
    """The clean runs, or all of them where too few are clean."""
    clean = [run for run in runs if run.is_clean]
    return clean if len(clean) >= FEWEST_CLEAN else runs


def median_total_s(runs: list[PlainRun]) -> float:
    """Median seconds of forward and backward together."""
    return statistics.median(x.forward_s + x.backward_s for x in undisturbed(runs))


def snapshot_bytes(tracker: MemTracker, kind: str) -> int:
    """What the tracker counts on all devices."""
    return sum(device["Total"] for device in tracker.get_tracker_snapshot(kind).values())


if __name__ == "__main__":
    main()
