"""Compare the plans of two checkouts of gplan, to prove that a redesign changed none of them.

    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT            about ten minutes, the first time more
    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT --quick    about a minute

Profiles are made once, by the old checkout, and kept as files in --profiles; both checkouts plan the same files. One
process per checkout and profile makes the plans, and the two take turns case by case, so that their planning times are
comparable on a host whose speed drifts; ratios are of processor time. A case is one call of `gplan.balance` or `gplan.search`, or one
`gplan balance` command; the plan of each is also simulated. Where a plan fits without a memory limit, the case is
repeated with a limit below its largest device peak, the same number of bytes for both checkouts.

Two proven plans must have equal stages, recomputed layers, devices and peak bytes, and step times, bubbles and timelines
that agree to 1e-9. A plan that the time limit stopped depends on the speed of the host. It is counted apart, and its step
time must agree to within the gap of the two plans. The exit code is 1 where any plan or error differs.

Only public functions and the command line are called. `for_checkout` is the place to change where the new checkout
reads another file format, `plan_facts` and `timeline_facts` where attributes of plans and timelines have other names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

NUM_DEVICES = (2, 4, 8)
NUM_CHUNKS = {
    "gpipe": 1, "1f1b": 1, "eager-1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "zb-v": 2,
}  # fmt: skip
RECOMPUTE = ("never", "always", "except-last", "selected")
MEMORY_SHARE = 0.9  # of the largest device peak without a limit
SELECTED_SHARE = 0.7  # the same where layers to recompute are selected, which fits more
TOLERANCE = 1e-9  # of seconds, relative, and of bubbles
SLOW_S = 0.05  # ratios of planning times of single cases are reported from here
NUM_RETIMED = 5  # largest ratios, each measured again
NUM_ROUNDS = 3  # of measuring them again; the least time counts
STUCK_S = 300.0  # a case that takes longer ends its process

MACHINE = """
[[host]]
name = "fast"
devices = 2
[[host]]
name = "slow"
devices = 2
speed = 0.5
[links]
within = "10GB/s,5us"
between = "1GB/s,50us"
"""

Option = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How a profile is made: an example and what else `gplan profile` is given."""

    name: str
    example: str
    options: tuple[str, ...] = ()
    is_quick: bool = False

    def command(self, checkout: Path, output: Path) -> list[str]:
        """The command that makes it."""
        model = str(checkout / "examples" / f"{self.example}.py")
        return [sys.executable, "-m", "gplan", "profile", model, "--budget", "1", "--json", "--output", str(output), *self.options]  # fmt: skip


def _source(name: str, example: str, options: str, *, is_quick: bool = False) -> Source:
    return Source(name=name, example=example, options=tuple(options.split()), is_quick=is_quick)


SOURCES = (
    _source("transformer_lm", "transformer_lm", "--microbatch-size 1,2,4", is_quick=True),
    _source(
        "transformer_lm_tied", "transformer_lm", "--set num_blocks=16 --set tie_embedding=true --microbatch-size 2"
    ),
    _source("resnet", "resnet", "--microbatch-size 1,2"),
    _source("unet", "unet", "--microbatch-size 2"),
    _source("amoebanet_d", "amoebanet_d", "--microbatch-size 2"),
    _source("bert_hf", "bert_hf", "--microbatch-size 2"),
    _source("gpt2_hf", "gpt2_hf", "--microbatch-size 2"),
    _source("llama_hf", "llama_hf", "--set num_blocks=14 --microbatch-size 2"),
    _source("t5_hf", "t5_hf", "--microbatch-size 2", is_quick=True),
    _source("vit_hf", "vit_hf", "--set num_blocks=14 --microbatch-size 2"),
    _source("nmt_transformer", "nmt_transformer", "--microbatch-size 2"),
    _source("transformer_l", "transformer_l", "--set num_layers=14 --microbatch-size 2"),
    _source(
        "transformer_lm_h100",
        "transformer_lm",
        "--set num_blocks=16 --device meta --hardware h100 --microbatch-size 1,4",
        is_quick=True,
    ),
    _source("unet_v100", "unet", "--device meta --hardware v100 --granularity op --microbatch-size 2"),
)
"""Measured and computed profiles; more blocks than by default where 8 devices with 2 chunks need 16 layers."""


