"""What gplan's engine costs beside a hand-written loop on torch.distributed.pipelining with the same stages.

    python benchmarks/engine_cost.py             some 20 minutes on 2 idle cores; writes reports/engine-cost/

Two processes, one core each, hold two stages of `examples/transformer_lm.py` four times: as `gplan.pipeline` makes
them, and as a user would write them by hand (the author's modules, torch's own PipelineStage, mean loss) under torch's
schedule runtime with the same order, and under torch's class of that schedule. Steps take turns, in an order drawn anew
every time: drift hits all alike, and so does what the step before leaves in the caches. The runtime by hand is there
twice, and the difference between the two is shown, which is none but for the noise. A step is timed from a barrier to
the end of the slower rank's last backward; the ratio of gplan's to each of its neighbours is taken, and the median of
these is shown with the quartiles. Losses and gradients are compared before. The loops by hand name their actions for a
profiler, as torch does, where there is none, too; gplan's only where there is one. During gplan's steps gloo's threads
are batch threads, as gplan makes them; during the others as torch does.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

import gplan
from gplan.core import Constraints, Plan
from gplan.core.units import percent_text, seconds_text
from gplan.simulation.simulator import schedule_of
from profiler.host.host_info import pin_to_share, processor
from profiler.host.links import connection_threads, deprioritize_connection_threads
from profiler.model.load import load_model_file
from profiler.timing.clock import median_error

ROOT = Path(__file__).parent.parent
REFERENCE = str(ROOT / "examples" / "transformer_lm.py")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
KINDS = ("gplan", "runtime", "class", "again")  # the last one is the runtime by hand a second time
COMPARED = {
    "beside_runtime": ("gplan", "runtime"),
    "beside_class": ("gplan", "class"),
    "beside_itself": ("runtime", "again"),
}
LEAST_TURNS = 20
Kind = tuple[Callable[[], float | None], list[nn.Parameter]]
"""A pipeline: its step, which gives the loss where it is told, and its parameters."""
CASES = [(schedule, width, size) for schedule in SCHEDULES for width, size in ((64, 2), (128, 4), (256, 4))]


class HandWritten(nn.Module):
    """The stage that a user would write: the blocks up to a cut with the embedding,
    or those behind it with the head."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        self.embedding = model.embedding if first == 0 else None
        self.blocks = nn.ModuleList(model.blocks[first:end])
        self.norm = model.norm if end == len(model.blocks) else None
        self.head = model.head if end == len(model.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states in, hidden states or logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def main() -> None:
    """Run all cases, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180, help="of steps in each case, after 5 turns to warm up")
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "engine-cost")
    options = parser.parse_args()
    rows = []
    for schedule, width, size in CASES:
        plan = planned(schedule, width, size)
        with tempfile.TemporaryDirectory() as place:
            mp.spawn(work, args=(plan, width, options.seconds, place), nprocs=2)
            found = [torch.load(Path(place) / f"{rank}.pt", weights_only=True) for rank in range(2)]
        rows.append(summary(plan, width, size, found))
        print(rows[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    table.to_csv(options.output / "engine-cost.csv", index=False)
    (options.output / "README.md").write_text(as_text(table))


def planned(schedule: str, width: int, size: int) -> Plan:
    """Two stages cut in the middle of eight blocks, eight micro-batches."""
    profile = gplan.profile(REFERENCE, microbatch_sizes=[size], settings={"width": width}, contention=0, budget_s=0.5)
    constraints = Constraints(cut_after=("blocks.3",))
    return gplan.balance(profile, num_devices=2, num_microbatches=8, schedule=schedule, constraints=constraints)


def work(rank: int, plan: Plan, width: int, seconds: float, place: str) -> None:
    """One rank: all pipelines, in turns; its times are written to a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pin_to_share(rank, num_shares=2, num_threads=1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    file = load_model_file(REFERENCE, settings={"width": width})
    batches = file.batches(plan.batch_size)
    inputs, target = next(batches)
    pipe = gplan.pipeline(REFERENCE, plan)
    kinds: list[Kind] = [
        (lambda: float(pipe.step(inputs, target)), list(pipe.parameters())),
        hand_written(rank, file, plan, inputs, target, make=with_runtime),
        hand_written(rank, file, plan, inputs, target, make=with_class),
        hand_written(rank, file, plan, inputs, target, make=with_runtime),
    ]
    for kind in kinds[1:]:
        check_equal(kinds[0], kind)
    warm = in_turns(kinds, 5)
    num_turns = torch.tensor(max(LEAST_TURNS, int(seconds / float(warm.median(dim=1).values.sum()))))
    dist.broadcast(num_turns, src=0)
    torch.save(in_turns(kinds, int(num_turns)), f"{place}/{rank}.pt")
    dist.destroy_process_group()


def in_turns(kinds: list[Kind], num_turns: int) -> Tensor:
    """[kinds, turns]: seconds of each step on this rank, from a barrier on; all ranks draw the same orders."""
    times: list[list[float]] = [[] for _ in kinds]
    draw = random.Random(num_turns)
    for _ in range(num_turns):
        for kind in draw.sample(range(len(kinds)), len(kinds)):
            step, parameters = kinds[kind]
            if KINDS[kind] == "gplan":
                deprioritize_connection_threads()
            else:
                leave_to_torch()
            for parameter in parameters:
                parameter.grad = None
            dist.barrier()
            start_s = time.perf_counter()
            step()
            times[kind].append(time.perf_counter() - start_s)
    return torch.tensor(times, dtype=torch.float64)


def leave_to_torch() -> None:
    """Gloo's threads as they were before `gplan.pipeline` made them wait."""
    for thread in connection_threads():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def with_class(stage: PipelineStage, plan: Plan, loss: Callable[..., Tensor]) -> Any:
    """torch's own class of the schedule."""
    return SCHEDULES[plan.schedule](stage, plan.num_microbatches, loss_fn=loss)


def with_runtime(stage: PipelineStage, plan: Plan, loss: Callable[..., Tensor]) -> Any:
    """torch's runtime of any order, as gplan uses it, with the order of the schedule."""
    runtime = _PipelineScheduleRuntime([stage], plan.num_microbatches, loss_fn=loss)  # type: ignore[no-untyped-call]
    orders = schedule_of(plan).orders
    runtime._prepare_schedule_with_comms(
        {i: [_Action.from_str(str(x)) for x in order] for i, order in enumerate(orders)}
    )
    return runtime


def hand_written(
    rank: int,
    file: Any,
    plan: Plan,
    inputs: Tensor,
    target: Tensor,
    *,
    make: Callable[[PipelineStage, Plan, Callable[..., Tensor]], Any],
) -> Kind:
    """A step over the author's modules, and the parameters of this rank."""
    half = len(file.model.blocks) // 2  # type: ignore[arg-type]
    module = HandWritten(file.model, *((0, half) if rank == 0 else (half, 2 * half)))
    microbatch = inputs.chunk(plan.num_microbatches)[0]
    first = HandWritten(file.model, 0, half)
    with torch.no_grad():
        hidden = first(microbatch)
        logits = HandWritten(file.model, half, 2 * half)(hidden)
    args, outputs = (microbatch, hidden) if rank == 0 else (hidden, logits)
    needs_gradient = rank == 1
    stage = PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=args.clone().to("meta").requires_grad_(needs_gradient),
        output_args=outputs.clone().to("meta").requires_grad_(True),
    )
    schedule = make(stage, plan, file.loss)

    def step() -> float | None:
        if rank == 0:
            schedule.step(inputs)
            return None
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses)
        return float(torch.stack([x.detach() for x in losses]).mean())

    return step, list(module.parameters())


