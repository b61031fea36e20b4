"""Prove exports by the receivers' own code, and compare published layouts with gplan's; writes reports/receivers.

    pip install 'gplan[receivers]'                          what installs without a GPU
    python benchmarks/receivers/check.py                    10,000 random plans for each receiver that is installed
    python benchmarks/receivers/check.py --plans 100 --only megatron deepspeed
    python benchmarks/receivers/check.py --no-layouts       leaves the published layouts out

Each random plan is exported, taken apart by the receiver's own parser or splitter, and compared with the plan stage by
stage; and read back by gplan. Receivers that run on a CPU train three steps, compared with the plain model's losses.
A receiver that is not installed, or whose import fails, is in the table with the reason.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[i]) for i in (1, 2))

from suite import markdown, options_of

from gplan.core import Plan, Profile
from gplan.interop.export.exporters import export
from gplan.interop.export.megatron import layout_of
from gplan.interop.layouts import read_layout
from gplan.interop.planning import ForReceiver, import_plan
from gplan.interop.receiver_table import RECEIVERS
from gplan.interop.receivers import decoder_of
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.decoder_config import Widths
from receivers import own_code
from receivers.published_layouts import PUBLISHED, Published, computed_profile
from receivers.random_plans import random_plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found for one receiver."""

    receiver: str
    version: str  # of its package; "": not installed
    num_plans: int  # that its own code had as the plan has them
    num_read_back: int  # by gplan
    run: str  # what was trained
    problem: str  # why its own code was not used, or what it found otherwise


