"""Which architectures can be planned and trained: each profiled, balanced for K = 2 and run beside the plain model.

    python benchmarks/architectures.py                        what is missing in reports/architectures/rows.csv
    python benchmarks/architectures.py --models gpt2 clip     these again
    python benchmarks/architectures.py --engine torch         the ten of `ON_TORCH` in two processes each
    python benchmarks/architectures.py --table                the report of the rows that are there

Every model of benchmarks/architecture_models.py is tiny and random, and has a process of its own with a time limit. A row
has the layers that were found, the way of tracing, the largest difference of a gradient from the plain model's (1F1B, four
micro-batches of two samples, float32 unless its name says otherwise), seconds of processor time, or the refusal as printed.
Needs transformers, and for some rows diffusers and peft; nothing is downloaded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import architecture_models as models
import torch
from suite import ROOT, Rows, markdown, options_of, write_report

import gplan
from gplan.core import Link
from gplan.core.errors import GplanError

FILE = str(ROOT / "benchmarks" / "architecture_models.py")
MICROBATCH_SIZE, NUM_MICROBATCHES = 2, 4
TIME_LIMIT_S = 240.0
LINK = Link(latency_s=1e-5, bytes_per_s=1e10)
ON_TORCH = (
    "gpt2", "gemma3text", "albert", "t5", "swin", "mamba", "clip", "mixtral", "UNet2DConditionModel", "llama, LoRA",
)  # fmt: skip
COLUMNS = (
    "model", "group", "engine", "parameters", "trained", "layers", "traced", "gradient_difference", "tolerance",
    "worst_parameter", "reference", "seconds", "refusal",
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
            row = examined(name, options.engine)
            rows.add(row, replace=True)
            outcome = row["refusal"] or f"{row['layers']} layers, {row['gradient_difference']}"
            print(f"{name}: {outcome} ({row['seconds']} s)", flush=True)
    write_report(options.output, report(rows.table(keep_default_na=False)))


def examined(name: str, engine: str) -> dict[str, Any]:
    """The row of one model, in a process of its own, which may fail or hang."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "row.json")
        process = multiprocessing.get_context("spawn").Process(target=_examine_into, args=(name, engine, place))
        process.start()
        process.join(TIME_LIMIT_S)
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
        found = json.loads(place.read_text()) if place.exists() else {}
    if process.exitcode and not found.get("refusal"):
        late = f"no result within {TIME_LIMIT_S:g} s"
        found["refusal"] = late if is_late else f"the process ended with {process.exitcode}"
    known = {"model": name, "group": models.ARCHITECTURES[name].group, "engine": engine}
    return {**dict.fromkeys(COLUMNS, ""), **known, **found}


def _examine_into(name: str, engine: Any, place: Path) -> None:
    """Write the row of a model as far as it is known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found: dict[str, Any] = {}
    begun_s = time.process_time()

    def keep(**more: Any) -> None:
        found.update(more, seconds=f"{time.process_time() - begun_s:.1f}")
        place.write_text(json.dumps(found))

    try:
        _examine(name, engine, keep)
    except GplanError as error:
        keep(refusal=" ".join(str(error).split()))
    except Exception as error:
        keep(refusal=f"a bug: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _examine(name: str, engine: Any, keep: Any) -> None:
    """Profile, balance and run a model."""
    profile = gplan.profile(
        FILE, settings={"name": name}, microbatch_sizes=[MICROBATCH_SIZE], contention=0, link=LINK, budget_s=0.2
    )
    keep(
        parameters=sum(x.num_parameters for x in (*profile.layers, *profile.shared_weights)),
        layers=len(profile.layers),
        traced=profile.model.traced or "as it is run",
    )
    plan = gplan.balance(profile, num_devices=2, num_microbatches=NUM_MICROBATCHES, schedule="1f1b")
    check = gplan.run(plan, engine=engine, num_steps=1, check=True).check
    assert check is not None
    whole = check.whole_batch
    loss_error = abs(check.loss - check.plain_loss) / max(abs(check.plain_loss), 1e-12)
    keep(
        gradient_difference=f"{max(check.max_relative_error, loss_error):.1e}",
        tolerance=f"{check.tolerance:.1e}",
        worst_parameter=check.worst_parameter,
        reference="the mini-batch in one piece" if whole is None else f"micro-batch by micro-batch ({whole.reason})",
        trained=check.num_parameters,
    )


def report(rows: Any) -> list[str]:
    """The summary, a table of what ran, and the refusals."""
    run, refused = ([x for x in rows.itertuples() if bool(x.refusal) == is_refused] for is_refused in (False, True))
    wrong = [x for x in run if float(x.gradient_difference) > float(x.tolerance)]
    cells = ([x.model, x.group, x.engine, x.layers, x.traced, _difference(x), x.seconds] for x in run)
    refusals = [f"- **{x.model}** ({x.engine}): {x.refusal.replace(f'{ROOT}/', '')}" for x in refused]
    return [
        "# Architectures: what is planned and trained, and what is refused\n",
        "Made by `python benchmarks/architectures.py`, which goes on where it was; all columns are in "
        f"[rows.csv](rows.csv). {_versions()}. Each model is tiny and random; it is profiled, balanced (K = 2, 1F1B, "
        f"{NUM_MICROBATCHES} micro-batches of {MICROBATCH_SIZE}), and its first step is compared with the plain model: the "
        "largest difference of a gradient or of the loss, relative to the largest entry of the gradients of that "
        "module (or to a thousandth of the model's largest). Where the plain model's own results depend on how the "
        "mini-batch is divided, as with a router's auxiliary loss, it runs micro-batch by micro-batch too (marked M, "
        "with the reason).\n",
        f"**{len(rows)} runs of {rows.model.nunique()} architectures: {len(run) - len(wrong)} right, {len(wrong)} with "
        f"other gradients, {len(refused)} refused.**\n",
        *markdown(["architecture", "kind", "engine", "layers", "traced", "gradients", "seconds"], cells),
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


def _versions() -> str:
    found = []
    for name in ("torch", "transformers", "diffusers", "peft"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
