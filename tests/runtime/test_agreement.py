"""Ranks that draw different batches or call different methods get an error at once; rank 0's batch can be sent to all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gplan
from gplan.core import Plan
from gplan.core.errors import GplanError, RunError, UsageError
from gplan.runtime.agreement import digest
from gplan.runtime.pipeline import Pipeline
from tests.memo import memoized
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import plan_of
from tests.runtime.semantics.models import Tied, row, subject, token_subject

ROW = subject(row)
DATA = TensorDataset(*ROW.batch(64))
REMEDIES = ("same seed", "broadcast_batches=True")


def pipeline(plan: Plan, **options: Any) -> Pipeline:
    return gplan.pipeline(row, plan, loss=ROW.loss, seed=0, timeout_s=20.0, **options)


@memoized
def planned(num_devices: int, num_replicas: int) -> Plan:
    plan = plan_of(ROW, num_devices, num_microbatches=4 // num_replicas)
    return replace(plan, num_replicas=num_replicas)


def error_on(num_ranks: int, script: Callable[[int], object]) -> list[str]:
    def job(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            script(rank)
        return str(caught.value)

    return on_ranks(num_ranks, job, timeout_s=20.0)


def unseeded(rank: int) -> Iterator[Any]:
    torch.manual_seed(rank)  # as in separate processes
    return iter(DataLoader(DATA, batch_size=8, shuffle=True))


def augmented(rank: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(rank)
    for x, y in DataLoader(DATA, batch_size=8):
        yield x + torch.randn(x.shape, generator=generator), y


def distributed(rank: int) -> Iterator[Any]:
    return iter(DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, 4, rank)))


@pytest.mark.parametrize(
    ("batches", "num_devices", "num_replicas", "found"),
    [
        (unseeded, 2, 1, "inputs and targets of rank 1 differ from those of rank 0; expected"),
        (augmented, 3, 1, "inputs of ranks 1, 2 differ from those of rank 0; expected"),
        (distributed, 2, 2, "inputs and targets of ranks 1, 2, 3 differ from those of rank 0; expected"),
    ],
)
def test_different_batches(
    batches: Callable[[int], Iterator[Any]], num_devices: int, num_replicas: int, found: str
) -> None:
    plan = planned(num_devices, num_replicas)
    texts = error_on(plan.num_ranks, lambda rank: pipeline(plan).step(*next(batches(rank))))
    for text in texts:
        assert f"ranks got different batches in pipe.step number 1: {found}" in text
        assert all(x in text for x in REMEDIES)


@pytest.mark.parametrize(("cheap_bytes", "noticed"), [(0, 16), (10**6, 11)])
def test_batches_that_differ_later(cheap_bytes: int, noticed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that goes out of step after the first ten is noticed at once, or with large batches at the next power of two."""

    monkeypatch.setattr("gplan.runtime.agreement._CHEAP_BYTES", cheap_bytes)
    plan = planned(2, 1)

    def script(rank: int) -> None:
        pipe = pipeline(plan)
        for number in range(1, 20):
            x, y = ROW.batch(8, seed=number + (rank if number > 10 else 0))
            pipe.step(x, None if rank == 0 else y)

    for text in error_on(2, script):
        assert f"in pipe.step number {noticed}: inputs of rank 1 differ" in text


def noise(rank: int, gradient: Tensor) -> Tensor:
    return gradient + torch.randn(gradient.shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("num_devices", "num_replicas", "odd"), [(2, 1, "rank 1"), (2, 2, "ranks 1, 2, 3")])
