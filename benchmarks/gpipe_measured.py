"""GPipe's Tables 2 and 3 measured on this host with scaled-down models, and where the time of a step goes.

    python benchmarks/gpipe_measured.py                 some 5 minutes on 2 idle cores; writes into reports/gpipe-paper/
    python benchmarks/gpipe_measured.py --steps 1 --rounds 1 --output /tmp/measured         only to see that it runs

Writes measured.md (a section that `benchmarks/gpipe_paper.py` takes up into its report), measured.csv and measured.png.
Each model is profiled, then all of its plans are run in turns, round after round; what is shown are medians over the
rounds of figures that compare runs of one round. Nothing is calibrated. The files are written when all is measured.
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path

import pandas as pd
from paper.measured import SUBJECTS, cases_of, measured_rows, profile_of
from paper.measured_chart import DOTS_PER_INCH, chart
from paper.measured_text import section

from gplan.core.units import seconds_text
from gplan.files.json_files import write_bytes

OUTPUT = Path(__file__).parent.parent / "reports" / "gpipe-paper"


def main() -> None:
    """Profile and run each model, then write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of each run; up to 3 of them warm up")
    parser.add_argument("--rounds", type=int, default=2, help="in which every plan is run once")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if min(options.steps, options.rounds) < 1:
        parser.error(f"--steps {options.steps} --rounds {options.rounds}: at least 1 of each is needed")
    write(measured(num_steps=options.steps, num_rounds=options.rounds), options.output)


def measured(*, num_steps: int, num_rounds: int) -> pd.DataFrame:
    """A row for each model, case and round."""
    started_s, rows = time.perf_counter(), []
    for subject in SUBJECTS:
        print(f"{time.perf_counter() - started_s:4.0f} s  profiling {subject.title}", flush=True)
        for row in measured_rows(cases_of(profile_of(subject)), num_steps=num_steps, num_rounds=num_rounds):
            rows.append({"model": subject.title, "num_steps": num_steps, "num_rounds": num_rounds, **row})
            case = f"round {row['round']} {row['way']} {row['engine']} K={row['k']} M={row['m']} recompute {row['recompute']}"
            found = f"{seconds_text(row['measured_step_s'])}, predicted {seconds_text(row['predicted_step_s'])}"
            print(f"{time.perf_counter() - started_s:4.0f} s  {case}: {found}", flush=True)
    return pd.DataFrame(rows)


def write(table: pd.DataFrame, directory: Path) -> None:
    """measured.csv, measured.png and measured.md, each of them whole; all are made before any is written."""
    picture = io.BytesIO()
    chart(table).savefig(picture, dpi=DOTS_PER_INCH)
    text = section(table)
    directory.mkdir(parents=True, exist_ok=True)
    write_bytes(directory / "measured.csv", table.to_csv(index=False).encode())
    write_bytes(directory / "measured.png", picture.getvalue())
    write_bytes(directory / "measured.md", text.encode())
    print(f"wrote {directory / 'measured.md'}")


if __name__ == "__main__":
    main()
