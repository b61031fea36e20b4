"""Choose the way to trace a model: ways are tried in steps, and the first whose layers compute what the model does wins.

1. As it is run: libraries take the path of a plain run, and constants keep their values.
2. As libraries run it for torch.export.
3. With the modules whose control flow depends on values called as they are (gplan_profiler/capture/opaque_calls.py), where
   these are layers or parts of one.
4. Along the path of the batch at hand, which is checked in training (gplan_profiler/capture/known_values.py), also as 3.
5. As 3, with modules that hold several layers too.

Every way is proven: outputs, gradients and buffers after one pass of the layers, each a stage of its own, equal those of
the model. Two cases are not. A run takes the way of its profile, which proved it. A model without weights has no values
to compare: its profile takes the first way that works and says so if that is not the first of all.

A model whose layers draw random numbers in another order is proven with numbers that depend on no order (`DrawsByShape`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from gplan.core.errors import ModelError
from gplan.core.units import some_names
from gplan_profiler.capture.authored_layers import unit_paths
from gplan_profiler.capture.chain import Chain, Tensors, call_arguments, flat_tensors, model_state_restored
from gplan_profiler.capture.module_attributes import (
    assigned_since,
    attributes_of,
    attributes_restored,
)
from gplan_profiler.capture.opaque_calls import recorded_calls
from gplan_profiler.capture.python_state import (
    State,
    StateError,
    changed_state_refused,
    check_settled,
    containers_restored,
    state_of,
)
from gplan_profiler.capture.trace import Trace, UntraceableError, Way, trace
from gplan_profiler.capture.value_forms import DATA_DEPENDENT
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.model.error_location import describe, objects_running, root_cause
from gplan_profiler.model.lazy_build import fake_mode_of, random_state_kept, seed_everything
from gplan_profiler.model.random_draws import DrawsByShape, host_random_state, line_of_first_draw
from gplan_profiler.torch_compat import pytree

_MOST_EPSILONS = 1000  # of the dtype, by which results of two orders of the same operations may differ
_LARGEST_TOLERANCE = 0.05
_SMALLEST_SCALE = 1e-3  # of the largest gradient: one that is zero up to rounding has no scale of its own
_GRADIENT = "the gradient of "
_MOST_COMPARED = 2**16  # numbers of a tensor, evenly spaced; of larger ones also the norm

Draws: TypeAlias = Callable[[], AbstractContextManager[object]]
"""What a run draws its random numbers inside."""


def captured_in_steps(
    model: nn.Module,
    inputs: object,
    cut: Callable[[Trace], Chain],
    *,
    traced: str | None = None,
    loss: Callable[..., Any] | None = None,
) -> Chain:
    """The layers that `cut` makes of the first trace that works, with a note on which it is and why.

    `traced` is the way that a profile took, which needs no proof; None: there is no profile yet. Raises the error of the
    first way where all fail, and that of any way that finds code which no way may capture, or a `loss` that reads what
    the forward changes.
    """
    first_error: ModelError | None = None
    plain = _PlainModel(model, inputs)
    for attempt in _ways(model, inputs):
        way, is_first = attempt.way, attempt.way == Way()
        before = host_random_state()
        try:
            with containers_restored(model), changed_state_refused(loss, model):
                found = trace(model, inputs, way)
            chain = cut(found)
        except UntraceableError as error:
            attempt.error = error
            first_error = first_error or error
            if not plain.has_no_values and plain.results is None:  # the model itself fails
                break
            continue
        if before != host_random_state() and not plain.has_no_values and plain.changes(host_seed=1):
            line = plain.line_of_first_draw()
            raise ModelError(
                f"{type(model).__name__} draws random numbers with Python or numpy in its forward{f' ({line})' if line else ''}; a trace would make them "
                "constants, the same at every step: draw them with torch (torch.rand), or switch this off, as "
                "apply_spec_augment = False does in the configs of speech models"
            )
        try:
            check_calls(model, inputs, found.readings, compared=traced is None)
        except StateError as error:
            raise error if found.readings else first_error or error from None
        chain.traced, chain.notes = "" if is_first else str(way), _notes_on(found, way)
        chain.lacks_tensors = DATA_DEPENDENT in found.left_out.values()
        if chain.traced == traced:
            return chain
        is_unproven = plain.has_no_values and traced is None
        difference = None if is_unproven else plain.difference_from(chain, found)
        if difference is not None and is_first and plain.changes(seed=1):
            difference = plain.difference_from(chain, found, draws=DrawsByShape)
        if difference is None:
            if not is_first:
                proof = ", which is not proven, as the model has no weights here" if is_unproven else ""
                reason = describe(root_cause(first_error)) if first_error is not None else "the profile did so"
                chain.notes += (f"the model was traced {way}{proof}; else: {reason}",)
            return chain
        attempt.error = ModelError(
            f"{type(model).__name__} was traced {way}, but its layers do not compute what the model does: {difference}; "
            "define it as an nn.Sequential or a list of stages, which is cut between its children without tracing"
        )
        first_error = first_error or attempt.error
    assert first_error is not None
    raise first_error


def _notes_on(found: Trace, way: Way) -> tuple[str, ...]:
    """Notes on what the layers leave out of the model."""
    notes = list[str]()
    if found.left_out:
        left_out = " and ".join(sorted({*found.left_out.values()}))
        notes.append(f"{left_out} in the model's output are left out: a stage returns only tensors whose size is known")
    if way.follows_batch:
        notes.append(
            "the model's control flow depends on values: its layers take the path of the batch that it was captured for, "
            "and training stops with an error at a batch that takes another one"
        )
    return tuple(notes)


@dataclass(slots=True)
class _Attempt:
    """A way to be tried, and the error of a try that failed."""

    way: Way
    error: ModelError | None = None  # also of one whose layers compute something else


def _ways(model: nn.Module, inputs: object) -> Iterator[_Attempt]:
    """The ways in their order; what comes next depends on how the ones before failed."""
    known = [_Attempt(Way(as_run=as_run)) for as_run in (True, False)]
    yield from known
    if fake_mode_of(model) is not None or known[0].error is None:
        return
    units = unit_paths(model)
    yield from _with_modules_called(model, inputs, units, known[0].error)
    along = _Attempt(Way(follows_batch=True))
    yield along
    yield from _with_modules_called(model, inputs, units, along.error, follows_batch=True)
    yield from _with_modules_called(model, inputs, {path for path, _ in model.named_modules()}, known[0].error)


def _with_modules_called(
    model: nn.Module, inputs: object, paths: Container[str], error: BaseException | None, *, follows_batch: bool = False
) -> Iterator[_Attempt]:
    """Attempts in which one more class of modules is called as it is, as long as one on these paths is at fault."""
    classes, (args, kwargs) = list[type](), call_arguments(inputs)
    owners = {id(x.__dict__): x for path, x in model.named_modules() if path in paths}
    while error is not None:
        running = [owners.get(id(x.__dict__)) for x in objects_running(root_cause(error)) if isinstance(x, nn.Module)]
        found = [x for x in running if x is not None and not type(x).__module__.startswith("torch.")]
        if not found or found[-1] is model or type(found[-1]) in classes:  # the innermost is at fault
            return
        classes.append(type(found[-1]))
        try:
            with model_state_restored(model), attributes_restored(model):
                recorded = recorded_calls(model, lambda: model(*args, **kwargs), classes)
        except ModelError:
            return
        attempt = _Attempt(Way(recorded=recorded, follows_batch=follows_batch))
        yield attempt
        error = attempt.error


class _PlainModel:
    """The model itself, called with the inputs of the trace; it is run when its results are first needed."""

    def __init__(self, model: nn.Module, inputs: object) -> None:
        self._model, self._inputs = model, inputs
        self.has_no_values = fake_mode_of(model) is not None

    @cached_property
    def results(self) -> Results | None:
        """What a forward and a backward compute; None if the model fails."""
        return self._results_with()

    def _results_with(
        self, *, seed: int = 0, host_seed: int = 0, left_out: Container[int] = (), draws: Draws = nullcontext
    ) -> Results | None:
        """The results without the leaves of the output at the indices `left_out`; None if the model fails."""

        def run() -> Any:
            args, kwargs = call_arguments(_copied(self._inputs))
            leaves = pytree.tree_leaves(self._model(*args, **kwargs))
            return [None if place in left_out else x for place, x in enumerate(leaves)]

        try:
            return _results_of(self._model, run, seed=seed, host_seed=host_seed, draws=draws)
        except Exception:  # what fails is reported where the model is run for its own sake
            return None

    def line_of_first_draw(self) -> str | None:
        """The author's line that first draws random numbers."""
        return line_of_first_draw(lambda: self._results_with())

    def changes(self, *, seed: int = 0, host_seed: int = 0) -> bool:
        """Whether other seeds, of torch or of Python and numpy, give other results; True for a model that cannot be run."""
        again = None if self.results is None else self._results_with(seed=seed, host_seed=host_seed)
        return again is None or self.results is None or _difference(self.results, again) is not None

    def difference_from(self, chain: Chain, traced: Trace, *, draws: Draws = nullcontext) -> str | None:
        """Where the layers compute something else than the model; None: nowhere, or the model itself fails."""
        if self.has_no_values:
            return "the model has no weights here"
        expected = self.results
        left_out = traced.left_out if DATA_DEPENDENT in traced.left_out.values() else ()
        if left_out or draws is not nullcontext:
            expected = self._results_with(left_out=left_out, draws=draws)
        if expected is None:
            return None

        def run_layers() -> Any:
            tensors: Tensors = flat_tensors(_copied(self._inputs), what="the inputs")
            for first, end in pairwise(range(len(chain) + 1)):
                tensors = chain.stage(first, end)(*tensors)
            return chain.model_output(tensors)

        graphs = [traced.graph, *(x.graph for x in traced.module.modules() if isinstance(x, GraphModule))]
        values = (x for graph in graphs for node in graph.nodes for x in tensors_in(node.meta.get("val")))
        dtypes = {x.dtype for x in values if x.is_floating_point()}
        coarsest = max((torch.finfo(x).eps for x in dtypes), default=0.0)  # such as that of autocast
        try:
            return _difference(expected, _results_of(self._model, run_layers, draws=draws), epsilon=coarsest)
        except Exception as error:
            return f"they fail, {describe(error)}"


