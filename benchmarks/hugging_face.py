"""Five Hugging Face models, trained as the plain model is: losses of every step, and the parameters at the end.

    python benchmarks/hugging_face.py             about 10 minutes; writes reports/hugging-face/

Each model is profiled, balanced for K = 2 and trained for 30 steps with AdamW: as the plain model, each mini-batch in
one piece; by the virtual engine in one process; by the torch engine in two processes, which torchrun starts on this
very file. Every process has one thread. What is rounding and what is not is told by float64, and by the plain model
that adds up the gradients of micro-batches. A plain model draws its random numbers in another order, so with the
dropout of the models' own configs K = 2 is compared with K = 1.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gplan
from gplan.core import Plan, Profile

ROOT = Path(__file__).parent.parent
BATCH_SIZE = 16
LEAST_SCALE = 1e-3  # of a parameter, as a share of the model's largest entry
MUCH = 0.01  # of a difference between parameters
SEED = 1  # of weights and dropout
CONFIG_DROPOUT = 0.1  # the default of the configs of GPT-2, BERT and T5; those of Llama and ViT have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, in one precision, and the way it is trained."""

    name: str  # of the example file
    schedule: str
    recompute: str
    microbatch_size: int
    dtype: str = "float32"
    dropout: float = 0.0

    @property
    def reference(self) -> str:
        """The model file."""
        return str(ROOT / "examples" / f"{self.name}.py")

    @property
    def settings(self) -> dict[str, float]:
        """What the model is built with."""
        return {"dropout": self.dropout} if self.dropout else {}

    def build(self) -> nn.Module:
        """The model, with random weights."""
        model: nn.Module = self.example["model"](**self.settings)
        return model.to(getattr(torch, self.dtype))

    def batches(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Endless (inputs, target) in the model's precision."""
        dtype = getattr(torch, self.dtype)
        for batch in self.example["batches"](batch_size):
            yield pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)

    @property
    def example(self) -> Mapping[str, Any]:
        """The functions of the model file."""
        return runpy.run_path(self.reference)


CASES = (
    Case(name="gpt2_hf", schedule="gpipe", recompute="never", microbatch_size=4),
    Case(name="bert_hf", schedule="1f1b", recompute="always", microbatch_size=4),
    Case(name="llama_hf", schedule="gpipe", recompute="except-last", microbatch_size=2),
    Case(name="t5_hf", schedule="1f1b", recompute="never", microbatch_size=4),
    Case(name="vit_hf", schedule="gpipe", recompute="always", microbatch_size=2),
)


@dataclass(frozen=True, slots=True)
class Trained:
    """What training left."""

    losses: list[float]  # of every step
    state: dict[str, Tensor]  # the model's state dict


def main() -> None:
    """Train everything, then write the tables; or, started by torchrun, be one rank of one training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "hugging-face")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # a folder with what torchrun's ranks train
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of is not None:
        be_a_rank(options.rank_of, options.steps)
        return
    agreement = [row for case in CASES for row in compared_with_plain(case, options.steps)]
    dropout = [compared_with_one_stage(case, options.steps) for case in CASES if has_config_dropout(case)]
    options.output.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([*agreement, *dropout]).to_csv(options.output / "results.csv", index=False)
    (options.output / "README.md").write_text(as_text(agreement, dropout, options.steps))


def has_config_dropout(case: Case) -> bool:
    """Whether the model's own config drops out by default."""
    return case.name in ("gpt2_hf", "bert_hf", "t5_hf")


def compared_with_plain(case: Case, num_steps: int) -> Iterator[dict[str, object]]:
    """In either precision, a row for each engine, and one for the plain model in micro-batches,
    beside the plain model."""
    for each in (case, replace(case, dtype="float64")):
        plan = planned(each, num_devices=2)
        plain = trained_plainly(each, num_steps)
        for engine, found in (
            ("virtual", trained_in_stages(each, plan, num_steps)),
            ("torch", trained_by_torchrun(each, plan, num_steps)),
            ("none", trained_plainly(each, num_steps, num_parts=plan.num_microbatches)),
        ):
            yield row(each, plan, engine, (found, plain))


def compared_with_one_stage(case: Case, num_steps: int) -> dict[str, object]:
    """With dropout: two processes beside the same model in one stage."""
    dropping = replace(case, dropout=CONFIG_DROPOUT)
    plan = planned(dropping, num_devices=2)
    found = trained_by_torchrun(dropping, plan, num_steps)
    whole = trained_in_stages(dropping, planned(dropping, num_devices=1), num_steps)
    return row(dropping, plan, "torch", (found, whole))