WITH_COMMANDS = ("transformer_lm", "t5_hf", "transformer_lm_h100")
"""Profiles that are also searched, and planned by the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call that both checkouts answer."""

    profile: str
    call: Literal["balance", "search", "command"]
    options: tuple[tuple[str, Option], ...] = ()  # of a function
    words: tuple[str, ...] = ()  # of a command

    @property
    def label(self) -> str:
        """The case in one line."""
        return " ".join([self.profile, self.call, *(f"{k}={v}" for k, v in self.options), *self.words])

    @property
    def time_limit_s(self) -> float:
        """How long the planner may search."""
        found = dict(self.options).get("time_limit_s") or self.words[self.words.index("--time-limit") + 1]
        return float(found)

    def with_memory(self, memory_bytes: int) -> Case:
        """The same with a limit on the memory of each device."""
        return replace(self, options=(*self.options, ("memory_bytes", memory_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What is compared of a stage."""

    layers: tuple[str, ...]
    recomputed: tuple[str, ...]
    device: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineFacts:
    """What is compared of a simulated step."""

    step_s: float
    bubble: float
    sum_starts_s: float
    sum_ends_s: float
    sum_transfers_s: float
    transferred_bytes: int
    actions: str  # a digest of the order of all actions of each device


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalFacts:
    """What is compared of a plan on the frontier of a search."""

    setting: str
    cuts: tuple[int, ...]
    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What is compared of a plan."""

    setting: str
    cuts: tuple[int, ...]
    stages: tuple[StageFacts, ...]
    step_s: float
    bubble: float
    peak_bytes: int  # of the device that needs most
    lower_bound_s: float
    gap: float
    is_proven: bool
    solver: str
    frontier: tuple[RivalFacts, ...]
    timeline: TimelineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan, or the error in its place, and the seconds that it took."""

    seconds: float
    cpu_s: float  # of processor time, which other work on the host changes less
    plan: PlanFacts | None = None
    error: str = ""  # its class
    exit_code: int = 0
    text: str = ""  # of the error, for the reader; not compared

    @property
    def kind(self) -> str:
        """Whether it is a plan, else which error."""
        return self.error or "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One case as both checkouts answered it."""

    case: Case
    old: Outcome
    new: Outcome

    @property
    def is_stopped(self) -> bool:
        """Whether the time limit had a part in either answer."""
        return any(_is_stopped(self.case, x) for x in (self.old, self.new))

    @property
    def is_timed(self) -> bool:
        """Whether the ratio of planning times means something: two plans that no time limit stopped."""
        return self.old.plan is not None and self.new.plan is not None and not self.is_stopped

    @property
    def ratio(self) -> float:
        """Processor time of planning, new over old."""
        return self.new.cpu_s / self.old.cpu_s

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs, in words; empty where nothing does."""
        old, new = self.old, self.new
        if self.is_stopped:
            return _differences_when_stopped(old, new)
        if (old.kind, old.exit_code) != (new.kind, new.exit_code):
            return (f"{old.kind} ({old.exit_code}) became {new.kind} ({new.exit_code}): {new.text or old.text}",)
        if old.plan is None or new.plan is None:
            return ()
        return tuple(_plan_differences(old.plan, new.plan))


def _is_stopped(case: Case, outcome: Outcome) -> bool:
    near_limit = outcome.seconds > 0.9 * case.time_limit_s
    if outcome.plan is None:  # a search for a plan that fits may end without one
        return near_limit and outcome.error == "NoPlanError"
    return not outcome.plan.is_proven or (case.call == "search" and near_limit)  # the frontier takes what time is left


def _differences_when_stopped(old: Outcome, new: Outcome) -> tuple[str, ...]:
    if old.plan is None or new.plan is None:
        return ()
    found, allowed = relative(old.plan.step_s, new.plan.step_s), max(old.plan.gap, new.plan.gap, TOLERANCE)
    return (f"step time differs by {found:.2e}, the gap is {allowed:.2e}",) if found > allowed else ()


def _plan_differences(old: PlanFacts, new: PlanFacts) -> Iterator[str]:
    if old.setting != new.setting:
        yield f"setting: {old.setting} became {new.setting}"
    if old.cuts != new.cuts:
        yield f"cuts: {old.cuts} became {new.cuts}"
    for name in ("layers", "recomputed", "device", "peak_bytes"):
        before, after = ([getattr(x, name) for x in plan.stages] for plan in (old, new))
        if before != after:
            yield f"{name} of stages: {_short(before)} became {_short(after)}"
    for name, one, other in _numbers(old, new):
        if abs(one - other) > TOLERANCE * (1.0 if name == "bubble" else max(abs(one), abs(other))):
            yield f"{name}: {one!r} became {other!r}"
    if old.timeline.actions != new.timeline.actions:
        yield "order of actions differs"
    if [(x.setting, x.cuts, x.peak_bytes) for x in old.frontier] != [(x.setting, x.cuts, x.peak_bytes) for x in new.frontier]:  # fmt: skip
        yield f"frontier: {len(old.frontier)} plans became {len(new.frontier)}, or other ones"


def _numbers(old: PlanFacts, new: PlanFacts) -> Iterator[tuple[str, float, float]]:
    yield "step time", old.step_s, new.step_s
    yield "bubble", old.bubble, new.bubble
    yield "bubble", old.timeline.bubble, new.timeline.bubble
    yield "lower bound", old.lower_bound_s, new.lower_bound_s
    for name in ("step_s", "sum_starts_s", "sum_ends_s", "sum_transfers_s", "transferred_bytes"):
        yield f"timeline {name}", getattr(old.timeline, name), getattr(new.timeline, name)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def relative(one: float, other: float) -> float:
    """The relative difference of two numbers.

    >>> relative(4.0, 5.0), relative(0.0, 0.0)
    (0.2, 0.0)
    """
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


# What a checkout is called with, and what it answers.


def for_checkout(profile_json: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """A profile of format 1 in the format that `checkout` reads."""
    formats = checkout / "gplan" / "files" / "json_files.py"
    if not formats.exists() or "gplan.profile/1" in formats.read_text():
        return profile_json
    layers = [{**x, "costs": [_renamed_keys(cost) for cost in x["costs"]]} for x in profile_json["layers"]]
    loss = [_renamed_keys(cost) for cost in profile_json["loss"]]
    values = [{key: x for key, x in value.items() if key in VALUE_KEYS} for value in profile_json["values"]]
    renamed = {**_renamed_keys(profile_json), "layers": layers, "loss": loss, "values": values}
    (found,) = set(re.findall(r"gplan\.profile/\d+", formats.read_text()))
    return {**renamed, "format": found}


VALUE_KEYS = ("producer", "consumers", "costs")  # in format 2; the others only importers of other formats had set


def _renamed_keys(found: dict[str, Any]) -> dict[str, Any]:
    """The keys that have another name in format 2 of profiles."""
    return {{"waiting": "leftovers", "whole": "whole_model"}.get(key, key): value for key, value in found.items()}


def plan_facts(plan: Any, timeline: Any) -> PlanFacts:
    """What is compared of a plan of either checkout."""
    return PlanFacts(
        setting=_setting(plan),
        cuts=tuple(plan.cuts),
        stages=tuple(
            StageFacts(
                layers=tuple(x.layer_names),
                recomputed=tuple(x.recompute_layers),
                device=x.on_device,
                peak_bytes=x.memory.peak_bytes,
            )
            for x in plan.stages
        ),
        step_s=plan.prediction.step_s,
        bubble=plan.prediction.bubble,
        peak_bytes=plan.peak_bytes,
        lower_bound_s=plan.proof.lower_bound_s,
        gap=plan.proof.gap,
        is_proven=plan.proof.is_proven,
        solver=plan.proof.solver,
        frontier=tuple(
            RivalFacts(setting=_setting(x), cuts=tuple(x.cuts), step_s=x.step_s, peak_bytes=x.peak_bytes)
            for x in plan.frontier
        ),
        timeline=timeline_facts(timeline),
    )


def _setting(plan: Any) -> str:
    return (
        f"{plan.schedule}, {plan.num_stages} stages, {plan.num_microbatches} micro-batches of {plan.microbatch_size}, "
        f"{plan.num_replicas} replicas, recompute {plan.recompute}"
    )


def timeline_facts(timeline: Any) -> TimelineFacts:
    """What is compared of a simulated step of either checkout."""
    actions = " ".join(f"{x.device}:{x.action}" for x in timeline.spans)
    return TimelineFacts(
        step_s=timeline.step_s,
        bubble=timeline.bubble,
        sum_starts_s=math.fsum(x.start_s for x in timeline.spans),
        sum_ends_s=math.fsum(x.end_s for x in timeline.spans),
        sum_transfers_s=math.fsum(x.end_s for x in timeline.transfers),
        transferred_bytes=sum(x.num_bytes for x in timeline.transfers),
        actions=hashlib.sha256(actions.encode()).hexdigest()[:16],
    )


# The process that plans with one checkout: requests on standard input, answers on standard output, a JSON line each.


def work() -> None:
    """Answer cases until standard input ends; the first line says which gplan is used."""
    import faulthandler

    import gplan

    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a solver prints is no answer
    answers.write(json.dumps(gplan.__file__).encode() + b"\n")
    profiles: dict[str, Any] = {}
    for line in sys.stdin:
        path, case = msgspec.json.decode(line, type=tuple[str, Case])
        if path not in profiles:
            profiles[path] = gplan.load(path)
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        answers.write(msgspec.json.encode(_answer(path, profiles[path], case)) + b"\n")
        faulthandler.cancel_dump_traceback_later()


def _answer(path: str, profile: Any, case: Case) -> Outcome:
    import gplan

    if case.call == "command":
        return _command_answer(path, case)
    function: Callable[..., Any] = gplan.balance if case.call == "balance" else gplan.search
    clock = Clock.now()
    try:
        plan = function(profile, **dict(case.options))
    except Exception as error:  # also those that are bugs: both checkouts must have the same
        code = getattr(error, "exit_code", 1)
        return replace(clock.stopped(), error=type(error).__name__, exit_code=code, text=str(error))
    outcome = clock.stopped()
    return replace(outcome, plan=plan_facts(plan, gplan.simulate(plan)))


def _command_answer(path: str, case: Case) -> Outcome:
    import gplan

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "plan.json")
        command = [sys.executable, "-P", "-m", "gplan", "balance", path, *case.words, "--output", str(output)]
        clock = Clock.now()
        done = subprocess.run(command, capture_output=True, text=True)
        outcome = clock.stopped()
        if done.returncode:
            return replace(outcome, error="command failed", exit_code=done.returncode, text=done.stderr.strip())
        plan: Any = gplan.load(output)
        return replace(outcome, plan=plan_facts(plan, gplan.simulate(plan)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When something began, by the clock and by the processor time of this process and those it started."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Clock:
        """This moment."""
        return cls(wall_s=time.perf_counter(), cpu_s=_cpu_s())

    def stopped(self) -> Outcome:
        """The seconds since then."""
        now = Clock.now()
        return Outcome(seconds=now.wall_s - self.wall_s, cpu_s=now.cpu_s - self.cpu_s)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Worker:
    """A process that plans with one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), "--work"],
            env=environment(checkout), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        found = Path(json.loads(self._line()))
        if not found.is_relative_to(checkout):
            raise SystemExit(f"gplan was imported from {found}; expected it from {checkout}")

    def answer(self, path: Path, case: Case) -> Outcome:
        """What the checkout makes of a case, with the profile in a file."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode((str(path), case)).decode() + "\n")
        return msgspec.json.decode(self._line(), type=Outcome)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a planning process ended without an answer; its output above has the reason")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if error is not None:
            self._process.terminate()
        self._process.wait()


def environment(checkout: Path) -> dict[str, str]:
    """In which Python imports gplan from a checkout, and its libraries compute in one thread."""
    return {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


# Profiles.


def make_profiles(sources: Iterable[Source], checkout: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The profiles by name, read from the folder; those that are not there yet are made."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in sources:
        path = folder / f"{source.name}.json"
        if not path.exists():
            print(f"profiling {source.name}", flush=True)
            command = source.command(checkout, path)
            done = subprocess.run(command, env=environment(checkout), capture_output=True, text=True)
            if done.returncode:
                print(f"left out {source.name}: {done.stderr.strip()[-500:]}", flush=True)
                continue
        found[source.name] = json.loads(path.read_text())
    return found


def features(profile: dict[str, Any]) -> set[str]:
    """What a profile of the old checkout's format exercises."""
    costs = [cost for layer in profile["layers"] for cost in layer["costs"]]
    tests = {
        "contention": any(x["contention"] != 1 for x in costs),
        "tied weights": bool(profile["shared_weights"]),
        "waiting values": any(x["waiting"] for x in costs),
        "engine costs": profile["engine"] is not None,
        "several micro-batch sizes": len(profile["layers"][0]["costs"]) > 1,
        "branches": bool(profile["values"]),
        "split backward": all(x["weight_gradient"] is not None for x in costs),
        "loss": bool(profile["loss"]),
        "computed seconds": profile["origin"] == "computed",
    }
    return {name for name, is_there in tests.items() if is_there}


FEATURES = (
    "contention", "tied weights", "waiting values", "engine costs", "several micro-batch sizes", "branches",
    "split backward", "loss", "computed seconds",
)  # fmt: skip


# Cases.


def grid_cases(name: str, profile: dict[str, Any], *, quick: bool, time_limit_s: float) -> Iterator[Case]:
    """Every number of devices, schedule and way to recompute, without a memory limit."""
    num_layers = len(profile["layers"])
    all_devices, all_recompute = (NUM_DEVICES[:2], RECOMPUTE[::3]) if quick else (NUM_DEVICES, RECOMPUTE)
    for num_devices, schedule, recompute in product(all_devices, NUM_CHUNKS, all_recompute):
        if num_devices * NUM_CHUNKS[schedule] <= num_layers:
            num_microbatches = 2 * num_devices if schedule in ("interleaved-1f1b", "zb-v") else 8
            yield _balance(name, num_devices, num_microbatches, time_limit_s, schedule=schedule, recompute=recompute)


def other_cases(name: str, profile: dict[str, Any], *, time_limit_s: float) -> Iterator[Case]:
    """Other objectives, micro-batch sizes, replicas and chunks."""
    num_layers = len(profile["layers"])
    for schedule in ("gpipe", "1f1b"):
        yield _balance(name, 4, 8, time_limit_s, schedule=schedule, minimize="max-stage")
    sizes = [x["microbatch_size"] for x in profile["layers"][0]["costs"]]
    for size in range(min(sizes), max(sizes)):
        yield _balance(name, 4, 8, time_limit_s, microbatch_size=size)
    yield _balance(name, 2, 8, time_limit_s, schedule="1f1b", num_replicas=2)
    yield _balance(name, num_layers + 1, 8, time_limit_s)  # an error
    if num_layers >= 8:
        yield _balance(name, 2, 8, time_limit_s, schedule="interleaved-1f1b:4")


def _balance(name: str, num_devices: int, num_microbatches: int, time_limit_s: float, **options: Option) -> Case:
    given = {"num_devices": num_devices, "num_microbatches": num_microbatches, "time_limit_s": time_limit_s, **options}
    return Case(profile=name, call="balance", options=tuple(given.items()))


def search_cases(name: str) -> Iterator[Case]:
    """Small spaces, which are searched to the end."""
    limit_s = 20.0
    spaces: tuple[dict[str, Option], ...] = (
        {"num_devices": 2, "num_microbatches": "auto", "batch_size": 8, "recompute": "never"},
        {"num_devices": "auto", "most_devices": 3, "batch_size": 8, "schedule": "1f1b", "recompute": "always"},
    )
    for space in spaces:
        yield Case(profile=name, call="search", options=tuple((space | {"time_limit_s": limit_s}).items()))


def command_cases(name: str, profile: dict[str, Any], machine: Path) -> Iterator[Case]:
    """The mixed-integer program, constraints and unequal devices, by the command line."""
    layers = [x["name"] for x in profile["layers"]]
    middle = len(layers) // 2
    commands = (
        "--k 2 --microbatches 8 --solver milp",
        "--k 3 --microbatches 6 --schedule 1f1b --solver milp",
        f"--k 2 --cut-after {layers[middle]}",
        f"--k 3 --schedule 1f1b --keep-together {layers[middle]}..{layers[middle + 1]} --pin {layers[0]}=0",
        f"--k 2 --cut-after {layers[0]} --pin {layers[0]}=1",  # an error
        f"--k 4 --machine {machine}",
    )
    for text in commands:
        words = (*text.split(), "--calibration", "none", "--time-limit", "30")
        yield Case(profile=name, call="command", words=words)


# Comparing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkouts:
    """The two checkouts, and a folder for what both are given."""

    old: Path
    new: Path
    folder: Path

    def path(self, name: str, checkout: Path) -> Path:
        """The file with a profile for a checkout."""
        return self.folder / ("old" if checkout == self.old else "new") / f"{name}.json"

    def write(self, name: str, profile: dict[str, Any]) -> None:
        """Write a profile for both."""
        for checkout in (self.old, self.new):
            path = self.path(name, checkout)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(for_checkout(profile, checkout)))


