"""What the benchmarks share: folders, Markdown tables, rows kept in a CSV file, and a verb in a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gplan.core.units import percent_text

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports"
DATA = Path(os.environ.get("GPLAN_REFERENCE_DATA", ROOT.parent / "shared" / "data"))


def options_of(doc: str | None, report: str) -> argparse.ArgumentParser:
    """A parser with the benchmark's docstring as its help, and --output for the folder of its report."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPORTS / report)
    return parser


def example(name: str) -> str:
    """The reference of an example's model."""
    return str(ROOT / "examples" / f"{name}.py")


def markdown(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table; an empty cell for what is not a number.

    >>> markdown(["model", "seconds"], [["unet", 1.5]])
    ['| model | seconds |', '|---|---|', '| unet | 1.5 |']
    """
    texts = [[*heads], *([*row] for row in rows)]
    lines = [f"| {' | '.join('' if x is None or x != x else str(x) for x in cells)} |" for cells in texts]
    return [lines[0], "|" + "---|" * len(texts[0]), *lines[1:]]


def write_report(folder: Path, lines: Iterable[str]) -> None:
    """Write the folder's README.md, and print it."""
    text = "\n".join(lines).rstrip("\n") + "\n"
    (folder / "README.md").write_text(text)
    print(text)


def error_text(error: float | None) -> str:
    """A signed error in per cent; "" where there is none.

    >>> error_text(0.0123), error_text(float("nan"))
    ('+1.2 %', '')
    """
    return "" if error is None or error != error else percent_text(error, signed=True)


def points_text(share: float | None, *, signed: bool = True) -> str:
    """A difference of two shares in percentage points; "" where there is none."""
    return "" if share is None or share != share else f"{100 * share:{'+' if signed else ''}.1f} points"


def median_and_worst(errors: pd.Series[float], *, points: bool = False) -> list[str]:
    """The median size of some errors, and the largest one with its sign; two empty cells where there are none."""
    found = errors.dropna()
    if found.empty:
        return ["", ""]
    middle, worst = float(found.abs().median()), float(max(found, key=abs))
    if points:
        return [points_text(middle, signed=False), points_text(worst)]
    return [percent_text(middle), error_text(worst)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a CSV file, written whenever some are added: an interrupt loses what runs, and the next call goes on."""

    path: Path
    key: Sequence[str]  # the columns that tell a setting from others

    def table(self, **options: Any) -> pd.DataFrame:
        """What is there, as pandas reads it."""
        return pd.read_csv(self.path, **options) if self.path.exists() else pd.DataFrame()

    def has(self, setting: Mapping[str, object]) -> bool:
        """Whether a setting has a row."""
        return bool(self._are_of(self._texts(), setting).any())

    def add(self, *rows: Mapping[str, object], replace: bool = False) -> None:
        """Add rows; with `replace` those of the same settings go."""
        there = self._texts()
        for row in rows if replace else ():
            there = there[~self._are_of(there, row)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = pd.concat([there.astype(object), pd.DataFrame(rows, dtype=object)], ignore_index=True)
        found.to_csv(self.path.with_suffix(".new"), index=False)
        self.path.with_suffix(".new").replace(self.path)

    def _texts(self) -> pd.DataFrame:
        return self.table(dtype=str, keep_default_na=False)

    def _are_of(self, texts: pd.DataFrame, setting: Mapping[str, object]) -> pd.Series[bool]:
        if texts.empty:
            return pd.Series(dtype=bool)
        return (texts[list(self.key)] == [str(setting[x]) for x in self.key]).all(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A verb that ended."""

    code: int
    errors: str
    processor_s: float  # which other work on the host changes less than seconds by the clock
    peak_bytes: int  # the most that the process held

    @property
    def figures(self) -> dict[str, object]:
        """What it took, for a row."""
        return {"processor_s": round(self.processor_s, 2), "process_bytes": self.peak_bytes}


def run_verb(arguments: Iterable[str]) -> Ended:
    """Run a verb of gplan in a process of its own."""
    command = [sys.executable, "-m", "gplan", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)  # of this child alone
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(
        code=process.returncode,
        errors=" ".join(errors.split()),
        processor_s=used.ru_utime + used.ru_stime,
        peak_bytes=1024 * used.ru_maxrss,
    )