def check_calls(model: nn.Module, inputs: object, readings: Mapping[str, str], *, compared: bool) -> None:
    """Raise StateError for a model whose calls depend on earlier ones: by `readings` (see python_state.py), or, if
    `compared`, by several outputs for the same inputs, seeds, buffers and other tensors of its modules.

    The calls alternate between the inputs and others; for `readings` the last two have the same.
    """
    mode = fake_mode_of(model)
    is_compared = compared and mode is None
    if not (readings or is_compared):
        return
    before, outputs, states = attributes_of(model), list[Sequence[Excerpt]](), list[State]()
    with random_state_kept(), attributes_restored(model), torch.no_grad(), mode or nullcontext():
        for is_other in (False, *(True, False) * (2 if is_compared else 1), *[False] * bool(readings)):
            args, kwargs = call_arguments((_other if is_other else _copied)(inputs))
            seed_everything(0)
            try:
                with model_state_restored(model):
                    made = [Excerpt.of(x) for x in tensors_in(model(*args, **kwargs))]
                outputs += [] if is_other else [made]
            # Inputs that are not valid, or the end of an iterator; else it is reported where the model is run.
            except Exception:
                is_compared = False
            if readings:
                states.append(state_of(model))
        kept = sorted({x.name for x in assigned_since(before)})
    if readings:
        check_settled(model, states[-2], states[-1], readings)
    pairs = [zip_longest(outputs[0], x) for x in outputs[1:]] if is_compared else []
    if any(x is None or y is None or not x.equals(y, least=0.0, epsilon=0.0) for both in pairs for x, y in both):
        names = f" (its forward sets {some_names(kept)})" if kept else ""
        raise StateError(
            f"{type(model).__name__} gives another output when it is called again with the same inputs and seed: it keeps values "
            f"from call to call{names}, or draws random numbers by a generator of its own, which would be constants of a trace, or "
            "go on with every micro-batch: keep values in registered buffers that are written in place (self.mean.copy_(...)), "
            "and draw with torch"
        )


