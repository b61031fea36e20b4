"""Damaged profiles, plans and runs, loaded and then used: each ends in a result or in one clear message.

    python benchmarks/mutated_files.py                       50,000 files, some 8 minutes on 2 cores
    python benchmarks/mutated_files.py --only 1234           one file again, with its traceback; from -1 down a checkpoint
    python benchmarks/mutated_files.py --count 800 --checkpoints 200 --report reports/hostile-files

Small valid files are made first, by gplan itself: profiles that are measured and computed, of a chain with tied weights
and of a model with branches; plans with chunks, a custom order, replicas, places of a machine, a frontier; runs and a
verification. Each case takes one of them, changes numbers, keys, entries or bytes, loads it, and where it can be loaded
gives it to the verbs of the command line that read such a file. A GplanError is a clear message; any other exception, a
case of more than 20 s or of more memory than 2 GiB, a message that does not name the file, and a table with an infinity
in it are failures. A checkpoint has one of its files damaged, lost, or replaced by a pickle that runs a command, also with
checksums that fit, and a run resumes from it: other losses than those of the whole checkpoint are a failure. So is,
always, a command that was run. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from suite import example

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
class Outcome:
    """What came of one case; of a failure also what was changed, by which verb it was found, and where in gplan."""

    index: int
    kind: str
    outcome: str
    seconds: float
    changes: tuple[str, ...] = ()
    verb: str = ""
    error: str = ""
    where: str = ""  # the last line of gplan's own code in the traceback


def main() -> None:
    """Make the files, change and use them on all workers, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--checkpoints", type=int, default=200, help="cases with a checkpoint, besides")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the summary there too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="INDEX", help="one case, in this process")
    options = parser.parse_args()
    started_s, outcomes = time.perf_counter(), list[Outcome]()
    with tempfile.TemporaryDirectory() as folder:
        originals = make_originals(Path(folder))
        if options.only is not None:
            os.environ["GPLAN_SHOW_TRACEBACK"] = "1"
            start_worker(Path(folder), originals)
            outcomes = tried_all(options.seed, [options.only])
        else:
            indices = [*range(-options.checkpoints, 0), *range(options.count)]
            batches = [indices[i : i + BATCH] for i in range(0, len(indices), BATCH)]
            with multiprocessing.get_context("spawn").Pool(options.workers, start_worker, (folder, originals)) as pool:
                for some in pool.imap_unordered(partial(tried_all, options.seed), batches):
                    outcomes += some
                    print(f"\r{len(outcomes)} of {len(indices)}", end="", file=sys.stderr, flush=True)
    text = summary(outcomes, time.perf_counter() - started_s)
    print(text)
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        made = f"python benchmarks/mutated_files.py --count {options.count} --checkpoints {options.checkpoints} --seed {options.seed}"
        head = f"# Damaged and hostile files\n\nMade by `{made}`. A failure is a traceback, a command that was run, or other losses"
        (options.report / "README.md").write_text(f"{head} than those of the whole checkpoint.\n\n```\n{text}\n```\n")
    sys.exit(1 if any(x.error for x in outcomes) else 0)


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """A row for every kind of file, then the failures, those of one place together."""
    counts, failures = Counter((x.kind, x.outcome) for x in outcomes), [x for x in outcomes if x.error]
    kinds = sorted({x.kind for x in outcomes})
    rows = [[kind, *(str(counts[kind, x]) for x in OUTCOMES)] for kind in kinds]
    rows.append(["all", *(str(sum(counts[kind, x] for kind in kinds)) for x in OUTCOMES)])
    lines = ["".join(f"{x:>21}" for x in row) for row in [["file", *OUTCOMES], *rows]]
    slowest = max((x.seconds for x in outcomes), default=0.0)
    lines.append(f"{len(outcomes)} files in {seconds:.0f} s, the slowest {slowest:.1f} s, {len(failures)} failures")
    alike: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for failure in failures:
        alike[failure.where, re.sub(r"[0-9.e+-]+", "#", failure.error)[:60]].append(failure)
    for (where, _), found in sorted(alike.items(), key=lambda x: -len(x[1])):
        lines.append(f"\n{len(found)} times {found[0].error[:300]} at {where}")
        lines += [f"    --only {x.index}: {x.kind}, {x.verb}: {'; '.join(x.changes)}" for x in found[:4]]
    return "\n".join(lines)


# the files that are changed


