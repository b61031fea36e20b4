"""The moving averages of norms, updated once per step.

They follow GPipe (Huang et al. 2019, section 2.2): every micro-batch is normalised by its own statistics, and the
averages r move once, by those of the mini-batch. Each forward finds the buffers as they were before the step; what it
writes, r_i = r + momentum * (statistic_i - r), is read and r is restored. So a recompute sees the same buffers, and a
step that fails changes nothing. With n_i values per channel, N in all, in float64:

    mean = sum(n_i mean_i) / N        var = (sum((n_i - 1) var_i + n_i mean_i^2) - N mean^2) / (N - 1)

Instance norms average means and variances over the samples. A micro-batch that changes neither buffer did not call
the norm and does not count. If one forward calls a norm several times, the variance includes the spread between
micro-batches of all calls together instead of each call's own; an exported cumulative norm keeps the last call only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from profiler.capture.running_norms import RunningNorm

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the replicas, in place."""


class MovingAverages:
    """The moving averages of some norms on one device; each pair of buffers belongs to one norm."""

    def __init__(self, norms: Iterable[RunningNorm]) -> None:
        self._norms = tuple(norms)
        pairs = [x.running_mean for x in self._norms] + [x.running_var for x in self._norms]
        self._buffers = [x.data for x in pairs]  # written past autograd, which may have saved them
        tracked = ((i, x.num_batches_tracked) for i, x in enumerate(self._norms))
        self._tracked = {i: x.data for i, x in tracked if x is not None}
        self._cumulative = [i for i, x in enumerate(self._norms) if x.momentum is None]
        self._mixture = _BatchStatistics(self._norms) if self._norms else None
        self._before = torch.empty(0)  # in the buffers, when the step began
        self._before_by_buffer: tuple[Tensor, ...] = ()  # the same by buffer
        self._tracked_before: list[Tensor] = []
        self._after_microbatches: list[tuple[Sequence[RunningNorm], Tensor]] = []  # in the buffers by each micro-batch

    @contextmanager
    def microbatch(self, norms: Sequence[RunningNorm]) -> Iterator[None]:
        """Run the forward of one micro-batch, not its recompute; restores the buffers.

        `norms` are those of the running capture, on the same buffers. A forward that raises does not count.
        """
        if not self._norms:
            yield
            return
        if not self._after_microbatches:
            self._snapshot()
        for i in self._cumulative:
            self._tracked[i].zero_()  # the forward then averages its own calls alone
        try:
            yield
            self._after_microbatches.append((norms, torch.cat(self._buffers)))
        finally:
            self._restore()

    def finish(self, reduce: Reduce | None = None) -> None:
        """Move the averages by all micro-batches since the last step.

        `reduce` is called once, on all replicas with tensors of the same length, also without micro-batches.
        """
        if self._mixture is None:
            return
        known = {id(norms): self._num_values(norms) for norms, _ in self._after_microbatches}
        num_values = [known[id(norms)] for norms, _ in self._after_microbatches]
        sums = self._mixture.sums(self._before, [left for _, left in self._after_microbatches], num_values)
        if reduce is not None:
            reduce(sums)
        num_calls, moved = self._mixture.moved(torch.cat(self._buffers), sums, self._shares())
        torch._foreach_copy_(self._buffers, torch.split(moved, self._mixture.sizes))
        if self._tracked:
            by_norm = num_calls.unbind()
            torch._foreach_add_(list(self._tracked.values()), [by_norm[i] for i in self._tracked])
        self.discard()

    def discard(self) -> None:
        """Forget the micro-batches of a failed step; the buffers are unchanged."""
        self._after_microbatches.clear()

    def _snapshot(self) -> None:
        assert self._mixture is not None
        self._before = torch.cat(self._buffers)
        self._before_by_buffer = torch.split(self._before, self._mixture.sizes)
        self._tracked_before = [x.clone() for x in self._tracked.values()]

    def _restore(self) -> None:
        torch._foreach_copy_(self._buffers, self._before_by_buffer)
        if self._tracked:
            torch._foreach_copy_(list(self._tracked.values()), self._tracked_before)

    def _num_values(self, norms: Iterable[RunningNorm]) -> list[int]:
        """Return each norm's values per channel; 0 if the capture does not have the norm."""
        given = {id(x.running_mean): x.num_values for x in norms}
        return [given.get(id(x.running_mean), 0) for x in self._norms]

    def _shares(self) -> list[float | Tensor]:
        """Return the weight of this mini-batch in each norm's averages."""
        return [
            x.num_calls / (self._tracked[i] + x.num_calls) if x.momentum is None else x.momentum
            for i, x in enumerate(self._norms)
        ]


