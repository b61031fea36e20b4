"""Damaged profiles, plans and runs, loaded and then used: each ends in a result or in one clear message.

    python benchmarks/mutated_files.py                       50,000 files, some 8 minutes on 2 cores
    python benchmarks/mutated_files.py --only 1234           one file again, with its traceback

Small valid files are made first: profiles with tied weights, values between layers, a loss, an engine's costs; plans
with chunks, a custom order, replicas, places of a machine, rivals, a frontier; runs and
verifications. Each case takes one of them, changes numbers, keys, entries or bytes, loads it, and where it can be loaded
gives it to the verbs of the command line that read such a file. A GplanError is a clear message; any other exception, a
case of more than 20 s or of more memory than 2 GiB, a message that does not name the file, and a table with an infinity
in it are failures. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import msgspec

import gplan
from gplan.cli import main as command_line

Json: TypeAlias = Any
Place: TypeAlias = tuple[str | int, ...]

LIMIT_S = 20.0
LIMIT_BYTES = 2 << 30  # beyond what a worker has mapped when it begins
BATCH = 50  # cases that a worker does without asking for more
OWN = "custom:0F0 0F1 2F0 2B0 2F1 2I1 0B0 2W1 0I1 0W1 / 1F0 1F1 1B0 1I1 1W1"
MACHINE = """[[host]]
name = "a"
devices = 2
memory = "1GiB"
[[host]]
name = "b"
speed = 0.5
[links]
within = "1GB/s,1us"
between = "100MB/s,5us"
"""
OUTCOMES = ("used", "refused when loaded", "refused when used", "failed")


class TookTooLongError(BaseException):
    """A case that is over its time; not an Exception, so that nothing on the way handles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that ended in something else than a result or a clear message."""

    index: int
    kind: str
    changes: tuple[str, ...]
    verb: str
    error: str
    where: str  # the last line of gplan's own code in the traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one case."""

    kind: str
    outcome: str
    seconds: float
    failure: Failure | None = None


