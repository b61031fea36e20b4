"""Runs a user's script with both engines and compares the results with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gplan
from gplan.core import Constraints, Plan, Profile
from gplan.core.errors import GplanError
from gplan.runtime.pipeline import Pipeline
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import unmeasured
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.models import Subject

T = TypeVar("T")

NUM_DEVICES = (2, 4)
MICROBATCH_SIZE = 2


@cache
def profile_of(subject: Subject) -> Profile:
    """Its layers, unmeasured; cached."""

    def batches(num_samples: int) -> Iterable[tuple[Any, Any]]:
        while True:
            yield subject.batch(num_samples)

    with torch.random.fork_rng():
        model = subject.build()
    file = model_in_memory(model, loss=subject.loss, batches=batches, loss_reduction=subject.loss_reduction)
    return unmeasured(file, MICROBATCH_SIZE, "auto")


def plan_of(
    subject: Subject, num_devices: int, *, num_microbatches: int = 4, cut_after: Sequence[str] = (), **options: Any
) -> Plan:
    """A plan for micro-batches of 2; `cut_after` names layers that end a stage."""
    return gplan.balance(
        profile_of(subject),
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        microbatch_size=MICROBATCH_SIZE,
        constraints=Constraints(cut_after=tuple(cut_after)),
        **options,
    )


def with_microbatches(plan: Plan, *, number: int, size: int) -> Plan:
    """The same stages for another number of micro-batches, of another size."""
    return replace(plan, num_microbatches=number, microbatch_size=size)


def both_engines(num_devices: int, script: Callable[[], T]) -> dict[str, list[T]]:
    """Return a script's result in one process (virtual engine) and on each of `num_devices` ranks (torch engine)."""

    def on_rank(_rank: int) -> T:
        found = script()
        dist.barrier()  # before any process ends
        return found

    return {"virtual": [script()], "torch": on_ranks(num_devices, on_rank)}


def failures(num_devices: int, script: Callable[[], object], *, num_ranks: int | None = None) -> list[str]:
    """Return class and text of the error that a script raises in one process and on every rank."""
    alone = [] if num_ranks is not None else [_failure(script)]
    return alone + on_ranks(num_ranks or num_devices, lambda _rank: _failure(script), timeout_s=20.0)


def _failure(script: Callable[[], object]) -> str:
    with pytest.raises(GplanError) as caught:
        script()
    return f"{type(caught.value).__name__}: {caught.value}"


def gradients_of(pipe: Pipeline) -> dict[str, Tensor]:
    """The gradients on this process."""
    return {name: x.grad.clone() for name, x in pipe.named_parameters() if x.grad is not None}


def merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tensors of all ranks; copies must be equal."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return found


def built(subject: Subject, *, seed: int = 0) -> nn.Module:
    """The plain model."""
    torch.manual_seed(seed)
    return subject.build()


def plain_gradients(
    subject: Subject, batch: tuple[Any, Any], *, model: nn.Module | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model on a whole mini-batch."""
    model = built(subject) if model is None else model
    inputs, targets = batch
    loss = subject.loss(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_same(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float = 1e-5, what: str = ""
) -> None:
    """Assert equal names, and tensors equal within `tolerance` of the largest entry of all."""
    assert set(found) == set(expected), f"{what} {set(found) ^ set(expected)}"
    largest = max((float(x.abs().max()) for x in expected.values() if x.numel()), default=1.0)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance * largest, msg=f"{what} {name}")