class _BatchStatistics:
    """Combines statistics of micro-batches into those of the mini-batch, for all channels of all norms at once.

    With B norms and C channels in total, a tensor of buffers has 2C entries: all means, then all variances.
    """

    def __init__(self, norms: Sequence[RunningNorm]) -> None:
        channels = [x.running_mean.numel() for x in norms]
        shares = [1.0 if x.momentum is None else x.momentum for x in norms]
        device = norms[0].running_mean.device
        self.sizes = channels * 2  # of the buffers
        self._norm_of = torch.repeat_interleave(torch.tensor(channels)).to(device)  # of every channel
        self._last_channel = torch.tensor(channels, device=device).cumsum(0) - 1  # of every norm
        self._num_calls = torch.tensor([x.num_calls for x in norms], device=device)
        self._never_moves = torch.tensor([x == 0 for x in shares], device=device)
        self._divisor = self._by_channel([x or 1.0 for x in shares]).repeat(2)
        self._spread = self._by_channel([0.0 if x.is_per_sample else 1.0 for x in norms])

    def sums(self, found: Tensor, left: Sequence[Tensor], num_values: Sequence[Sequence[int]]) -> Tensor:
        """Return sums over micro-batches: n by norm; n mean and (n - 1) var + n mean^2 by channel; shape (B + 2C,).

        `found` are the buffers before each micro-batch, `left` those after it, `num_values` the n_i of each norm.
        Mostly in place, as allocating takes longer than the arithmetic.
        """
        if not left:
            return self._divisor.new_zeros(len(self._num_calls) + 2 * len(self._norm_of))
        before = found.double()
        change = torch.stack(tuple(left)).double().sub_(before)
        count = torch.tensor(num_values, dtype=torch.float64, device=found.device)
        count *= self._are_called(change != 0)
        n = count[:, self._norm_of]
        mean, var = change.div_(self._divisor).add_(before).chunk(2, dim=1)  # of each micro-batch
        of_means = n * mean
        totals = of_means.sum(0)
        squares = of_means.mul_(mean).mul_(self._spread).addcmul_(n.sub_(self._spread).clamp_(min=0), var)
        return torch.cat([count.sum(0), totals, squares.sum(0)])

    def moved(self, now: Tensor, sums: Tensor, shares: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
        """Return the number of calls by norm, and the buffers `now` moved by `shares`."""
        count, total, squares = torch.split(sums, [len(self._num_calls), len(self._norm_of), len(self._norm_of)])
        n, share = count[self._norm_of], self._by_channel(shares)
        mean = total / n
        var = (squares - self._spread * n * mean**2).clamp(min=0) / (n - self._spread)
        moved = now + share.repeat(2) * (torch.cat([mean, var]) - now)
        return self._num_calls * (count > 0), torch.where(n.repeat(2) > 0, moved, now.double())

    def _are_called(self, changed: Tensor) -> Tensor:
        """Return by micro-batch and norm whether its buffers changed."""
        mean, var = changed.chunk(2, dim=1)
        so_far = (mean | var).cumsum(1)[:, self._last_channel]  # of this norm and those before it
        return (so_far.diff(dim=1, prepend=torch.zeros_like(so_far[:, :1])) > 0) | self._never_moves

    def _by_channel(self, values: Sequence[float | Tensor]) -> Tensor:
        by_norm = torch.tensor([float(x) for x in values], dtype=torch.float64, device=self._norm_of.device)
        return by_norm[self._norm_of]
