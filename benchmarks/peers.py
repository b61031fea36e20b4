"""gplan beside torchgpipe, hand-written torch.distributed.pipelining and DeepSpeed's rules, on the same models.

    python benchmarks/peers.py                          some 6 minutes on 2 idle cores; writes reports/gpipe-paper/peers.*
    python benchmarks/peers.py --models even --steps 5  less of it

How even everybody's cut is (K = 2, 4, 8), how long a step takes and how much memory two devices need for it (K = 2, one
core each), and how many lines users write. torchgpipe is not needed by gplan: where it is not installed it is left out,
which the text says (`pip install --no-deps torchgpipe==0.0.7`). Of DeepSpeed only the rules are judged, carried out by
gplan's engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from beside.contenders import CONTENDERS, OWN, Contender, Cuts, cuts_of, has_torchgpipe
from beside.lines import line_rows
from beside.models import NUM_MICROBATCHES, SUBJECTS, loss
from beside.quality import DEVICE_COUNTS, cut_rules, cuts_or_reason, plan_with, rated
from beside.text import as_text, how_measured
from beside.turns import NUM_WARM_UP, Entry, Measured, take_turns
from beside.written import with_gplan

import gplan
from gplan.core import Profile

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure all models, then write the section and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--steps", type=int, default=20, help="of each contender, after 3 to warm up")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "gpipe-paper")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps} has no quartiles; expected 2 or more")
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for row in compared(name, num_steps=options.steps):
            rows.append({"model": name, **row})
            print(rows[-1], flush=True)
    table = pd.DataFrame([*rows, *line_rows()])
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "peers.csv", index=False)
    how = how_measured(num_steps=options.steps, num_warm_up=NUM_WARM_UP, date=str(datetime.now(UTC).date()))
    text = as_text(table, how=how)
    (options.output / "peers.md").write_text(text)
    print(text)


def compared(name: str, *, num_steps: int) -> Iterator[dict[str, Any]]:
    """The rows of one model: its partitions first, then its contenders."""
    subject = SUBJECTS[name]
    model, (inputs, targets) = subject.model(), subject.sample()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gplan.plan.json"
        sizes = {"num_devices": 2, "num_microbatches": NUM_MICROBATCHES}
        profile = with_gplan.plan(model, inputs, targets, loss, **sizes, path=path)  # type: ignore[no-untyped-call]
        given = {(OWN, k): cuts_by_torchgpipe(name, k) for k in DEVICE_COUNTS} if has_torchgpipe() else {}
        rules = cut_rules(profile, model, subject.block)
        yield from ({"table": "partition", **row} for row in rated(profile, rules, given=given))
        cuts = cuts_in_two(rules) | {name: found for (name, k), found in given.items() if k == 2}
        contenders = [x for x in CONTENDERS if x.cut == "gplan" or x.cut in cuts]
        entries = [entry_of(x, profile, cuts.get(x.cut), Path(folder) / f"{i}.json") for i, x in enumerate(contenders)]
        entries[0] = Entry(contender=contenders[0], plan_file=str(path), cuts=entries[0].cuts)
        yield from measured_rows(entries, take_turns(name, entries, num_steps=num_steps))


def cuts_in_two(rules: Mapping[str, Callable[[int], Cuts]]) -> dict[str, Cuts]:
    """The cuts for two devices of the rules that have a plan for them."""
    found = {name: cuts_or_reason(rule, 2) for name, rule in rules.items()}
    return {name: cuts for name, cuts in found.items() if not isinstance(cuts, str)}


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread, and afterwards with as many as before."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def cuts_by_torchgpipe(name: str, num_devices: int) -> Cuts:
    """The cut that torchgpipe makes from its own measurement, one thread as in gplan's profile."""
    from beside.written import with_torchgpipe

    subject = SUBJECTS[name]
    sizes = {"num_devices": num_devices, "num_microbatches": NUM_MICROBATCHES}
    with one_thread():
        counts = with_torchgpipe.plan(subject.model(), subject.sample()[0], **sizes)  # type: ignore[no-untyped-call]
    return cuts_of(counts)


def entry_of(contender: Contender, profile: Profile, cuts: Cuts | None, path: Path) -> Entry:
    """A contender with its cut, and with a plan file where gplan's engine carries it out."""
    if contender.cut == "gplan":
        plan = gplan.balance(
            profile,
            num_devices=2,
            num_microbatches=NUM_MICROBATCHES,
            schedule=contender.schedule,
            recompute=contender.recompute,
        )
    else:
        assert cuts is not None
        plan = plan_with(profile, cuts, schedule=contender.schedule, recompute=contender.recompute)
    gplan.save(plan, path)
    return Entry(contender=contender, plan_file=str(path), cuts=plan.cuts)


def measured_rows(entries: list[Entry], found: list[Measured]) -> Iterator[dict[str, Any]]:
    """A row for each contender; ratios are medians over the rounds, to gplan with the same schedule and recompute."""
    own = {_way(x.contender): y for x, y in zip(entries, found, strict=True) if x.contender.is_gplan}
    for entry, one in zip(entries, found, strict=True):
        contender, reference = entry.contender, own[_way(entry.contender)]
        check_alike(contender, reference.losses, one.losses)
        ratios = [x / y for x, y in zip(one.step_s, reference.step_s, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        yield {
            "table": "step",
            **asdict(contender),
            "cuts": list(entry.cuts),
            "step_s": statistics.median(one.step_s),
            "step_ratio": middle,
            "lower": lower,
            "upper": upper,
            "growth_bytes": sum(one.growth_bytes),
            "growth_ratio": sum(one.growth_bytes) / sum(reference.growth_bytes),
            "largest_growth_bytes": max(one.growth_bytes),
        }


def _way(contender: Contender) -> tuple[str, str]:
    return contender.schedule, contender.recompute


def check_alike(contender: Contender, expected: Sequence[float], found: Sequence[float]) -> None:
    """Raise ValueError where a contender's losses are not gplan's, to a thousandth."""
    for step, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if not abs(ours - theirs) <= 1e-3 * abs(ours):
            raise ValueError(
                f"in step {step} {contender} finds a loss of {theirs} where gplan finds {ours}; expected the same work of all"
            )


if __name__ == "__main__":
    main()
