"""Contracts of torch's private names: each is there and does what gplan relies on, on every version that is supported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from gplan_profiler import torch_compat
from gplan_profiler.torch_compat import FakeTensorMode, finish_sharded_backward, reset_sharded, torch_notes
from tests.runtime.ranks import on_ranks


def test_newer_torch_is_noted() -> None:
    newest = ".".join(map(str, torch_compat.NEWEST_TESTED))
    assert not torch_notes(f"{newest}.1+cpu") and not torch_notes("unknown")
    (note,) = torch_notes("99.0.0a0")
    assert "99.0.0a0" in note and newest in note


def test_cuda_builds_do_not_warn_that_triton_was_not_found() -> None:
    script = "import sys, torch; torch.version.cuda, sys.modules['triton'] = '13.0', None; import gplan_profiler.analytic.work_counter"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_calls_of_modules_go_through_the_replacement() -> None:
    layer, seen = nn.Linear(2, 2), list[type]()

    def call(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module))
        return plain(module, *args, **kwargs)

    with torch_compat.module_calls_replaced(call):
        nn.Sequential(layer)(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    assert seen == [nn.Sequential, nn.Linear]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


twice = Twice.apply  # a name of a script's own


def test_custom_functions_and_moves_are_replaced() -> None:
    instance = nn.Module()
    instance.kept = Twice.apply  # type: ignore[assignment]
    with torch_compat.function_calls_replaced(lambda _plain, function, x: function.__name__, [instance]):
        assert Twice.apply(torch.ones(1)) == twice(torch.ones(1)) == instance.kept(torch.ones(1)) == "Twice"
    with torch_compat.function_calls_replaced(lambda plain, _function, x: plain(x)):
        assert float(twice(torch.ones(1))) == 2
    assert all(float(x(torch.ones(1))) == 2 for x in (Twice.apply, twice, instance.kept))
    with torch_compat.module_moves_replaced(lambda module, *_: "moved"):
        assert nn.Linear(1, 1).to("meta") == "moved"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_script_runs_as_its_python() -> None:
    script = torch.jit.script(torch.nn.functional.silu)
    with torch_compat.scripts_as_python():
        assert script._torchdynamo_inline is torch.nn.functional.silu
        assert torch.equal(script(torch.ones(2)), torch.nn.functional.silu(torch.ones(2)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_is_replaced(use_reentrant: bool) -> None:
    seen = list[str]()

    def kept(_function: Any, *_: Any, **__: Any) -> Any:
        seen.append("plain")
        yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, _keeps: bool, *args: Any) -> Any:
            seen.append("reentrant")
            return function(*args)

    with torch_compat.checkpoint_replaced(kept=kept, reentrant=Reentrant):
        checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)
    assert seen == ["reentrant" if use_reentrant else "plain"]


def test_trace_states() -> None:
    assert torch_compat.running_tracer() is None and not torch_compat.is_transforming()
    inside = list[bool]()
    torch.vmap(lambda x: (inside.append(torch_compat.is_transforming() and torch_compat.is_wrapped(x)), x)[1])(
        torch.ones(2)
    )
    assert inside == [True]
    with torch_compat.seen_as_plain_run():
        assert not torch.compiler.is_exporting()
    with FakeTensorMode(), torch_compat.on_real_tensors():
        assert float(torch.ones(1)) == 1.0


def test_stack_traces_are_left_out() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + 1

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    with torch_compat.without_stack_traces():
        program = torch.export.export(Adds(), (torch.ones(2),), strict=False)
    assert len(program.graph.nodes) == 3


def test_clipping_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.utils import clip_grad

    for module, names in (
        (clip_grad, ("_get_total_norm", "_clip_grads_with_norm_")),
        (nn.utils, ("get_total_norm", "clip_grads_with_norm_")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    clipped = list[float]()
    torch_compat.replace_clipping(lambda *_: torch.tensor(7.0), lambda _, most, norm, __: clipped.append(float(norm)))
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    assert float(nn.utils.clip_grad_norm_([weight], 1.0)) == 7.0
    assert clipped == [7.0]


def test_private_parts_do_what_they_should() -> None:
    _, dtype, _, _ = torch_compat.parse_to(torch.bfloat16)
    assert dtype is torch.bfloat16
    a, b = [torch.zeros(2), torch.zeros(1)], [torch.ones(2), torch.ones(1)]
    torch_compat.foreach_copy_(a, b)
    torch_compat.foreach_add_(a, b)
    assert [x.tolist() for x in a] == [[2, 2], [2]]
    layer = nn.Linear(1, 1, bias=False)
    with torch_compat.reparametrize_module(layer, {"weight": torch.full((1, 1), 3.0)}):
        assert float(layer(torch.ones(1, 1))) == 3.0
    assert isinstance(nn.BatchNorm1d(1), torch_compat.BatchNorm) and not isinstance(
        nn.LayerNorm(1), torch_compat.BatchNorm
    )
    assert not torch_compat.is_profiler_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.is_profiler_running()


def sharded() -> tuple[nn.Linear, FSDPModule]:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    assert dist.group.WORLD is not None
    fully_shard(module, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(False)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    return module, module


def whole_gradient(module: nn.Linear) -> Tensor:
    found = module.weight.grad
    assert found is not None
    return found.full_tensor()  # type: ignore[attr-defined, no-any-return]


def two_backwards(rank: int) -> tuple[Tensor, bool]:
    module = sharded()[0]
    for factor in (1.0, 2.0):
        module(torch.full((1, 4), factor * (rank + 1))).sum().backward()
    finish_sharded_backward(module)
    return whole_gradient(module), hasattr(module.weight, "full_tensor")


def test_gradients_of_several_backwards_are_reduced_once() -> None:
    for gradient, is_sharded_again in on_ranks(2, two_backwards):
        assert torch.equal(gradient, torch.full((4, 4), 3.0 * 1.5)) and is_sharded_again


def failed_between(_rank: int) -> tuple[Tensor, Tensor]:
    """Gradients of a good step, and after a failed step and another good one."""
    module, shards = sharded()
    module(torch.ones(1, 4)).sum().backward()
    finish_sharded_backward(module)
    first = whole_gradient(module).clone()
    shards.set_is_last_backward(False)
    shards.set_requires_gradient_sync(False)
    module(torch.ones(1, 4))  # no backward follows: the step failed
    reset_sharded(module)
    assert module.weight.grad is not None, "gradients of earlier steps were dropped"
    module(torch.ones(1, 4)).sum().backward()
    finish_sharded_backward(module)
    return first, whole_gradient(module)


def test_a_failed_step_leaves_earlier_gradients() -> None:
    for first, second in on_ranks(2, failed_between):
        assert torch.equal(second, 2 * first)


def test_gathered_parameters_stay_the_same_tensors() -> None:
    def job(_rank: int) -> list[bool]:
        module, shards = sharded()
        shards.unshard()
        gathered, freed = module.weight, []
        for _ in range(2):
            shards.reshard()
            freed.append(gathered.untyped_storage().nbytes() == 0 and module.weight is not gathered)
            shards.unshard()
        return [*freed, module.weight is gathered, gathered.untyped_storage().nbytes() > 0]

    assert on_ranks(2, job) == [[True] * 4] * 2


FORKED = """
import os
import torch
from gplan_profiler.torch_compat import FakeTensorMode, start_autograd

start_autograd()
with FakeTensorMode():
    torch.ones(2)
torch.ones((), requires_grad=True).backward()
child = os.fork()
if not child:
    torch.ones((), requires_grad=True).backward()  # a RuntimeError on builds for CUDA without `start_autograd`
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="only builds for CUDA count devices without a GPU",
)
def test_forks_can_run_a_backward_after_tensors_were_faked() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True)
