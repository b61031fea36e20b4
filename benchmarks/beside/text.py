"""The section on gplan's peers as Markdown: what the table says, and how it was measured."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pandas as pd
import torch
from paper.text import markdown

from beside.contenders import INSTALL, OWN, has_torchgpipe
from beside.models import NUM_MICROBATCHES
from gplan.core.units import bytes_text, seconds_text
from profiler.host.host_info import processor, usable_cores

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}


def as_text(table: pd.DataFrame, *, how: str) -> str:
    """The section: partition quality, step time and memory, lines; `how` says how it was measured."""
    steps = table[table.table == "step"]
    return "\n".join(
        [
            "## Beside its peers\n",
            how,
            "### How even the cut is\n",
            *quality_table(table[table.table == "partition"]),
            QUALITY,
            "### Step time and memory\n",
            STEPS_HEAD,
            *step_table(steps),
            *step_sentences(steps),
            STEPS,
            "### Lines that a user writes\n",
            *line_table(table[table.table == "lines"]),
            LINES,
        ]
    )


def how_measured(*, num_steps: int, num_warm_up: int, date: str) -> str:
    """Versions, machine and the way of measuring."""
    peer = f"torchgpipe {importlib.metadata.version('torchgpipe')}" if has_torchgpipe() else MISSING
    return (
        f"`python benchmarks/peers.py`, {date}, {processor()}, {len(usable_cores())} cores, torch {torch.__version__}, {peer}. "
        "Four small models, each an `nn.Sequential` (`benchmarks/beside/models.py`), trained with SGD on a mini-batch of "
        f"M = {NUM_MICROBATCHES} micro-batches. *even* has blocks that are all alike, *vocabulary* such blocks and a head over "
        "6000 words, *convolution* takes its time in the early layers and has its parameters in the late ones, *widening* "
        f"is a perceptron of growing layers. All contenders of a model stay alive and take turns, one step each, {num_steps} "
        f"rounds after {num_warm_up} to warm up, the first one changing; their losses are compared after every step and agree to a "
        "thousandth. DeepSpeed itself is not run: its rules are carried out by gplan's engine.\n"
    )


def quality_table(table: pd.DataFrame) -> list[str]:
    """Rules down, models and K across."""
    columns = [(model, k) for model in table.model.unique() for k in sorted(set(table.k))]
    rows = []
    for rule in table.rule.unique():
        found = {(x.model, x.k): x.ratio for x in table[table.rule == rule].itertuples()}
        rows.append([rule, *(_quality_cell(found.get(column)) for column in columns)])
    return markdown(["", *(f"{model}, K = {int(k)}" for model, k in columns)], rows)


def _quality_cell(ratio: float | None) -> str:
    return "no plan" if ratio is None or pd.isna(ratio) else f"{ratio:.2f}"


def step_table(table: pd.DataFrame) -> list[str]:
    """Contenders down, models across."""
    models = list(table.model.unique())
    rows = []
    for who, part in _by_contender(table):
        found = {x.model: x for x in part.itertuples()}
        rows.append([who, *(_step_cell(found[model]) if model in found else "" for model in models)])
    return markdown(["", *models], rows)


def _step_cell(x: Any) -> str:
    return f"{seconds_text(x.step_s)}, {x.step_ratio:.2f}, {bytes_text(x.growth_bytes)}"


def step_sentences(table: pd.DataFrame) -> list[str]:
    """Where a peer is faster than gplan, equal or slower, and where it needs less memory."""
    rivals = table[(table.executor != "gplan") | (table.cut != "gplan")]
    named: list[tuple[str, Any]] = [
        (f"{who} on {x.model}", x) for who, part in _by_contender(rivals) for x in part.itertuples()
    ]
    found = {
        "Faster than gplan (the upper quartile of the ratio is below 1)": [who for who, x in named if x.upper < 1],
        "Equal (1 lies between the quartiles)": [who for who, x in named if x.lower <= 1 <= x.upper],
        "Slower (the lower quartile is above 1)": [who for who, x in named if x.lower > 1],
        "Less memory than gplan, by more than 5 %": [who for who, x in named if x.growth_ratio < 0.95],
        "More memory than gplan, by more than 5 %": [who for who, x in named if x.growth_ratio > 1.05],
    }
    return [*(f"- {what}: {'; '.join(cases) or 'none'}." for what, cases in found.items()), ""]


def _by_contender(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of one contender each, with its name."""
    columns = ["executor", "cut", "schedule", "recompute", "num_processes", "num_threads"]
    groups: Any = table.groupby(columns, sort=False)
    return [(_name(*key), part) for key, part in groups]


