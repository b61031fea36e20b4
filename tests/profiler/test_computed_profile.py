"""Computed profiles: real and fake layers, and profiles that can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gplan.core import Profile, Work
from gplan.core.errors import ModelError, UsageError
from gplan.cost.reserved_bytes import CONTEXT_BYTES
from gplan.files import json_files
from gplan.strategy_search.planner import balance
from gplan_profiler.analytic.computed_profile import ComputeOptions, computed_profile
from gplan_profiler.analytic.hardware import load_hardware
from gplan_profiler.analytic.layer_work import analyse, analyse_split
from gplan_profiler.analytic.roofline import Operation, roofline_seconds, total_work
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Chain, Tensors, flat_tensors
from gplan_profiler.memory.layer_memory import allocate_gradients, measure_bytes, measure_halves
from gplan_profiler.model.load import ModelFile, model_in_memory
from tests.profiler.models import Branching, ConvNet, Tied

H100 = load_hardware("h100")


class Block(nn.Module):
    """A pre-norm perceptron with a table that is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


def deep(num_blocks: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), *(Block(width) for _ in range(num_blocks)), nn.Linear(width, 4))


def to_fake_tensors(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with fake parameters, its buffers real."""
    real = build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = build()
    for name, buffer in real.named_buffers():
        owner, _, last = name.rpartition(".")
        fake.get_submodule(owner)._buffers[last] = buffer
    return fake


def file_of(model: nn.Module, *, reduction: str | None = None) -> ModelFile:
    def batches(batch_size: int) -> Any:
        while True:
            yield torch.randn(batch_size, 4), torch.arange(batch_size) % 4

    return model_in_memory(
        model,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        batches=batches,
        loss_reduction=reduction,
    )


def captured(model: nn.Module, inputs: Any) -> tuple[Chain, list[nn.Module], Tensors]:
    chain = capture(model, inputs)
    return chain, [chain.stage(i, i + 1) for i in range(len(chain))], flat_tensors(inputs, what="the inputs")


def sum_of_squares(tensors: Tensors) -> Tensor:
    return torch.stack([x.square().sum() for x in tensors if x.requires_grad]).sum()


@pytest.fixture(scope="module")
def profile() -> Profile:
    return computed_profile(file_of(deep(8)), ComputeOptions(hardware=H100, microbatch_sizes=(1, 2)))


def test_a_linear_layer_is_counted_by_hand() -> None:
    _, layers, tensors = captured(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)), torch.randn(3, 6))
    first, second, _ = analyse(layers, tensors, sum_of_squares)
    assert (flops_of(first.forward, "matmul"), flops_of(second.backward, "matmul")) == (
        2 * 3 * 6 * 7,
        2 * 2 * 3 * 7 * 5,
    )
    assert flops_of(first.backward, "matmul") == 2 * 3 * 6 * 7  # no input gradient
    assert (first.memory.stash_bytes, first.memory.output.num_bytes) == (4 * 3 * 7, 4 * 3 * 7)
    assert first.dtype == "float32"


def flops_of(operations: tuple[Operation, ...] | None, kind: str) -> int:
    assert operations is not None
    return sum(x.work.num_flops for x in operations if x.work.kind == kind)


def test_each_half_of_a_backward_has_one_of_the_two_products() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3, padding=1), nn.Flatten(), nn.Linear(320, 6))  # fmt: skip
    _, layers, tensors = captured(model, torch.randn(2, 3, 8, 8))
    stem, norm, conv, _, linear, _ = analyse_split(layers, tensors, sum_of_squares)
    assert stem.input_half is None  # nothing goes back through it
    for half in (conv.input_half, conv.weight_half):
        assert flops_of(half, "convolution") == 2 * 2 * 64 * 9 * 4 * 5
    for half in (linear.input_half, linear.weight_half):
        assert flops_of(half, "matmul") == 2 * 2 * 320 * 6
    assert flops_of(norm.input_half, "normalization") > 0


def test_a_weight_that_layers_share_has_its_second_half_once() -> None:
    _, layers, tensors = captured(Tied(), torch.randint(0, 11, (2, 5)))
    *_, head, _ = analyse_split(layers, tensors, sum_of_squares)
    assert flops_of(head.weight_half, "matmul") == flops_of(head.input_half, "matmul") == 2 * 10 * 8 * 11


def test_pending_bytes_match_the_allocator() -> None:
    model = ConvNet()
    _, layers, tensors = captured(model, torch.randn(2, 3, 8, 8))
    computed = [x.memory.halves.pending_bytes for x in analyse_split(layers, tensors, sum_of_squares)]
    allocate_gradients(model)
    assert computed == [x.pending_bytes for x in measure_halves(layers, tensors, sum_of_squares)]
    assert any(computed)


def test_a_computed_profile_has_halves(profile: Profile) -> None:
    first, second = (layer.costs[0] for layer in profile.layers[:2])
    assert (first.input_gradient, first.weight_gradient) == (None, first.backward)
    assert second.input_gradient is not None and second.input_gradient.origin == "computed"
    assert second.pending_bytes == profile.layers[4].costs[0].pending_bytes > 0  # blocks are alike
    one, two = (cost.pending_bytes for cost in profile.layers[3].costs)
    assert two == 2 * one
    assert second.weight_workspace_bytes is not None
    assert 0 < second.weight_workspace_bytes < second.backward_workspace_bytes


@pytest.mark.parametrize(
    ("model", "inputs"), [(Tied(), torch.randint(0, 11, (2, 5))), (deep(2), torch.randn(3, 4))], ids=["tied", "deep"]
)
def test_memory_is_that_of_the_allocator(model: nn.Module, inputs: Tensor) -> None:
    _, layers, tensors = captured(model, inputs)
    computed = [x.memory for x in analyse(layers, tensors, sum_of_squares)]
    allocate_gradients(model)
    measured = measure_bytes(layers, tensors, sum_of_squares)
    for a, b in zip(computed, measured, strict=True):
        assert (a.stash_bytes, a.output) == (b.stash_bytes, b.output)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [(ConvNet, torch.randn(2, 3, 8, 8)), (Tied, torch.randint(0, 11, (2, 5))), (lambda: deep(2), torch.randn(3, 4))],
    ids=["conv", "tied", "deep"],
)
def test_fake_parameters_give_the_same_analysis_as_real_ones(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    _, layers, tensors = captured(build(), inputs)
    _, fake_layers, _ = captured(to_fake_tensors(build), inputs)
    assert analyse(layers, tensors, sum_of_squares) == analyse(fake_layers, tensors, sum_of_squares)


def test_analysis_leaves_the_layers_as_they_were() -> None:
    model, inputs = ConvNet(), torch.randn(2, 3, 8, 8)
    _, layers, tensors = captured(model, inputs)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random_state = torch.get_rng_state()
    analyse(layers, tensors, sum_of_squares)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_real_target_of_the_loss_is_not_charged_to_it() -> None:
    target = torch.randn(1000, 8)
    layer = nn.Linear(4, 8)
    *_, loss = analyse([nn.Sequential(layer)], (torch.randn(3, 4),), lambda x: x[0].sum() * target.view(-1)[0])
    assert loss.memory.stash_bytes < 100


def test_layers_that_decide_by_values_are_named() -> None:
    _, layers, tensors = captured(nn.Sequential(Branching(), nn.Linear(4, 2)), torch.randn(3, 4))
    with pytest.raises(ModelError, match="cannot be followed on tensors without values: .*models.py, line"):
        analyse(layers, tensors, sum_of_squares)


def test_every_figure_of_the_profile_says_that_it_is_computed(profile: Profile) -> None:
    assert profile.origin == "computed"
    costs = [cost for x in profile.layers for cost in x.costs] + list(profile.loss)
    timings = [t for cost in costs for t in (cost.forward, cost.backward)]
    assert {t.origin for t in (*timings, profile.step.optimizer, profile.step.zero_grad)} == {"computed"}
    assert (profile.device.kind, profile.device.memory_bytes) == ("cuda", H100.memory_bytes)
    assert (profile.link, profile.whole_model) == (H100.link, ())


def test_seconds_are_the_rooflines_of_the_work(profile: Profile) -> None:
    for cost in (*profile.layers[2].costs, *profile.loss):
        assert cost.forward.median_s == roofline_seconds(cost.forward_work, H100, dtype="float32")
        assert cost.backward.median_s == roofline_seconds(cost.backward_work, H100, dtype="float32")


def test_layers_that_are_alike_are_analysed_once(profile: Profile) -> None:
    assert [x.same_as for x in profile.layers] == [None] * 4 + [2] * 4 + [None] * 2
    assert profile.layers[5].costs == profile.layers[2].costs
    assert profile.layers[5].name == "5"


def test_repeated_layers_equal_full_analysis(profile: Profile) -> None:
    _, layers, tensors = captured(deep(8), torch.randn(2, 4))
    all_of_them = analyse(layers, tensors, lambda x: F.cross_entropy(x[0], torch.tensor([0, 1])))
    for layer, found in zip(profile.layers, all_of_them, strict=False):
        assert (layer.costs[1].forward_work, layer.costs[1].backward_work) == tuple(
            map(total_work, (found.forward, found.backward))
        )
        assert layer.costs[1].stash_bytes == found.memory.stash_bytes


def test_doubling_the_batch_doubles_flops_and_what_is_kept(profile: Profile) -> None:
    one, two = profile.layers[2].costs
    flops = [{x.kind: x.num_flops for x in cost.forward_work}["matmul"] for cost in (one, two)]
    assert flops[1] == 2 * flops[0]
    assert two.stash_bytes == 2 * one.stash_bytes


def test_the_optimizers_state_is_that_of_a_real_one(profile: Profile) -> None:
    model = deep(8)
    optimizer = torch.optim.Adam(model.parameters())
    allocate_gradients(model)
    optimizer.step()
    state = [x for of_one in optimizer.state.values() for x in of_one.values()]
    assert profile.step.state_bytes == sum(x.nbytes for x in state)
    assert profile.step.optimizer_name == "Adam"
    assert profile.step.workspace_bytes == sum(x.nbytes for x in model.parameters())  # lists of them, as on a GPU


def test_cpu_optimizer_steps_one_parameter_at_a_time() -> None:
    step = computed_profile(file_of(deep(8)), ComputeOptions(hardware=load_hardware("cpu"))).step
    assert (step.workspace_bytes, step.largest_workspace) == (0, 2)  # two temporary tensors of the largest parameter


def test_a_profile_needs_no_weights_and_survives_its_file(profile: Profile) -> None:
    lazy = computed_profile(
        file_of(to_fake_tensors(lambda: deep(8))), ComputeOptions(hardware=H100, microbatch_sizes=(1, 2))
    )
    assert (lazy.layers, lazy.loss, lazy.step) == (profile.layers, profile.loss, profile.step)
    assert json_files.parse(Profile, json_files.to_json(lazy), name="lazy") == lazy


def test_the_notes_say_what_was_assumed() -> None:
    notes = computed_profile(file_of(deep(1)), ComputeOptions(hardware=H100)).notes
    assert any(x.startswith("computed for h100, nothing was measured; figures: NVIDIA H100") for x in notes)
    assert any("assumed: matmul 65.0 % / 80.0 %" in x for x in notes)
    assert any("assumed to be a mean" in x for x in notes)
    summed = computed_profile(file_of(deep(1), reduction="sum"), ComputeOptions(hardware=H100))
    assert summed.loss_reduction == "sum"
    assert not any("assumed to be a mean" in x for x in summed.notes)


def test_a_dtype_that_the_hardware_lacks_is_refused() -> None:
    file = file_of(nn.Sequential(nn.Linear(4, 4).bfloat16()))
    file = replace(file, functions={"example_inputs": lambda n: torch.randn(n, 4, dtype=torch.bfloat16)})
    with pytest.raises(UsageError, match="multiplies in bfloat16, for which v100 has no flop rate"):
        computed_profile(file, ComputeOptions(hardware=load_hardware("v100")))


def test_options_name_wrong_sizes() -> None:
    with pytest.raises(UsageError, match=r"micro-batch sizes are \(2, 1\)"):
        ComputeOptions(hardware=H100, microbatch_sizes=(2, 1))


def test_the_work_of_a_layer_has_each_kind_once(profile: Profile) -> None:
    def kinds(work: tuple[Work, ...]) -> list[str]:
        return [x.kind for x in work]

    for layer in profile.layers:
        for work in (layer.costs[0].forward_work, layer.costs[0].backward_work):
            assert len(set(kinds(work))) == len(kinds(work)) > 0


def test_plan_of_a_model_file_says_what_a_gpu_reserves() -> None:
    """Also at a size between two profiled ones, and with recompute; a profile for a CPU has no such allocator."""
    profile = computed_profile(file_of(deep(8)), ComputeOptions(hardware=H100, microbatch_sizes=(1, 3)))
    for size in (1, 2, 3):
        for recompute in ("never", "always"):
            plan = balance(profile, num_devices=2, num_microbatches=4, microbatch_size=size, recompute=recompute)
            assert min(x - y for x, y in zip(plan.reserved_bytes, plan.device_peak_bytes, strict=True)) > 0
            assert plan.context_bytes == CONTEXT_BYTES
    on_cpu = computed_profile(file_of(deep(2)), ComputeOptions(hardware=load_hardware("cpu")))
    assert balance(on_cpu, num_devices=2, num_microbatches=4).reserved_bytes == ()
