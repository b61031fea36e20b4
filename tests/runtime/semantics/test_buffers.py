"""Buffers that forwards write to: as in the plain model on one device, refused if several devices share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gplan
from gplan.core.errors import RunError, UsageError
from tests.runtime.ranks import on_ranks
from tests.runtime.semantics.checks import both_engines, built, failures, merged, plan_of, with_microbatches
from tests.runtime.semantics.models import WIDTH, Buffered, Floor, subject


class Counting(nn.Module):
    """Two layers share a buffer that one of them writes to; a third writes to its own."""

    seen: Tensor
    own: Tensor

    def __init__(self, writer: int) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(4))
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("own", torch.zeros(WIDTH))
        self.writer = writer

    def forward(self, x: Tensor) -> Tensor:
        for number, floor in enumerate(self.floors):
            x = floor(x)
            if number in (0, 3):
                x = x * self.seen.clone()
            if number == self.writer and self.training:
                self.seen.mul_(1.5)
            if number == 2 and self.training:
                self.own.copy_(0.9 * self.own + 0.1 * x.detach().mean(0))
        return x


class Counter(Floor):
    """A layer of a sequence; all share a buffer, and one writes to it."""

    def __init__(self, seen: Tensor, *, writes: bool) -> None:
        super().__init__()
        self.register_buffer("seen", seen)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes and self.training:
            self.seen += 1  # type: ignore[operator]
        return super().forward(x) * self.seen.clone()  # type: ignore[operator]


def counting_row(*, writes: bool = True) -> nn.Sequential:
    seen = torch.ones(())
    return nn.Sequential(Counter(seen, writes=writes), Floor(), Floor(), Counter(seen, writes=False))


class Normed(Floor):
    """Divides by a running scale, which its backward needs as it was, and reads the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0), 0.1)  # type: ignore[operator]
        return super().forward(x) / self.scale


def normed_row() -> nn.Sequential:
    return nn.Sequential(Normed(), Floor(), Floor())


def test_written_buffer_that_a_backward_needs_has_a_remedy() -> None:
    case = subject(normed_row)
    pipe = gplan.pipeline(normed_row, plan_of(case, 2), loss=case.loss)
    with pytest.raises(
        RunError, match=r"backward of micro-batch .*modified by an inplace.*read a copy \(self\.name\.clone"
    ):
        pipe.step(*case.batch(8))


def never() -> Counting:
    return Counting(-1)


def first() -> Counting:
    return Counting(0)


def last() -> Counting:
    return Counting(3)


def test_shared_buffer_written_on_another_device() -> None:
    case = subject(last)
    plan = plan_of(case, 2)
    found = failures(2, lambda: gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0))
    expected = (
        "UsageError: the buffer seen is written by the forward of stage 1 and used by stages 0 and 1, which are on"
    )
    assert all(x.startswith(expected) and "--keep-together" in x for x in found), found


class CountingByAnotherPath(nn.Module):
    """Two layers share a buffer under two paths; one writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Floor() for _ in range(4))
        seen = torch.ones(())
        for floor in (self.floors[0], self.floors[3]):
            floor.register_buffer("seen", seen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.floors[0](x) * self.floors[0].get_buffer("seen").clone()
        x = self.floors[3](self.floors[2](self.floors[1](x)))
        if self.training:
            self.floors[3].get_buffer("seen").mul_(1.5)
        return x


def test_shared_buffer_with_two_paths() -> None:
    case = subject(CountingByAnotherPath)
    with pytest.raises(
        UsageError, match=r"the buffer floors\.0\.seen is written by the forward of stage 1 and used by"
    ):
        gplan.pipeline(case.build, plan_of(case, 2), loss=case.loss)


def test_written_buffer_reaches_later_layers() -> None:
    case = subject(first)
    plan, model, total = plan_of(case, 2), built(case), 0.0
    for inputs, targets in zip(*(x.split(2) for x in case.batch(8)), strict=True):
        total += case.loss(model(inputs), targets).item() / 4

    def script() -> tuple[float, dict[str, Tensor]]:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0)
        return pipe.step(*case.batch(8)).item(), pipe.state_dict()

    for parts in both_engines(2, script).values():
        assert [x for x, _ in parts] == [pytest.approx(total, rel=1e-5)] * len(parts)
        assert torch.equal(merged(x for _, x in parts)["seen"], model.get_buffer("seen"))


def test_untraced_shared_buffer_refused_in_step() -> None:
    case = subject(counting_row)
    pipe = gplan.pipeline(case.build, plan_of(case, 2), loss=case.loss)
    with pytest.raises(UsageError, match=r"the buffer 0\.seen is written by a forward and used by stages 0 and 1"):
        pipe.step(*case.batch(8))


@pytest.mark.parametrize("build", [never, Buffered, lambda: counting_row(writes=False)])
def test_read_only_shared_buffers_allowed(build: type[nn.Module]) -> None:
    case = subject(build)
    plan = plan_of(case, 2)

    def script() -> float:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0)
        return [pipe.step(*case.batch(8)).item() for _ in range(2)][-1]

    assert len({round(x, 6) for parts in both_engines(2, script).values() for x in parts}) == 1


def test_replicas_follow_first_buffers() -> None:
    case = subject(never)
    plan = replace(plan_of(case, 2, num_microbatches=2), num_replicas=2)

    def script(_rank: int) -> Tensor | None:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0)
        pipe.step(*case.batch(8))
        return pipe.state_dict().get("own")

    found = [x for x in on_ranks(4, script) if x is not None]
    assert len(found) == 2
    assert found[0].abs().sum() > 0
    assert torch.equal(*found)


def normed() -> nn.Sequential:
    return nn.Sequential(Floor(), nn.BatchNorm1d(WIDTH), Floor())


def imaged() -> nn.Sequential:
    """A batch norm of several values per sample, which accepts one sample."""
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), Floor())


def test_batch_norm_refuses_one_sample() -> None:
    case = subject(normed)
    plan = with_microbatches(plan_of(case, 2), number=3, size=2)

    def script() -> list[str]:
        pipe = gplan.pipeline(case.build, plan, loss=case.loss, timeout_s=20.0)
        texts = []
        for num_rows in (5, 1):
            with pytest.raises(UsageError) as caught:
                pipe.step(*case.batch(num_rows))
            texts.append(str(caught.value))
        return texts

    told = (
        "got 5 samples, which leaves a micro-batch of one; 1 then has a single value per channel and no variance: give 4, or "
        "leave such a batch out (drop_last=True of a DataLoader)"
    )
    alone = told.replace("got 5", "got 1").replace("give 4, or ", "")
    for parts in both_engines(2, script).values():
        assert parts == [[told, alone]] * len(parts)


def test_image_norm_accepts_one_sample() -> None:
    case = subject(imaged)
    pipe = gplan.pipeline(case.build, plan_of(case, 2), loss=case.loss)
    assert pipe.step(*case.batch(1)).isfinite()