def compare_profile(
    checkouts: Checkouts, name: str, cases: Iterable[Case], *, with_memory: bool = True
) -> Iterator[Compared]:
    """Each case by both checkouts in turns, the one that begins alternating; then with a memory limit that binds."""
    paths = [checkouts.path(name, x) for x in (checkouts.old, checkouts.new)]
    with Worker(checkouts.old) as old, Worker(checkouts.new) as new:
        workers, is_odd = (old, new), False

        def both(case: Case) -> Compared:
            nonlocal is_odd
            is_odd = not is_odd
            order = (0, 1) if is_odd else (1, 0)
            found = {i: workers[i].answer(paths[i], case) for i in order}
            return Compared(case=case, old=found[0], new=found[1])

        for case in cases:
            compared = both(case)
            yield compared
            plan = compared.old.plan
            if with_memory and plan is not None and case.call == "balance":
                share = SELECTED_SHARE if ("recompute", "selected") in case.options else MEMORY_SHARE
                yield both(case.with_memory(int(share * plan.peak_bytes)))


def retimed(checkouts: Checkouts, slowest: Sequence[Compared]) -> list[tuple[Compared, float, float]]:
    """Cases with the least planning times of several rounds, each in new processes."""
    found = []
    for compared in slowest:
        case = compared.case
        rounds = [
            again
            for _ in range(NUM_ROUNDS)
            for again in compare_profile(checkouts, case.profile, [case], with_memory=False)
        ]
        found.append((compared, min(x.old.cpu_s for x in rounds), min(x.new.cpu_s for x in rounds)))
    return found