def _name(executor: str, cut: str, schedule: str, recompute: str, num_processes: float, num_threads: float) -> str:
    """What a contender is called.

    >>> _name("by hand", "equal layer counts", "1f1b", "never", 2, 1)
    'by hand, 1F1B'
    >>> _name("gplan", "gplan", "gpipe", "always", 2, 1)
    'gplan, GPipe, recompute'
    """
    parts = [executor, SCHEDULES[schedule]]
    if executor == "gplan" and cut != "gplan":
        parts = ["cut of " + cut.split(",")[0] + " in gplan's engine", SCHEDULES[schedule]]
    parts += ["recompute"] if recompute == "always" else []
    parts += [f"{int(num_threads)} threads"] if num_threads > 1 else []
    return ", ".join(parts)


def line_table(table: pd.DataFrame) -> list[str]:
    """Lines of each file."""
    rows = [
        [x["rule"], str(int(x["num_plan_lines"])), str(int(x["num_lines"])), x["started_by"]]
        for x in table.to_dict("records")
    ]
    return markdown(["", "to plan", "all", "started by"], rows)


MISSING = f"without torchgpipe, which is not installed (`{INSTALL}`)"

QUALITY = f"""\
The largest stage's seconds over the smallest possible, by gplan's measured profile: 1.00 is the optimum, which is proven. Seconds are those that a stage computes for a micro-batch, forward and backward, without transfers and without what gplan's engine takes, which none of the peers looks at. "{OWN}" is the cut that `balance_by_time` made here, anew for every K; its `balance_by_size` cannot be judged, as it refuses a CPU ("size profiler supports only CUDA device"). DeepSpeed's `type:regex` counts the layers of the class that the model repeats. gplan's row "for the step" minimises the predicted step with both, so that its largest stage can be above the smallest possible. All figures come from one profile, which is gplan's own: what it measures wrongly counts for gplan and against a peer that measured by itself.
"""

STEPS_HEAD = """\
K = 2. Each cell has the median step, its ratio to gplan's with the same schedule and recompute (median over the rounds), and the memory. `peers.csv` has the quartiles, the cuts and the fullest process.
"""

STEPS = """\
All have two cores, and one thread for each device but where the table says two: gplan and the hand-written loop are two processes, one core each; torchgpipe is one process on both cores, under Python's GIL. torchgpipe 0.0.7 runs unchanged with this torch, but on a CPU its devices do not compute side by side: `torchgpipe/worker.py` has one worker thread for all partitions on "cpu", and autograd runs the backward of a CPU in one. So its step is that of a model which is not pipelined, with two threads one whose operations are divided between the cores; what torchgpipe does on GPUs, for which it was made, cannot be told from this. Its cut in gplan's engine can. Recompute is of whole stages: torchgpipe's `checkpoint` is "never" or "always", gplan's `recompute` the same; the hand-written loop has none, as torch's tutorial has none. It tells the schedule not to return the outputs, which torch's classes otherwise keep for all micro-batches and join.

Memory is the growth of the resident set from the moment everything is built to its highest point in any step, added up over the processes: gradients, activations, buffers, and what libraries set up at their first step, which two processes do twice. It is read in the same way for all; every process keeps what it frees (glibc's mallopt), so that page faults decide nothing.
"""

LINES = """\
Lines of the files in `benchmarks/beside/written/`, which are what was timed here, without empty lines, comments and docstrings; none of them defines the model, the loss or the data. torchgpipe's is the shortest and needs no launcher; the model must be an `nn.Sequential`. The hand-written loop has no plan, its cut being the number of layers divided by K, and finds the shapes between its stages by running the layers before them. DeepSpeed is not among them, as it was not run.
"""