def _difference(expected: Results, found: Results, *, epsilon: float = 0.0) -> str | None:
    """The first result that differs by more than the order of operations explains, at this precision or its own."""
    if expected.keys() != found.keys():
        return f"{len(expected)} results became {len(found)}"
    largest = max((x.largest for name, x in expected.items() if x and name.startswith(_GRADIENT)), default=0.0)
    for name, x in expected.items():
        y = found[name]
        least = _SMALLEST_SCALE * largest if name.startswith(_GRADIENT) else 0.0
        if x is not y and (x is None or y is None or not x.equals(y, least=least, epsilon=epsilon)):
            return f"{name} differs"
    return None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Numbers of a tensor, evenly spaced, and its norm; as a large model's gradients are not kept twice."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: Tensor
    norm: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Excerpt:
        """The excerpt of a tensor."""
        values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        flat = values.reshape(-1)
        numbers = flat[:: max(1, len(flat) // _MOST_COMPARED)].clone()
        norm = torch.linalg.vector_norm(flat) if flat.is_floating_point() and len(flat) else flat.new_zeros(())
        return cls(tuple(tensor.shape), tensor.dtype, numbers, norm)

    @property
    def largest(self) -> float:
        """The largest of its finite numbers."""
        return float(self.numbers.nan_to_num(0.0, 0.0, 0.0).abs().max()) if self.numbers.numel() else 0.0

    def equals(self, other: Excerpt, *, least: float, epsilon: float) -> bool:
        """Whether the tensors are the same up to the order of operations; numbers below `least` are rounding."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        x, y = self.numbers, other.numbers
        if not x.numel() or not x.is_floating_point():
            return torch.equal(x, y)
        tolerance = min(_LARGEST_TOLERANCE, _MOST_EPSILONS * max(epsilon, torch.finfo(x.dtype).eps))
        near = partial(torch.allclose, rtol=tolerance, equal_nan=True)
        least_norm = tolerance * least * prod(self.shape) ** 0.5
        return bool(
            near(x, y, atol=tolerance * max(least, self.largest)) and near(self.norm, other.norm, atol=least_norm)
        )


Results: TypeAlias = Mapping[str, Excerpt | None]
"""Outputs, gradients and the buffers after a forward and a backward, by their names."""


def _copied(inputs: object) -> Any:
    """The inputs in memory of their own, as a forward may write into them."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), inputs)


def _other(inputs: object) -> Any:
    """Inputs of the same form with other values: the samples in another order, and smaller."""

    def changed(x: Tensor) -> Tensor:
        y = x.detach().roll(1, 0) if x.dim() else x.detach().clone()
        return y / 2 if y.is_floating_point() else y

    return pytree.tree_map_only(Tensor, changed, inputs)


def _results_of(
    model: nn.Module, run: Callable[[], Any], *, seed: int = 0, host_seed: int = 0, draws: Draws = nullcontext
) -> Results:
    """The results of a run from the same state; random numbers are drawn inside `draws()`."""
    with random_state_kept(), model_state_restored(model), attributes_restored(model), draws():
        seed_everything(host_seed)
        torch.manual_seed(seed)
        outputs = list(tensors_in(run()))
        trained = [x for x in outputs if x.requires_grad]
        torch.manual_seed(0)
        if trained:
            torch.autograd.backward(trained, [torch.randn(x.shape, dtype=x.dtype, device=x.device) for x in trained])
        found = {f"output {place}": x for place, x in enumerate(outputs, start=1)}
        gradients = {f"{_GRADIENT}{name}": x.grad for name, x in model.named_parameters()}
        buffers = {f"the buffer {name}": x for name, x in model.named_buffers()}
        made: dict[str, Tensor | None] = {**found, **gradients, **buffers}
        return {name: None if x is None else Excerpt.of(x) for name, x in made.items()}
