"""gplan on several versions of torch: the loop, schedules, recompute, sharding and architectures, checked on each.

    python benchmarks/torch_versions.py PYTHON [PYTHON ...]     on each of these interpreters; what has a row is left out
    python benchmarks/torch_versions.py --table                 the report of the rows that are there

Every interpreter has its own torch, gplan's other packages, transformers and pytest. A case profiles a small model, balances it for two
devices and trains it in two processes (four with sharding, one for architectures), with the first step's gradients
compared with the plain model's. Its row has the largest difference of a gradient and the largest error of a predicted peak, or the error. One case more runs
the tests of what gplan assumes of torch (`CONTRACTS`). A torch that gplan refuses has one row, with the refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from suite import ROOT, Rows, error_text, example, markdown, options_of, write_report

import gplan
from gplan.core import Link, Profile
from gplan_profiler.torch_compat import version_problem

TRANSFORMER = {"num_blocks": 5, "width": 128, "num_heads": 4, "sequence_length": 64, "dropout": 0.0}
ARCHITECTURES = (
    "gpt2", "gemma3text", "albert", "t5", "swin", "mamba", "clip", "mixtral", "llama", "vit",
)  # fmt: skip
CONTRACTS = "tests/profiler/test_torch_compat.py"
REFUSED = "refused"  # the group of the row of a torch that gplan refuses
PEAKS_FROM_BYTES = 2**20  # the error of a smaller peak is that of a few kilobytes


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run."""

    group: str
    name: str
    dials: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""  # "": the transformer

    def run(self, profiles: dict[str, Profile]) -> dict[str, Any]:
        """Profile, balance and train, or run the tests; the row, or the error of what failed."""
        if self.name == CONTRACTS:
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", CONTRACTS]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            return {"passed": not done.returncode, "error": "; ".join(failed)[:600]}
        try:
            made = profiles.get(self.architecture) or self._profile()
            profiles[self.architecture] = made
            plan = gplan.balance(made, **{"num_devices": 2, "num_microbatches": 4, "schedule": "1f1b"} | self.dials)
            run = gplan.run(plan, engine="virtual" if self.architecture else "torch", num_steps=4, check=True)
        except Exception as error:  # of any kind: it is the result
            return {"error": f"{type(error).__name__}: {error}".replace(f"{ROOT}/", "")[:600]}
        check = run.check
        assert check is not None
        pairs = zip(plan.device_peak_bytes, run.peak_bytes, strict=True)
        errors = [(x - y) / y for x, y in pairs if y >= PEAKS_FROM_BYTES]
        return {
            "passed": check.passed,
            "gradient_difference": f"{check.max_relative_error:.1e}",
            "peak_error": f"{max(errors, key=abs):.4f}" if errors else "",
        }

    def _profile(self) -> Profile:
        reference = example("transformer_lm")
        settings: dict[str, Any] = TRANSFORMER
        if self.architecture:
            reference, settings = str(ROOT / "benchmarks" / "architecture_models.py"), {"name": self.architecture}
        return gplan.profile(
            reference,
            settings=settings,
            microbatch_sizes=(2,),
            contention=0,
            link=Link(latency_s=1e-5, bytes_per_s=1e10),
            budget_s=0.2,
        )


def cases() -> Iterator[Case]:
    """All of them."""
    yield Case(group="loop", name="1f1b")
    for name in ("gpipe", "eager-1f1b", "interleaved-1f1b:2", "looped-bfs:2", "zb-h1", "zb-v"):
        yield Case(group="schedules", name=name, dials={"schedule": name})
    for mode in ("always", "except-last", "selected"):
        for schedule in ("gpipe", "1f1b"):
            dials = {"schedule": schedule, "recompute": mode, "num_microbatches": 16}
            yield Case(group="recompute", name=f"{schedule}, {mode}, M = 16", dials=dials)
    for sharding in ("optimizer", "weights"):
        yield Case(group="sharding", name=sharding, dials={"num_replicas": 2, "sharding": sharding})
    for name in ARCHITECTURES:
        yield Case(group="architectures", name=name, architecture=name)
    yield Case(group="contracts", name=CONTRACTS)


