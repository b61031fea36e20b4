"""The best assignment of a published profile's nodes to K devices, by the objective of its planner.

    python benchmarks/published.py bert24_training.json --k 4
    python benchmarks/published.py vgg16.graph.txt --k 4 --objective compute --solver milp --json

FILE is dnn-partitioning's JSON or PipeDream's graph.txt. Objectives:
- device-load: the largest load of a device, which pays for every value that it shares with others; at most K devices
  (dnn-partitioning; the default for its files);
- compute: the largest compute time of exactly K stages (PipeDream; the default for its files).

Times are milliseconds for dnn-partitioning's files and seconds for PipeDream's. Without --memory the limit of the file
holds, if it states one. Exit codes: 0 an answer, also INFEASIBLE; 2 usage; 3 a file that cannot be used; 4 no answer in
time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from published import Answer, PublishedGraph, read_graph, solve

from gplan.core.errors import GplanError


def main() -> int:
    """Solve and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--k", type=int, required=True, help="how many devices")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="of each device")
    parser.add_argument("--objective", choices=["device-load", "compute"])
    parser.add_argument("--solver", choices=["dp", "milp"], default="auto", help="default: dp where it can be used")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the result as JSON")
    options = parser.parse_args()
    try:
        graph = read_graph(options.file)
        answer = solve(
            graph,
            num_devices=options.k,
            objective=options.objective,
            memory_bytes=options.memory,
            solver=options.solver,
            time_limit_s=options.time_limit,
        )
    except GplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except TimeoutError as error:
        print(f"error: {error}; give it more time (--time-limit)", file=sys.stderr)
        return 4
    found = as_dict(answer, graph)
    print(json.dumps(found) if options.as_json else as_text(found))
    return 0


def as_dict(answer: Answer, graph: PublishedGraph) -> dict[str, Any]:
    """The answer as the command prints it."""
    return {
        "value": "INFEASIBLE" if answer.value is None else answer.value, "unit": graph.unit, "proven": answer.is_proven,
        "seconds": answer.seconds, "assignment": answer.assignment,
    }  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    """The answer in two lines or more: the value, then the nodes of each device."""
    if found["value"] == "INFEASIBLE":
        return f"INFEASIBLE, in {found['seconds']:.2f} s"
    proven = "proven" if found["proven"] else "not proven"
    lines = [f"{found['value']:.6g} {found['unit']}, {proven}, in {found['seconds']:.2f} s"]
    for device in sorted(set(found["assignment"].values())):
        nodes = [node for node, at in found["assignment"].items() if at == device]
        lines.append(f"device {device}: {' '.join(nodes)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
