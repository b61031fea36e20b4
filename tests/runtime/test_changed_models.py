"""Scripts that change a model after its pipeline was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gplan
from gplan.core.errors import UsageError
from gplan.runtime.pipeline import Pipeline
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import unmeasured_plan


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8))
        self.head, self.temperature, self.epoch = nn.Linear(8, 5), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x)) / self.temperature
        return y


def made(model: nn.Module) -> tuple[Pipeline, Callable[[], Tensor]]:
    inputs = torch.randn(4, 8)
    plan = unmeasured_plan(model_in_memory(model, inputs=inputs), num_devices=2)
    pipe = gplan.pipeline(model, plan, loss=cross_entropy, inputs=inputs)
    return pipe, lambda: pipe.step(torch.randn(plan.batch_size, 8), torch.randint(5, (plan.batch_size,)))


def set_temperature(model: Tempered) -> None:
    model.temperature = 0.5


def set_dropout(model: Tempered) -> None:
    model.layers[2].p = 0.5  # type: ignore[assignment]


def freeze_norm(model: Tempered) -> None:
    model.layers[1].eval()


def add_hook(model: Tempered) -> None:
    model.head.register_forward_hook(lambda _module, _inputs, output: output / 2)


def replace_head(model: Tempered) -> None:
    model.head = nn.Linear(8, 5)


def assign_weights(model: Tempered) -> None:
    model.load_state_dict({name: x / 2 for name, x in model.state_dict().items()}, assign=True)


def patch_forward(model: Tempered) -> None:
    model.layers.forward = lambda x: x  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_hook, "the hooks, weights, children or the forward of head were changed"),
        (replace_head, "the hooks, weights, children or the forward of Tempered were changed"),
        (assign_weights, "the hooks, weights, children or the forward of layers.0 were changed"),
        (patch_forward, "the hooks, weights, children or the forward of layers were changed"),
        (set_temperature, "temperature was changed"),
        (set_dropout, "layers.2.p was changed"),
        (freeze_norm, "layers.1 was put in evaluation mode"),
    ],
)
def test_change_that_stages_would_not_see_is_refused(change: Callable[[Tempered], None], text: str) -> None:
    model = Tempered()
    _, step = made(model)
    step()
    change(model)
    with pytest.raises(UsageError, match=f"{text} after the pipeline was made"):
        step()


def test_hook_on_a_backward_is_refused() -> None:
    model = Tempered()
    model.head.register_full_backward_hook(lambda _module, gradients, _: (gradients[0] / 2,))
    plan = unmeasured_plan(model_in_memory(Tempered(), inputs=torch.randn(4, 8)), num_devices=2)
    with pytest.raises(UsageError, match="head has a hook on its backward"):
        gplan.pipeline(model, plan, loss=cross_entropy, inputs=torch.randn(4, 8))


def test_change_before_the_pipeline_or_of_what_the_forward_does_not_read_is_accepted() -> None:
    model = Tempered()
    set_temperature(model)
    freeze_norm(model)
    pipe, step = made(model)
    step()
    model.epoch = 1
    model.eval()
    pipe.eval_step(torch.randn(4, 8), torch.randint(5, (4,)))
    model.train()
    model.layers[1].eval()
    step()