def main() -> None:
    """Make the files, change and use them on all workers, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="INDEX", help="one case, in this process")
    options = parser.parse_args()
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        originals = make_originals(Path(folder))
        if options.only is not None:
            os.environ["GPLAN_SHOW_TRACEBACK"] = "1"
            start_worker(Path(folder), originals)
            outcomes = [tried(options.seed, options.only)]
        else:
            outcomes = list(on_workers(Path(folder), originals, options.seed, options.count, options.workers))
    failures = [x.failure for x in outcomes if x.failure is not None]
    print(summary(outcomes, failures, time.perf_counter() - started_s))
    sys.exit(1 if failures else 0)


def on_workers(folder: Path, originals: Json, seed: int, count: int, num_workers: int) -> Iterator[Outcome]:
    """The outcomes of all cases, in any order, with progress on standard error."""
    num_done, num_failed, started_s = 0, 0, time.perf_counter()
    with ProcessPoolExecutor(num_workers, initializer=start_worker, initargs=(folder, originals)) as pool:
        batches = [range(i, min(i + BATCH, count)) for i in range(0, count, BATCH)]
        waiting: dict[Future[list[Outcome]], range] = {pool.submit(tried_all, seed, x): x for x in batches}
        while waiting:
            done, _ = wait(waiting, timeout=BATCH * LIMIT_S, return_when=FIRST_COMPLETED)
            if not done:
                running = [str(x) for future, x in waiting.items() if future.running()]
                sys.exit(
                    f"nothing has ended for {BATCH * LIMIT_S:.0f} s; these cases are running: {', '.join(running)}"
                )
            for future in done:
                del waiting[future]
                outcomes = future.result()
                num_done, num_failed = (
                    num_done + len(outcomes),
                    num_failed + sum(x.failure is not None for x in outcomes),
                )
                for failure in filter(None, (x.failure for x in outcomes)):
                    print(f"\nfailed: --only {failure.index}: {failure.error[:100]}", file=sys.stderr)
                yield from outcomes
            seconds = time.perf_counter() - started_s
            print(
                f"\r{num_done} of {count}, {num_failed} failed, {seconds:.0f} s ", end="", file=sys.stderr, flush=True
            )
    print(file=sys.stderr)


def summary(outcomes: Sequence[Outcome], failures: Sequence[Failure], seconds: float) -> str:
    """A row for every kind of file, then the failures, those of one place together."""
    counts = Counter((x.kind, x.outcome) for x in outcomes)
    kinds = sorted({x.kind for x in outcomes})
    rows = [[kind, *(str(counts[kind, x]) for x in OUTCOMES)] for kind in kinds]
    rows.append(["all", *(str(sum(counts[kind, x] for kind in kinds)) for x in OUTCOMES)])
    lines = ["".join(f"{x:>21}" for x in row) for row in [["file", *OUTCOMES], *rows]]
    slowest = max((x.seconds for x in outcomes), default=0.0)
    lines.append(f"{len(outcomes)} files in {seconds:.0f} s, the slowest {slowest:.1f} s, {len(failures)} failures")
    alike: dict[tuple[str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        alike[failure.where, re.sub(r"[0-9.e+-]+", "#", failure.error)[:60]].append(failure)
    for (where, _), found in sorted(alike.items(), key=lambda x: -len(x[1])):
        lines.append(f"\n{len(found)} times {found[0].error[:300]} at {where}")
        lines += [f"    --only {x.index}: {x.kind}, {x.verb}: {'; '.join(x.changes)}" for x in found[:4]]
    return "\n".join(lines)


# the files that are changed


def make_originals(folder: Path) -> dict[str, list[Json]]:
    """Valid files of every kind, as decoded JSON."""
    profiles = [plain_profile(), rich_profile(), graph_profile()]
    loaded = [loaded_from(folder, content) for content in profiles]
    plans = [saved(folder, plan) for plan in made_plans(folder, loaded)]
    runs = [run_of(folder, plan) for plan in plans if len(plan["stages"]) < 6]
    verification = {
        "format": "gplan.verification/5",
        "engine": "virtual",
        "contenders": [
            {"label": "plan", "run": without_format(runs[0]), "steps_s": [0.02, 0.021]},
            {"label": "rival", "run": without_format(runs[1]), "steps_s": [0.03], "num_refused": 1},
        ],
        "left_out": [{"label": "other", "reason": "too large"}],
        "num_steps": 3,
        "created": "2000-01-01T00:00:00+00:00",
    }
    made = {
        "profile": profiles,
        "plan": plans,
        "run": runs,
        "verification": [verification],
    }
    for kind, contents in made.items():
        for content in contents:
            assert type(loaded_from(folder, content)).__name__.lower() == kind
    return made


def timing(seconds: float) -> Json:
    return {"median_s": seconds, "low_s": 0.9 * seconds, "high_s": 1.2 * seconds, "num_samples": 9, "num_refused": 1}


def layer_cost(index: int, size: int, *, is_rich: bool) -> Json:
    """One layer's costs at one size; a rich one has everything that a layer can have."""
    seconds, num_bytes = 1e-3 * (1 + index) * size, 1000 * (1 + index) * size
    work = {"kind": "matmul", "num_operations": 2, "num_flops": 10**6 * size, "num_bytes": num_bytes}
    extra = {
        "recompute": timing(seconds),
        "first_backward": timing(2.2 * seconds),
        "input_gradient": timing(seconds),
        "weight_gradient": timing(seconds),
        "pending_bytes": num_bytes,
        "contention": 1.1,
        "leftovers": [{"num_later": 1, "num_bytes": 64}] if index < 3 else [],
        "forward_work": [work],
        "backward_work": [work, {**work, "kind": "pointwise"}],
    }
    return {
        "microbatch_size": size,
        "forward": timing(seconds),
        "backward": timing(2 * seconds),
        "stash_bytes": 4 * num_bytes,
        "forward_workspace_bytes": num_bytes,
        "backward_workspace_bytes": 2 * num_bytes,
        "output_bytes": num_bytes,
        "output_gradient_bytes": num_bytes,
        "output_unsaved_bytes": num_bytes // 2,
        **(extra if is_rich else {}),
    }


