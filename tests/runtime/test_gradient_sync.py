"""Replicas: gradients, losses and averages of the plain model on the whole mini-batch, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gplan
from gplan.core import Plan, RecomputeMode
from gplan.core.errors import UsageError
from gplan.runtime.gradient_sync import average_gradients
from gplan.runtime.pipeline import Pipeline
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.memory.allocations import now_ns, traced_allocations
from gplan_profiler.model.load import model_in_memory
from tests.memo import memoized
from tests.runtime.forked import run_forked
from tests.runtime.plans import SMALL, plan_for, run_virtually, scheduled, small_example, unmeasured_plan
from tests.runtime.ranks import on_ranks

NUM_MICROBATCHES = 4


class Tied(nn.Module):
    """A tied embedding, a batch norm, and a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mix = nn.Linear(8, 8)
        self.aside = nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.mix(self.norm(self.table(tokens))))
        return self.head(x), self.aside(x)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0], target)


def build() -> Tied:
    torch.manual_seed(0)
    return Tied()


def rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 9, (number,), generator=generator), torch.randint(0, 9, (number,), generator=generator)


@memoized
def planned(num_devices: int, num_replicas: int, schedule: str = "gpipe") -> Plan:
    inputs, _ = rows(4)
    file = model_in_memory(
        build(),
        inputs=inputs,
        loss=loss,
        optimizer=lambda x: torch.optim.SGD(x, lr=0.1),
        batches=lambda n: iter(lambda: rows(n), None),
    )
    plan = unmeasured_plan(file, num_devices=num_devices, num_microbatches=NUM_MICROBATCHES, microbatch_size=4)
    recompute: RecomputeMode = "always" if schedule == "zb-h1" else "never"
    return replace(scheduled(plan, schedule), num_replicas=num_replicas, recompute=recompute)


