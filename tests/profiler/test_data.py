"""Data and loss of a model file: mean or sum, and notes on odd data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.core.errors import ModelError
from gplan_profiler.model.data import LossFacts, check_batch, find_loss_reduction, first_difference, first_not_finite
from gplan_profiler.model.load import ModelFile, model_in_memory


def file_of(
    model: nn.Module,
    *,
    inputs: Any = lambda n: torch.ones(n, 8),
    target: Any = lambda n: torch.arange(n) % 4,
    loss: Any = F.cross_entropy,
    loss_reduction: str | None = None,
) -> ModelFile:
    def batches(batch_size: int) -> Any:
        while True:
            yield inputs(batch_size), target(batch_size)

    return model_in_memory(model, loss=loss, batches=batches, loss_reduction=loss_reduction)


class NoisyInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_is_told_from_a_sum(reduction: str) -> None:
    file = file_of(nn.Linear(8, 4), loss=lambda output, target: F.cross_entropy(output, target, reduction=reduction))
    assert find_loss_reduction(file, 3) == LossFacts(reduction=reduction, notes=())


@pytest.mark.parametrize("is_training", [True, False])
def test_parts_in_evaluation_mode_stay_in_it(is_training: bool) -> None:
    """Unless the whole model is in evaluation mode, which says nothing of its parts."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout())
    model[1].eval()
    model.training = is_training
    find_loss_reduction(file_of(model), 3)
    assert (model.training, model[0].training, model[1].training) == (True, True, not is_training)


def test_loss_neither_mean_nor_sum_is_refused() -> None:
    file = file_of(nn.Linear(8, 4), loss=lambda output, _: output.sum() ** 2)
    with pytest.raises(ModelError, match=r"their mean over the samples or their sum, "):
        find_loss_reduction(file, 3)


def test_a_mean_over_what_is_not_padding_is_refused() -> None:
    torch.manual_seed(0)  # with some weights in a thousand both halves have nearly the same loss
    file = file_of(
        nn.Linear(8, 4),
        target=lambda n: torch.tensor([0, 0, 1, 1, 2, 3, 1])[:n],
        loss=lambda output, target: F.cross_entropy(output, target, ignore_index=0),
    )
    with pytest.raises(ModelError, match="divide by their number in the whole batch"):
        find_loss_reduction(file, 7)


@pytest.mark.parametrize("padded_batch", [0, 1, 3])
def test_padding_in_a_later_batch_is_found_too(padded_batch: int) -> None:
    def batches(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for i in count():
            target = (
                torch.tensor([0, 0, 1, 1, 2, 3])[:batch_size] if i == padded_batch else torch.arange(batch_size) % 3 + 1
            )
            yield torch.randn(batch_size, 8, generator=generator), target

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=0)

    torch.manual_seed(0)
    with pytest.raises(ModelError, match="ignored or padding tokens"):
        find_loss_reduction(model_in_memory(nn.Linear(8, 4), batches=batches, loss=loss), 6)


def test_what_the_file_says_of_its_loss_is_taken() -> None:
    file = file_of(nn.Linear(8, 4), loss=lambda output, _: output.sum() ** 2, loss_reduction="sum")
    assert find_loss_reduction(file, 3).reduction == "sum"


def test_loss_that_depends_on_the_division_is_noted_for_plans() -> None:
    def contrastive(output: Tensor, _: object) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    file = file_of(nn.Linear(8, 4), inputs=lambda n: torch.arange(8.0 * n).view(n, 8).cos(), loss=contrastive)
    with pytest.raises(ModelError, match="ignored or padding tokens.* class weights.* state loss_reduction"):
        find_loss_reduction(file, 4)
    stated = find_loss_reduction(replace(file, loss_reduction="mean"), 4).plan_notes
    assert "the loss depends on how a mini-batch is divided" in stated[0] and "as the mean of two halves" in stated[0]


def test_what_a_file_lacks_is_noted() -> None:
    model = nn.Linear(8, 4)
    files = [file_of(model), model_in_memory(model), model_in_memory(model, loss=F.cross_entropy)]
    optimizer = "Linear defines no optimizer"
    assert [[note.partition(":")[0] for note in file.notes_on_missing] for file in files] == [
        [optimizer], [optimizer, "Linear defines no loss"], [optimizer, "Linear defines no batches"],
    ]  # fmt: skip