def profile_of(num_layers: int, *, sizes: Sequence[int], is_rich: bool, **more: Json) -> Json:
    """A profile with the costs above, and what else a kind of profile has."""
    layers = [
        {
            "name": f"layer{i}",
            "kind": "Linear" if i % 2 else "Block",
            "num_parameters": 1000 * i,
            "weight_bytes": 4000 * i,
            "gradient_bytes": 4000 * i,
            "update_s": 1e-4 * i,
            "costs": [layer_cost(i, size, is_rich=is_rich) for size in sizes],
        }
        for i in range(num_layers)
    ]
    return {
        "format": "gplan.profile/6",
        "model": {"name": "model.py", "settings": [["depth", "3"]], "digest": "d"},
        "device": {"name": "made", "kind": "cpu", "num_threads": 2, "memory_bytes": 2**34},
        "layers": layers,
        "shared_weights": [],
        "loss": [],
        "loss_reduction": "mean",
        "step": {
            "optimizer": timing(1e-3), "zero_grad": timing(1e-4), "optimizer_name": "Adam", "state_bytes": 10**5,
            "workspace_bytes": 100, "contention": 1.2, "update_contention": 1.3, "fixed_s": 1e-6,
        },
        "link": {"latency_s": 1e-5, "bytes_per_s": 1e9},
        "overhead_s": 1e-5,
        "whole_model": [],
        "created": "2000-01-01T00:00:00+00:00",
        "versions": [["torch", "2"]],
        **more,
    }  # fmt: skip


def plain_profile() -> Json:
    return profile_of(3, sizes=[1], is_rich=False)


YARDSTICK = {"compute_s": 1e-3, "memory_s": 5e-4, "interpreter_s": 2e-4}
HOST_SPEED = {
    "reference": YARDSTICK,
    "windows": [{"start_s": 0.0, "end_s": 1.0, "times": YARDSTICK, "num_readings": 9}],
    "load": {"steal_share": 0.0, "wait_share": 0.001}, "beside": YARDSTICK, "weights": [0.4, 0.4, 0.2],
}  # fmt: skip


def rich_profile() -> Json:
    """Two sizes, tied weights, a loss, an engine's costs, measured links, the model in one piece, a yardstick."""
    link = {
        "latency_s": 1e-5, "bytes_per_s": 1e9, "origin": "measured",
        "points": [{"num_bytes": 100, "seconds": 1e-5}, {"num_bytes": 10**6, "seconds": 1e-3}],
    }  # fmt: skip
    whole = [
        {"microbatch_size": x, "forward": timing(0.01 * x), "backward": timing(0.02 * x), "allocated_bytes": 10**6}
        for x in (1, 4)
    ]
    tied = {
        "name": "table",
        "layers": [0, 3],
        "num_parameters": 500,
        "weight_bytes": 2000,
        "gradient_bytes": 2000,
        "update_s": 1e-3,
    }
    content = profile_of(
        4, sizes=[1, 4], is_rich=True, shared_weights=[tied], link=link, whole_model=whole, num_neighbours=1, notes=["a note"],
        loss=[layer_cost(0, size, is_rich=False) for size in (1, 4)], plan_notes=["another note"],
        engine={"action_s": 1e-4, "step_s": 1e-3, "sending": link}, host_speed=HOST_SPEED,
    )  # fmt: skip
    content["layers"][2]["same_as"] = 1
    return content


def graph_profile() -> Json:
    """Values between layers: a skip, an input of the model, one with seconds of its own."""

    def value(producer: int | None, *consumers: int, **more: Json) -> Json:
        costs = [{"microbatch_size": 1, "num_bytes": 4096, "gradient_bytes": 4096, "unsaved_bytes": 100}]
        return {"producer": producer, "consumers": consumers, "costs": costs, **more}

    values = [value(None, 0, 2), value(0, 1, 2), value(1, 3), value(2, 3), value(3, 4)]
    return profile_of(4, sizes=[1], is_rich=True, values=values)