def planned(case: Case, *, num_devices: int) -> Plan:
    """The plan for a model, as a user would have it."""
    return gplan.balance(
        profiled(case),
        num_devices=num_devices,
        num_microbatches=BATCH_SIZE // case.microbatch_size,
        schedule=case.schedule,
        recompute=case.recompute,
    )


def profiled(case: Case) -> Profile:
    """By reference to the model file; in float64, which no file has, with the model itself."""
    sizes = [case.microbatch_size]
    if case.dtype == "float32":
        return gplan.profile(case.reference, settings=case.settings, microbatch_sizes=sizes, budget_s=2.0, contention=0)
    example = case.example
    return gplan.profile(
        case.build(),
        inputs=next(case.batches(case.microbatch_size))[0],
        loss=example["loss"],
        optimizer=example["optimizer"],
        batches=case.batches,
        microbatch_sizes=sizes,
        budget_s=2.0,
        contention=0,
    )


def trained_plainly(case: Case, num_steps: int, *, num_parts: int = 1) -> Trained:
    """As anyone would; with several parts the gradients of as many micro-batches are added up."""
    torch.manual_seed(SEED)
    model, loss_of = case.build().train(), case.example["loss"]
    optimizer = case.example["optimizer"](model.parameters())
    losses = []
    for batch in islice(case.batches(BATCH_SIZE), num_steps):
        losses.append(0.0)
        for inputs, target in parts_of(batch, num_parts):
            loss = loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs), target) / num_parts
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, model.state_dict())


def parts_of(batch: Any, num_parts: int) -> list[Any]:
    """A mini-batch cut into equal parts, one after the other."""
    leaves, structure = pytree.tree_flatten(batch)
    return [pytree.tree_unflatten(part, structure) for part in zip(*(x.chunk(num_parts) for x in leaves), strict=True)]


