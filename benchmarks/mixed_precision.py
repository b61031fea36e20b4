"""Every precision beside a plain loop of it: losses of 20 steps, and memory and times predicted and measured.

    python benchmarks/mixed_precision.py                              half an hour on 2 cores
    python benchmarks/mixed_precision.py --models lm --precisions mixed
    python benchmarks/mixed_precision.py --table                      the tables of what is there, without running

Each model is profiled in a precision, planned for K = 2 and trained on two processes (torch engine) and in one (virtual
engine). The plain loop trains the same model on the same batches without gplan: with torch.autocast, in bfloat16, or
with float32 master weights whose gradients it adds up itself, micro-batch by micro-batch. Times are those of a host
that may be busy; losses and bytes do not depend on that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gplan
from gplan.core import Plan, Precision, Profile
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.evaluate.compare import OPTIMIZER, STEP_TIME, compare
from gplan.files.json_files import write_bytes
from profiler.model.load import ModelFile, load_model_file

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "reports" / "mixed-precision"
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {  # file, settings, samples and number of micro-batches
    "lm": ("examples/transformer_lm.py", {}, 4, 4),
    "lm tied": ("examples/transformer_lm.py", {"tie_embedding": True, "num_blocks": 4}, 4, 4),
    "gpt2": (
        "examples/gpt2_hf.py",
        {"num_blocks": 12, "width": 768, "num_heads": 12, "sequence_length": 32, "vocabulary": 50257, "lr": 1e-4},
        1,
        2,
    ),
}
PRECISIONS = ("float32", "bfloat16", "mixed", "mixed-bf16-gradients", "autocast")
ENGINES = ("torch", "virtual")


def main() -> None:
    """Run what is asked for, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="write the tables only")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "rows.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    torch.set_num_threads(1)
    for model in () if options.table else options.models:
        for precision in options.precisions:
            found = list(_measured(model, precision, options.steps))
            rows = [x for x in rows if (x["model"], x["precision"]) != (model, precision)] + found
            write_bytes(path, json.dumps(rows, indent=1).encode())
    (options.output / "README.md").write_text(as_text(rows))
    print((options.output / "README.md").read_text())


def _measured(model: str, precision: str, num_steps: int) -> Iterator[dict[str, Any]]:
    """The runs on both engines, beside the plain loop."""
    reference, settings, size, num_microbatches = MODELS[model]
    reference = str(ROOT / reference)
    profile = gplan.profile(
        reference,
        settings=settings,
        microbatch_sizes=[size],
        precision=precision,
        budget_s=4.0,  # type: ignore[arg-type]
    )
    plan = gplan.balance(profile, num_devices=2, num_microbatches=num_microbatches, schedule="1f1b")
    expected = plain_losses(load_model_file(reference, settings=settings), plan, num_steps=num_steps)
    for engine in ENGINES:
        losses: list[float] = []
        run = gplan.run(
            plan,
            engine=engine,  # type: ignore[arg-type]
            num_steps=num_steps,
            progress=lambda _step, loss: losses.append(loss),  # noqa: B023
        )
        comparison = compare(run)
        print(model, precision, engine, difference(losses, expected), flush=True)
        yield {
            "model": model,
            "precision": precision,
            "engine": engine,
            "losses": losses,
            "plain_losses": expected,
            "peak_bytes": list(run.peak_bytes),
            "predicted_peak_bytes": [x.memory.peak_bytes for x in plan.stages],
            "parts": parts_of(plan, profile),
            **{
                f"{name}_s": [[x.predicted, x.measured] for x in comparison.rows if x.quantity == quantity]
                for name, quantity in (("step", STEP_TIME), ("optimizer", OPTIMIZER))
            },
        }