def test_edits_that_are_not_the_same_on_every_rank(num_devices: int, num_replicas: int, odd: str) -> None:
    """Copies of a tied weight, and replicas, drifted apart without a word."""
    tied = token_subject(Tied)
    plan = plan_of(tied, num_devices, num_microbatches=4 // num_replicas)
    plan = replace(plan, num_replicas=num_replicas)

    def script(rank: int) -> None:
        pipe = gplan.pipeline(tied.build, plan, loss=tied.loss, timeout_s=20.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(*tied.batch(8))
            for x in pipe.parameters():
                x.grad = noise(rank, x.grad)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()

    for text in error_on(plan.num_ranks, script):
        assert re.search(rf"the copies of .* drifted apart before pipe.step number 2: values of {odd} differ", text)


def test_equal_edits_are_accepted() -> None:
    tied = token_subject(Tied)
    plan = plan_of(tied, 2)

    def job(_rank: int) -> float:
        pipe = gplan.pipeline(tied.build, plan, loss=tied.loss, timeout_s=20.0)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        for _ in range(3):
            loss = pipe.step(*tied.batch(8))
            pipe.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    first, second = on_ranks(2, job, timeout_s=20.0)
    assert first == second


def test_other_numbers_of_samples() -> None:
    plan = planned(3, 1)

    def script(rank: int) -> None:
        pipe = pipeline(plan)
        x, y = ROW.batch(6)
        pipe.step(*((None, None) if rank == 1 else (x, y)))

    for text in error_on(3, script):
        assert "pipe.step number 1 got other numbers of samples: 6 by ranks 0, 2; 8 by rank 1" in text


def test_step_after_a_failed_one() -> None:
    plan = planned(2, 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise ValueError("a bad target")
        return ROW.loss(output, target)

    def job(rank: int) -> list[str]:
        pipe, (x, y) = gplan.pipeline(row, plan, loss=loss, timeout_s=2.0), ROW.batch(8)
        texts = []
        for targets in (torch.full_like(y, math.nan), y):
            with pytest.raises(RunError) as caught:
                pipe.step(x, targets)
            texts.append(str(caught.value))
        return texts

    first, again = zip(*on_ranks(2, job, timeout_s=20.0), strict=True)
    assert "a bad target" in first[1]
    assert "lost" in first[0] or "did not answer" in first[0]
    assert all(x.startswith("step 1 failed and left other ranks") and "resume from a checkpoint" in x for x in again)


def test_none_where_data_are_not_used() -> None:
    plan = planned(3, 1)

    def job(rank: int) -> list[float]:
        pipe = pipeline(plan)
        return [
            float(call(x if rank == 0 else None, y if rank == 2 else None))
            for call in (pipe.step, pipe.eval_step)
            for x, y in [ROW.batch(8)]
        ]

    alone = pipeline(plan)
    expected = [float(call(*ROW.batch(8))) for call in (alone.step, alone.eval_step)]
    assert on_ranks(3, job) == [pytest.approx(expected, rel=1e-6)] * 3


def trained(pipe: Pipeline, batches: Iterator[Any]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=0.01), []
    for number, (x, y) in enumerate(batches):
        losses.append(float(pipe.step(x, y) if number != 1 else pipe.step(x[:6], y[:6])))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, float(pipe.eval_step(*ROW.batch(13, seed=pipe.rank)))]


@pytest.mark.parametrize(("num_devices", "num_replicas"), [(2, 1), (3, 1), (2, 2)])
def test_broadcast_equals_one_process(num_devices: int, num_replicas: int) -> None:
    plan = planned(num_devices, num_replicas)
    expected = trained(pipeline(plan), unseeded(0))

    def job(rank: int) -> list[float]:
        return trained(pipeline(plan, broadcast_batches=True), unseeded(rank))

    assert on_ranks(plan.num_ranks, job) == [pytest.approx(expected, rel=1e-6)] * plan.num_ranks


def test_broadcast_of_structures() -> None:
    """Inputs by name, of several dtypes; None on all ranks but the first."""
    flag = torch.tensor([True, False] * 4)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(5, 6), nn.Linear(6, 6)

        def forward(self, ids: Tensor, flag: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(ids) * flag[:, None])
            return out

    case = replace(
        ROW, build=Named, inputs=lambda g, n: {"ids": torch.randint(5, (n,), generator=g), "flag": flag[:1].expand(n)}
    )
    plan = plan_of(case, 2)

    def job(rank: int) -> tuple[float, Any]:
        pipe = gplan.pipeline(Named, plan, loss=case.loss, timeout_s=20.0, broadcast_batches=True)
        x, y = ({"ids": case.batch(8)[0]["ids"], "flag": flag}, case.batch(8)[1]) if rank == 0 else (None, None)
        return float(pipe.step(x, y)), pipe.predict(x)

    alone = gplan.pipeline(Named, plan, loss=case.loss)
    given = {"ids": case.batch(8)[0]["ids"], "flag": flag}
    loss = float(alone.step(given, case.batch(8)[1]))
    (first, none), (last, output) = on_ranks(2, job)
    assert (first, last, none) == (pytest.approx(loss, rel=1e-6), pytest.approx(loss, rel=1e-6), None)
    torch.testing.assert_close(output, alone.predict(given))


CALLS: dict[str, Callable[[Pipeline, Path], object]] = {
    "save": lambda pipe, folder: pipe.save(folder),
    "load": lambda pipe, folder: pipe.load(folder),
    "eval_step": lambda pipe, _: pipe.eval_step(*ROW.batch(8)),
    "predict": lambda pipe, _: pipe.predict(ROW.batch(8)[0]),
    "full_state_dict": lambda pipe, _: pipe.full_state_dict(),
    "clip_grad_norm_": lambda pipe, _: pipe.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("goes_on", [True, False])
def test_call_on_one_rank_only(name: str, goes_on: bool, tmp_path: Path) -> None:
    """The other rank takes its next step, or ends; the timeout would be 60 s."""

    plan = planned(2, 1)

    def job(rank: int) -> str:
        pipe = gplan.pipeline(row, plan, loss=ROW.loss)
        for number in range(12):
            pipe.step(*ROW.batch(8, seed=number))
        if rank == 1 and not goes_on:
            return ""
        with pytest.raises(GplanError) as caught:
            (pipe.step(*ROW.batch(8)) if rank else CALLS[name](pipe, tmp_path))
        assert isinstance(caught.value, UsageError if goes_on and rank == 0 else RunError)
        return str(caught.value)

    first, other = on_ranks(2, job)
    if goes_on:
        assert f"pipe.{name} by rank 0; pipe.step by rank 1; expected the same calls" in first
        assert "another rank of the run" in other
    else:
        # The other rank may have ended before its last step's numbers were read here.
        assert re.search(rf"call pipe\.({name}|step) on every rank, not within `if pipe.rank == 0`", first)


def test_objects_that_are_no_data_have_no_digest() -> None:
    """The text of an object may hold its address, which differs between processes."""
    tensor = torch.arange(3)
    assert digest((tensor, object())) == digest((tensor, object()))
    assert digest((tensor, 1)) != digest((tensor, 2))