def made_plans(folder: Path, profiles: Sequence[gplan.Profile]) -> Iterator[gplan.Plan]:
    """Plans with every optional content."""
    plain, rich, graph = profiles
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        yield gplan.balance(graph if schedule == "1f1b" else rich, num_devices=2, num_microbatches=4, schedule=schedule)
    yield gplan.balance(rich, num_devices=2, num_microbatches=4, schedule="interleaved-1f1b:2")
    yield gplan.balance(rich, num_devices=2, num_microbatches=2, schedule=OWN)
    yield gplan.balance(plain, num_devices=2, num_microbatches=2, num_replicas=2, recompute="except-last")
    yield gplan.balance(
        rich, num_devices="auto", total_devices=2, schedule="auto", recompute="auto", batch_size=8, time_limit_s=2.0
    )
    machine = folder / "machine.toml"
    machine.write_text(MACHINE)
    for extra in (["--machine", str(machine)], ["--cut-after", "layer1"], ["--recompute", "selected"]):
        path = folder / "wished.json"
        gplan.save(rich, folder / "profile.json")
        verb(["balance", str(folder / "profile.json"), "--k", "2", "--output", str(path), *extra])
        plan = gplan.load(path)
        assert isinstance(plan, gplan.Plan)
        yield plan


def run_of(folder: Path, content: Json) -> Json:
    """A run that did what its plan predicts."""
    plan = loaded_from(folder, content)
    timeline = msgspec.to_builtins(gplan.simulate(plan))
    check = {
        "max_relative_error": 1e-6, "worst_parameter": "layer0.weight", "loss": 0.5, "plain_loss": 0.5,
        "num_parameters": 4, "tolerance": 1e-4, "whole_batch": None,
    }  # fmt: skip
    return {
        "format": "gplan.run/7", "plan": without_format(content), "engine": "virtual", "losses": [0.5, 0.4, 0.3],
        "step_s": [0.2, 0.1, 0.1], "num_warmup_steps": 1, "num_disturbed": 0, "num_counted": 2,
        "timeline": {**timeline, "origin": "measured"}, "peak_bytes": [10**6] * plan.num_devices, "check": check,
        "created": "2000-01-01T00:00:00+00:00", "versions": [["torch", "2"]], "notes": ["a note"],
        "step_timelines": [timeline] * 2 if plan.schedule == "gpipe" else [],
        "host_speed": [{"first_step": x, "end_step": x + 1, "ranks": [YARDSTICK], "compute_s": [0.1]} for x in (1, 2)],
        "host_load": {"steal_share": 0.0, "wait_share": 0.2}, "core_stretch": [1.2] * plan.num_devices,
    }  # fmt: skip


def saved(folder: Path, value: Any) -> Json:
    gplan.save(value, folder / "saved.json")
    return json.loads((folder / "saved.json").read_text())


def loaded_from(folder: Path, content: Json) -> Any:
    (folder / "content.json").write_text(json.dumps(content))
    return gplan.load(folder / "content.json")


def without_format(content: Json) -> Json:
    return {key: value for key, value in content.items() if key != "format"}


# how they are changed