def parts_of(plan: Plan, profile: Profile) -> dict[str, int]:
    """Bytes by part, of all stages together."""
    parts = [x.parts for x in plan.stages if x.parts is not None]
    return {
        "weights": sum(x.weight for x in parts),
        "gradients": sum(x.gradient for x in parts),
        "optimizer": sum(x.optimizer for x in parts),
        "master weights, model": profile.step.master_bytes,
        "activations of a micro-batch": sum(x.stash for x in parts),
    }


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference between losses of the same step."""
    return max(abs(x / y - 1) for x, y in zip(found, expected, strict=True))


def plain_losses(file: ModelFile, plan: Plan, *, num_steps: int) -> list[float]:
    """The losses of a plain mixed-precision loop over the batches that the plan trains on."""
    precision, model = plan.precision, file.model
    trained = [x for x in model.parameters() if x.requires_grad]
    masters = [nn.Parameter(x.detach().clone()) for x in trained] if precision.master_weights else trained
    if precision.parameters == "bfloat16":
        model.to(torch.bfloat16)
    optimizer, batches, losses = file.optimizer(masters), file.batches(plan.batch_size), []
    for _ in range(num_steps):
        inputs, target = next(batches)
        pairs = list(zip(*(x.split(plan.microbatch_size) for x in (inputs, target)), strict=True))
        total = 0.0
        for x, y in pairs:
            with torch.autocast("cpu", torch.bfloat16) if precision.autocast else nullcontext():
                loss = file.loss(model(x), y)
            (loss / len(pairs)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / len(pairs)
            if precision.master_weights:
                _add_gradients(masters, trained, precision)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        losses.append(total)
    return losses


def _add_gradients(masters: list[nn.Parameter], trained: list[nn.Parameter], precision: Precision) -> None:
    """Add the gradients of a micro-batch to those of the master weights, rounded to the precision's dtype."""
    for master, parameter in zip(masters, trained, strict=True):
        if parameter.grad is not None:
            found = parameter.grad.float()
            total = found if master.grad is None else master.grad + found
            master.grad = total.to(getattr(torch, precision.gradients or "float32")).float()
            parameter.grad = None


def as_text(rows: list[dict[str, Any]]) -> str:
    """The report."""
    rows = sorted(rows, key=lambda x: ([*MODELS].index(x["model"]), PRECISIONS.index(x["precision"])))
    lines = [
        "# Mixed precision beside plain loops",
        "",
        f"Made by `python benchmarks/mixed_precision.py`; every loss is in [rows.json](rows.json). {len_text(rows)} "
        "Peak memory is of each stage, predicted and measured by the allocator's record; step and optimizer are predicted "
        "over measured, less 1, on a host that other work may have kept busy: they are no figures to go by.",
        "",
        "Of a tied weight, the plain loop rounds the sum of both gradients to bfloat16; its stages add them in the dtype that "
        "gradients accumulate in. So losses part by the rounding of bfloat16 there, and nowhere else.",
        "",
        "| model | precision | engine | losses, first and last | plain | largest difference | peak, predicted | measured | "
        "error | step | optimizer |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
        "",
        "Bytes by part, of both stages together (tied weights are held by both):",
        "",
        "| model | precision | weights | gradients | optimizer's state | of it master weights | activations of a micro-batch |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {x['model']} | {x['precision']} | {' | '.join(map(bytes_text, x['parts'].values()))} |"
            for x in rows
            if x["engine"] == ENGINES[0]
        ),
        "",
    ]
    return "\n".join(lines)


def len_text(rows: list[dict[str, Any]]) -> str:
    """How many steps."""
    steps = sorted({len(x["losses"]) for x in rows})
    return f"{' and '.join(map(str, steps))} steps, AdamW, K = 2, 1F1B."


def _line(row: dict[str, Any]) -> str:
    predicted, measured = row["predicted_peak_bytes"], row["peak_bytes"]
    errors = [percent_text(x / y - 1, signed=True) for x, y in zip(predicted, measured, strict=True)]
    cells = [
        row["model"],
        row["precision"],
        row["engine"],
        *(f"{x[0]:.5f}, {x[-1]:.5f}" for x in (row["losses"], row["plain_losses"])),
        f"{difference(row['losses'], row['plain_losses']):.1e}",
        *(", ".join(map(bytes_text, x)) for x in (predicted, measured)),
        ", ".join(errors),
        *(", ".join(_time_text(*x) for x in row[name]) for name in ("step_s", "optimizer_s")),
    ]
    return f"| {' | '.join(cells)} |"


def _time_text(predicted_s: float, measured_s: float) -> str:
    return f"{seconds_text(measured_s)} ({percent_text(predicted_s / measured_s - 1, signed=True)})"


if __name__ == "__main__":
    main()