def trained_in_stages(case: Case, plan: Plan, num_steps: int) -> Trained:
    """With gplan: every process makes only its own stage."""
    inputs, _ = next(case.batches(plan.microbatch_size))
    pipe = gplan.pipeline(case.build, plan, loss=case.example["loss"], inputs=inputs, seed=SEED)
    optimizer = case.example["optimizer"](pipe.parameters())
    losses = []
    for inputs, target in islice(case.batches(BATCH_SIZE), num_steps):
        losses.append(float(pipe.step(inputs, target)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, pipe.full_state_dict())


def trained_by_torchrun(case: Case, plan: Plan, num_steps: int) -> Trained:
    """The same in one process for each stage."""
    with tempfile.TemporaryDirectory() as folder:
        gplan.save(plan, Path(folder) / "plan.json")
        torch.save(case, Path(folder) / "case.pt")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        script = [str(plan.num_stages), __file__, "--rank-of", folder, "--steps", str(num_steps)]
        subprocess.run([*torchrun, *script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: Trained = torch.load(Path(folder) / "trained.pt", weights_only=False)
        return found


def be_a_rank(folder: Path, num_steps: int) -> None:
    """Train what the folder says; rank 0 leaves there what came of it."""
    plan = gplan.load(folder / "plan.json")
    assert isinstance(plan, Plan)
    trained = trained_in_stages(torch.load(folder / "case.pt", weights_only=False), plan, num_steps)
    dist.destroy_process_group()  # a process that ends with gloo's threads at work can abort (pytorch#179291)
    if trained.state:
        torch.save(trained, folder / "trained.pt")


def row(case: Case, plan: Plan, engine: str, pair: tuple[Trained, Trained]) -> dict[str, object]:
    """How far one training is from another; what came of the first loads into the plain model, its keys checked."""
    found, expected = pair
    model = case.build()
    model.load_state_dict(found.state, strict=True)
    parameter, difference = worst_parameter(model, found.state, expected.state)
    result = {
        "model": type(model).__name__,
        "num_parameters": sum(x.numel() for x in model.parameters()),
        "num_stages": plan.num_stages,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "recompute": plan.recompute,
        "dropout": case.dropout,
        "dtype": case.dtype,
        "engine": engine,
        "first_loss": expected.losses[0],
        "last_loss": expected.losses[-1],
        "loss_difference": loss_difference(found, expected),
        "parameter_difference": difference,
        "worst_parameter": parameter,
    }
    print(result, flush=True)
    return result


def loss_difference(found: Trained, expected: Trained) -> float:
    """The largest of all steps, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))


def worst_parameter(model: nn.Module, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """The parameter that differs most, and by how much.

    Relative to its own largest entry, or to a thousandth of the model's largest where that is more: a bias that is zero
    but for rounding has no scale of its own.
    """
    names = [name for name, _ in model.named_parameters()]
    largest = {name: float(expected[name].abs().max()) for name in names}
    least = LEAST_SCALE * max(largest.values())
    differences = {
        name: float((found[name] - expected[name]).abs().max()) / max(largest[name], least) for name in names
    }
    worst = max(differences, key=differences.__getitem__)
    return worst, differences[worst]


AGREEMENT = """
## Without dropout, beside the plain model

Largest relative difference over {num_steps} steps of the loss, and at the end of a parameter: from its largest entry, or from a thousandth of the model's largest where that is more. *No engine* is the plain model itself that adds up the gradients of the same micro-batches, in float32: what it differs by from the mini-batch in one piece is rounding.

| model | parameters | K | schedule | M | recompute | engine | loss, float32 | parameters, float32 | loss, float64 | parameters, float64 |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

AdamW divides a gradient by its own size. A parameter whose gradient is zero but for rounding therefore moves by rounding alone, as far as any other: the bias of the keys is one (in GPT-2 a third of `c_attn.bias`), since softmax ignores what is added to all scores of a row. In float32 such parameters differ most ({noisy}), in the plain model too, and the loss does not depend on them; in float64 they agree. Llama and T5 compute their norms in float32 whatever the model's precision.
"""  # fmt: skip

DROPOUT = """
## With the dropout of the model's own config, K = 2 beside K = 1

A plain model draws its random numbers in the order in which it computes; gplan gives every layer its own for every micro-batch, so that they depend neither on K nor on the engine. Two processes beside one that computes one stage; Llama's and ViT's configs have no dropout.

| model | dropout | schedule | M | recompute | loss at first | at last | loss, float32 | parameters, float32 |
|---|---|---|---|---|---|---|---|---|
{rows}
"""  # fmt: skip


def as_text(agreement: list[dict[str, object]], dropout: list[dict[str, object]], num_steps: int) -> str:
    """The report."""
    table = pd.DataFrame(agreement)
    single, double = table[table.dtype == "float32"], table[table.dtype == "float64"]
    rows = [
        f"| {x.model} | {x.num_parameters:,} | {plan_text(x)} | {x.loss_difference:.1e} | {x.parameter_difference:.1e} | "
        f"{y.loss_difference:.1e} | {y.parameter_difference:.1e} |"
        for x, y in zip(single.itertuples(), double.itertuples(), strict=True)
    ]
    noisy = sorted({f"`{x.worst_parameter}`" for x in single.itertuples() if x.parameter_difference > MUCH})
    return "\n".join(
        [
            "# Hugging Face models in two stages, beside the plain model\n",
            f"`python benchmarks/hugging_face.py`: random weights, the example files' default sizes, mini-batches of "
            f"{BATCH_SIZE}, AdamW, {num_steps} steps, one thread a process; torch {torch.__version__}, transformers "
            f"{version('transformers')}. Each model is cut where `gplan.profile` and `gplan.balance` say, built from "
            "the same seed by a function, each process its own stage, and what `pipe.full_state_dict()` gives at the end is "
            "loaded into the plain model with `strict=True`. `results.csv` has every row.",
            AGREEMENT.format(num_steps=num_steps, rows="\n".join(rows), noisy=", ".join(noisy)),
            DROPOUT.format(rows="\n".join(map(dropout_row, dropout))),
        ]
    )


def plan_text(x: Any) -> str:
    """The columns that say how a model was trained."""
    if x.engine == "none":
        return f"1 | | {x.num_microbatches} | never | none"
    return f"{x.num_stages} | {x.schedule} | {x.num_microbatches} | {x.recompute} | {x.engine}"


def dropout_row(x: Mapping[str, Any]) -> str:
    """A line of the second table."""
    return (
        f"| {x['model']} | {x['dropout']} | {x['schedule']} | {x['num_microbatches']} | {x['recompute']} | "
        f"{x['first_loss']:.4f} | {x['last_loss']:.4f} | {x['loss_difference']:.1e} | {x['parameter_difference']:.1e} |"
    )


if __name__ == "__main__":
    main()
