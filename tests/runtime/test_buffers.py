"""Moving averages of norms, against the plain model on the whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gplan
from gplan.core import Constraints
from gplan.core.errors import UsageError
from gplan_profiler.capture.capture import capture, exported
from gplan_profiler.capture.chain import Chain
from gplan_profiler.capture.moving_averages import MovingAverages, RunningNorm
from gplan_profiler.model.load import model_in_memory
from tests.runtime.plans import plan_for
from tests.runtime.ranks import on_ranks

Sizes = Sequence[int]
Capturing = Callable[[nn.Module, Tensor], Chain]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Forward(nn.Module):
    """A module that is not an nn.Sequential, so it is exported."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class InParts:
    """A model with its captures by micro-batch size."""

    def __init__(self, model: nn.Module, example: Tensor, capturing: Capturing = capture) -> None:
        self._model, self._capturing = model, capturing
        self._known: dict[int, tuple[nn.Module, Sequence[RunningNorm]]] = {}
        self.averages = MovingAverages(self._captured(example)[1])

    def forward(self, batch: Tensor, sizes: Sizes) -> MovingAverages:
        """Forwards of a mini-batch in micro-batches of these sizes, not finished."""
        for part in batch.split(list(sizes)):
            stage, norms = self._captured(part)
            with self.averages.microbatch(norms):
                stage(part)
        return self.averages

    def _captured(self, part: Tensor) -> tuple[nn.Module, Sequence[RunningNorm]]:
        if len(part) not in self._known:
            chain = self._capturing(self._model, part)
            self._known[len(part)] = chain.stage(0, len(chain)), chain.norms(0, len(chain))
        return self._known[len(part)]


def move_in_parts(model: nn.Module, batch: Tensor, sizes: Sizes, capturing: Capturing = capture) -> None:
    """One step."""
    InParts(model, batch[: sizes[0]], capturing).forward(batch, sizes).finish()