RAW = "@raw{}@"  # stands in a tree for text that json would not write
RAW_TEXTS = ("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 400, "1" * 5000, "0x10", "1.", "true")
NUMBERS: tuple[float, ...] = (
    0, 1, -1, 2, 3, 7, 0.5, 1.5, 0.0, -0.0, 1e-9, 1e-6, 1e6, 1e9, 1e12, 1e-30, 2**49, 2**59, 1e15, 1e18, 10**30, 1e100, 1e154, 1e308, -1e308, 1e-320, 1e-300,
    5e-324, 1e-12, 2**31, 2**40, 2**50, 2**53 + 1, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**64),
    math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = ("", " ", "x", "0", "1e9", "nan", "\u0000", "\n", "[red]", "[/]", "\ud800", "é" * 50, "x" * 10_000, "custom:", "custom:0F0 0B0",
         "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b:2", "interleaved-1f1b:999999999", "looped-bfs:2", "custom:0F999999999",
         "computed", "always", "selected", "max-stage", "../..", "%s", "{0}")  # fmt: skip


class Mutation:
    """Changes to one decoded file, drawn at random, with a list of them in words."""

    def __init__(self, content: Json, draw: random.Random) -> None:
        self.content, self._draw = copy.deepcopy(content), draw
        self.changes: list[str] = []
        self._raw: list[str] = []

    def change(self) -> None:
        """One change at a place whose key is drawn evenly, however often the file has it."""
        by_key: dict[Place, list[Place]] = defaultdict(list)
        for path in paths_of(self.content):
            by_key[tuple("*" if isinstance(x, int) else x for x in path)].append(path)
        single = [x for x in by_key.values() if not isinstance(at(self.content, x[0]), dict | list)]
        path = self._draw.choice(self._draw.choice(single if self._draw.random() < 0.7 else list(by_key.values())))
        parent, key = at(self.content, path[:-1]), path[-1]
        how = self._draw.choices((self._replace, self._structure, self._swap), (80, 15, 5))[0]
        self.changes.append(f"{text_of(path)} {how(parent, key)}")

    def text(self) -> bytes:
        """The file as it is written."""
        text = json.dumps(self.content)
        for i, raw in enumerate(self._raw):
            text = text.replace(json.dumps(RAW.format(i)), raw)
        return text.encode()

    def _replace(self, parent: Json, key: Any) -> str:
        old = parent[key]
        if isinstance(old, str):
            likely = [self._new_text] * 4 + [self._new_other]
        elif isinstance(old, dict | list):
            likely = [self._new_other]
        else:
            likely = [self._new_number] * 9 + [self._new_other]
        parent[key], words = self._draw.choice(likely)(old)
        return words

    def _new_number(self, old: Json) -> tuple[Json, str]:
        if isinstance(old, int | float) and abs(old) < 1e300 and self._draw.random() < 0.5:
            new = self._draw.choice((-old, old * 10, old * 1000, old / 7, old + 1, old * 10**9, float(old), int(old)))
        elif self._draw.random() < 0.08:
            return self._new_raw(self._draw.choice(RAW_TEXTS))
        else:
            new = self._draw.choice(NUMBERS)
            if isinstance(old, int) and math.isfinite(new) and self._draw.random() < 0.5:
                new = int(new)
        return new, f"= {new!r}"

    def _new_text(self, old: Json) -> tuple[Json, str]:
        new = self._draw.choice(TEXTS)
        return new, f"= {new[:30]!r}"

    def _new_other(self, old: Json) -> tuple[Json, str]:
        which = self._draw.randrange(12)
        if which == 0:
            depth = self._draw.choice((10, 100, 1000, 100_000))
            raw, words = self._new_raw("[" * depth + "]" * depth)
            return raw, f"{words[:12]}, {depth} deep"
        others = (None, [], {}, str(old)[:30], self._draw.random() < 0.5, self._draw.choice(NUMBERS))
        new = others[which % len(others)]
        return new, f"= {new!r}"

    def _new_raw(self, text: str) -> tuple[Json, str]:
        self._raw.append(text)
        return RAW.format(len(self._raw) - 1), f"= {text[:20]}"

    def _structure(self, parent: Json, key: Any) -> str:
        """A key or an entry too few or too many."""
        if isinstance(parent, dict):
            if self._draw.random() < 0.7:
                del parent[key]
                return "removed"
            parent[self._draw.choice(("colour", "", "format", f"{key}s"))] = parent[key]
            return "copied to another key"
        which = self._draw.randrange(4)
        if which == 0:
            del parent[key]
            return "removed"
        if which == 1:
            parent[key:key] = [copy.deepcopy(parent[key])] * self._draw.choice((1, 2, 100))
            return "repeated"
        if which == 2:
            parent.reverse()
            return "and its neighbours reversed"
        parent.clear()
        return "and its neighbours removed"

    def _swap(self, parent: Json, key: Any) -> str:
        """Exchanged with another of its object or list."""
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        other = self._draw.choice(keys)
        parent[key], parent[other] = parent[other], parent[key]
        return f"exchanged with {other}"


def mutated(content: Json, draw: random.Random) -> tuple[bytes, tuple[str, ...]]:
    """A changed file, and the changes in words."""
    mutation = Mutation(content, draw)
    for _ in range(draw.choices((0, 1, 2, 3), (6, 70, 16, 8))[0]):
        mutation.change()
    text = bytearray(mutation.text())
    if mutation.changes and draw.random() > 0.03:
        return bytes(text), tuple(mutation.changes)
    place = draw.randrange(len(text))
    if draw.random() < 0.3:
        return bytes(text[:place]), (*mutation.changes, f"cut off after {place} bytes")
    for _ in range(draw.choice((1, 1, 3))):
        place = draw.randrange(len(text))
        text[place] = draw.choice((draw.randrange(256), ord(draw.choice('0123456789e.-,[]{}"'))))
        mutation.changes.append(f"byte {place} = {text[place]}")
    return bytes(text), tuple(mutation.changes)


def paths_of(content: Json, path: Place = ()) -> Iterator[Place]:
    """The path of everything in a decoded file but of itself."""
    pairs: Sequence[tuple[str | int, Json]] = ()
    if isinstance(content, dict):
        pairs = list(content.items())
    elif isinstance(content, list):
        pairs = list(enumerate(content))
    for key, value in pairs:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


def at(content: Json, path: Place) -> Json:
    for key in path:
        content = content[key]
    return content


def text_of(path: Place) -> str:
    return "$" + "".join(f"[{x}]" if isinstance(x, int) else f".{x[:30]}" for x in path)


# what is done with them

_ORIGINALS: dict[str, list[Json]] = {}


def start_worker(folder: Path, originals: dict[str, list[Json]]) -> None:
    """Put the files that verbs need beside the changed one into a folder of this process, and limit its memory."""
    _ORIGINALS.update(originals)
    os.chdir(tempfile.mkdtemp(dir=folder))
    os.environ["GPLAN_DEBUG"] = "1"
    for kind, contents in originals.items():
        for i, content in enumerate(contents):
            Path(f"{kind}{i}.json").write_text(json.dumps(content))
    for words in (["show", "plan0.json"], ["explain", "plan0.json", "--profile", "profile1.json"]):
        verb(words)  # what it imports is there before the first case
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, too_long)