def plain(num_rows: int, num_replicas: int) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of two steps of the plain model, the second one's scaled by half."""
    model, total = build(), 0.0
    for scale in (1.0, 0.5):
        total = 0.0
        for part in microbatches(num_rows, num_replicas):
            inputs, target = (x[part] for x in rows(num_rows))
            value = loss(model(inputs), target) * (part.stop - part.start) / num_rows
            (value * scale).backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
    return total, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def microbatches(num_rows: int, num_replicas: int) -> list[slice]:
    """Each replica's share in micro-batches of at most 4, as equal as possible."""
    shares = torch.arange(num_rows).tensor_split(num_replicas)
    parts = [part for share in shares for part in share.tensor_split(-(-len(share) // 4))]
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def stepped(pipe: Pipeline, num_rows: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Second loss, summed gradients and buffers of two steps."""
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(*rows(num_rows))
    value = pipe.step(*rows(num_rows), scale=0.5)
    gradients = {name: x.grad.clone() for name, x in pipe.named_parameters() if x.grad is not None}
    return float(value), gradients, {k: x.clone() for k, x in pipe.state_dict().items() if "running" in k}


@pytest.mark.parametrize(
    ("num_devices", "num_replicas", "schedule"),
    [(1, 3, "gpipe"), (2, 2, "zb-h1"), (4, 2, "interleaved-1f1b:2")],
)
def test_replicas_gradients_equal_plain_model(num_devices: int, num_replicas: int, schedule: str) -> None:
    plan = planned(num_devices, num_replicas, schedule)
    sizes = (plan.batch_size, 14, 2 * num_replicas)

    def job(_rank: int) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
        pipe = gplan.pipeline(build, plan, loss=loss, timeout_s=30.0)
        return [stepped(pipe, size) for size in sizes]

    alone = gplan.pipeline(build, plan, loss=loss)
    on_every_rank = on_ranks(plan.num_devices * num_replicas, job)
    for i, size in enumerate(sizes):
        expected, gradients = plain(size, num_replicas)
        by_itself = stepped(alone, size)
        for found, own, buffers in [by_itself, *(x[i] for x in on_every_rank)]:
            assert found == pytest.approx(expected, rel=1e-6)
            for name, gradient in own.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-7)
            for name, buffer in buffers.items():
                torch.testing.assert_close(buffer, by_itself[2][name])
        assert {name for x in on_every_rank for name in x[i][1]} >= gradients.keys()


def test_fewer_samples_than_replicas_refused() -> None:
    pipe = gplan.pipeline(build, planned(1, 3), loss=loss)
    with pytest.raises(UsageError, match="2 samples for 3 replicas; expected at least one for each"):
        pipe.step(*rows(2))


def test_replicas_run_equals_virtual_engine(tmp_path: Path) -> None:
    file = small_example("transformer_lm")
    plan = replace(unmeasured_plan(file, num_devices=1), num_replicas=2)
    options = RunOptions(num_steps=3, check=True)
    run = run_forked(file.name, plan, options, settings=SMALL["transformer_lm"])
    assert run.check is not None and run.check.passed, run.check
    assert run.losses == pytest.approx(run_virtually(file, plan, options).losses, rel=1e-6)
    assert len(run.peak_bytes) == 1


class Parts(nn.Module):
    """Parameters of several dtypes, one frozen, one larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere = nn.Parameter(torch.zeros(3, 2))
        self.wide = nn.Parameter(torch.zeros(2, 4, 3, 3).to(memory_format=torch.channels_last))
        self.once = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.nowhere = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.large = nn.Parameter(torch.zeros(7, 1024, 1024))
        self.turned = nn.Parameter(torch.zeros(512, 1024).t())


def test_average_gradients_in_place() -> None:
    def job(rank: int) -> list[Tensor | None]:
        group = dist.group.WORLD
        assert group is not None
        parts, other = Parts(), nn.Linear(1, 1)
        other.weight = parts.everywhere  # of two stages; it counts once
        for name in ("everywhere", "wide", "large", "turned"):
            parameter = parts.get_parameter(name)
            values = torch.arange(float(parameter.numel())).view_as(parameter)
            parameter.grad = torch.empty_like(parameter).copy_(values * (1 + 2 * rank))
        if rank == 1:
            parts.once.grad = torch.full_like(parts.once, 3.0)
        before = [x.grad for x in parts.parameters()]
        average_gradients(dict.fromkeys([*parts.parameters(), *other.parameters()]), group)
        average_gradients([], group)
        assert all(x.grad is y for x, y in zip(parts.parameters(), before, strict=True) if y is not None)
        return [x.grad for x in parts.parameters()]

    for everywhere, wide, once, nowhere, frozen, large, turned in on_ranks(2, job):
        assert torch.equal(everywhere, torch.arange(6.0).view(3, 2) * 2)
        assert torch.equal(wide, torch.arange(72.0).view(2, 4, 3, 3) * 2)
        assert torch.equal(once, torch.full((4,), 1.5, dtype=torch.bfloat16))
        assert nowhere is None
        assert frozen is None
        assert torch.equal(large.flatten(), torch.arange(7.0 * 2**20) * 2)
        assert torch.equal(turned.flatten(), torch.arange(2.0**19) * 2)


def stack() -> nn.Sequential:
    """3 MiB of small parameters, which are averaged in a bucket, and 2 MiB of a large one, which is not."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)), nn.Linear(256, 2048, bias=False))


def test_memory_of_replicas() -> None:
    """Counted from before the pipeline is built, so what is allocated with it and kept is seen.

    The smallest peak of several steps: gloo's thread may hold a gradient into the next step, or not.
    """
    inputs, targets = torch.ones(8, 256), torch.zeros(8, dtype=torch.long)
    file = model_in_memory(
        stack(),
        inputs=inputs,
        loss=nn.functional.cross_entropy,
        optimizer=lambda x: torch.optim.SGD(x, lr=0.1),
        batches=lambda n: iter(lambda: (inputs[:n], targets[:n]), None),
    )
    plan = plan_for(file, num_devices=1, num_microbatches=2, num_replicas=2)

    def job(_rank: int) -> int:
        with traced_allocations() as trace:
            pipe = gplan.pipeline(stack, plan, loss=nn.functional.cross_entropy, timeout_s=30.0)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            starts_ns = []
            for _ in range(8):
                starts_ns.append(now_ns())
                pipe.step(inputs, targets)
                optimizer.step()
                optimizer.zero_grad()
        return min(map(trace.peak_bytes, starts_ns[1:], [*starts_ns[2:], now_ns()]))

    (stage,) = plan.stages
    copied_bytes = sum(x.nbytes for x in stack()[:-1].parameters())
    assert stage.memory.moment == "optimizer"  # gradients are averaged before it
    assert stage.memory.workspace_bytes == copied_bytes
    for measured_bytes in on_ranks(2, job):
        assert measured_bytes == pytest.approx(stage.memory.peak_bytes, rel=0.01)


class Drawn(nn.Sequential):
    """Random buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self[1].register_buffer("noise", torch.randn(8))
        self[2].register_buffer("unsaved", torch.randn(8), persistent=False)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_replicas_start_equal(schedule: str) -> None:
    file = model_in_memory(Drawn(), inputs=torch.ones(4, 8))
    plan = scheduled(unmeasured_plan(file, num_devices=2, num_microbatches=2, microbatch_size=4), schedule)

    def job(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        pipe = gplan.pipeline(Drawn(), replace(plan, num_replicas=2), inputs=torch.ones(4, 8), timeout_s=20.0)
        return [x.detach().clone() for stage in pipe.runner.stages for x in pipe.runner.resident_tensors(stage)]

    found = on_ranks(4, job)
    assert sum(map(len, found[:2])) == 10
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
