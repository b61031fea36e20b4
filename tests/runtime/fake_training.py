"""A fake training for checkpoint tests: gradients depend on name, step and value only.

A parameter changes equally on every rank, so a resumed run can be compared bit for bit with an uninterrupted one.
"""

from __future__ import annotations

import multiprocessing
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from gplan.runtime.checkpoint.loading import load_checkpoint
from gplan.runtime.checkpoint.saving import save_checkpoint
from gplan.runtime.checkpoint.state import PlainValue, RankState

DIGEST = "a-model"
SHAPES = {
    "embed": (7, 4),
    "0.weight": (4, 4),
    "0.bias": (4,),
    "1.scale": (),
    "1.kernel": (2, 3, 3, 3),
    "1.none": (0, 3),
}
SHARES = {1: [[*SHAPES]], 2: [["embed", "0.weight"], ["0.bias", "1.scale", "1.kernel", "1.none"]]} | {
    3: [["embed"], ["0.weight", "0.bias", "1.scale", "1.kernel", "1.none"], []]  # the last stage trains nothing
}

Parameters = dict[str, nn.Parameter]
MakeOptimizer = Callable[[Parameters], Optimizer]
MakeSchedulers = Callable[[Optimizer], Sequence[Any]]


@dataclass(kw_only=True)
class Training:
    """One rank's share of the training."""

    state: RankState

    def run(self, steps: range) -> None:
        for step in steps:
            for name, parameter in self.state.parameters.items():
                noise = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
                drawn = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
                parameter.grad = 0.3 * parameter.detach() + drawn
            for optimizer in self.state.optimizers:
                optimizer.step()
            for scheduler in self.state.schedulers:
                scheduler.step()
            for name, tensor in self.state.model.items():
                if name.endswith("num_batches"):
                    tensor += 1

    def save(self, directory: Path, step: int, group: dist.ProcessGroup | None = None, **progress: PlainValue) -> Path:
        return save_checkpoint(directory, self.state, step=step, progress=progress, digest=DIGEST, group=group)

    def load(self, path: Path, group: dist.ProcessGroup | None = None) -> dict[str, PlainValue]:
        return load_checkpoint(path, self.state, digest=DIGEST, group=group).progress

    def everything(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state by name."""
        found = {name: tensor.detach().clone() for name, tensor in self.state.model.items()}
        for index, optimizer in enumerate(self.state.optimizers):
            for name, parameter in self.state.parameters.items():
                entries = optimizer.state.get(parameter, {})
                found |= {f"{index}.{name}.{k}": torch.as_tensor(v) for k, v in entries.items() if v is not None}
        return found


def sgd(parameters: Parameters) -> Optimizer:
    return SGD(parameters.values() or [nn.Parameter(torch.empty(0))], lr=0.1)


def momentum(parameters: Parameters) -> Optimizer:
    return SGD(parameters.values() or [nn.Parameter(torch.empty(0))], lr=0.1, momentum=0.9)


def adam(parameters: Parameters) -> Optimizer:
    return Adam(parameters.values() or [nn.Parameter(torch.empty(0))], lr=0.01)


def adamw_with_groups(parameters: Parameters) -> Optimizer:
    """Weight decay for matrices only, so that on some stages a group is empty."""
    decayed = [x for x in parameters.values() if x.dim() > 1]
    others = [x for x in parameters.values() if x.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    return AdamW(groups, lr=0.02)


def a_group_per_parameter(parameters: Parameters) -> Optimizer:
    return Adam([{"params": [x], "lr": 0.01 * (1 + len(name))} for name, x in parameters.items()])


def cosine(optimizer: Optimizer) -> Sequence[Any]:
    return [schedules.CosineAnnealingLR(optimizer, T_max=7)]


def one_cycle(optimizer: Optimizer) -> Sequence[Any]:
    return [schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)]


def halving(optimizer: Optimizer) -> Sequence[Any]:
    return [schedules.LambdaLR(optimizer, lambda step: 0.5**step)]


def no_schedule(_optimizer: Optimizer) -> Sequence[Any]:
    return []


class Decay:
    """A schedule with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (step + self.calls)


def training(
    make_optimizer: MakeOptimizer,
    make_schedulers: MakeSchedulers = lambda _: (),
    *,
    names: Sequence[str] = tuple(SHAPES),
    stage: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Training:
    """A share of the model, initialised as in the whole; a buffer and a frozen, tied parameter belong to "embed"."""
    parameters = {}
    for name in names:
        start = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameters[name] = nn.Parameter(torch.randn(SHAPES[name], generator=start).to(dtype))
    model: dict[str, Tensor] = dict(parameters)
    if "embed" in names:
        model |= {"tied": parameters["embed"], "num_batches": torch.zeros((), dtype=torch.int64)}
        model["frozen"] = torch.full((3,), 2.5)
    optimizer = make_optimizer(parameters)
    state = RankState(
        model=model,
        parameters=parameters,
        optimizers=[optimizer],
        schedulers=tuple(make_schedulers(optimizer)),
        stages=[] if stage is None else [stage],
    )
    return Training(state=state)


def share(
    make_optimizer: MakeOptimizer,
    make_schedulers: MakeSchedulers = lambda _: (),
    *,
    shares: Sequence[Sequence[str]] | None = None,
) -> Training:
    """This rank's share; one stage per rank."""
    rank = dist.get_rank()
    names = (shares or SHARES[dist.get_world_size()])[rank]
    return training(make_optimizer, make_schedulers, names=names, stage=rank)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two runs have equal values and dtypes."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def in_fresh_processes(num_ranks: int, work: Callable[..., object], place: Path, *arguments: Any) -> list[Any]:
    """Return `work(*arguments)` of every rank in processes of a fork server, None for a killed one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "gplan.runtime.checkpoint.loading", "gplan.runtime.checkpoint.saving", "pytest"]
    )  # an optimizer needs the first
    meeting = place / f"meeting-{len([*place.iterdir()])}"
    meeting.mkdir(parents=True)
    processes = [
        context.Process(target=_rank, args=(rank, num_ranks, meeting, work, arguments)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        assert {*codes} <= {0, -9}, f"a rank hangs (None) or failed (see its traceback): {codes}"
    finally:
        for process in processes:
            process.kill()
    results = [meeting / f"result-{rank}" for rank in range(num_ranks)]
    return [pickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def _rank(rank: int, num_ranks: int, meeting: Path, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    (meeting / f"result-{rank}").write_bytes(pickle.dumps(work(*arguments)))
