"""What an author puts on parameters and modules, attributes and hooks, is there wherever the model is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core import Precision
from gplan.core.errors import GplanError, UsageError
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.analytic.computed_profile import computed_step
from gplan_profiler.analytic.hardware import load_hardware
from gplan_profiler.model.load import ModelFile, model_in_memory
from gplan_profiler.model.materialise import attributes
from gplan_profiler.model.precision import in_precision
from tests.runtime.plans import measured, run_virtually, unmeasured_plan
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import (
    assert_same,
    both_engines,
    built,
    gradients_of,
    merged,
    plain_gradients,
    plan_of,
)
from tests.runtime.semantics.models import Tower, row, subject


def marked() -> nn.Module:
    """The inner layers' parameters are in a group; one has another mark."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    for layer in list(model)[1:3]:
        for parameter in layer.parameters():
            parameter.group = "hidden"  # type: ignore[attr-defined]
    model[3].bias._no_weight_decay = True  # type: ignore[union-attr]
    return model


def adam_for_group(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    hidden = [x for x in parameters if getattr(x, "group", "") == "hidden"]
    rest = [x for x in parameters if getattr(x, "group", "") != "hidden"]
    if not hidden:
        return torch.optim.SGD(rest, lr=0.1)
    return torch.optim.Adam([{"params": hidden}, {"params": rest, "lr": 1e-4}])


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 32, generator=generator), torch.randn(size, 32, generator=generator)


def file_of() -> ModelFile:
    return model_in_memory(
        marked(),
        loss=nn.functional.mse_loss,
        optimizer=adam_for_group,
        batches=lambda n: iter(lambda: batch(n), None),
    )


def test_profile_measures_the_optimizer_of_the_run() -> None:
    profile = measured(file_of(), 2, "layer")
    assert profile.step.optimizer_name == "Adam"
    state_bytes = 2 * 4 * sum(x.numel() for x in marked().parameters())
    assert profile.step.state_bytes == pytest.approx(state_bytes, rel=0.01)
    plan = gplan.balance(profile, num_devices=1, num_microbatches=4)
    run = run_virtually(file_of(), plan, RunOptions(num_steps=5))
    assert run.peak_bytes == pytest.approx(plan.device_peak_bytes, rel=0.08)


def test_computed_profile_has_the_attributes() -> None:
    seen: list[str] = []

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        seen.extend(getattr(x, "group", "none") for x in parameters)
        return torch.optim.Adam(parameters)

    file = replace(file_of(), functions={**file_of().functions, "optimizer": optimizer})
    computed_step(file, load_hardware("b200"))
    assert sorted(seen) == ["hidden", "hidden", "none", "none", "none"]  # by shape, group and mark


def marks(pipe: Any) -> dict[str, list[str]]:
    return {name: sorted(attributes(x)) for name, x in pipe.named_parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"num_replicas": 2, "sharding": "weights"}, {"num_replicas": 2, "sharding": "optimizer"}]
)
def test_attributes_on_every_rank(options: dict[str, Any]) -> None:
    plan = replace(unmeasured_plan(file_of(), num_devices=2, num_microbatches=2), **options)
    expected = {name: sorted(vars(x)) for name, x in marked().named_parameters()}
    found = on_ranks(plan.num_ranks, lambda _rank: marks(gplan.pipeline(marked, plan, loss=nn.functional.mse_loss)))
    assert {name: x for part in found for name, x in part.items()} == expected


def test_attributes_of_master_weights() -> None:
    file = in_precision(file_of(), Precision.named("mixed"))
    plan = gplan.balance(measured(file, 2, "layer"), num_devices=1, num_microbatches=2)
    pipe = gplan.pipeline(marked, plan, loss=nn.functional.mse_loss)
    assert marks(pipe) == {name: sorted(vars(x)) for name, x in marked().named_parameters()}


def clip_sum(x: Tensor) -> None:
    assert x.grad is not None
    x.grad.clamp_(-1e-3, 1e-3)


def on_gradient() -> nn.Module:
    model = row()
    model[1].mix.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[index, union-attr]
    return model


