"""Which architectures can be planned and trained: each profiled, balanced for K = 2 and run beside the plain model.

    python benchmarks/architectures.py                        what is missing in reports/architectures/rows.csv
    python benchmarks/architectures.py --models gpt2 clip     these again
    python benchmarks/architectures.py --engine torch         the ten of `ON_TORCH` in two processes each
    python benchmarks/architectures.py --table                the report of the rows that are there

Every model of benchmarks/architecture_models.py is tiny and random, and has a process of its own with a time limit. A row
has the layers that were found, the way of tracing, the largest difference of a gradient from the plain model's (1F1B, four
micro-batches of two samples, float32 unless its name says otherwise), seconds of processor time, or the refusal as printed. Of a model that is
refused it says whether the plain model itself trains, and gives the same numbers twice. Needs transformers, and for
some rows diffusers and peft; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architecture_models as models
import pandas as pd
import torch

import gplan
from gplan.core import Link
from gplan.core.errors import GplanError
from profiler.capture.chain import call_arguments

ROOT = Path(__file__).parent.parent
FILE = str(ROOT / "benchmarks" / "architecture_models.py")
OUTPUT = ROOT / "reports" / "architectures"
MICROBATCH_SIZE, NUM_MICROBATCHES = 2, 4
TIME_LIMIT_S = 240.0
LINK = Link(latency_s=1e-5, bytes_per_s=1e10)
ON_TORCH = (
    "gpt2", "gemma3text", "albert", "t5", "swin", "mamba", "clip", "mixtral", "UNet2DConditionModel", "llama, LoRA",
)  # fmt: skip
_UNKNOWN = "an earlier one"
COLUMNS = (
    "model", "group", "engine", "parameters", "trained", "layers", "traced", "gradient_difference", "tolerance",
    "worst_parameter", "reference", "seconds", "refusal", "plain", "commit",
)  # fmt: skip


def main() -> None:
    """Run what is not there yet, or what is named, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=models.ARCHITECTURES, help="run again")
    parser.add_argument("--groups", nargs="*", help="only models of these groups")
    parser.add_argument("--refused", action="store_true", help="run again what was refused or wrong")
    parser.add_argument("--engine", choices=("virtual", "torch"), default="virtual")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--table", action="store_true", help="write the report only")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.csv"
    rows = pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame(columns=list(COLUMNS))
    for row in _examined(() if options.table else _wanted(rows, options), options):
        rows = rows[(rows.model != row["model"]) | (rows.engine != options.engine)]
        rows = _sorted(pd.concat([rows, pd.DataFrame([row], columns=list(COLUMNS))], ignore_index=True))
        rows.to_csv(path, index=False)
        outcome = row["refusal"] or f"{row['layers']} layers, {float(row['gradient_difference']):.1e}"
        print(f"{row['model']}: {outcome} ({row['seconds']} s)", flush=True)
    if path.exists():
        (options.output / "README.md").write_text(as_text(pd.read_csv(path, keep_default_na=False)))


def _wanted(rows: pd.DataFrame, options: argparse.Namespace) -> list[str]:
    """The names of the models to run, in their order."""
    if options.models:
        return list(options.models)
    names = ON_TORCH if options.engine == "torch" else tuple(models.ARCHITECTURES)
    there = rows[rows.engine == options.engine]
    if options.refused:
        return [x for x in names if x in {row.model for row in there.itertuples() if not _is_right(row)}]
    chosen = [x for x in names if not options.groups or models.ARCHITECTURES[x].group in options.groups]
    return [x for x in chosen if x not in set(there.model)]


def _is_right(row: Any) -> bool:
    return not row.refusal and float(row.gradient_difference) <= float(row.tolerance)


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    order = {name: place for place, name in enumerate(models.ARCHITECTURES)}
    return rows.sort_values(
        ["engine", "model"], key=lambda x: x.map(lambda y: order.get(y, y == "torch")), ignore_index=True
    )