def too_long(_signal: int, _frame: FrameType | None) -> None:
    raise TookTooLongError(f"a case took more than {LIMIT_S:.0f} s")


def tried_all(seed: int, indices: range) -> list[Outcome]:
    return [tried(seed, index) for index in indices]


def tried(seed: int, index: int) -> Outcome:
    """Change one file and use it."""
    draw = random.Random(f"{seed}:{index}")
    kind = draw.choices(("profile", "plan", "run", "verification"), (40, 35, 17, 8))[0]
    which = draw.randrange(len(_ORIGINALS[kind]))
    text, changes = mutated(_ORIGINALS[kind][which], draw)
    file = Path("changed.json")
    file.write_bytes(text)
    calls = calls_for(kind, which, draw)
    started_s, words, outcome = time.perf_counter(), ["load"], "used"
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        try:
            gplan.load(file)
        except gplan.GplanError as error:
            outcome = "refused when loaded"
            if file.name not in str(error):
                raise AssertionError(f"the message does not name the file: {error}") from error
        else:
            for words in calls:
                if not used(words, changes):
                    outcome = "refused when used"
    except (Exception, TookTooLongError) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.environ.get("GPLAN_SHOW_TRACEBACK"):
            traceback.print_exc()
        failure = Failure(
            index=index, kind=f"{kind}{which}", changes=changes, verb=" ".join(words)[:80],
            error=f"{type(error).__name__}: {error}", where=place_of(error),
        )  # fmt: skip
        return Outcome(kind=kind, outcome="failed", seconds=time.perf_counter() - started_s, failure=failure)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Outcome(kind=kind, outcome=outcome, seconds=time.perf_counter() - started_s)


