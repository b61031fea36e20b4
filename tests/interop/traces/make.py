"""Record the sample traces again: `python -m tests.interop.traces.make` from the root of the repository.

Two processes over gloo train a small model for five steps under every schedule, the first step not recorded; then each
trace is stripped to what README.md says.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gplan.interop.traces.reading import is_kept_mark

HERE = Path(__file__).parent
NUM_RANKS, NUM_STEPS, NUM_MICROBATCHES, WIDTH, NUM_SAMPLES = 2, 4, 4, 192, 16
TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "1f1b-stacks": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
GPLAN, PLAN = "gplan-zb-v", "plan.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_plan(Path(folder) / PLAN)
        for port, name in enumerate([*TORCH_SCHEDULES, GPLAN], start=29611):
            record(name, Path(folder), port=port)
            for rank in range(NUM_RANKS):
                strip(Path(folder) / f"{name}.rank{rank}.json", HERE / f"{name}.rank{rank}.json.gz")


def record(name: str, folder: Path, *, port: int) -> None:
    """Both ranks at once, each a process with this module."""
    shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, name, str(folder)],  # type: ignore[union-attr]
            env={**os.environ, **shared, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(NUM_RANKS)
    ]
    if any(rank.wait(timeout=300) for rank in ranks):
        raise SystemExit(f"{name} failed")


def strip(source: Path, target: Path) -> None:
    """The trace with its ranges and its outermost operations alone, without arguments, its first step at 0."""
    content = source.read_bytes()
    trace = json.loads(gzip.decompress(content) if source.suffix == ".gz" else content)
    events = [x for x in trace["traceEvents"] if x["ph"] == "X" and isinstance(x["tid"], int)]
    first = min(float(x["ts"]) for x in events)
    trace["traceEvents"] = [_stripped(x, first) for x in sorted(_outermost(events), key=lambda x: float(x["ts"]))]
    trace["baseTimeNanoseconds"] += round(1e3 * first)
    trace.pop("deviceProperties", None)
    trace["traceName"], trace["host_name"] = source.name, "host"
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(json.dumps(trace, indent=1).encode())


def _stripped(event: dict[str, Any], first: float) -> dict[str, Any]:
    return {**{key: event[key] for key in ("ph", "cat", "name", "pid", "tid")},
            "ts": round(float(event["ts"]) - first, 3), "dur": event["dur"]}  # fmt: skip


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept, ends = [], dict[int, float]()
    for x in sorted(events, key=lambda x: (float(x["ts"]), -float(x["dur"]))):
        start, end = float(x["ts"]), float(x["ts"]) + float(x["dur"])
        if x["cat"] == "cpu_op" and start >= ends.get(x["tid"], 0.0):
            ends[x["tid"]] = end
            kept.append(x)
        elif x["cat"] == "user_annotation" or is_kept_mark(x["name"]):
            kept.append(x)
    return kept


def train(name: str, folder: Path) -> None:
    """One rank: the steps of a schedule, recorded."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    step, close = _gplan_step(folder / PLAN) if name == GPLAN else _torch_step(TORCH_SCHEDULES[name], rank)
    steps = schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1)
    stacks = name.endswith("stacks")
    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks, schedule=steps) as recorded:
        for _ in range(1 + NUM_STEPS):
            step()
            recorded.step()
    recorded.export_chrome_trace(str(folder / f"{name}.rank{rank}.json"))
    dist.barrier()
    close()


def _torch_step(name: str, rank: int) -> Any:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules

    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    is_single = name in ("ScheduleGPipe", "Schedule1F1B")
    num_stages = NUM_RANKS if is_single else 2 * NUM_RANKS
    held = [rank] if is_single else [rank, num_stages - 1 - rank] if "DualPipe" in name else [rank, rank + NUM_RANKS]
    modules = [_blocks(1 + stage % 2) for stage in held]
    stages = []
    for stage, module in zip(held, modules, strict=True):
        passed = torch.zeros(NUM_SAMPLES, WIDTH, device="meta", requires_grad=True)
        given = passed if stage else torch.zeros(NUM_SAMPLES, WIDTH, device="meta")
        stages.append(
            PipelineStage(module, stage, num_stages, torch.device("cpu"), input_args=(given,), output_args=(passed,))
        )
    kind = getattr(schedules, name)
    made = kind(stages[0] if is_single else stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(nn.ModuleList(modules).parameters())
    batch = torch.randn(NUM_SAMPLES * NUM_MICROBATCHES, WIDTH)

    def step() -> None:
        dist.barrier()
        target = {"target": batch} if num_stages - 1 in held else {}
        made.step(*([batch] if rank == 0 else []), **target)
        optimizer.step()
        optimizer.zero_grad()

    return step, dist.destroy_process_group


def make_plan(path: Path) -> None:
    """A plan whose devices have two stages each and split their backwards."""
    import torch
    from torch import nn

    import gplan

    profile = gplan.profile(
        _model(), microbatch_sizes=[NUM_SAMPLES], inputs=lambda size: torch.zeros(size, WIDTH), budget_s=1.0,
        loss=nn.functional.mse_loss, loss_reduction="mean", contention=0, link=gplan.Link(latency_s=1e-4, bytes_per_s=1e9),
    )  # fmt: skip
    gplan.save(gplan.balance(profile, num_devices=2, num_microbatches=NUM_MICROBATCHES, schedule="zb-v"), path)


def _gplan_step(plan: Path) -> Any:
    """gplan's own engine."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import gplan

    pipe = gplan.pipeline(_model(), gplan.load(plan), loss=nn.functional.mse_loss)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(pipe.parameters())
    batch = torch.randn(NUM_SAMPLES * NUM_MICROBATCHES, WIDTH)

    def step() -> None:
        pipe.step(batch, batch)
        optimizer.step()
        optimizer.zero_grad()

    return step, dist.destroy_process_group


def _model() -> Any:
    from torch import nn

    return nn.Sequential(*(_blocks(1 + i % 2) for i in range(4)))


def _blocks(num_blocks: int) -> Any:
    from torch import nn

    return nn.Sequential(*(layer for _ in range(num_blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        train(sys.argv[1], Path(sys.argv[2]))
