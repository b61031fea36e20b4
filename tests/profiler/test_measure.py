"""Measuring: bytes to the unit where they are known, nothing of the model changed, every layer timed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gplan.errors import ModelError, UsageError
from gplan.nouns import Link, Profile
from profiler.load import ModelFile, model_in_memory
from profiler.measure import ProfileOptions, find_loss_reduction, measure_profile
from tests.profiler.models import ConvNet, Tied

LINK = Link(latency_s=0.0, bytes_per_s=1e9)
OPTIONS = ProfileOptions(microbatch_sizes=(2,), link=LINK, budget_s=0.05)


def in_memory(model: nn.Module, inputs: Any, targets: Any, loss: Any = None) -> ModelFile:
    def batches(batch_size: int) -> Any:
        while True:
            yield inputs(batch_size), targets(batch_size)

    return model_in_memory(
        model,
        loss=loss or (lambda output, target: F.cross_entropy(output, target)),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        batches=batches,
    )


def classes(batch_size: int) -> Tensor:
    return torch.arange(batch_size) % 4


def mlp() -> ModelFile:
    model = nn.Sequential(nn.Linear(256, 512), nn.Sigmoid(), nn.Linear(512, 4))
    return in_memory(model, lambda n: torch.randn(n, 256), classes)


def conv_net() -> ModelFile:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)

    return in_memory(ConvNet(), lambda n: torch.randn(n, 3, 8, 8), classes, loss)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure_profile(mlp(), OPTIONS)


def test_weights_and_gradients_are_counted_to_the_byte(profile: Profile) -> None:
    first, sigmoid, last = profile.layers
    assert (first.weight_bytes, first.gradient_bytes, first.num_parameters) == (4 * 131_584, 4 * 131_584, 131_584)
    assert (sigmoid.weight_bytes, last.num_parameters) == (0, 512 * 4 + 4)


def test_the_stash_is_charged_to_the_layer_that_produced_it(profile: Profile) -> None:
    first, sigmoid, last = (layer.costs[0] for layer in profile.layers)
    assert first.stash_bytes == 0  # a sigmoid keeps its result, not its input
    assert sigmoid.stash_bytes == 2 * 512 * 4
    assert (first.output_bytes, first.output_unsaved_bytes) == (2 * 512 * 4, 2 * 512 * 4)
    assert (sigmoid.output_bytes, sigmoid.output_unsaved_bytes) == (2 * 512 * 4, 0)
    assert last.output_gradient_bytes == 2 * 4 * 4


def test_every_layer_and_the_loss_have_times_with_spread(profile: Profile) -> None:
    for cost in [*(layer.costs[0] for layer in profile.layers), *profile.loss]:
        for timing in (cost.forward, cost.backward):
            assert timing.num_samples > 0
            assert timing.low_s <= timing.median_s <= timing.high_s
    assert profile.whole[0].recompute.num_samples > 0
    assert profile.step.optimizer.num_samples > 0


def test_adams_state_is_two_copies_of_the_weights_and_a_step_count_each(profile: Profile) -> None:
    num_tensors = 4
    assert profile.step.state_bytes == 2 * 4 * profile.num_parameters + 4 * num_tensors
    assert profile.step.optimizer_name == "Adam"


def test_a_shared_parameter_is_listed_apart_and_counted_once() -> None:
    file = in_memory(Tied(), lambda n: torch.arange(n * 5).view(n, 5) % 11, lambda n: torch.zeros(n, 5, dtype=torch.long),
                     lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))  # fmt: skip
    found = measure_profile(file, OPTIONS)
    assert [(x.name, x.layers, x.num_parameters) for x in found.shared_weights] == [("embedding.weight", (0, 4), 88)]
    assert found.num_parameters == sum(x.numel() for x in file.model.parameters())


def test_profiling_leaves_parameters_gradients_buffers_and_random_state_untouched() -> None:
    file = conv_net()
    file.model.stem.weight.grad = torch.ones_like(file.model.stem.weight)  # type: ignore[union-attr,arg-type]
    file.model.blocks.eval()  # type: ignore[union-attr]
    before, state = copy.deepcopy(file.model.state_dict()), torch.random.get_rng_state()
    measure_profile(file, OPTIONS)
    for name, x in file.model.state_dict().items():
        assert torch.equal(x, before[name]), name
    for name, x in file.model.named_parameters():
        assert (x.grad is not None) == (name == "stem.weight"), name
    assert float(file.model.stem.weight.grad.mean()) == 1.0  # type: ignore[union-attr,arg-type]
    assert next(name for name, x in file.model.named_modules() if not x.training) == "blocks"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_several_micro_batch_sizes_stand_side_by_side() -> None:
    found = measure_profile(mlp(), ProfileOptions(microbatch_sizes=(1, 3), link=LINK, budget_s=0.05))
    assert found.microbatch_sizes == (1, 3)
    one, three = found.layers[1].costs
    assert three.stash_bytes == 3 * one.stash_bytes


def test_frozen_layers_have_weights_without_gradients() -> None:
    file = mlp()
    file.model[0].requires_grad_(False)  # type: ignore[index,union-attr]
    found = measure_profile(file, OPTIONS)
    assert (found.layers[0].weight_bytes > 0, found.layers[0].gradient_bytes) == (True, 0)
    assert found.layers[0].costs[0].output_gradient_bytes == 0


@pytest.mark.parametrize(("reduction", "expected"), [("mean", "mean"), ("sum", "sum")])
def test_a_mean_is_told_from_a_sum(reduction: str, expected: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction=reduction)

    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n, 8), classes, loss)
    assert find_loss_reduction(file, 3) == expected


def test_a_loss_that_is_neither_mean_nor_sum_is_refused_with_the_numbers() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.ones(n, 8), classes, lambda output, _: output.sum() ** 2)
    with pytest.raises(ModelError, match=r"a mean over the samples\) or .* \(a sum\)"):
        find_loss_reduction(file, 3)


def test_a_mean_over_what_is_not_padding_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=0)

    file = in_memory(
        nn.Linear(8, 4), lambda n: torch.randn(n, 8), lambda n: torch.tensor([0, 0, 1, 1, 2, 3, 1])[:n], loss
    )
    with pytest.raises(ModelError, match="weight every sample alike"):
        find_loss_reduction(file, 7)


def test_inputs_that_do_not_fit_the_model_are_named_with_their_shape() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n, 9), classes)
    with pytest.raises(ModelError, match=r"does not accept its inputs, \(2, 9\) float32"):
        measure_profile(file, OPTIONS)


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n, 8), classes, lambda output, _: output)
    with pytest.raises(ModelError, match=r"shape \(2, 4\); expected a scalar"):
        measure_profile(file, OPTIONS)


def test_batches_of_another_size_are_refused_with_both_numbers() -> None:
    file = in_memory(nn.Linear(8, 4), lambda n: torch.randn(n + 1, 8), classes)
    with pytest.raises(ModelError, match=r"shape \(3, 8\); expected 2 samples"):
        measure_profile(file, OPTIONS)


def test_micro_batch_sizes_that_make_no_sense_are_refused() -> None:
    for sizes in ((), (0,), (4, 2)):
        with pytest.raises(UsageError, match="micro-batch sizes"):
            ProfileOptions(microbatch_sizes=sizes)
    with pytest.raises(UsageError, match="threads"):
        ProfileOptions(num_threads=10_000)