def assert_same_buffers(found: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    wanted = dict(expected.named_buffers())
    for name, buffer in found.named_buffers():
        torch.testing.assert_close(
            buffer, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda x, n=name: f"{n}: {x}"
        )


def with_history(model: nn.Module) -> nn.Module:
    """The model with moving averages that differ from the initial ones."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))
            else:
                buffer.fill_(3)
    return model


@contextmanager
def buffers_untouched(model: nn.Module) -> Iterator[None]:
    before = deepcopy(dict(model.named_buffers()))
    yield
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (12, 3)),
    "2d": (lambda: nn.BatchNorm2d(3, momentum=0.3), (12, 3, 5, 4)),
    "3d": (lambda: nn.BatchNorm3d(3), (12, 3, 2, 5, 4)),
    "sequences": (lambda: nn.BatchNorm1d(3), (12, 3, 6)),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (12, 3, 5, 4)),
    "momentum 0": (lambda: nn.BatchNorm2d(3, momentum=0.0), (12, 3, 5, 4)),
    "momentum 1": (lambda: nn.BatchNorm2d(3, momentum=1.0), (12, 3, 5, 4)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (12, 3, 5, 4)),
    "no averages": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (12, 3, 5, 4)),
    "by sample": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (12, 3, 5, 4)),
    "float64": (lambda: nn.BatchNorm1d(3).double(), (12, 3)),
}


@pytest.mark.parametrize("capturing", [capture, exported], ids=["sequential", "exported"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2), (12,)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_averages_equal_plain_model_on_minibatches(norm: str, sizes: Sizes, capturing: Capturing) -> None:
    make, shape = NORMS[norm]
    model = with_history(nn.Sequential(make())).train()
    plain = deepcopy(model)
    batches = [torch.randn(shape, dtype=torch.float64 if norm == "float64" else None) * (1 + i) + i for i in range(3)]
    parts = InParts(model, batches[0][: sizes[0]], capturing)
    for batch in batches:
        plain(batch)
        parts.forward(batch, sizes).finish()
    assert_same_buffers(model, plain)


def test_deeper_norm_averages() -> None:
    model = Forward(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 5), nn.BatchNorm1d(5)))
    last, given = deepcopy(model.layers[4]), list[Tensor]()
    batch = torch.randn(12, 4)
    for part in batch.split(4):
        given.append(deepcopy(model).layers[:4](part))
    move_in_parts(model, batch, (4, 4, 4))
    last(torch.cat(given))
    assert_same_buffers(model.layers[4], last)


def test_variance_includes_spread_between_microbatches() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    batch = torch.tensor([[0.0], [0.0], [10.0], [10.0]])  # no micro-batch of two has any variance
    move_in_parts(model, batch, (2, 2))
    assert model[0].running_var.item() == pytest.approx(batch.var().item())


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_large_mean_loses_variance_digits_only(offset: float) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.01))
    exact, batch = deepcopy(model).double(), torch.randn(256, 4) + offset
    parts = InParts(model, batch[:64])
    for _ in range(10):
        exact(batch.double())
        parts.forward(batch, (64,) * 4).finish()
    torch.testing.assert_close(model[0].running_mean.double(), exact[0].running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(model[0].running_var.double(), exact[0].running_var, rtol=1e-8 * offset, atol=0)


def test_variance_never_negative() -> None:
    model = nn.Sequential(nn.BatchNorm1d(400, momentum=0.3))
    model[0].running_var.zero_()
    move_in_parts(model, (torch.rand(400) * 1e4).expand(21, 400), (7, 7, 7))
    assert model[0].running_var.min() >= 0


@pytest.mark.parametrize("is_exported", [True, False])
def test_recompute_does_not_count(is_exported: bool) -> None:
    norm = nn.BatchNorm1d(3)
    plain, gradients = deepcopy(norm), []
    batch = torch.randn(8, 3, requires_grad=True)
    for again in (False, True):
        model = nn.Sequential(deepcopy(norm))
        chain = (exported if is_exported else capture)(model, batch[:4])
        stage, averages = chain.stage(0, 1), MovingAverages(chain.norms(0, 1))
        outputs = []
        for part in batch.split(4):
            with averages.microbatch(chain.norms(0, 1)):
                outputs += checkpoint(stage, part, use_reentrant=False) if again else stage(part)
        with buffers_untouched(model) if not again else kept(model):
            torch.stack(outputs).pow(3).sum().backward()
        averages.finish()
        gradients.append(batch.grad)
        batch.grad = None
    plain(batch.detach())
    assert_same_buffers(model[0], plain)
    assert torch.equal(*gradients)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """The buffers are restored as a stage does around a recompute."""
    before = [(x, x.clone()) for x in model.buffers()]
    yield
    for buffer, value in before:
        buffer.data.copy_(value)


def test_forward_reads_averages_of_step_start() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.seen = nn.BatchNorm1d(3), list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(self.norm.running_mean.clone())
            return self.norm(x)

    model = nn.Sequential(Seeing())
    move_in_parts(model, torch.randn(8, 3), (4, 4))
    first, second = model[0].seen[-2:]
    assert torch.equal(first, second)


def test_norm_in_eval_mode() -> None:
    model = with_history(nn.Sequential(nn.BatchNorm1d(3).eval()))
    with buffers_untouched(model):
        move_in_parts(model, torch.randn(8, 3), (4, 4))


def test_custom_norm_buffers() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return functional.batch_norm(x, self.mean, self.var, training=True, momentum=0.2)

    plain = Own()
    for model in (nn.Sequential(deepcopy(plain)), Forward(deepcopy(plain))):
        expected, batch = deepcopy(model), torch.randn(9, 3)
        move_in_parts(model, batch, (3, 3, 3))
        expected(batch)
        assert_same_buffers(model, expected)


@pytest.mark.parametrize("is_exported", [True, False])
def test_a_norm_called_twice_moves_twice(is_exported: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm(3 * x + 2)  # given the plain model's values in both calls

    model = with_history(nn.Sequential(Twice()))
    plain, batch = deepcopy(model), torch.randn(1200, 3)
    plain(batch)
    move_in_parts(model, batch, (400,) * 3, exported if is_exported else capture)
    assert_same_buffers(model, plain, tolerance=1e-3)  # the spread between micro-batches is that of both calls' mean
    assert model[0].norm.num_batches_tracked == 5


def test_norm_shared_by_two_stages() -> None:
    norm = nn.BatchNorm1d(3)
    model = with_history(nn.Sequential(norm, nn.Tanh(), norm))
    batch = torch.randn(8, 3)
    plain = deepcopy(model)
    chain = capture(model, batch[:4])
    stages = [(0, 1), (1, 3)]
    averages = [MovingAverages(chain.norms(*stage)) for stage in stages]
    given = list[Tensor]()
    for part in batch.split(4):
        tensors = (part,)
        for own, stage in zip(averages, stages, strict=True):
            with own.microbatch(chain.norms(*stage)):
                tensors = chain.stage(*stage)(*tensors)
            given += [x.tanh() for x in tensors if stage == (0, 1)]
    for own in averages:
        own.finish()
    plain[0](batch)
    plain[0](torch.cat(given))
    assert_same_buffers(model, plain)


def test_skipped_norm_does_not_count() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if x[0, 0] > 0 else x

    model = with_history(nn.Sequential(Skipping()))
    plain, batch = deepcopy(model[0]), torch.randn(12, 3).abs()
    batch[4] *= -1
    move_in_parts(model, batch, (4, 4, 4))
    plain(torch.cat([batch[:4], batch[8:]]))
    assert_same_buffers(model[0], plain)


@pytest.mark.parametrize("sizes", [((4, 4), (4, 4)), ((5, 3), (2, 2, 2, 2)), ((8,), ())], ids=str)
def test_replicas_agree_on_averages(sizes: tuple[Sizes, Sizes]) -> None:
    model = with_history(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)))
    plain, batch = deepcopy(model), torch.randn(sum(map(sum, sizes)), 3)
    replicas = [deepcopy(model), deepcopy(model)]
    ranks = [InParts(replica, batch[:2]) for replica in replicas]
    for rank, part, cuts in zip(ranks, batch.split([sum(x) for x in sizes]), sizes, strict=True):
        if cuts:
            rank.forward(part, cuts)
    total = sum_of_all([rank.averages for rank in ranks])
    for rank in ranks:
        rank.averages.finish(lambda sums: sums.copy_(total))
    plain[0](batch)
    assert_same_buffers(replicas[0][0], plain[0])
    assert_same_buffers(replicas[1], replicas[0])


def sum_of_all(averages: Sequence[MovingAverages]) -> Tensor:
    """What replicas sum, from copies."""
    given = list[Tensor]()
    for own in averages:
        deepcopy(own).finish(lambda sums: given.append(sums.clone()))
    return torch.stack(given).sum(0)


def test_failed_step_changes_nothing() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("no")
            return x

    model = with_history(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None), Failing()))
    plain, batch = deepcopy(model), torch.randn(4, 3)
    parts = InParts(model, batch)
    with buffers_untouched(model):
        parts.forward(torch.randn(4, 3), (4,))
        model[2].fails = True
        with pytest.raises(ValueError, match="no"):
            parts.forward(torch.randn(4, 3), (4,))
        parts.averages.discard()
    model[2].fails = False
    parts.forward(batch, (4,)).finish()
    plain(batch)
    assert_same_buffers(model, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_under_autocast(dtype: torch.dtype) -> None:
    model = Forward(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))
    plain, batch = deepcopy(model), torch.randn(12, 2, 6, 6)
    with torch.autocast("cpu", dtype=dtype):
        move_in_parts(model, batch, (4, 4, 4))
        plain(batch)
    assert_same_buffers(model, plain, tolerance=1e-4)
    assert model.layers[1].running_mean.dtype == torch.float32


def test_bfloat16_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).bfloat16()
    plain, batch = deepcopy(model), torch.randn(12, 3, dtype=torch.bfloat16)
    move_in_parts(model, batch, (4, 4, 4))
    plain(batch)
    assert_same_buffers(model, plain, tolerance=2**-7)


def test_stage_without_norms() -> None:
    averages = MovingAverages(())
    with averages.microbatch(()):
        pass
    averages.finish(lambda _: pytest.fail("nothing to add up"))


def test_norm_shared_across_processes_refused() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    file = model_in_memory(
        model,
        inputs=torch.randn(4, 4),
        loss=nn.functional.mse_loss,
        optimizer=lambda x: torch.optim.SGD(x, lr=0.1),
        batches=lambda n: iter(lambda: (torch.randn(n, 4), torch.randn(n, 4)), None),
    )
    plan = plan_for(file, num_devices=2, constraints=Constraints(cut_after=("1",)))

    def job(_rank: int) -> str:
        with pytest.raises(UsageError, match=r"1\.running_mean is written by stages 0 and 1.*keep the layers"):
            gplan.pipeline(model, plan, loss=nn.functional.mse_loss, timeout_s=30.0)
        return "refused"

    assert on_ranks(2, job) == ["refused", "refused"]
