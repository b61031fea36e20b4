"""float32 master weights: the pipeline's parameters, which the optimizer updates, beside what the stages compute with.

    step:  round masters into weights | forwards and backwards of the weights | gradients become the masters'
    user:  clip, optimizer.step(), zero_grad()   on the masters

Autograd accumulates the weights' gradients in the precision's dtype (`Tensor.grad_dtype`), so that in float32 a gradient
is handed over without a copy; in bfloat16 it is converted for the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from gplan.runtime.gradient_sync import take_hooks
from gplan_profiler.model.materialise import parameter_as
from gplan_profiler.model.precision import MASTER_DTYPE, round_into


class MasterWeights:
    """Pairs of master weights and the weights that stages compute with; none without master weights."""

    def __init__(self, masters: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        """`masters` are this process's tensors by name, `like` has a tensor as stages compute with for each."""
        self.computing: dict[str, Tensor] = {}  # by name; without a master the tensors of `masters` themselves
        self._weights: dict[nn.Parameter, nn.Parameter] = {}  # by master
        self._fresh: dict[nn.Parameter, int] = {}  # by master, its version when it was rounded
        for name, master in masters.items():
            self.computing[name] = master
            if isinstance(master, nn.Parameter) and master.dtype != like[name].dtype:
                model_weight = like[name]
                assert isinstance(model_weight, nn.Parameter)
                weight = parameter_as(master.detach().to(model_weight.dtype), model_weight)
                take_hooks(weight)  # the master's run
                self.computing[name] = self._weights[master] = weight

    def round(self, masters: Iterable[nn.Parameter] | None = None) -> None:
        """Round masters, all by default, into the weights; `lent` does not repeat it for those that are named."""
        chosen = self._weights if masters is None else [x for x in masters if x in self._weights]
        round_into([self._weights[x] for x in chosen], list(chosen))
        self._fresh.update(() if masters is None else ((x, x._version) for x in chosen))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the weights have the values and the gradients of their masters, which get the gradients back."""
        stale = [x for x in self._weights if self._fresh.get(x) != x._version]
        round_into([self._weights[x] for x in stale], stale)
        for master, weight in self._weights.items():
            weight.grad = None if master.grad is None else master.grad.to(weight.grad_dtype)
            master.grad = None
        try:
            yield
        finally:
            self._fresh.clear()
            self.take_gradients(self._weights)

    def take_gradients(self, masters: Iterable[nn.Parameter]) -> None:
        """Hand the gradients of weights over to these masters."""
        for master in masters:
            weight = self._weights.get(master)
            if weight is not None and weight.grad is not None:
                master.grad, weight.grad = weight.grad.to(MASTER_DTYPE), None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._weights)