def check_equal(one: Kind, other: Kind) -> None:
    """Both pipelines give the same loss, where both are told it, and the same gradients."""
    for _, parameters in (one, other):
        for parameter in parameters:
            parameter.grad = None
    losses = [step() for step, _ in (one, other)]
    if losses[1] is not None:
        torch.testing.assert_close(losses[0], losses[1])
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def summary(plan: Plan, width: int, size: int, found: list[Tensor]) -> dict[str, Any]:
    """One row: the slower rank's time of every step, and what one kind took more than another."""
    times = dict(zip(KINDS, torch.stack(found).amax(0).tolist(), strict=True))
    row = {"schedule": plan.schedule, "width": width, "microbatch_size": size, "num_turns": len(times["gplan"])}
    row |= {f"{kind}_s": statistics.median(times[kind]) for kind in KINDS}
    for name, (kind, other) in COMPARED.items():
        more = [x / y - 1 for x, y in zip(times[kind], times[other], strict=True)]
        lower, middle, upper = statistics.quantiles(more, n=4)
        error = median_error(more)
        row |= {name: middle, f"{name}_error": error, f"{name}_lower": lower, f"{name}_upper": upper}
    return row


def as_text(table: pd.DataFrame) -> str:
    """The table as Markdown."""
    lines = [
        "# What gplan's engine costs",
        "",
        "`python benchmarks/engine_cost.py`: `gplan.pipeline` beside hand-written loops on torch.distributed.pipelining, two "
        "processes, one core each, eight micro-batches, steps of each kind taken in turns, in an order drawn anew every "
        f"time; {processor()}, torch {torch.__version__}. Differences are medians over the turns ± their standard errors, "
        "with the quartiles; the last column is what two equal pipelines, written by hand, differ by. During gplan's steps "
        "gloo's threads are batch threads, as gplan makes them (profiler/host/links.py); during the others as torch does.",
        "",
        "| schedule | width | micro-batch | turns | gplan | torch's runtime by hand | torch's class by hand "
        "| gplan beside the runtime | gplan beside the class | the runtime beside itself |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        cells = [row["schedule"], row["width"], row["microbatch_size"], row["num_turns"]]
        cells += [seconds_text(row[f"{kind}_s"]) for kind in KINDS[:3]]
        for name in COMPARED:
            middle, *quartiles = (percent_text(row[x], signed=True) for x in (name, f"{name}_lower", f"{name}_upper"))
            cells.append(f"{middle} ± {percent_text(row[f'{name}_error'])} ({' to '.join(quartiles)})")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