def used(words: Sequence[str], changes: Sequence[str]) -> bool:
    """Whether a verb did its work; False where it ended with a clear message."""
    code, text = verb(words)
    found = re.search(r"(?<![\w./'\"-])-?(inf|nan)\b(?! *')", text)
    if found and not any("'nan'" in x for x in changes):
        line = next(x for x in text.splitlines() if found[0] in x)
        raise AssertionError(f"a table has {found[0]}: {line.strip()[:200]}")
    return code == 0


def verb(words: Sequence[str]) -> tuple[int, str]:
    """The exit code of the command line, and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            command_line(words)
        except SystemExit as error:
            return int(error.code or 0), output.getvalue()
    return 0, output.getvalue()


def calls_for(kind: str, which: int, draw: random.Random) -> list[list[str]]:
    """The verbs that a file of this kind is given to: cheap ones always, the others now and then."""
    always: dict[str, Callable[[], list[list[str]]]] = {
        "profile": lambda: profile_calls(which, draw),
        "plan": lambda: plan_calls(draw),
    }
    show = ["show", "changed.json", *draw.choice(([], ["--all"], ["--json"]))]
    return [show, *(always[kind]() if kind in always else [])]


def profile_calls(which: int, draw: random.Random) -> list[list[str]]:
    options = ["--time-limit", "1", "--output", "out.json"]
    choices: list[list[str]] = [
        ["--k", "2", "--microbatches", "4"],
        ["--k", "1", "--microbatches", "2"],
        ["--k", "2", "--schedule", "1f1b", "--recompute", draw.choice(("always", "except-last", "selected"))],
        ["--k", "2", "--schedule", draw.choice(("eager-1f1b", "zb-h1", "zb-v", "looped-bfs:1"))],
        ["--k", "2", "--memory", draw.choice(("30KB", "100KB", "1MB", "1GB"))],
        ["--k", "2", "--minimize", "max-stage"],
        ["--k", "2", "--microbatches", "3", "--microbatch-size", draw.choice(("1", "2", "4"))],
        ["--k", "2", "--cut-after", "layer1"],
    ]
    calls = [["balance", "changed.json", *options, *draw.choice(choices)]]
    more: list[tuple[float, list[str]]] = [
        (0.02, ["balance", "changed.json", "--devices", "2", "--batch-size", "4", *options]),
        (0.05, ["explain", "plan0.json", "--profile", "changed.json"]),
        (0.10, ["diff", f"profile{which}.json", "changed.json"]),
        (0.05, ["export", "plan0.json", "--to", "torchtitan", "--profile", "changed.json"]),
    ]
    return calls + [words for share, words in more if draw.random() < share]


def plan_calls(draw: random.Random) -> list[list[str]]:
    schedule = draw.choice(([], [], ["--schedule", "gpipe"], ["--microbatches", "3"], ["--schedule", "all"]))
    trainer = draw.choice(("torchgpipe", "torchtitan", "megatron", "deepspeed"))
    calls = [["simulate", "changed.json", *schedule], ["export", "changed.json", "--to", trainer]]
    explained = [
        "explain",
        "changed.json",
        "--profile",
        draw.choice(("profile0.json", "profile1.json", "profile2.json")),
    ]
    return calls + ([explained] if draw.random() < 0.1 else [])


def place_of(error: BaseException) -> str:
    """The last line of gplan's code that an error came through."""
    own = [x for x in traceback.extract_tb(error.__traceback__) if "gplan" in Path(x.filename).parts]
    return f"{own[-1].filename.rpartition('gplan/')[2]}:{own[-1].lineno}" if own else "this script"


if __name__ == "__main__":
    main()