CHAIN = {"num_blocks": 2, "width": 16, "num_heads": 2, "sequence_length": 8, "tie_embedding": True}
BRANCHED = {"depth": 2, "width": 4, "image_size": 32}


def make_originals(folder: Path) -> dict[str, list[Json]]:
    """Valid files of every kind, as decoded JSON."""
    chain, quick = (
        example("transformer_lm"),
        {"budget_s": 0.3, "contention": 0, "link": gplan.Link(latency_s=1e-5, bytes_per_s=1e9)},
    )
    measured = gplan.profile(chain, settings=CHAIN, microbatch_sizes=[1, 4], **quick)
    branched = gplan.profile(example("unet"), settings=BRANCHED, microbatch_sizes=[1], **quick)
    computed = gplan.profile(chain, settings=CHAIN, microbatch_sizes=[1], device="meta", hardware="h100")
    plans = made_plans(folder, measured, branched, computed)
    gplan.run(plans[0], engine="virtual", num_steps=1, save_every=1, checkpoints=folder / "checkpoints")
    gplan.save(plans[0], folder / "of_checkpoint.json")
    runs = [gplan.run(plan, engine="virtual", num_steps=3, check=True) for plan in plans[:4]]
    verified = gplan.verify(plans[0], measured, engine="virtual", num_steps=6, num_rounds=1, num_rivals=1)
    made: dict[str, list[Any]] = {
        "profile": [measured, branched, computed], "plan": plans, "run": runs, "verification": [verified],
    }  # fmt: skip
    return {kind: [saved(folder, x) for x in values] for kind, values in made.items()}


def made_plans(
    folder: Path, measured: gplan.Profile, branched: gplan.Profile, computed: gplan.Profile
) -> list[gplan.Plan]:
    """Plans with every optional content."""
    few = {"num_devices": 2, "num_microbatches": 4}
    plans = [
        gplan.balance(measured, **few),
        gplan.balance(branched, **few, schedule="1f1b"),
        gplan.balance(measured, **few, schedule="zb-h1"),
        gplan.balance(measured, **few, schedule="interleaved-1f1b:2"),
        gplan.balance(measured, num_devices=2, num_microbatches=2, schedule=OWN),
        gplan.balance(computed, **few, num_replicas=2, recompute="except-last"),
        gplan.balance(measured, total_devices=2, schedule="auto", recompute="auto", batch_size=8, time_limit_s=2.0),
    ]
    machine = folder / "machine.toml"
    machine.write_text(MACHINE)
    gplan.save(measured, folder / "profile.json")
    cut = measured.layers[1].name
    for extra in (["--machine", str(machine)], ["--cut-after", cut], ["--recompute", "selected"]):
        path = folder / "wished.json"
        code, text = verb(["balance", str(folder / "profile.json"), "--k", "2", "--output", str(path), *extra])
        assert code == 0, text
        plan = gplan.load(path)
        assert isinstance(plan, gplan.Plan)
        plans.append(plan)
    return plans


def saved(folder: Path, value: Any) -> Json:
    """A value as its file has it."""
    gplan.save(value, folder / "saved.json")
    return json.loads((folder / "saved.json").read_text())


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
         "x\nimport os; os.system('touch executed')", "'+__import__('os').system('touch executed')+'", "$(touch executed)",
         "\"\"\"\nopen('executed', 'w')\n\"\"\"", "<script>alert(1)</script>", "computed", "always", "selected", "max-stage", "../..", "%s", "{0}")  # fmt: skip


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
        old, is_other = parent[key], self._draw.random() < 0.15
        if is_other or isinstance(old, dict | list):
            parent[key], words = self._new_other(old)
        elif isinstance(old, str):
            parent[key] = self._draw.choice(TEXTS)
            words = f"= {parent[key][:30]!r}"
        else:
            parent[key], words = self._new_number(old)
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

    def _new_other(self, old: Json) -> tuple[Json, str]:
        if self._draw.random() < 0.1:
            depth = self._draw.choice((10, 100, 1000, 100_000))
            return self._new_raw("[" * depth + "]" * depth)
        new = self._draw.choice((None, [], {}, str(old)[:30], True, False, self._draw.choice(NUMBERS)))
        return new, f"= {new!r}"

    def _new_raw(self, text: str) -> tuple[Json, str]:
        self._raw.append(text)
        return RAW.format(len(self._raw) - 1), f"= {text[:20]}"

    def _structure(self, parent: Json, key: Any) -> str:
        """A key or an entry too few or too many."""
        ways = ["removed"] * 2 + (["copied"] if isinstance(parent, dict) else ["repeated", "reversed", "emptied"])
        way = self._draw.choice(ways)
        if way == "removed":
            del parent[key]
        elif way == "copied":
            parent[self._draw.choice(("colour", "", "format", f"{key}s"))] = parent[key]
        elif way == "repeated":
            parent[key:key] = [copy.deepcopy(parent[key])] * self._draw.choice((1, 2, 100))
        elif way == "reversed":
            parent.reverse()
        else:
            parent.clear()
        return f"and all beside it {way}" if way in ("reversed", "emptied") else way

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
_CHECKPOINTS: dict[str, Path] = {}  # the folder of one, and its plan


