"""GPipe's own tables, recomputed: which of its published numbers the cost model gives, which not, and why.

    python benchmarks/gpipe_paper.py                            some minutes; writes reports/gpipe-paper/
    python benchmarks/gpipe_paper.py --parts throughput         one part of it; the other tables stay as they are

Parts: counts (parameters of the paper's models), memory (Table 1's own sizes), largest (Table 1, searched), throughput
(Tables 2 and 3). Nothing is measured and nothing is fitted: models are built on the meta device, their work is counted,
and a roofline with assumed efficiencies (profiler/analytic/hardware.toml) makes seconds of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
from paper.charts import draw
from paper.parts import PARTS
from paper.text import report

ROOT = Path(__file__).parent.parent
FURTHER = ("measured.md", "peers.md")  # sections that other benchmarks write


def main() -> None:
    """Compute the parts, then write tables, charts and text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "gpipe-paper")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        started_s, rows = time.perf_counter(), []
        for row in PARTS[part]():
            print(part, row, flush=True)
            rows.append(row)
        pd.DataFrame(rows).to_csv(options.output / f"{part}.csv", index=False)
        print(f"{part}: {time.perf_counter() - started_s:.0f} s", flush=True)
    missing = [part for part in PARTS if not (options.output / f"{part}.csv").exists()]
    if missing:
        parser.error(
            f"{options.output} has no {missing[0]}.csv, which the report needs; run --parts {' '.join(missing)} too"
        )
    tables = {part: pd.read_csv(options.output / f"{part}.csv") for part in PARTS}
    draw(tables, options.output)
    further = [path.read_text() for name in FURTHER if (path := options.output / name).exists()]
    (options.output / "README.md").write_text(report(tables, further=further))
    print(f"wrote {options.output / 'README.md'}")


if __name__ == "__main__":
    main()