def on_sum() -> nn.Module:
    model = Tower()
    model.floors[1].mix.weight.register_post_accumulate_grad_hook(clip_sum)  # type: ignore[union-attr]
    return model


def on_sequence() -> nn.Module:
    model = row()
    model.register_forward_hook(lambda _module, _inputs, output: output * 2)
    return model


def on_child() -> nn.Module:
    model = Tower()
    model.floors[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
    return model


def on_childs_gradient() -> nn.Module:
    model = row()
    model[1].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))  # type: ignore[index]
    return model


@pytest.mark.parametrize("build", [on_gradient, on_sum, on_sequence, on_child, on_childs_gradient])
def test_hooks_run(build: Callable[[], nn.Module]) -> None:
    case = subject(build)
    _, expected = plain_gradients(case, case.batch(8))
    plan = plan_of(case, 2)

    def script() -> dict[str, Tensor]:
        pipe = gplan.pipeline(build, plan, loss=case.loss, timeout_s=20.0)
        pipe.step(*case.batch(8))
        return gradients_of(pipe)

    for parts in both_engines(2, script).values():
        assert_same(merged(parts), expected)
    pipe = gplan.pipeline(built(case), plan, loss=case.loss)
    pipe.step(*case.batch(8))
    assert_same(gradients_of(pipe), expected)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_hooks_put_on_a_pipeline_run_once_a_step(precision: str) -> None:
    """For the gradient of each mini-batch, in a loop that accumulates three; before the last the hook is removed."""
    plan = gplan.balance(
        measured(in_precision(file_of(), Precision.named(precision)), 2, "layer"), num_devices=2, num_microbatches=4
    )
    seen, mark = list[Tensor](), torch.ones(32, 32)

    def marked_gradient(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return mark

    hooked, plain = (
        gplan.pipeline(marked, plan, loss=lambda x, y: nn.functional.mse_loss(x.float(), y)) for _ in range(2)
    )
    weight = dict(hooked.named_parameters())["1.weight"]
    handle = weight.register_hook(marked_gradient)  # type: ignore[no-untyped-call]
    for number in range(3):
        if number == 2:
            handle.remove()
        for pipe in (hooked, plain):
            pipe.step(*batch(8))
    found, every = gradients_of(hooked), {name: x / 3 for name, x in gradients_of(plain).items()}
    expected = {
        **{name: 3 * x for name, x in every.items()},
        "1.weight": 2 * mark + every["1.weight"],
    }
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0.02, atol=1e-4)
    assert len(seen) == 2 and all(x.dtype == torch.float32 for x in seen)
    assert_same({"1.weight": seen[0]}, {"1.weight": every["1.weight"]})
    assert mark.eq(1).all()


def test_what_an_nn_module_has_is_named_with_what_to_use() -> None:
    case = subject(row)
    pipe = gplan.pipeline(row, plan_of(case, 2), loss=case.loss)
    with pytest.raises(AttributeError, match=r"has no eval: pipe.step trains, pipe.eval_step"):
        pipe.eval()
    assert not hasattr(pipe, "train")
    with pytest.raises(UsageError, match="a pipeline cannot be called like a model: pipe.step trains"):
        pipe(case.batch(8)[0])
    with pytest.raises(UsageError, match="a pipeline cannot be copied or pickled"):
        deepcopy(pipe)


def on_traced_gradient() -> nn.Module:
    model = Tower()
    model.floors[1].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))
    return model


def test_hooks_that_cannot_run_are_refused() -> None:
    with pytest.raises(
        GplanError, match=r"do not compute what the model does: the gradient of floors.0.mix.weight differs"
    ):
        plan_of(subject(on_traced_gradient), 2)
    case = subject(on_gradient)
    plan = replace(
        plan_of(case, 1, num_microbatches=2),
        num_replicas=2,
        sharding="weights",
    )

    def job(_rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            gplan.pipeline(on_gradient, plan, loss=case.loss, timeout_s=20.0)
        return str(caught.value)

    for text in on_ranks(2, job):
        assert "1.mix.weight has gradient hooks, which do not run where replicas divide the parameters" in text
