"""Compare the plans of two checkouts of gplan: a change of code that must change no plan, or must say which.

    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT            about ten minutes, the first time more
    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT --quick    about a minute
    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT --steps    equal steps suffice where both are proven

Profiles are made once, by the old checkout, and kept as files in --profiles; both checkouts plan the same files. One
process per checkout and profile makes the plans, and the two take turns case by case, so that their planning times are
comparable on a host whose speed drifts; ratios are of processor time. A case is one call of `gplan.balance`, with or
without open dials, or one `gplan balance` command; the plan of each is also simulated. Where a plan fits without a memory
limit, the case is repeated with a limit below its largest device peak, the same number of bytes for both checkouts.

Two proven plans must have equal stages, recomputed layers, devices and peak bytes, and step times, lower bounds, bubbles
and timelines that agree to 1e-9; with --steps only equal step times (largest stages where these are minimised), as
another cut may be as good. A plan that the time limit stopped depends on the speed of the host. It is counted apart, and
its step time must agree to within the gap of the two plans. The report names each plan that was proven before and no
longer is, with its gap. The exit code is 1 where any plan or error differs; plans that are no longer proven do not change it.

Only public functions and the command line are called. Keys of a profile that a checkout does not read are dropped for it;
`plan_facts` is the place for attributes of plans that it calls something else.
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
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

import msgspec
import pandas as pd

NUM_DEVICES = (2, 4, 8)
NUM_CHUNKS = {
    "gpipe": 1, "1f1b": 1, "eager-1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "zb-v": 2,
}  # fmt: skip
RECOMPUTE = ("never", "always", "except-last", "selected")
MEMORY_SHARE = 0.9  # of the largest device peak without a limit
SELECTED_SHARE = 0.7  # the same where layers to recompute are selected, which fits more
TOLERANCE = 1e-9  # of seconds, relative, and of bubbles
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

H100 = "--set num_blocks=16 --device meta --hardware h100 --microbatch-size 1,4"
SOURCES = {
    "transformer_lm": ("transformer_lm", "--microbatch-size 1,2,4"),
    "transformer_lm_tied": ("transformer_lm", "--set num_blocks=16 --set tie_embedding=true --microbatch-size 2"),
    "resnet": ("resnet", "--microbatch-size 1,2"),
    "unet": ("unet", "--microbatch-size 2"),
    "amoebanet_d": ("amoebanet_d", "--microbatch-size 2"),
    "bert_hf": ("bert_hf", "--microbatch-size 2"),
    "gpt2_hf": ("gpt2_hf", "--microbatch-size 2"),
    "llama_hf": ("llama_hf", "--set num_blocks=14 --microbatch-size 2"),
    "t5_hf": ("t5_hf", "--microbatch-size 2"),
    "vit_hf": ("vit_hf", "--set num_blocks=14 --microbatch-size 2"),
    "nmt_transformer": ("nmt_transformer", "--microbatch-size 2"),
    "transformer_l": ("transformer_l", "--set num_layers=14 --microbatch-size 2"),
    "transformer_lm_h100": ("transformer_lm", H100),
    "unet_v100": ("unet", "--device meta --hardware v100 --granularity op --microbatch-size 2"),
}
"""Examples and options of `gplan profile`; more blocks than by default where 8 devices with 2 chunks need 16 layers."""
WITH_COMMANDS = ("transformer_lm", "t5_hf", "transformer_lm_h100")
"""Profiles that are also searched, and planned by the command line; with --quick there are no others."""

Facts = dict[str, Any]
Option = int | float | str


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
class Outcome:
    """The facts of a plan, or the error in its place, and the seconds that it took."""

    seconds: float
    cpu_s: float  # of processor time, which other work on the host changes less
    plan: Facts | None = None
    error: str = ""  # its class
    exit_code: int = 0
    text: str = ""  # of the error, for the reader; not compared

    @property
    def kind(self) -> str:
        """Whether it is a plan, else which error with which exit code."""
        return f"{self.error} ({self.exit_code})" if self.error else "plan"

    @property
    def is_proven(self) -> bool:
        """Whether it is a plan that is proven best."""
        return self.plan is not None and bool(self.plan["is_proven"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One case as both checkouts answered it."""

    case: Case
    old: Outcome
    new: Outcome
    steps_only: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether the time limit had a part in either answer."""
        return any(_is_stopped(self.case, x) for x in (self.old, self.new))

    @property
    def lost_proof(self) -> bool:
        """Whether the old plan is proven and the new one is not."""
        return self.old.is_proven and self.new.plan is not None and not self.new.is_proven

    @property
    def step_difference(self) -> float:
        """Of the step times of two plans, relative; nan where there is only one."""
        if self.old.plan is None or self.new.plan is None:
            return math.nan
        return relative(self.old.plan["step_s"], self.new.plan["step_s"])

    @property
    def differences(self) -> list[str]:
        """What differs, in words; empty where nothing does."""
        old, new = self.old, self.new
        if old.plan is None or new.plan is None:
            is_equal = old.kind == new.kind or self.is_stopped
            return [] if is_equal else [f"{old.kind} became {new.kind}: {new.text or old.text}"]
        if self.is_stopped:
            allowed = max(old.plan["gap"], new.plan["gap"], TOLERANCE)
            found = self.step_difference
            return [f"step time differs by {found:.2e}, the gap is {allowed:.2e}"] if found > allowed else []
        names = [x for x in old.plan if x not in UNCOMPARED]
        if self.steps_only:
            names = ["setting", "objective_s"]
        return [x for name in names for x in differences_of(old.plan[name], new.plan[name], name)]

    def row(self) -> Facts:
        """The case in the table of figures."""
        plans = (self.old.plan, self.new.plan)
        both = all(plans)
        settled = [x for x in plans if x] if both and not self.is_stopped else []
        old, new = settled or (None, None)
        peaks = [abs(x - y) for x, y in zip(old["peak_bytes"], new["peak_bytes"], strict=False)] if old and new else []
        return {
            "profile": self.case.profile, "cases": 1, "plans": self.old.plan is not None, "errors": bool(self.old.error),
            "stopped": self.is_stopped, "different": bool(self.differences), "lost proof": self.lost_proof,
            "new proof": self.new.is_proven and self.old.plan is not None and not self.old.is_proven,
            "other cuts": bool(old and new and old["cuts"] != new["cuts"]),
            "other errors": self.old.kind != self.new.kind,
            "other solver": bool(old and new and old["solver"] != new["solver"]),
            "step": self.step_difference if settled else 0.0, "peak": max(peaks, default=0),
            "bubble": abs(old["bubble"] - new["bubble"]) if old and new else 0.0,
            "step, stopped": self.step_difference if both and not settled else 0.0,
            "time ratio": self.new.cpu_s / self.old.cpu_s if settled else math.nan,
        }  # fmt: skip


UNCOMPARED = ("gap", "solver", "is_proven")


def _is_stopped(case: Case, outcome: Outcome) -> bool:
    near_limit = outcome.seconds > 0.9 * case.time_limit_s
    if outcome.plan is None:  # a search for a plan that fits may end without one
        return near_limit and outcome.error == "NoPlanError"
    return not outcome.is_proven or (case.call == "search" and near_limit)  # the frontier takes what time is left


def differences_of(old: Any, new: Any, place: str) -> Iterator[str]:
    """Where two facts differ: floats by more than the tolerance, relative but for bubbles, all else at all."""
    if isinstance(old, dict):
        for key, value in old.items():
            yield from differences_of(value, new[key], f"{place} {key}")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > TOLERANCE * (1.0 if place.endswith("bubble") else max(abs(old), abs(new))):
            yield f"{place}: {old!r} became {new!r}"
    elif old != new:
        before, after = (text if len(text) <= 200 else f"{text[:200]}..." for text in (str(old), str(new)))
        yield f"{place}: {before} became {after}"


def relative(one: float, other: float) -> float:
    """The relative difference of two numbers.

    >>> relative(4.0, 5.0), relative(0.0, 0.0)
    (0.2, 0.0)
    """
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


# What a checkout is called with, and what it answers.


def for_checkout(profile: Facts, checkout: Path) -> Facts:
    """A profile of the old checkout with the format line that `checkout` reads."""
    text = (checkout / "gplan" / "files" / "json_files.py").read_text()
    (found,) = set(re.findall(r"gplan\.profile/\d+", text))
    return {**profile, "format": found}


def plan_facts(plan: Any, timeline: Any) -> Facts:
    """What is compared of a plan and its simulated step."""
    actions = " ".join(f"{x.device}:{x.action}" for x in timeline.spans)
    return {
        "setting": _setting(plan),
        "cuts": list(plan.cuts),
        "layers": [list(x.layer_names) for x in plan.stages],
        "recomputed": [list(x.recompute_layers) for x in plan.stages],
        "devices": [x.on_device for x in plan.stages],
        "peak_bytes": [x.memory.peak_bytes for x in plan.stages],
        "largest peak": plan.peak_bytes,
        "step_s": plan.prediction.step_s,
        "bubble": plan.prediction.bubble,
        "objective_s": plan.proof.objective_s,
        "lower_bound_s": plan.proof.lower_bound_s,
        "gap": plan.proof.gap,
        "is_proven": plan.proof.is_proven,
        "solver": plan.proof.solver,
        "frontier": [f"{_setting(x)}, cuts {x.cuts}, {x.peak_bytes} bytes" for x in plan.frontier],
        "timeline": {
            "step_s": timeline.step_s,
            "bubble": timeline.bubble,
            "starts_s": math.fsum(x.start_s for x in timeline.spans),
            "ends_s": math.fsum(x.end_s for x in timeline.spans),
            "transfers_s": math.fsum(x.end_s for x in timeline.transfers),
            "transferred_bytes": sum(x.num_bytes for x in timeline.transfers),
            "order of actions": hashlib.sha256(actions.encode()).hexdigest()[:16],
        },
    }


def _setting(plan: Any) -> str:
    return (
        f"{plan.schedule}, {plan.num_stages} stages, {plan.num_microbatches} micro-batches of {plan.microbatch_size}, "
        f"{plan.num_replicas} replicas, recompute {plan.recompute}"
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
            profiles[path] = _loaded(Path(path))
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        answers.write(msgspec.json.encode(_answer(path, profiles[path], case)) + b"\n")
        faulthandler.cancel_dump_traceback_later()


def _loaded(path: Path) -> Any:
    """The profile, without the keys that this checkout does not have."""
    import gplan

    while True:
        try:
            return gplan.load(path)
        except gplan.GplanError as error:
            unknown = re.search(r"unknown key, \$\S*?(\w+);", str(error))
            if unknown is None:
                raise
            print(f"{path.name}: {unknown[1]} dropped", file=sys.stderr)
            path.write_text(json.dumps(_without(json.loads(path.read_text()), unknown[1])))


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(x, key) for name, x in value.items() if name != key}
    return [_without(x, key) for x in value] if isinstance(value, list) else value


def _answer(path: str, profile: Any, case: Case) -> Outcome:
    import gplan

    wall_s, cpu_s = time.perf_counter(), _cpu_s()

    def outcome(**found: Any) -> Outcome:
        return Outcome(seconds=time.perf_counter() - wall_s, cpu_s=_cpu_s() - cpu_s, **found)

    if case.call == "command":
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-P", "-m", "gplan", "balance", path, *case.words, "--output", "plan.json"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            ended = outcome(error="command failed" if done.returncode else "", exit_code=done.returncode, text=done.stderr.strip())  # fmt: skip
            if done.returncode:
                return ended
            plan: Any = gplan.load(Path(folder, "plan.json"))
    else:
        try:
            plan = gplan.balance(profile, **dict(case.options))
        except Exception as error:  # also those that are bugs: both checkouts must have the same
            return outcome(error=type(error).__name__, exit_code=getattr(error, "exit_code", 1), text=str(error))
        ended = outcome()
    return replace(ended, plan=plan_facts(plan, gplan.simulate(plan)))


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
        self._process.stdin.write(msgspec.json.encode((str(path), case)).decode() + "\n")
        return msgspec.json.decode(self._line(), type=Outcome)

    def _line(self) -> str:
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a planning process ended without an answer; its output above has the reason")
        return line

    def close(self) -> None:
        """The end of its input ends it."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def environment(checkout: Path) -> dict[str, str]:
    """In which Python imports gplan from a checkout, and its libraries compute in one thread."""
    return {
        **os.environ,
        "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'profiler'}",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


# Profiles and cases.


def make_profiles(names: Iterable[str], checkout: Path, folder: Path) -> dict[str, Facts]:
    """The profiles by name, read from the folder; those that are not there yet are made."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        path, (example, options) = folder / f"{name}.json", SOURCES[name]
        if not path.exists():
            print(f"profiling {name}", flush=True)
            command = [sys.executable, "-m", "gplan", "profile", str(checkout / "examples" / f"{example}.py")]
            command += ["--budget", "1", "--json", "--output", str(path.resolve()), *options.split()]
            done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
            if done.returncode:
                print(f"left out {name}: {done.stderr.strip()[-500:]}", flush=True)
                continue
        found[name] = json.loads(path.read_text())
    return found


def cases_of(name: str, profile: Facts, machine: Path, *, quick: bool, is_first: bool, time_limit_s: float) -> Iterator[Case]:  # fmt: skip
    """Every number of devices, schedule and way to recompute without a memory limit; then other objectives, micro-batch
    sizes, replicas and chunks, small searches, and commands with the MILP, constraints, a machine."""
    layers = [x["name"] for x in profile["layers"]]

    def balance(num_devices: int, num_microbatches: int = 8, **options: Option) -> Case:
        given = {"num_devices": num_devices, "num_microbatches": num_microbatches, "time_limit_s": time_limit_s}
        return Case(profile=name, call="balance", options=tuple((given | options).items()))

    all_devices, all_recompute = (NUM_DEVICES[:2], RECOMPUTE[::3]) if quick else (NUM_DEVICES, RECOMPUTE)
    for k, schedule, recompute in product(all_devices, NUM_CHUNKS, all_recompute):
        if k * NUM_CHUNKS[schedule] <= len(layers):
            num_microbatches = 2 * k if schedule in ("interleaved-1f1b", "zb-v") else 8
            yield balance(k, num_microbatches, schedule=schedule, recompute=recompute)
    if quick and not is_first:
        return
    for schedule in ("gpipe", "1f1b"):
        yield balance(4, schedule=schedule, minimize="max-stage")
    sizes = [x["microbatch_size"] for x in profile["layers"][0]["costs"]]
    for size in range(min(sizes), max(sizes)):
        yield balance(4, microbatch_size=size)
    yield balance(2, schedule="1f1b", num_replicas=2)
    yield balance(len(layers) + 1)  # an error
    if len(layers) >= 8:
        yield balance(2, schedule="interleaved-1f1b:4")
    if name in WITH_COMMANDS:
        spaces: tuple[dict[str, Option], ...] = (  # small ones, which are searched to the end
            {"num_devices": 2, "num_microbatches": "auto", "schedule": "auto", "recompute": "never"},
            {"num_devices": "auto", "total_devices": 3, "schedule": "1f1b", "recompute": "always"},
        )
        for space in spaces:
            options = {"batch_size": 8, "time_limit_s": 20.0} | space
            yield Case(profile=name, call="search", options=tuple(options.items()))
        middle = len(layers) // 2
        for text in (
            "--k 2 --microbatches 8 --solver milp",
            "--k 3 --microbatches 6 --schedule 1f1b --solver milp",
            f"--k 2 --cut-after {layers[middle]}",
            f"--k 3 --schedule 1f1b --keep-together {layers[middle]}..{layers[middle + 1]} --pin {layers[0]}=0",
            f"--k 2 --cut-after {layers[0]} --pin {layers[0]}=1",  # an error
            f"--k 4 --machine {machine}",
        ):
            yield Case(profile=name, call="command", words=(*text.split(), "--time-limit", "30"))


def compare_profile(old: Path, new: Path, paths: list[Path], cases: Iterable[Case], *, steps: bool) -> Iterator[Compared]:  # fmt: skip
    """Each case by both checkouts in turns, the one that begins alternating; then with a memory limit that binds."""
    with closing(Worker(old)) as one, closing(Worker(new)) as other:
        workers, is_odd = (one, other), False

        def both(case: Case) -> Compared:
            nonlocal is_odd
            is_odd = not is_odd
            found = {i: workers[i].answer(paths[i], case) for i in ((0, 1) if is_odd else (1, 0))}
            return Compared(case=case, old=found[0], new=found[1], steps_only=steps)

        for case in cases:
            compared = both(case)
            yield compared
            plan = compared.old.plan
            if plan is not None and case.call == "balance":
                share = SELECTED_SHARE if ("recompute", "selected") in case.options else MEMORY_SHARE
                yield both(case.with_memory(int(share * plan["largest peak"])))


# The report.

_LARGEST = ("step", "peak", "bubble", "step, stopped")


def figures_of(cases: Iterable[Compared]) -> pd.DataFrame:
    """A row for each profile, and one for all."""
    rows = pd.DataFrame([x.row() for x in cases])
    rows = pd.concat([rows, rows.assign(profile="all")])

    def ratio(values: pd.Series[float]) -> float:
        found = values.dropna()
        return round(geometric_mean(found), 3) if len(found) else math.nan

    ways: dict[str, Any] = (
        dict.fromkeys(rows.columns[1:], "sum") | dict.fromkeys(_LARGEST, "max") | {"time ratio": ratio}
    )
    table = rows.groupby("profile", sort=False).agg(ways)
    for name in ("step", "bubble", "step, stopped"):
        table[name] = table[name].map("{:.1e}".format)
    return table.reset_index()


def report_lines(cases: list[Compared], seconds: float) -> Iterator[str]:
    """The report in Markdown."""
    different, lost = [x for x in cases if x.differences], [x for x in cases if x.lost_proof]
    yield f"# Plans of two checkouts: {f'{len(different)} cases differ' if different else 'no difference'}, {len(lost)} no longer proven"
    yield ""
    yield f"{len(cases)} cases in {seconds:.0f} s. Stopped: the time limit ended the search of either checkout, so only step times are"
    yield "compared, to within the gap. Step and bubble: largest differences, relative and absolute; peak: in bytes. Time ratio:"
    yield "geometric mean of planning times (processor time), new over old, of plans that were not stopped."
    yield ""
    table = figures_of(cases).astype(str)
    for cells in (table.columns, ["---"] * len(table.columns), *table.values):
        yield f"| {' | '.join(cells)} |"
    yield ""
    kinds = Counter(x.old.kind for x in cases) + Counter(x.old.plan["solver"] for x in cases if x.old.plan)
    yield f"Outcomes and solvers of the old checkout: {', '.join(f'{kind} {number}' for kind, number in kinds.items())}."
    yield "\n## Proven before, not now\n"
    for x in lost:
        assert x.new.plan is not None and x.old.plan is not None
        change = x.new.plan["step_s"] / x.old.plan["step_s"] - 1
        yield f"- {x.case.label}: gap {x.new.plan['gap']:.2%}, step {change:+.2%}"
    yield "\n## Differences\n"
    for x in different:
        yield f"- {x.case.label}: {'; '.join(x.differences)}"


def main() -> int:
    """Compare, print and write the report; 1 where a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    parser.add_argument("--profiles", type=Path, default=Path("compare-checkouts", "profiles"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=Path("compare-checkouts"), metavar="FOLDER")
    parser.add_argument("--time-limit", type=float, default=1.0, metavar="SECONDS", help="of one plan  [default: 1]")
    parser.add_argument(
        "--only", nargs="*", choices=SOURCES, metavar="PROFILE", help="names of profiles  [default: all]"
    )
    parser.add_argument("--quick", action="store_true", help="fewer profiles and settings")
    parser.add_argument("--steps", action="store_true", help="of proven plans compare settings and step times only")
    options = parser.parse_args()
    started_s = time.perf_counter()
    old, new = options.old.resolve(), options.new.resolve()
    names = options.only or (WITH_COMMANDS if options.quick else SOURCES)
    profiles, found = make_profiles(names, old, options.profiles), list[Compared]()
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "machine.toml")
        machine.write_text(MACHINE)
        for index, (name, profile) in enumerate(profiles.items()):
            paths = [Path(folder, f"{name}.{side}.json") for side in ("old", "new")]
            for path, checkout in zip(paths, (old, new), strict=True):
                path.write_text(json.dumps(for_checkout(profile, checkout)))
            cases = cases_of(name, profile, machine, quick=options.quick, is_first=not index, time_limit_s=options.time_limit)  # fmt: skip
            since_s = time.perf_counter()
            some = list(compare_profile(old, new, paths, cases, steps=options.steps))
            counts = figures_of(some).iloc[-1]
            print(f"{name}: {counts.cases} cases, {counts.different} different, {counts.stopped} stopped, "
                  f"{counts['lost proof']} no longer proven, {time.perf_counter() - since_s:.0f} s", flush=True)  # fmt: skip
            found += some
    text = "\n".join(report_lines(found, time.perf_counter() - started_s)) + "\n"
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text)
    rows = [asdict(x) | {"differences": x.differences, "is_stopped": x.is_stopped} for x in found]
    (options.output / "report.json").write_text(json.dumps(rows))
    return 1 if any(x.differences for x in found) else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        sys.exit(main())
