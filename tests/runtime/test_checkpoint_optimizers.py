from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from gplan.core.errors import FileError, UsageError
from gplan.runtime.checkpoint.state import equal_values, load_optimizer_state, optimizer_state
from tests.runtime.fake_training import same_bits, training

EVERY = [
    lambda x: optim.ASGD(x),
    lambda x: optim.Adadelta(x),
    lambda x: optim.Adafactor(x),
    lambda x: optim.Adagrad(x, lr_decay=0.1),
    lambda x: optim.Adam(x, amsgrad=True),
    lambda x: optim.Adam(x, lr=torch.tensor(0.01)),
    lambda x: optim.AdamW(x, foreach=True),
    lambda x: optim.AdamW(x, fused=True),
    lambda x: optim.Adamax(x),
    lambda x: optim.NAdam(x),
    lambda x: optim.RAdam(x),
    lambda x: optim.RMSprop(x, momentum=0.9, centered=True),
    lambda x: optim.Rprop(x),
    lambda x: optim.SGD(x, lr=0.1),
    lambda x: optim.SGD(x, lr=0.1, momentum=0.9, nesterov=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", EVERY)
def test_optimizers_resume_bit_for_bit(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    def own(parameters: dict[str, nn.Parameter]) -> optim.Optimizer:
        optimizer: optim.Optimizer = make([x for x in parameters.values() if x.numel()])
        return optimizer

    undisturbed, resumed = training(own, dtype=dtype), training(own, dtype=dtype)
    undisturbed.run(range(3))
    resumed.load(undisturbed.save(tmp_path, 3))
    assert same_bits(resumed.everything(), undisturbed.everything())
    for run in (undisturbed, resumed):
        run.run(range(3, 5))
    assert same_bits(resumed.everything(), undisturbed.everything())


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2)) for name in names}


def stepped(optimizer: optim.Optimizer, own: dict[str, nn.Parameter]) -> optim.Optimizer:
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_reading_state_changes_nothing() -> None:
    own = parameters("a", "b")
    fresh = optim.Adam(own.values())
    assert optimizer_state(fresh, own)[0] == {}
    assert not fresh.state
    momentum = stepped(optim.SGD(own.values(), momentum=0.9), own)
    assert optimizer_state(momentum, own)[0]["b"]["momentum_buffer"] is momentum.state[own["b"]]["momentum_buffer"]


def test_groups_by_parameter_name() -> None:
    own = parameters("a", "b")
    groups = optimizer_state(optim.SGD(own.items(), lr=0.5), own)[1]
    assert groups[0]["params"] == ["a", "b"]
    assert groups[0]["lr"] == 0.5
    assert "param_names" not in groups[0]


def test_placeholders_skipped() -> None:
    own, placeholder = parameters("a"), nn.Parameter(torch.empty(0))
    saved = optimizer_state(optim.SGD([{"params": own.values()}, {"params": []}], lr=0.5), own)
    optimizer = optim.SGD([{"params": [placeholder]}, {"params": own.values()}], lr=9.0)
    assert optimizer_state(optimizer, own)[1][0]["params"] == []
    load_optimizer_state(optimizer, own, {}, [saved[1]])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.param_groups[0]["params"] == [placeholder]


def test_state_from_before_is_gone() -> None:
    own = parameters("a")
    optimizer = stepped(optim.Adam(own.values()), own)
    load_optimizer_state(optimizer, own, {}, [optimizer_state(optim.Adam(own.values()), own)[1]])
    assert not optimizer.state


def test_state_keeps_dtype() -> None:
    own = {"a": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}
    optimizer = optim.SGD(own.values(), momentum=0.9)
    exact = torch.full((2,), 1 / 3)
    load_optimizer_state(optimizer, own, {"a": {"momentum_buffer": exact}}, [optimizer_state(optimizer, own)[1]])
    assert torch.equal(optimizer.state[own["a"]]["momentum_buffer"], exact)


def test_split_groups_refused() -> None:
    own = parameters("a", "b")
    two = optim.SGD([{"params": [own["a"]], "lr": 0.1}, {"params": [own["b"]], "lr": 0.2}])
    with pytest.raises(FileError, match=r"group 0 of the optimizer holds a and b, which .* lr 0\.1 and 0\.2"):
        load_optimizer_state(optim.SGD(own.values()), own, {}, [optimizer_state(two, own)[1]])


def test_unnamed_parameter_refused() -> None:
    own = parameters("a")
    with pytest.raises(UsageError, match=r"SGD holds a parameter of shape \(3, 2\) that this stage does not train"):
        optimizer_state(optim.SGD([*own.values(), nn.Parameter(torch.zeros(3, 2))]), own)


def test_unattributable_state_refused() -> None:
    own = parameters("a")
    optimizer = optim.SGD(own.values())
    optimizer.state["shared"] = {"count": 1}
    with pytest.raises(UsageError, match=r"SGD keeps state that belongs to no parameter \('shared'\)"):
        optimizer_state(optimizer, own)


def test_random_state_round_trip(tmp_path: Path) -> None:
    def own(parameters: dict[str, nn.Parameter]) -> optim.Optimizer:
        return optim.SGD([parameters["embed"]], lr=0.1)

    saving, loading = training(own), training(own)
    odd = {"factors": {0: torch.ones(2), 1: {}}, "count": 3, "none": None, "pair": (1, 2.5), "list": [torch.zeros(1)]}
    saving.state.optimizers[0].state[saving.state.parameters["embed"]] = odd
    loading.load(saving.save(tmp_path, 1))
    assert equal_values(dict(loading.state.optimizers[0].state[loading.state.parameters["embed"]]), odd)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        ((1, [2]), (1, [2]), True),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, True),
        ({"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.float64)}, False),
        ([1], [1, 2], False),
        (torch.ones(1), 1.0, False),
    ],
)
def test_values_are_compared_in_all(one: object, other: object, equal: bool) -> None:
    assert equal_values(one, other) is equal
