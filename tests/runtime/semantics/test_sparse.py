"""Sparse gradients, as of nn.Embedding(sparse=True), under every kind of backward and with replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Plan
from gplan.runtime.pipeline import Pipeline
from tests.runtime.plans import scheduled
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import assert_same, built, merged, plan_of
from tests.runtime.semantics.models import NUM_CLASSES, WIDTH, Subject, token_subject


class Looked(nn.Module):
    """Two tables with sparse gradients, on the first and on a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * NUM_CLASSES, WIDTH, sparse=True)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Embedding(2 * NUM_CLASSES, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.table(tokens)))
        x = torch.tanh(self.second(x)) * self.other(tokens + 1)
        output: Tensor = self.head(x)
        return output


class Shared(Looked):
    """Both tables are one."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.table.weight


class SharedWithHead(Looked):
    """The first table is the head's weight too, whose gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_CLASSES, WIDTH, sparse=True)
        self.head.weight = self.table.weight


LOOKED = token_subject(Looked)
CASES = [
    (LOOKED, "gpipe", 1),
    (LOOKED, "zb-h1", 1),
    (LOOKED, "gpipe", 2),
    (LOOKED, "zb-h1", 2),
    (token_subject(Shared), "1f1b", 2),
    (token_subject(Shared), "zb-h1", 1),
    (token_subject(SharedWithHead), "1f1b", 2),
]


def planned(case: Subject, schedule: str, num_replicas: int) -> Plan:
    plan = scheduled(plan_of(case, 2, cut_after=("first",), num_microbatches=4 // num_replicas), schedule)
    return replace(plan, num_replicas=num_replicas)


def accumulated(model: Any, backward: Any, case: Subject) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients of two mini-batches, and the names of the sparse ones."""
    for number in range(2):
        backward(*case.batch(8, seed=number))
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    sparse = {name for name, x in found.items() if x.is_sparse}
    return {name: x.to_dense() if x.is_sparse else x.clone() for name, x in found.items()}, sparse


@pytest.mark.parametrize(("case", "schedule", "num_replicas"), CASES)
def test_sparse_gradients(case: Subject, schedule: str, num_replicas: int) -> None:
    plan, model = planned(case, schedule, num_replicas), built(case)
    expected, sparse = accumulated(model, lambda x, y: case.loss(model(x), y).backward(), case)  # type: ignore[no-untyped-call]

    def script(_rank: int = 0) -> Any:
        pipe: Pipeline = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0)
        return accumulated(pipe, pipe.step, case)

    for parts in ([script()], on_ranks(plan.num_devices * num_replicas, script)):
        assert set().union(*(found for _, found in parts)) == sparse
        assert_same(merged(found for found, _ in parts), expected)


def test_sparse_optimizer_skips_unused_rows() -> None:
    plan, model = planned(LOOKED, "1f1b", 2), built(LOOKED)

    def trained(of: Any, backward: Any, tables: list[nn.Parameter]) -> dict[str, Tensor]:
        optimizer = torch.optim.SparseAdam(tables, lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            backward(*LOOKED.batch(8, seed=number))
            optimizer.step()
        return {name: x.detach().clone() for name, x in of.named_parameters() if x.shape[0] == 2 * NUM_CLASSES}

    def script(_rank: int) -> dict[str, Tensor]:
        pipe = gplan.pipeline(LOOKED.build, plan, loss=LOOKED.loss, timeout_s=20.0)
        return trained(pipe, pipe.step, [x for x in pipe.parameters() if x.shape[0] == 2 * NUM_CLASSES])

    tables = [model.table.weight, model.other.weight]
    expected = trained(model, lambda x, y: LOOKED.loss(model(x), y).backward(), tables)  # type: ignore[arg-type, no-untyped-call]
    assert_same(merged(on_ranks(4, script)), expected, tolerance=1e-4)
