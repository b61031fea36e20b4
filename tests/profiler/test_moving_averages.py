"""Moving averages found by a capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gplan_profiler.capture.capture import capture, exported
from gplan_profiler.capture.chain import Chain
from gplan_profiler.model.lazy_build import build_without_weights, to_fake_tensors

CAPTURES = pytest.mark.parametrize("capturing", [capture, exported], ids=["sequential", "exported"])
Capturing = Callable[[nn.Module, Tensor], Chain]


@CAPTURES
def test_norm_buffers_momentum_and_values(capturing: Capturing) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3, momentum=0.3))
    (norm,) = capturing(model, torch.randn(4, 1, 5, 6)).norms(0, 2)
    assert norm.running_mean is model[1].running_mean
    assert norm.running_var is model[1].running_var
    assert norm.num_batches_tracked is model[1].num_batches_tracked
    assert (norm.momentum, norm.num_values, norm.num_calls, norm.is_per_sample) == (0.3, 4 * 5 * 6, 1, False)


@CAPTURES
def test_norms_belong_to_the_layers_that_call_them(capturing: Capturing) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    chain = capturing(model, torch.randn(5, 3))
    means = [[norm.running_mean for norm in chain.norms(*layers)] for layers in ((0, 2), (1, 2), (2, 4))]
    assert [len(x) for x in means] == [1, 0, 2]
    assert means[2][0] is model[2].running_mean
    assert means[2][1] is model[3].running_mean


@CAPTURES
def test_what_writes_no_averages_is_not_found(capturing: Capturing) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    chain = capturing(model, torch.randn(5, 3))
    assert chain.norms(0, len(chain)) == ()


@CAPTURES
def test_cumulative_average_has_no_momentum(capturing: Capturing) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    (norm,) = capturing(model, torch.randn(5, 3)).norms(0, 1)
    assert norm.momentum is None
    assert model[0].momentum is None


@CAPTURES
def test_calls_of_one_norm_add_up(capturing: Capturing) -> None:
    norm = nn.BatchNorm1d(3, momentum=0.1)
    model = nn.Sequential(norm, nn.Tanh(), norm)
    chain = capturing(model, torch.randn(5, 3))
    (both,) = chain.norms(0, len(chain))
    assert both.num_calls == 2
    assert both.momentum == pytest.approx(1 - 0.9 * 0.9)


@CAPTURES
def test_instance_norms_count_samples(capturing: Capturing) -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True))
    (norm,) = capturing(model, torch.randn(4, 3, 5, 6)).norms(0, 1)
    assert (norm.num_values, norm.is_per_sample, norm.num_batches_tracked) == (4, True, None)


@CAPTURES
@pytest.mark.parametrize(
    "call",
    [
        lambda x, mean, var: functional.batch_norm(x, mean, var, None, None, True, 0.2),
        lambda x, mean, var: functional.batch_norm(x, running_var=var, running_mean=mean, training=True, momentum=0.2),
        lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.2, 1e-5, False),
        lambda x, mean, var: torch.native_batch_norm(x, None, None, mean, var, True, 0.2, 1e-5)[0],
    ],
    ids=["positional", "by name", "torch", "native"],
)
def test_norm_calls_are_found(call: Callable[..., Tensor], capturing: Capturing) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return call(x, self.mean, self.var)

    model = nn.Sequential(Own())
    (norm,) = capturing(model, torch.randn(5, 3)).norms(0, 1)
    assert norm.running_mean is model[0].mean
    assert norm.running_var is model[0].var
    assert (norm.momentum, norm.num_values, norm.num_batches_tracked) == (0.2, 5, None)


@CAPTURES
def test_norms_inside_no_grad_and_autocast_blocks_are_found(capturing: Capturing) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quiet, self.coarse = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.quiet(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x + y + self.coarse(x)

    model = nn.Sequential(Inside())
    chain = capturing(model, torch.randn(5, 3, requires_grad=True))
    norms = chain.norms(0, len(chain))
    assert [norm.running_mean for norm in norms] == [model[0].quiet.running_mean, model[0].coarse.running_mean]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@CAPTURES
def test_blocks_that_repeat_have_norms_of_their_own(capturing: Capturing) -> None:
    model = nn.Sequential(*(Block() for _ in range(5)))
    chain = capturing(model, torch.randn(5, 3))
    norms = chain.norms(0, len(chain))
    assert [id(x.running_var) for x in norms] == [id(block.norm.running_var) for block in model]
    assert {x.momentum for x in norms} == {None}


@CAPTURES
def test_a_model_without_weights_has_the_same_norms(capturing: Capturing) -> None:
    model = build_without_weights(lambda: nn.Sequential(*(Block() for _ in range(3))), what="the model")
    to_fake_tensors(model)
    chain = capturing(model, torch.randn(5, 3))
    norms = chain.norms(0, len(chain))
    assert [id(x.running_mean) for x in norms] == [id(block.norm.running_mean) for block in model]
    assert {x.num_values for x in norms} == {5}


def test_a_norm_can_be_put_on_other_tensors() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    (norm,) = capture(model, torch.randn(5, 3)).norms(0, 1)
    real = torch.ones(3)
    backed = norm.backed_by({id(norm.running_mean): real})
    assert backed.running_mean is real
    assert backed.running_var is norm.running_var