def start_worker(folder: Path | str, originals: dict[str, list[Json]]) -> None:
    """Put the files that verbs need beside the changed one into a folder of this process, and limit its memory."""
    _ORIGINALS.update(originals)
    os.chdir(tempfile.mkdtemp(dir=folder))
    _CHECKPOINTS.update({"folder": Path(folder, "checkpoints"), "plan": Path(folder, "of_checkpoint.json")})
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


def tried_all(seed: int, indices: Sequence[int]) -> list[Outcome]:
    return [tried(seed, index) if index >= 0 else tried_checkpoint(seed, index) for index in indices]


class Bomb:
    """What a hostile pickle holds."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


@cache
def losses_of_whole() -> tuple[float, ...]:
    """The losses after the checkpoint that is not damaged."""
    return resumed(_CHECKPOINTS["folder"])


def resumed(checkpoints: Path) -> tuple[float, ...]:
    plan = gplan.load(_CHECKPOINTS["plan"])
    assert isinstance(plan, gplan.Plan)
    return gplan.run(plan, engine="virtual", num_steps=2, checkpoints=checkpoints, resume=checkpoints).losses


DAMAGES = (
    "byte",
    "bit",
    "cut off",
    "removed",
    "emptied",
    "pickle",
    "pickle with its checksum",
    "torch file with its checksum",
)


def damaged(file: Path, draw: random.Random) -> str:
    """Damage one file of a checkpoint, or replace it, and say how."""
    how, before = draw.choice(DAMAGES), file.read_bytes()
    content, place = bytearray(before), draw.randrange(len(before))
    if how in ("byte", "bit"):
        content[place] ^= 1 << draw.randrange(8) if how == "bit" else draw.randrange(1, 256)
    elif how.startswith("torch file"):
        saved_bytes = io.BytesIO()
        torch.save({"state": Bomb()}, saved_bytes)
        content = bytearray(saved_bytes.getvalue())
    elif how.startswith("pickle"):
        content = bytearray(pickle.dumps(Bomb()))
    else:
        del content[0 if how == "emptied" else place :]
    file.write_bytes(content)
    if how == "removed":
        file.unlink()
    if how.endswith("checksum"):
        old, new = (hashlib.blake2b(x).hexdigest() for x in (before, bytes(content)))
        for sums in {*file.parent.rglob("checksums")} - {file}:
            *lines, last = sums.read_text().replace(old, new).splitlines(keepends=True)
            own = hashlib.blake2b("".join(lines).encode()).hexdigest()
            sums.write_text("".join(lines) + own + last[len(own) :])
    return how


def tried_checkpoint(seed: int, index: int) -> Outcome:
    """Damage one file of a checkpoint and resume from it."""
    draw, started_s = random.Random(f"{seed}:{index}"), time.perf_counter()
    shutil.rmtree("damaged", ignore_errors=True)
    shutil.copytree(_CHECKPOINTS["folder"], "damaged")
    file = draw.choice(sorted(x for x in Path("damaged").rglob("*") if x.is_file() and x.stat().st_size))
    how, outcome, found = damaged(file, draw), "used", dict[str, Any]()
    whole = losses_of_whole()  # which shows that the checkpoint resumes where it is not damaged
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if resumed(Path("damaged")) != whole:
                raise AssertionError("resumed silently with other values")
    except gplan.GplanError:
        outcome = "refused when loaded"
    except Exception as error:
        outcome = "failed"
        found = {"error": f"{type(error).__name__}: {error}", "where": place_of(error)}
    if Path("executed").exists():
        Path("executed").unlink()
        outcome, found = "failed", {"error": "a command of the file was run", "where": "a checkpoint"}
    found.update({"changes": (f"{file}: {how}",), "verb": "run --resume"} if found else {})
    return Outcome(index=index, kind="checkpoint", outcome=outcome, seconds=time.perf_counter() - started_s, **found)


def tried(seed: int, index: int) -> Outcome:
    """Change one file and use it."""
    draw = random.Random(f"{seed}:{index}")
    kind = draw.choices(("profile", "plan", "run", "verification"), (42, 37, 17, 4))[0]
    which = draw.randrange(len(_ORIGINALS[kind]))
    text, changes = mutated(_ORIGINALS[kind][which], draw)
    file = Path("changed.json")
    file.write_bytes(text)
    calls = calls_for(kind, which, draw)
    started_s, words, outcome, found = time.perf_counter(), ["load"], "used", dict[str, Any]()
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
        if Path("executed").exists():
            Path("executed").unlink()
            raise AssertionError("a command of the file was run")
    except (Exception, TookTooLongError) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.environ.get("GPLAN_SHOW_TRACEBACK"):
            traceback.print_exc()
        outcome = "failed"
        found = {
            "changes": changes,
            "verb": " ".join(words)[:80],
            "error": f"{type(error).__name__}: {error}",
            "where": place_of(error),
        }
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - started_s
    return Outcome(index=index, kind=f"{kind}{which}", outcome=outcome, seconds=seconds, **found)


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
    stream = io.BytesIO()  # as --json writes bytes
    output = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            command_line(words)
        except SystemExit as error:
            return int(error.code or 0), stream.getvalue().decode()
    return 0, stream.getvalue().decode()


def calls_for(kind: str, which: int, draw: random.Random) -> list[list[str]]:
    """The verbs that a file of this kind is given to: cheap ones always, the others now and then."""
    more = profile_calls(which, draw) if kind == "profile" else plan_calls(draw) if kind == "plan" else []
    return [["show", "changed.json", *draw.choice(([], ["--all"], ["--json"]))], *more]


def profile_calls(which: int, draw: random.Random) -> list[list[str]]:
    options = ["--time-limit", "1", "--output", "out.json"]
    choices: list[list[str]] = [
        ["--k", "2", "--microbatches", "4"],
        ["--k", "1", "--microbatches", "2"],
        ["--k", "2", "--schedule", "1f1b", "--recompute", draw.choice(("always", "except-last", "selected"))],
        ["--k", "2", "--schedule", draw.choice(("eager-1f1b", "zb-h1", "zb-v", "looped-bfs:1"))],
        ["--k", "2", "--memory", draw.choice(("100KB", "300KB", "1MB", "1GB"))],
        ["--k", "2", "--minimize", "max-stage"],
        ["--k", "2", "--microbatches", "3", "--microbatch-size", draw.choice(("1", "2", "4"))],
        ["--k", "2", "--cut-after", _ORIGINALS["profile"][which]["layers"][1]["name"]],
    ]
    calls = [["balance", "changed.json", *options, *draw.choice(choices)]]
    more: list[tuple[float, list[str]]] = [
        (0.02, ["balance", "changed.json", "--devices", "2", "--batch-size", "4", *options]),
        (0.05, ["explain", "plan0.json", "--profile", "changed.json"]),
        (0.05, ["export", "plan0.json", "--to", "torchtitan", "--profile", "changed.json"]),
    ]
    return calls + [words for share, words in more if draw.random() < share]


def plan_calls(draw: random.Random) -> list[list[str]]:
    schedule = draw.choice(([], [], ["--schedule", "gpipe"], ["--microbatches", "3"], ["--schedule", "all"]))
    trainer = draw.choice(("torchgpipe", "torchtitan", "megatron", "deepspeed"))
    calls = [["simulate", "changed.json", *schedule], ["export", "changed.json", "--to", trainer]]
    profile = draw.choice(("profile0.json", "profile1.json", "profile2.json"))
    return calls + ([["explain", "changed.json", "--profile", profile]] if draw.random() < 0.1 else [])


def place_of(error: BaseException) -> str:
    """The last line of gplan's code that an error came through."""
    own = [x for x in traceback.extract_tb(error.__traceback__) if "gplan" in Path(x.filename).parts]
    return f"{own[-1].filename.rpartition('gplan/')[2]}:{own[-1].lineno}" if own else "this script"


if __name__ == "__main__":
    main()
