"""Updates of a weight that several devices of the virtual engine hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gplan.runtime.run.run_options import RunOptions
from gplan.runtime.virtual_engine import TiedUpdates
from tests.runtime.plans import plain_losses, run_virtually, small_example, unmeasured_plan

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda x: torch.optim.SGD(x, lr=0.1),
    "momentum": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9),
    "adamw": lambda x: torch.optim.AdamW(x, lr=0.1),
    "rmsprop": lambda x: torch.optim.RMSprop(x, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_of_three_devices_is_updated_by_each_and_changes_once(name: str) -> None:
    once, thrice = ([nn.Parameter(torch.full((3, 2), x)) for x in (1.0, 2.0, 3.0)] for _ in range(2))
    plain, optimizer = OPTIMIZERS[name](once), OPTIMIZERS[name](thrice)
    tied, *others = thrice
    updates = TiedUpdates(optimizer, [[tied, others[0]], [tied, others[1]], [tied]])
    for step in range(1, 4):
        for x, y in zip(once, thrice, strict=True):
            x.grad, y.grad = (torch.full((3, 2), 0.5 * step) for _ in range(2))
        plain.step()
        gradients = {x: x.grad for x in thrice}
        for device in range(3):
            for i, x in enumerate(others):
                x.grad = gradients[x] if i == device else None
            before = tied.detach().clone()
            with updates.of_device(device):
                assert tied.grad is not None
                assert tied.grad.tolist() == [[0.5 * step] * 2] * 3
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                assert not torch.equal(tied, before)
        assert [x.tolist() for x in thrice] == [x.tolist() for x in once]


@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs:2"])
def test_training_with_a_tied_embedding_equals_the_plain_model(schedule: str) -> None:
    file, updated = small_example("transformer_lm", tie_embedding=True), list[nn.Parameter]()

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        updated.extend(x for group in optimizer.param_groups for x in group["params"] if x.grad is not None)

    plan = unmeasured_plan(file, num_devices=2, schedule=schedule)
    hook = register_optimizer_step_pre_hook(note)
    run = run_virtually(file, plan, RunOptions(num_steps=4, check=True))
    hook.remove()
    assert sorted(Counter(updated).values())[-2:] == [4, 2 * 4]  # of two devices in four steps: only the tied one
    assert run.check is not None
    assert run.check.passed, run.check
    plain = small_example("transformer_lm", tie_embedding=True)
    expected = plain_losses(
        plain, unmeasured_plan(plain, num_devices=1, schedule=schedule.partition(":")[0]), num_steps=4
    )
    assert run.losses == pytest.approx(expected, rel=1e-5)
    updates = {span.action.stage: span.duration_s for span in run.timeline.spans if span.action.kind.value == "O"}
    assert len(updates) == 2
