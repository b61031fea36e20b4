"""Exports run: torch.distributed.pipelining and torchtitan's own splitter train on two gloo processes, torchgpipe and
DeepSpeed's PipelineModule on the CPU, each with the losses of the plain model."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from gplan.core import Plan
from gplan.interop.export.exporters import export
from gplan.interop.receivers import Settings
from receivers import own_code
from receivers.random_plans import plan_of

NUM_STEPS, NUM_MICROBATCHES, BATCH, TOKENS, VOCABULARY = 3, 4, 8, 16, 64
TOLERANCE = 1e-5


class Decoder(nn.Module):
    """A small model with torchtitan's names whose forward passes over children that are None."""

    def __init__(self, num_blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(width, width), nn.Tanh()) for i in range(num_blocks)}
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """int64 tokens (batch, tokens) -> logits, or the hidden states of a part."""
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


NAMES = ("tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "lm_head")


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, a mean over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def made_model() -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Decoder()


def batches() -> list[tuple[Tensor, Tensor]]:
    """The same batches in every process."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator) for _ in range(NUM_STEPS)]
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in tokens]


def plain_losses() -> list[float]:
    """Three steps of the whole model by itself."""
    model = made_model()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = loss_of(model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_plan(schedule: str = "1f1b") -> Plan:
    """Two stages."""
    settings = Settings(schedule=schedule, num_devices=2, num_microbatches=NUM_MICROBATCHES)
    return plan_of(NAMES, [3], settings)


def pytorch_losses(rank: int) -> list[float]:
    """`pipeline()` with the exported split_spec, and the exported make_schedule."""
    from torch.distributed.pipelining import pipeline

    found = own_code.executed(export(small_plan(), to="pytorch").text)
    tokens, _ = batches()[0]
    pipe = pipeline(made_model(), mb_args=(tokens[: BATCH // NUM_MICROBATCHES],), split_spec=found["split_spec"])
    assert pipe.num_stages == 2, "pipeline() makes other stages"
    schedule = found["make_schedule"](pipe, rank, torch.device("cpu"), loss_of)
    return _trained(rank, schedule, schedule._stage.submod)


def torchtitan_losses(rank: int) -> list[float]:
    """torchtitan's `_pipeline_module_split` and `_build_pipeline_schedule` with the exported configuration."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _pipeline_module_split

    config = own_code.executed(export(small_plan(), to="torchtitan").text)["planned"](own_code._debug_config())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    parallelism = config.parallelism
    parallelism.pipeline_parallel_microbatch_size = BATCH // NUM_MICROBATCHES
    stages, parts = _pipeline_module_split(
        made_model(), mesh["pp"], parallelism.pipeline_parallel_schedule, torch.device("cpu"),
        parallelism.module_fqns_per_model_part,
    )  # fmt: skip

    def with_count(output: Tensor, target: Tensor) -> tuple[Tensor, None]:
        return loss_of(output, target) / NUM_MICROBATCHES, None  # torchtitan's schedule does not scale gradients

    schedule = _build_pipeline_schedule(
        parallelism=parallelism, local_batch_size=BATCH, stages=stages, loss_fn=with_count
    )
    return _trained(rank, schedule, parts[0], scale=NUM_MICROBATCHES)


def _trained(rank: int, schedule: Any, module: nn.Module, *, scale: int = 1) -> list[float]:
    """The losses of some steps; () on the rank without a loss."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for tokens, target in batches():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            parts: list[Tensor] = []
            schedule.step(target=target, losses=parts)
            losses.append(scale * torch.stack(parts).mean().item())
        optimizer.step()
    return losses


RUNS: dict[str, Callable[[int], list[float]]] = {"pytorch": pytorch_losses, "torchtitan": torchtitan_losses}


def _process(rank: int, receiver: str, port: int, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        losses = RUNS[receiver](rank)
        Path(folder, f"{rank}.txt").write_text(" ".join(map(repr, losses)))
        dist.destroy_process_group()
    except Exception:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise


def run_on_two_processes(receiver: str) -> tuple[list[float], list[float]]:
    """The losses of the pipeline and of the plain model; raises RuntimeError with the trace of a rank that failed."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        try:
            mp.spawn(_process, args=(receiver, port, folder), nprocs=2)
        except Exception as error:
            traces = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise RuntimeError(traces[0] if traces else str(error)) from error
        found = [float(x) for x in Path(folder, "1.txt").read_text().split()]
    return found, plain_losses()


def run_torchgpipe() -> tuple[list[float], list[float]]:
    """GPipe on two partitions of the CPU, and the plain model."""
    import torchgpipe as package

    model, real = made_model(), package.GPipe
    chain = nn.Sequential(model.tok_embeddings, *model.layers.values(), model.norm, model.lm_head)

    def on_cpu(module: nn.Sequential, **options: Any) -> Any:
        return real(module, devices=["cpu", "cpu"], **options)

    package.GPipe = on_cpu
    try:
        made = own_code.executed(export(small_plan("gpipe"), to="torchgpipe").text, model=chain)["model"]
    finally:
        package.GPipe = real
    optimizer, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = loss_of(made(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, plain_losses()