# The report.


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What some cases come to."""

    num_cases: int
    num_plans: int  # of the old checkout
    num_errors: int
    num_stopped: int
    num_different: int
    num_other_cuts: int
    num_other_errors: int
    num_other_solvers: int
    max_step_difference: float  # relative
    max_peak_difference_bytes: int
    max_bubble_difference: float
    max_stopped_difference: float  # of step times, relative
    ratio: float | None  # geometric mean of planning times, new over old


def figures_of(cases: Sequence[Compared]) -> Figures:
    """The figures of some cases."""
    plans = [(x.old.plan, x.new.plan, x.is_stopped) for x in cases if x.old.plan and x.new.plan]
    settled = [(old, new) for old, new, is_stopped in plans if old and new and not is_stopped]
    stopped = [(old, new) for old, new, is_stopped in plans if old and new and is_stopped]
    ratios = [x.ratio for x in cases if x.is_timed]
    peaks = [abs(a.peak_bytes - b.peak_bytes) for old, new in settled for a, b in zip(old.stages, new.stages, strict=False)]  # fmt: skip
    return Figures(
        num_cases=len(cases),
        num_plans=sum(x.old.plan is not None for x in cases),
        num_errors=sum(x.old.plan is None for x in cases),
        num_stopped=sum(x.is_stopped for x in cases),
        num_different=sum(bool(x.differences) for x in cases),
        num_other_cuts=sum(old.cuts != new.cuts for old, new in settled),
        num_other_errors=sum((x.old.kind, x.old.exit_code) != (x.new.kind, x.new.exit_code) for x in cases),
        num_other_solvers=sum(old.solver != new.solver for old, new in settled),
        max_step_difference=max((relative(old.step_s, new.step_s) for old, new in settled), default=0.0),
        max_peak_difference_bytes=max(peaks, default=0),
        max_bubble_difference=max((abs(old.bubble - new.bubble) for old, new in settled), default=0.0),
        max_stopped_difference=max((relative(old.step_s, new.step_s) for old, new in stopped), default=0.0),
        ratio=geometric_mean(ratios) if ratios else None,
    )


HEADINGS = (
    "profile", "cases", "plans", "errors", "stopped", "different", "other cuts", "other errors", "other solver",
    "step", "peak", "bubble", "step, stopped", "time ratio",
)  # fmt: skip


def report_lines(
    cases: Sequence[Compared],
    slow: Sequence[tuple[Compared, float, float]],
    found_features: dict[str, list[str]],
    seconds: float,
) -> Iterator[str]:
    """The report in Markdown."""
    different = [x for x in cases if x.differences]
    yield f"# Plans of two checkouts: {f'{len(different)} cases differ' if different else 'no difference'}"
    yield ""
    yield f"{len(cases)} cases in {seconds:.0f} s. Stopped: the time limit ended the search of either checkout, so only step "
    yield "times are compared, to within the gap. Step and bubble: largest differences, relative and absolute; peak: in bytes."
    yield "Time ratio: geometric mean of planning times (processor time), new over old, of plans that were not stopped."
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|" + "---|" * len(HEADINGS)
    for name in dict.fromkeys(x.case.profile for x in cases):
        yield _row(name, figures_of([x for x in cases if x.case.profile == name]))
    yield _row("all", figures_of(cases))
    yield ""
    yield "## What the profiles exercise"
    yield ""
    for feature in FEATURES:
        yield f"- {feature}: {', '.join(found_features[feature]) or 'NONE'}"
    kinds = Counter(x.old.kind for x in cases)
    yield f"- outcomes of the old checkout: {', '.join(f'{kind} {number}' for kind, number in kinds.most_common())}"
    solvers = Counter(x.old.plan.solver for x in cases if x.old.plan)
    yield f"- solvers of the old checkout: {', '.join(f'{kind} {number}' for kind, number in solvers.most_common())}"
    yield ""
    yield f"## Largest time ratios of cases over {SLOW_S * 1e3:.0f} ms, least of {NUM_ROUNDS} further rounds"
    yield ""
    for compared, old_s, new_s in sorted(slow, key=lambda x: x[1] / x[2]):
        yield f"- {new_s / old_s:.2f} ({old_s * 1e3:.0f} ms, {new_s * 1e3:.0f} ms; {compared.ratio:.2f} at first): {compared.case.label}"  # fmt: skip
    yield ""
    yield "## Differences"
    yield ""
    for compared in different:
        yield f"- {compared.case.label}: {'; '.join(compared.differences)}"


def _row(name: str, x: Figures) -> str:
    cells = (
        name, x.num_cases, x.num_plans, x.num_errors, x.num_stopped, x.num_different, x.num_other_cuts,
        x.num_other_errors, x.num_other_solvers, f"{x.max_step_difference:.1e}", x.max_peak_difference_bytes,
        f"{x.max_bubble_difference:.1e}", f"{x.max_stopped_difference:.1e}",
        "" if x.ratio is None else f"{x.ratio:.3f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def slowest_of(cases: Sequence[Compared]) -> list[Compared]:
    """The cases that take long and became slower by the largest factor."""
    slow = [x for x in cases if x.is_timed and max(x.old.cpu_s, x.new.cpu_s) > SLOW_S]
    return sorted(slow, key=lambda x: -x.ratio)[:NUM_RETIMED]


def run_cases(checkouts: Checkouts, profiles: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Compared]:
    """All cases of all profiles, with a line on each profile as it is done."""
    machine = checkouts.folder / "machine.toml"
    machine.write_text(MACHINE)
    found: list[Compared] = []
    for index, (name, profile) in enumerate(profiles.items()):
        checkouts.write(name, profile)
        cases = [*grid_cases(name, profile, quick=options.quick, time_limit_s=options.time_limit)]
        if not options.quick or index == 0:
            cases += other_cases(name, profile, time_limit_s=options.time_limit)
        if name in WITH_COMMANDS and (not options.quick or index == 0):
            cases += [*search_cases(name), *command_cases(name, profile, machine)]
        started_s = time.perf_counter()
        compared = list(compare_profile(checkouts, name, cases))
        found += compared
        figures = figures_of(compared)
        print(
            f"{name}: {figures.num_cases} cases, {figures.num_different} different, {figures.num_stopped} stopped, "
            f"{time.perf_counter() - started_s:.0f} s",
            flush=True,
        )
    return found


def main() -> int:
    """Compare, print and write the report; 1 where a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    parser.add_argument("--profiles", type=Path, default=Path("compare-checkouts", "profiles"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=Path("compare-checkouts"), metavar="FOLDER")
    parser.add_argument("--time-limit", type=float, default=1.0, metavar="SECONDS", help="of one plan  [default: 1]")
    parser.add_argument("--only", nargs="*", metavar="PROFILE", help="names of profiles  [default: all]")
    parser.add_argument("--quick", action="store_true", help="fewer profiles and settings")
    options = parser.parse_args()
    started_s = time.perf_counter()
    old, new = options.old.resolve(), options.new.resolve()
    sources = [x for x in SOURCES if (x.name in options.only if options.only else x.is_quick or not options.quick)]
    profiles = make_profiles(sources, old, options.profiles)
    with tempfile.TemporaryDirectory() as folder:
        checkouts = Checkouts(old=old, new=new, folder=Path(folder).resolve())
        cases = run_cases(checkouts, profiles, options)
        slow = retimed(checkouts, slowest_of(cases))
    found_features = {x: [name for name, profile in profiles.items() if x in features(profile)] for x in FEATURES}
    text = "\n".join(report_lines(cases, slow, found_features, time.perf_counter() - started_s)) + "\n"
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text)
    rows = [asdict(x) | {"differences": x.differences, "is_stopped": x.is_stopped} for x in cases]
    (options.output / "report.json").write_text(json.dumps({"figures": asdict(figures_of(cases)), "cases": rows}))
    return 1 if any(x.differences for x in cases) else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        sys.exit(main())