def _examined(names: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of some models as they are found, each in a process of its own."""
    if not names:
        return
    import_module("transformers")  # once for all processes, as is what an export needs
    torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), strict=False)
    waiting, running = list(names), list[_Examination]()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(_Examination(waiting.pop(0), options.engine))
        time.sleep(0.05)
        for ended in [x for x in running if x.has_ended]:
            running.remove(ended)
            yield ended.row()


class _Examination:
    """One model in a process of its own, which may fail or hang."""

    def __init__(self, name: str, engine: str) -> None:
        self._name, self._engine = name, engine
        self._folder = tempfile.TemporaryDirectory()
        self._place = Path(self._folder.name) / "row.json"
        self._started_s = time.perf_counter()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_examine_into, args=(name, engine, self._place))
        self._process.start()

    @property
    def has_ended(self) -> bool:
        """Whether it ended, or was ended because of the time limit."""
        if self._process.is_alive() and time.perf_counter() - self._started_s > TIME_LIMIT_S:
            self._process.kill()
            self._process.join()
        return not self._process.is_alive()

    def row(self) -> dict[str, Any]:
        """What was found."""
        found = json.loads(self._place.read_text()) if self._place.exists() else {}
        self._folder.cleanup()
        code = self._process.exitcode
        if code and not found.get("refusal"):
            found["refusal"] = (
                f"no result within {TIME_LIMIT_S:g} s" if code == -9 else f"the process ended with {code}"
            )
        group = models.ARCHITECTURES[self._name].group
        known = {"model": self._name, "group": group, "engine": self._engine, "commit": _commit()}
        return {**dict.fromkeys(COLUMNS, ""), **known, **found}


def _commit() -> str:
    """The commit of the code that is examined."""
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _examine_into(name: str, engine: str, place: Path) -> None:
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
    if not _is_right(SimpleNamespace(**{"refusal": "", **found})):
        keep(plain=_plain(name))


def _examine(name: str, engine: Any, keep: Any) -> None:
    """Profile, balance and run a model."""
    reference, settings = FILE, {"name": name}
    profile = gplan.profile(
        reference, settings=settings, microbatch_sizes=[MICROBATCH_SIZE], contention=0, link=LINK, budget_s=0.2
    )
    keep(
        parameters=sum(x.num_parameters for x in (*profile.layers, *profile.shared_weights)),
        layers=len(profile.layers),
        traced=profile.model.traced or "as it is run",
    )
    plan = gplan.balance(profile, num_devices=2, num_microbatches=NUM_MICROBATCHES, schedule="1f1b")
    run = gplan.run(plan, engine=engine, num_steps=1, check=True)
    check = run.check
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


def _plain(name: str) -> str:
    """Whether the plain model trains, and whether it gives the same loss and gradients again."""
    try:
        torch.manual_seed(0)
        model = models.model(name)
        inputs, _ = next(models.batches(MICROBATCH_SIZE, name))
        args, kwargs = call_arguments(inputs)
        losses, gradients = [], []
        before = {key: x.clone() for key, x in model.state_dict().items()}
        for seed in (1, 2):
            model.load_state_dict(before)
            model.zero_grad()
            torch.manual_seed(seed)
            loss = models.loss(model(*args, **kwargs), None)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    except Exception as error:
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    same = losses[0] == losses[1] and all(torch.equal(a, b) for a, b in zip(*gradients, strict=False))
    return "trains, the same again" if same else f"draws random numbers: losses {losses[0]:.6g} and {losses[1]:.6g}"


def as_text(rows: pd.DataFrame) -> str:
    """The report."""
    right = [x for x in rows.itertuples() if _is_right(x)]
    wrong = [x for x in rows.itertuples() if not x.refusal and not _is_right(x)]
    refused = [x for x in rows.itertuples() if x.refusal]
    return "\n".join(
        [
            "# Architectures: what is planned and trained, and what is refused",
            "",
            "Made by `python benchmarks/architectures.py`, which goes on where it was; all columns are in "
            f"[rows.csv](rows.csv). {_versions()}. Each model is tiny and random; it is profiled, balanced (K = 2, 1F1B, "
            f"{NUM_MICROBATCHES} micro-batches of {MICROBATCH_SIZE}), and its first step is compared with the plain model: the "
            "largest difference of a gradient or of the loss, relative to the largest entry of the gradients of that "
            "module (or to a thousandth of the model's largest). Where the plain model's own results depend on how the "
            "mini-batch is divided, as with a router's auxiliary loss, it runs micro-batch by micro-batch too (marked M, "
            "with the reason).",
            "",
            f"**{len(rows)} runs of {rows.model.nunique()} architectures: {len(right)} right, {len(wrong)} with other gradients, "
            f"{len(refused)} refused.** Rows by the commit of the code: "
            f"{', '.join(f'{n} by {x or _UNKNOWN}' for x, n in rows.commit.value_counts().items())}.",
            "",
            "| architecture | kind | engine | layers | traced | gradients | seconds |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {x.model} | {x.group} | {x.engine} | {x.layers} | {x.traced} | {_difference(x)} | {x.seconds} |"
                for x in (*right, *wrong)
            ),
            "",
            "## Refused",
            "",
            *_refusals(refused),
        ]
    )


def _difference(row: Any) -> str:
    """The difference of the gradients, and what is special about it."""
    tolerance, by_microbatch = float(row.tolerance), row.reference.partition("micro-batch by micro-batch ")[2]
    over = "" if _is_right(row) else f" **over {tolerance:.0e}**"
    rounded = f" (16-bit numbers, up to {tolerance:.0e})" if tolerance > 1e-5 and not over else ""
    return f"{float(row.gradient_difference):.1e}{over}{rounded}{f' M {by_microbatch}' if by_microbatch else ''}"


def _refusals(rows: Iterable[Any]) -> Iterable[str]:
    found = [f"- **{x.model}** ({x.engine}). The plain model {x.plain}. Printed: {_shortened(x.refusal)}" for x in rows]
    return [*(found or ["None."]), ""]


def _shortened(text: str) -> str:
    return text.replace(str(ROOT) + "/", "").replace("|", "\\|")


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