def checked(receiver: str, num_plans: int) -> Checked:
    """Round trips and runs of one receiver."""
    version, reader = own_code.installed(receiver), own_code.READERS.get(receiver)
    problem, num_equal, num_back = "", 0, 0
    for plan in random_plans(receiver, num_plans):
        num_back += _is_read_back(receiver, plan)
        if problem or reader is None or version is None:
            continue
        try:
            found = reader(plan)
        except (Exception, AssertionError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            continue
        if found != [list(x.layer_names) for x in plan.stages]:
            problem = f"other stages than the plan's: {export(plan, to=receiver).text.splitlines()[0]}"
        num_equal += not problem
    if version is None:
        problem = "not installed" if receiver in own_code.PACKAGES else "several hundred MB, not installed"
    return Checked(
        receiver=receiver,
        version=f"{own_code.PACKAGES.get(receiver, '')} {version}" if version else "",
        num_plans=num_equal,
        num_read_back=num_back,
        run=_run(receiver) if version else "",
        problem=problem,
    )


def _is_read_back(receiver: str, plan: Plan) -> bool:
    profile = _profile(len(plan.layer_names))
    names = (replace(x, name=name) for x, name in zip(profile.layers, plan.layer_names, strict=True))
    layout = read_layout(export(plan, to=receiver).text, replace(profile, layers=tuple(names)), receiver=receiver)
    return layout.cuts == plan.cuts


@cache
def _profile(num_layers: int) -> Profile:
    return computed_profile("llama3-8b", Widths(), {"num_hidden_layers": num_layers - 2})


def _run(receiver: str) -> str:
    """Three steps by a receiver that runs on a CPU, beside the plain model."""
    from receivers import two_processes

    runs: dict[str, Callable[[], tuple[list[float], list[float]]]] = {
        "torchgpipe": two_processes.run_torchgpipe,
        **{name: partial(two_processes.run_on_two_processes, name) for name in two_processes.RUNS},
    }
    if receiver not in runs:
        return ""
    where = "one process" if receiver == "torchgpipe" else "two gloo processes"
    try:
        found, plain = runs[receiver]()
    except Exception as error:
        return f"failed: {str(error).strip().splitlines()[-1][:160]}"
    worst = max(abs(a / b - 1) for a, b in zip(found, plain, strict=True))
    return f"{len(plain)} steps on {where}; losses differ from the plain model's by {worst:.1g}"


def compared(published: Published, *, time_limit_s: float) -> dict[str, Any]:
    """A published layout beside gplan's, both priced on the same profile without a limit of memory."""
    profile = published.profile
    given: dict[str, Any] = {"num_devices": published.num_devices, "num_microbatches": published.num_microbatches}
    given |= {"memory_bytes": 10**15, "time_limit_s": time_limit_s}
    plan = import_plan(published.layout, profile, receiver="megatron", **given)
    chunks, rules = plan.num_stages // plan.num_devices, ForReceiver.of("megatron", profile)
    best = balance(profile, schedule=rules.default_schedule(chunks), constraints=rules.constraints, **given)
    return {
        "model": published.model, "source": published.source, "num_devices": published.num_devices, "num_chunks": chunks,
        "layout": published.layout, "own_layout": layout_of(best, decoder_of(best.layer_names, "Megatron-LM")),
        "step_s": plan.prediction.step_s, "own_step_s": best.prediction.step_s, "bound_s": best.proof.lower_bound_s,
        "peak_gib": plan.peak_bytes / 2**30, "own_peak_gib": best.peak_bytes / 2**30,
    }  # fmt: skip


def report(found: list[Checked], layouts: list[dict[str, Any]], num_plans: int) -> str:
    """The tables of reports/receivers; what the page has below "What this does not show" is written by hand."""
    heads = ["receiver", "package", "by what", f"equal plans of {num_plans:,}", "read back by gplan", "run"]
    lines = [
        "# Exports, proven by the receivers' own code\n",
        "Made by `python benchmarks/receivers/check.py`; nothing here needs a GPU. Random plans have up to 60 blocks, 8 devices and",
        "4 stages a device (16 blocks and 4 devices for torchtitan and NeMo Automodel, which copy the model for every stage), every",
        "schedule and recompute mode of the receiver, and cuts wherever it can cut.\n",
        *markdown(heads, map(_cells, found)),
    ]
    if layouts:
        lines += ["", "## Published layouts", "", *_layout_lines(layouts)]
    return "\n".join([*lines, ""]) + "\n"


def _cells(x: Checked) -> list[object]:
    rules = RECEIVERS[x.receiver]
    equal = f"{x.num_plans:,}{f' ({x.problem})' if x.problem else ''}"
    if not x.problem and x.receiver not in own_code.READERS:
        equal = "no parser of its own"
    return [rules.title, x.version or "-", rules.how, equal, f"{x.num_read_back:,}", x.run or "-"]


def _layout_lines(layouts: list[dict[str, Any]]) -> Iterator[str]:
    yield """Each layout and gplan's for the same model, widths, schedule and micro-batches, priced by gplan's cost model on the same
computed profile. Collectives within layers and memory limits are left out, so only differences count; the gap is how far
below a plan could lie. `gplan layout` makes the one, `gplan import-plan` prices the other.\n"""
    heads = ["", "model", "PP x VPP", "published", "gplan", "step", "gplan's step (gap)", "longer", "largest peak, GiB"]
    cells = []
    for i, x in enumerate(layouts, 1):
        published, own = (f"`{x[name].replace('|', chr(92) + '|')}`" for name in ("layout", "own_layout"))
        own_step = f"{x['own_step_s']:.3f} s ({1 - x['bound_s'] / x['own_step_s']:.1%})"
        steps = [f"{x['step_s']:.3f} s", own_step, f"{x['step_s'] / x['own_step_s'] - 1:.1%}"]
        peaks, widths = f"{x['peak_gib']:.1f}, {x['own_peak_gib']:.1f}", f"{x['num_devices']} x {x['num_chunks']}"
        cells.append([i, x["model"], widths, published, own, *steps, peaks])
    yield from markdown(heads, cells)
    yield "\nSources, in this order:\n"
    yield from (f"{i}. {x['source']}" for i, x in enumerate(layouts, 1))


def main() -> None:
    """Check, compare, write the report."""
    parser = options_of(__doc__, "receivers")
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument(
        "--only", nargs="*", default=[x for x, y in RECEIVERS.items() if y.cuts != "own"], metavar="RECEIVER"
    )
    parser.add_argument("--no-layouts", action="store_true")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="receivers.json files whose rows are kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found, layouts = [], []
    with own_code.quiet():
        for receiver in options.only:
            started_s = time.perf_counter()
            found.append(checked(receiver, options.plans))
            print(f"{receiver}: {found[-1]} in {time.perf_counter() - started_s:.1f} s", flush=True)
    for published in () if options.no_layouts else PUBLISHED:
        layouts.append(compared(published, time_limit_s=options.time_limit))
        print(layouts[-1], flush=True)
    for path in options.merge:
        before = json.loads(path.read_text())
        found += [Checked(**x) for x in before["receivers"] if x["receiver"] not in {y.receiver for y in found}]
        layouts = layouts or before["layouts"]
    found.sort(key=lambda x: [*RECEIVERS].index(x.receiver))
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / "README.md"
    _, heading, limits = (page.read_text() if page.exists() else "").partition("## What this does not show\n")
    page.write_text(report(found, layouts, options.plans) + heading + limits)
    figures = {"receivers": [asdict(x) for x in found], "layouts": layouts}
    (options.output / "receivers.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