def main() -> None:
    """Run what is not there yet, then write the report; with --worker run the named cases and print their rows."""
    parser = options_of(__doc__, "torch-versions")
    parser.add_argument("pythons", nargs="*", type=Path, metavar="PYTHON")
    parser.add_argument("--table", action="store_true", help="write the report only")
    parser.add_argument("--worker", nargs="*", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return worker(options.worker)
    rows = Rows(options.output / "rows.csv", ("torch", "python", "group", "case"))
    for python in () if options.table else options.pythons:
        examine(python, rows)
    write_report(options.output, report(rows.table(keep_default_na=False, dtype=str)))
    return None


def examine(python: Path, rows: Rows) -> None:
    """Add the rows of one interpreter."""
    ask = "import platform, torch; print(torch.__version__, platform.python_version())"
    version, of_python = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    known = {"torch": version, "python": of_python, "made": datetime.now(timezone.utc).date().isoformat()}
    empty = dict.fromkeys(("passed", "gradient_difference", "peak_error", "error"), "")
    if problem := version_problem(version):
        rows.add({**known, **empty, "group": REFUSED, "case": "", "error": problem}, replace=True)
        return
    todo = [x for x in cases() if not rows.has({**known, "group": x.group, "case": x.name})]
    command = [python, __file__, "--worker", *(f"{x.group}/{x.name}" for x in todo)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "profiler"), str(ROOT / "benchmarks")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout if todo else ():
            row = json.loads(line)
            rows.add({**known, **empty, **row}, replace=True)
            print(version, row, flush=True)


def worker(names: list[str]) -> None:
    """Run the named cases in this interpreter; a line of JSON for each."""
    output, profiles = os.dup(1), dict[str, Profile]()
    os.dup2(2, 1)  # what the runs print is no row
    with tempfile.TemporaryDirectory() as folder, os.fdopen(output, "w") as lines:
        os.chdir(folder)
        for case in cases():
            if f"{case.group}/{case.name}" in names:
                print(
                    json.dumps({"group": case.group, "case": case.name, **case.run(profiles)}), file=lines, flush=True
                )


def cell(found: Any, num_cases: int) -> str:
    """How many cases of a group passed, of those that ran."""
    if not len(found):
        return "not run"
    missing = num_cases - len(found)
    return f"{(found.passed == 'True').sum()} of {len(found)}" + f", {missing} not run" * bool(missing)


def report(rows: Any) -> list[str]:
    """A line for each version, then what failed."""
    groups = list(dict.fromkeys(x.group for x in cases()))
    cells, failed, refusals = [], [], []
    order = lambda key: [int(x) for y in key for x in y.split("+")[0].split(".")]  # noqa: E731
    for (torch, python), found in sorted(rows.groupby(["torch", "python"]), key=lambda pair: order(pair[0])):
        if set(found.group) == {REFUSED}:
            cells.append([torch, python, *[REFUSED] * len(groups), "", "", max(found.made)])
            refusals += [f"torch {torch}, Python {python}: `{found.error.iloc[0]}`"]
            continue
        counts = [cell(found[found.group == y], sum(x.group == y for x in cases())) for y in groups]
        differences = [float(x) for x in found.gradient_difference if x]
        peaks = [float(x) for x in found.peak_error if x]
        largest = [f"{max(differences):.1e}" if differences else "", error_text(max(peaks, key=abs) if peaks else None)]
        cells.append([torch, python, *counts, *largest, " to ".join(sorted({min(found.made), max(found.made)}))])
        failed += [
            f"- torch {torch}, Python {python}, {x.group}, {x.case}: {x.error or f'gradients differ by {x.gradient_difference}'}"
            for x in found.itertuples()
            if x.passed != "True"
        ]
    return [
        "# Versions of torch\n",
        "Made by `python benchmarks/torch_versions.py PYTHON ...`; all rows are in [rows.csv](rows.csv). Each interpreter has "
        'an environment of its own, such as by `uv venv` and `uv pip install "torch==VERSION" "transformers>=5,<6" pytest` with '
        "gplan's dependencies: the wheels that the package index has for Linux on x86-64, CUDA builds, on a CPU; in those of "
        f"{max(rows.made)} libraries without code stand in for CUDA's, which no case calls. Cases of an earlier date are of the gplan "
        "of that day. torch 2.15 has no wheel for Python 3.10; Python 3.14 was not tried.\n",
        "A cell counts the cases whose first step has the gradients of the plain model. K = 2, "
        f"{len(list(cases()))} cases: the loop (1F1B), six further schedules, three recompute modes with GPipe and 1F1B and "
        "16 micro-batches, both kinds of sharded replicas in four processes, and ten tiny architectures (in one process); "
        f"the last is `pytest {CONTRACTS}`, what gplan assumes of torch. The peak is the largest error of a predicted peak "
        "memory of 1 MiB or more.\n",
        *markdown(["torch", "Python", *groups, "largest gradient difference", "worst peak", "made"], cells),
        *(f"\n{x}." for x in refusals),
        "\n## What failed\n",
        *(failed or ["Nothing."]),
    ]


if __name__ == "__main__":
    sys.exit(main())
