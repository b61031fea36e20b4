"""Choose the way to trace a model: ways are tried in steps, and the first whose layers compute what the model does wins.

1. As it is run: libraries take the path of a plain run, and constants keep their values.
2. As libraries run it for torch.export.
3. Both again without the values of constants, where the code read some.
4. With the modules whose control flow depends on values called as they are (profiler/capture/opaque_modules.py).

The first way needs no proof. Every other way is proven: outputs, gradients and buffers after one pass of the layers, each
a stage of its own, equal those of the model. A model without weights has no values to compare: a profile takes the first
way that works and says so, and a run takes the way of the profile or builds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gplan.core.errors import ModelError
from profiler.capture.authored_layers import attributes_restored
from profiler.capture.chain import Chain, Tensors, call_arguments, flat_tensors, model_state_restored
from profiler.capture.constants import Answers
from profiler.capture.opaque_modules import ModuleRecords, recorded_calls
from profiler.capture.trace import Trace, UntraceableError, Way, trace
from profiler.model.error_location import describe, root_cause
from profiler.model.lazy_build import fake_mode_of

_MOST_EPSILONS = 1000  # of the dtype, by which results of two orders of the same operations may differ
_LARGEST_TOLERANCE = 0.05


def captured_in_steps(
    model: nn.Module, inputs: object, cut: Callable[[Trace], Chain], *, traced: str | None = None
) -> Chain:
    """The layers that `cut` makes of the first trace that works, with a note on which it is and why.

    `traced` is the way that a profile took, which needs no proof; None: there is no profile yet. Raises the error of the
    first way where all fail, and that of any way that finds code which no way may capture.
    """
    first_error: UntraceableError | None = None
    expected: Results | None = None
    for way in _ways(model, inputs):
        try:
            chain = cut(trace(model, inputs, way.way, way.answers))
        except UntraceableError as error:
            way.error = error
            if first_error is not None:
                continue
            first_error = error
            if fake_mode_of(model) is None and (expected := _plain_results(model, inputs)) is None:
                break  # the model itself fails
            continue
        if first_error is None:
            return chain
        if traced == str(way.way):
            is_right = True
        elif expected is None:
            is_right = traced is None
        else:
            is_right = expected.equals(_results_of(model, partial(_output_by_layers, chain, inputs)))
        if is_right:
            proof = "" if expected is not None else ", which is not proven, as the model has no weights here"
            chain.traced = str(way.way)
            chain.notes = (f"the model was traced {way.way}{proof}; else: {describe(root_cause(first_error))}",)
            return chain
    assert first_error is not None
    raise first_error


@dataclass(slots=True)
class _Attempt:
    """A way to be tried, and the error of a try that failed."""

    way: Way
    answers: Answers
    error: UntraceableError | None = None


def _ways(model: nn.Module, inputs: object) -> Iterator[_Attempt]:
    """The ways in their order; what comes next depends on how the ones before failed."""
    known = [_Attempt(Way(as_run=as_run), Answers()) for as_run in (True, False)]
    yield from known
    for attempt in known:
        if attempt.error is not None and attempt.answers.num_given:
            yield _Attempt(Way(as_run=attempt.way.as_run, knows_constants=False), Answers())
    classes = list[type]()
    error = known[0].error
    while error is not None and fake_mode_of(model) is None:
        at_fault = _class_at_fault(model, error)
        if at_fault is None or at_fault in classes:
            return
        classes.append(at_fault)
        try:
            attempt = _Attempt(Way(recorded=_recorded(model, inputs, classes)), Answers())
        except ModelError:
            return
        yield attempt
        error = attempt.error


def _recorded(model: nn.Module, inputs: object, classes: list[type]) -> ModuleRecords:
    args, kwargs = call_arguments(inputs)
    with model_state_restored(model), attributes_restored(model):
        return recorded_calls(model, lambda: model(*args, **kwargs), classes)


def _class_at_fault(model: nn.Module, error: BaseException) -> type | None:
    """The class of the innermost module on the stack of an error; None for the model itself and for torch's own."""
    owners = {id(x.__dict__): x for x in model.modules()}
    frame, found = root_cause(error).__traceback__, None
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        inner = owners.get(id(module.__dict__)) if isinstance(module, nn.Module) else None
        if inner is not None and not type(inner).__module__.startswith("torch."):
            found = inner
        frame = frame.tb_next
    return None if found is None or found is model else type(found)


@dataclass(frozen=True, slots=True)
class Results:
    """What a forward and a backward compute: outputs, gradients and the buffers afterwards."""

    tensors: tuple[Tensor | None, ...]

    def equals(self, other: Results | None) -> bool:
        """Whether all tensors are the same, up to the order of operations."""
        return (
            other is not None
            and len(self.tensors) == len(other.tensors)
            and all(_are_close(x, y) for x, y in zip(self.tensors, other.tensors, strict=True))
        )


def _are_close(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    tolerance = min(_LARGEST_TOLERANCE, _MOST_EPSILONS * torch.finfo(x.dtype).eps)
    largest = float(x.abs().max())
    return bool(torch.allclose(x, y, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def _plain_results(model: nn.Module, inputs: object) -> Results | None:
    args, kwargs = call_arguments(inputs)
    return _results_of(model, lambda: model(*args, **kwargs))


def _output_by_layers(chain: Chain, inputs: object) -> Any:
    tensors: Tensors = flat_tensors(inputs, what="the inputs")
    for first, end in pairwise(range(len(chain) + 1)):
        tensors = chain.stage(first, end)(*tensors)
    return chain.model_output(tensors)


def _results_of(model: nn.Module, run: Callable[[], Any]) -> Results | None:
    """The results of a run from the same state and seed; None for one that fails."""
    with model_state_restored(model), attributes_restored(model):
        torch.manual_seed(0)
        try:
            outputs = [x for x in pytree.tree_leaves(run()) if isinstance(x, Tensor)]
            trained = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(trained, [torch.randn_like(x) for x in trained])
        except Exception:
            return None
        gradients = [x.grad for x in model.parameters()]
        buffers = [x.clone() for x in model.buffers()]
        return Results((*(x.detach() for x in outputs), *gradients, *buffers))
