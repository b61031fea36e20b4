"""Which architectures can be planned and trained: each profiled, balanced for K = 2 and run beside the plain model.

    python benchmarks/architectures.py                        what is missing in reports/architectures/rows.csv
    python benchmarks/architectures.py --models gpt2 clip     these again
    python benchmarks/architectures.py --engine torch         the ten of `ON_TORCH` in two processes each
    python benchmarks/architectures.py --table                the report of the rows that are there

Every model of benchmarks/architecture_models.py is tiny and random; `gplan profile`, `balance` and `run --check` are
processes of their own. A row has the layers that were found, the way of tracing, the largest difference of a gradient from
the plain model's (1F1B, four micro-batches of two samples, float32 unless its name says otherwise), seconds of processor
time, or the refusal as printed. Needs transformers, and for some rows peft; nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import architecture_models as models
from suite import ROOT, Rows, markdown, options_of, run_verb, write_report

import gplan
from gplan.core import Profile, Run

FILE = str(ROOT / "benchmarks" / "architecture_models.py")
ON_TORCH = ("gpt2", "gemma3text", "albert", "t5", "swin", "mamba", "clip", "mixtral", "llama, LoRA")
COLUMNS = (
    "model", "group", "engine", "parameters", "trained", "layers", "traced", "gradient_difference", "tolerance",
    "worst_parameter", "reference", "seconds", "refusal", "processes", "peft",
)  # fmt: skip


def main() -> None:
    """Run what is not there yet, or what is named, then write the report."""
    parser = options_of(__doc__, "architectures")
    parser.add_argument("--models", nargs="*", choices=models.ARCHITECTURES, help="run again")
    parser.add_argument("--engine", choices=("virtual", "torch"), default="virtual")
    parser.add_argument("--table", action="store_true", help="write the report only")
    options = parser.parse_args()
    rows = Rows(options.output / "rows.csv", ("model", "engine"))
    names = options.models or (ON_TORCH if options.engine == "torch" else models.ARCHITECTURES)
    for name in () if options.table else names:
        if options.models or not rows.has({"model": name, "engine": options.engine}):
            known = {"model": name, "group": models.ARCHITECTURES[name].group, "engine": options.engine}
            row = {**dict.fromkeys(COLUMNS, ""), **known, **examined(name, options.engine)}
            rows.add(row, replace=True)
            print(f"{name}: {row['refusal'] or row['gradient_difference']} ({row['seconds']} s)", flush=True)
    write_report(options.output, report(rows.table(keep_default_na=False)))


def examined(name: str, engine: str) -> dict[str, Any]:
    """The row of one model, as far as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{x}.json") for x in ("profile", "plan", "run")]
        profile, plan, run = map(str, paths)
        commands = (
            f"profile {FILE} --set {{}} --microbatch-size 2 --contention 0 --link 10GB/s,10us --budget 0.2 --output {profile}",
            f"balance {profile} --k 2 --microbatches 4 --schedule 1f1b --output {plan}",
            f"run --plan {plan} --engine {engine} --steps 1 --check --output {run}",
        )
        seconds, refusal = 0.0, ""
        for command in commands:
            ended = run_verb([f"name={name}" if word == "{}" else word for word in command.split()])
            seconds += ended.processor_s
            if ended.code:
                refusal = ended.errors
                break
        found, check = [gplan.load(path) if path.exists() else None for path in paths], None
    row: dict[str, Any] = {"seconds": f"{seconds:.1f}", "refusal": refusal, "processes": len(commands), "peft": _peft()}
    if isinstance(found[0], Profile):
        made = found[0]
        parameters = sum(x.num_parameters for x in (*made.layers, *made.shared_weights))
        row |= {"parameters": parameters, "layers": len(made.layers), "traced": made.model.traced or "as it is run"}
    if isinstance(found[2], Run) and (check := found[2].check) is not None:
        whole, loss_error = check.whole_batch, abs(check.loss - check.plain_loss) / max(abs(check.plain_loss), 1e-12)
        row |= {
            "gradient_difference": f"{max(check.max_relative_error, loss_error):.1e}",
            "tolerance": f"{check.tolerance:.1e}",
            "worst_parameter": check.worst_parameter,
            "reference": "the mini-batch in one piece"
            if whole is None
            else f"micro-batch by micro-batch ({whole.reason})",
            "trained": check.num_parameters,
        }
    return row


def _peft() -> str:
    """The version of peft; empty if there is none."""
    try:
        return version("peft")
    except PackageNotFoundError:
        return ""


def report(rows: Any) -> list[str]:
    """The summary, a table of what ran, and the refusals."""
    run, refused = ([x for x in rows.itertuples() if bool(x.refusal) == is_refused] for is_refused in (False, True))
    wrong = [x for x in run if float(x.gradient_difference) > float(x.tolerance)]
    cells = ([x.model, x.group, x.engine, x.layers, x.traced, _difference(x), x.seconds, x.processes] for x in run)
    peft = ", ".join(sorted({x.peft for x in run if "LoRA" in x.model and x.peft}))
    refusals = [f"- **{x.model}** ({x.engine}): {x.refusal.replace(f'{ROOT}/', '')}" for x in refused]
    return [
        "# Architectures: what is planned and trained, and what is refused\n",
        "Made by `python benchmarks/architectures.py`, which goes on where it was; all columns are in "
        f"[rows.csv](rows.csv). torch {version('torch')}, transformers {version('transformers')}, "
        f"peft {peft or 'not used'}. Each model is tiny and random; it is profiled, balanced (K = 2, 1F1B, 4 micro-batches "
        "of 2), and its first step is compared with the plain model: the largest difference of a gradient or of the loss, relative to the largest entry of the gradients of that "
        "module (or to a thousandth of the model's largest). Where the plain model's own results depend on how the "
        "mini-batch is divided, as with a router's auxiliary loss, it runs micro-batch by micro-batch too (marked M, "
        "with the reason).\n",
        "Seconds are processor time. Compare only rows with the same number of processes: with 3, a process for each of "
        "`profile`, `balance` and `run`, their imports are in it; with 1, an earlier version did all three in one, after "
        "its imports and without the processes of stages.\n",
        f"**{len(rows)} runs of {rows.model.nunique()} architectures: {len(run) - len(wrong)} right, {len(wrong)} with "
        f"other gradients, {len(refused)} refused.**\n",
        *markdown(["architecture", "kind", "engine", "layers", "traced", "gradients", "seconds", "processes"], cells),
        "\n## Refused\n",
        *(refusals or ["None."]),
    ]


def _difference(row: Any) -> str:
    """The difference of the gradients, and what is special about it."""
    found, tolerance = float(row.gradient_difference), float(row.tolerance)
    over = f" **over {tolerance:.0e}**" if found > tolerance else ""
    rounded = f" (16-bit numbers, up to {tolerance:.0e})" if tolerance > 1e-5 and not over else ""
    by_microbatch = row.reference.partition("micro-batch by micro-batch ")[2]
    return f"{found:.1e}{over}{rounded}{f' M {by_microbatch}' if by_microbatch else ''}"


if __name__ == "__main__":
    main()