def test_random_loss_in_evaluation_is_named() -> None:
    file = file_of(nn.Sequential(nn.Linear(8, 4), NoisyInEvaluation()))
    with pytest.raises(ModelError, match=r"1 \(NoisyInEvaluation\) draws random numbers.*loss_reduction = \"mean\""):
        find_loss_reduction(file, 4)


def test_non_finite_loss_is_noted_with_module() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    found = find_loss_reduction(file_of(model), 4)
    assert found.reduction == "mean"
    assert "not finite" in found.notes[0] and "first in 1 (Linear)" in found.notes[0]


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-x.abs())


def test_the_module_that_first_gives_nan_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Log()), nn.Linear(2, 2))
    assert first_not_finite(model, lambda: model(torch.ones(1, 2))) == "1.1 (Log)"


def test_the_module_that_draws_random_numbers_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Noise(), nn.Linear(2, 2))
    assert first_difference(model, lambda: model(torch.ones(1, 2))) == "1 (Noise)"


def test_sound_model_has_no_faulty_module() -> None:
    model = nn.Linear(2, 2)
    assert first_not_finite(model, lambda: model(torch.ones(1, 2))) is None
    assert first_difference(model, lambda: model(torch.ones(1, 2))) is None
    assert not model._forward_hooks


class Draws(nn.Module):
    """Draws random numbers in its own forward, between its children."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "noise":
            x = x + torch.randn_like(x)
        if self.how == "order":
            x = x[torch.randperm(len(x))]
        if self.how == "numpy":
            x = x * float(np.random.rand())
        for block in self.blocks:
            if self.how != "skipped layers" or random.random() < 0.5:
                x = block(x)
        return x


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("noise", "x = x + torch.randn_like(x)"),
        ("order", "x = x[torch.randperm(len(x))]"),
        ("numpy", "x = x * float(np.random.rand())"),
        ("skipped layers", 'if self.how != "skipped layers" or random.random() < 0.5:'),
    ],
)
def test_random_numbers_of_the_models_own_forward_name_it_and_its_line(how: str, line: str) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    with pytest.raises(ModelError) as raised:
        find_loss_reduction(file_of(Draws(how), inputs=lambda n: torch.linspace(0.0, 1.0, 8 * n).view(n, 8)), 4)
    assert "the model (Draws) draws random numbers (" in str(raised.value)
    assert str(raised.value).count(f": {line})") == 1


class Keeps(nn.Module):
    """Adds a share of its last output, or how often it was called, or noise of its own generator."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.last, self.calls = what, torch.zeros(()), 0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        shifts = {"last": self.last, "calls": self.calls, "noise": torch.rand((), generator=self.generator)}
        x = x + shifts[self.what]
        self.last = x.detach().mean()
        return x


@pytest.mark.parametrize("what", ["last", "calls", "noise"])
def test_values_kept_from_call_to_call_are_no_draws_of_random_numbers(what: str) -> None:
    with pytest.raises(
        ModelError, match=r"1 \(Keeps\) keeps values from call to call or draws .* generator of its own"
    ):
        find_loss_reduction(file_of(nn.Sequential(nn.Linear(8, 8), Keeps(what), nn.Linear(8, 8))), 4)


def test_random_numbers_of_a_child_name_the_child_and_its_line() -> None:
    with pytest.raises(ModelError, match=r"1 \(Noise\) draws random numbers \(.*return x \+ torch.randn_like\(x\)\)"):
        find_loss_reduction(file_of(nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 8))), 4)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((40, 8), r"such as \(4, 10, 8\), and let the model join them with x.flatten\(0, 1\)"),
        ((2, 40), "transpose a tensor whose samples are in another dimension, such as the edges of graphs"),
        ((3,), "drop the last batch"),
    ],
)
def test_rows_that_are_no_samples_name_the_way_out(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        check_batch(torch.zeros(shape), 4, what="the inputs")
