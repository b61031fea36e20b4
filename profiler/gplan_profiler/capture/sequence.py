"""Capture an nn.Sequential, or a list of stages, by cutting it between its children, without export.

The children may contain anything, data-dependent control flow included. Any structure of tensors and constants may pass
between them (gplan_profiler/capture/value_forms.py). If children write into their input, a stage that begins with them works
on copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import module_key
from gplan_profiler.capture.chain import (
    AtLayer,
    Chain,
    Route,
    Tensors,
    TensorSpec,
    call_arguments,
    detached,
    flat_tensors,
    model_state_restored,
)
from gplan_profiler.capture.module_attributes import assigned_since, attributes_of, attributes_restored
from gplan_profiler.capture.moving_averages import RecordedCall, RunningNorm, recorded_norms, running_norms
from gplan_profiler.capture.python_state import readings_of_changes
from gplan_profiler.capture.value_forms import Form
from gplan_profiler.memory.allocations import storage_key
from gplan_profiler.model.error_location import author_line, describe
from gplan_profiler.model.lazy_build import fake_mode_of
from gplan_profiler.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    disable_current_modes,
    pytree,
)


@dataclass(frozen=True, slots=True)
class Call:
    """The result of one call of a child."""

    tensors: Tensors
    form: Form
    writes: bool  # into an input tensor
    returns_input: bool  # an input tensor, or a view of one
    passed: tuple[int | None, ...]  # for each output the input that it is; None: the child made it
    overlaps: bool  # two output tensors have elements in common
    norms: tuple[RecordedCall, ...]  # its norms that write moving averages


def call_child(name: str, child: nn.Module, tensors: Tensors, form: Form) -> Call:
    """Call a child with a value of this form; raises ModelError, with the author's line, where that fails."""
    given = tuple(x.clone() for x in detached(tensors))
    before = [x._version for x in given]
    try:
        with recorded_norms(child) as norms:
            value = child(form.value(given))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        line = author_line(error)
        where = f" ({line})" if line else ""
        raise ModelError(
            f"the control flow of {name} ({type(child).__name__}) depends on the values of its input{where}, which a "
            "model without weights does not have; use torch.where or torch.cond, or measure on a host with more memory"
        ) from error
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ModelError(
            f"{name} ({type(child).__name__}) fails on inputs of shape {shapes}: {describe(error)}"
        ) from error
    made, outputs = Form.of(value, what=output_of(name, child))
    writes = [x._version for x in given] != before
    passed: list[int | None] = []
    following = 0  # an output that is an input out of their order counts as made
    for output in outputs:
        index = next((i for i in range(following, len(given)) if given[i] is output and not writes), None)
        following = following if index is None else index + 1
        passed.append(index)
    return Call(
        outputs,
        made,
        writes=writes,
        returns_input=any(_share_memory(x, y) for x, y in product(given, outputs)),
        passed=tuple(passed),
        overlaps=any(_overlap(x, y) for x, y in combinations(outputs, 2)),
        norms=tuple(norms),
    )


def output_of(name: str, child: nn.Module) -> str:
    """The name of a child's output in error messages."""
    return f"the output of {name} ({type(child).__name__})"


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.layout == y.layout == torch.strided and storage_key(x) == storage_key(y)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have elements in common, not only a storage as the parts of a chunk."""
    if not _share_memory(x, y):
        return False
    with disable_current_modes(), torch.no_grad():
        end = max(
            1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (x, y)
        )
        is_of_x = torch.zeros(max(0, end), dtype=torch.bool)
        is_of_x.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
        return bool(is_of_x.as_strided(y.shape, y.stride(), y.storage_offset()).any())


class SequentialChain(Chain):
    """A chain whose layers are the children of a sequence; a child that occurs twice is two layers."""

    def __init__(self, model: nn.Sequential, inputs: object) -> None:
        children = tuple((name, child) for name, child in model._modules.items() if child is not None)
        if not children:
            raise ModelError(
                f"the model is an empty {type(model).__name__}: there is no layer to measure or to cut; see what builds it, "
                "and with which settings"
            )
        super().__init__(model, [name for name, _ in children], [type(child).__name__ for _, child in children])
        self._children = children
        before, versions = attributes_of(model), [x._version for x in model.buffers()]
        with attributes_restored(model), readings_of_changes(model) as self.readings:
            self._forms, self._specs, self._calls = self._trace(inputs)
            self.assigned = assigned_since(before)
        pairs = zip(model.named_buffers(), versions, strict=True)
        self._written = {name.rpartition(".")[2] for (name, x), version in pairs if x._version != version}
        self._routes = self._found_routes()
        maker: str | None = None  # of overlapping tensors
        for name, call in zip(self.names, self._calls, strict=True):
            if maker is not None and call.writes:  # after a cut the other tensor would not change
                raise ModelError(
                    f"{name} writes in place into its input, where {maker} returns tensors that share memory; between two "
                    f"stages each tensor has its own memory: let {name} write into a copy (.clone()), or {maker} return copies"
                )
            if call.overlaps:
                maker = name
            elif not call.returns_input:
                maker = None

    def _stage(self, first: int, end: int, at_layer: AtLayer | None, sends: bool) -> nn.Module:
        """Layers [first, end) as a module whose parameters keep their names in the sequence."""
        forms = self._forms[first], self._forms[end]
        calls = self._calls[first:end]
        last = next((x for x in calls if x.writes or not x.returns_input), None)  # that may write into the input
        layers = _Slice(self._children[first:end], forms, copies_input=last is not None and last.writes)
        layers.first, layers.at_layer, layers.sends = first, at_layer, sends
        return layers

    def draws(self, layer: int) -> bool:
        """Always True: the children are not inspected."""
        return True

    def specs(self, boundary: int) -> tuple[TensorSpec, ...]:
        """The specs of the tensors between two children."""
        return self._specs[boundary]

    def routes(self, boundary: int) -> tuple[Route, ...]:
        """From the child that makes a tensor to all that are given it, as children may read any of their inputs."""
        return self._routes[boundary]

    @property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Each child and the next one, also where it only hands on what it is given."""
        return tuple(pairwise(range(len(self))))

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Those that the capture wrote into, and all of the same last name, as children that are alike run once."""
        return tuple(x for name, x in self.model.named_buffers() if name.rpartition(".")[2] in self._written)

    def reordered(self, order: Sequence[int]) -> SequentialChain:
        """Only the identity: every child reads the output of the one before it."""
        if list(order) != list(range(len(self))):
            raise ModelError(
                f"the layers of an nn.Sequential cannot run in the order {list(order)}; each child reads what the one "
                "before it gives: expected 0, 1, 2, ..."
            )
        return self

    def structure(self, layer: int) -> Hashable:
        """Equal for children that are alike, with inputs of equal specs."""
        child, call = self._children[layer][1], self._calls[layer]
        return module_key(child), self._forms[layer], tuple((x, x.strides) for x in self._specs[layer]), call.writes

    def state(self, layer: int) -> dict[str, Tensor]:
        """The child's own parameters and buffers."""
        name, child = self._children[layer]
        return dict([*child.named_parameters(prefix=name), *child.named_buffers(prefix=name)])

    def norms(self, first: int, end: int) -> tuple[RunningNorm, ...]:
        """By the calls recorded during capture."""
        layers = range(first, end)
        calls = (heard.within(self._children[x][1]) for x in layers for heard in self._calls[x].norms)
        return running_norms(self.model, calls)

    def model_output(self, tensors: Tensors) -> Any:
        """The output of the last child."""
        return self._forms[-1].value(tensors)

    def _found_routes(self) -> list[tuple[Route, ...]]:
        makers: list[tuple[int | None, ...]] = [(None,) * len(self._specs[0])]
        for layer, call in enumerate(self._calls):
            makers.append(tuple(layer if i is None else makers[-1][i] for i in call.passed))
        last: list[tuple[int, ...]] = [(len(self),) * len(self._specs[-1])]  # the last layers that are given each
        for layer in range(len(self) - 1, -1, -1):
            after = dict(zip(self._calls[layer].passed, last[-1], strict=True))
            last.append(tuple(after.get(i, layer) for i in range(len(self._specs[layer]))))
        return [
            tuple(
                Route(maker, tuple(range(0 if maker is None else maker + 1, end + 1)))
                for maker, end in zip(*ends, strict=True)
            )
            for ends in zip(makers, reversed(last), strict=True)
        ]

    def _trace(self, inputs: object) -> tuple[list[Form], list[tuple[TensorSpec, ...]], list[Call]]:
        """The form and specs at each boundary, and the calls of the children.

        A model without weights runs on fake tensors, children that are alike only once.
        """
        args, kwargs = call_arguments(inputs)
        if kwargs or len(args) != 1:
            found = f"inputs by name ({', '.join(kwargs)})" if kwargs else f"{len(args)} inputs"
            raise ModelError(f"an nn.Sequential or a list of modules takes one input; the model file gives {found}")
        tensors = flat_tensors(args[0], what="the inputs")
        # As each is split into micro-batches separately, they are different tensors.
        form, _ = Form.of(pytree.tree_map_only(Tensor, Tensor.detach, args[0]), what="the inputs")
        forms, specs, calls = [form], [TensorSpec.of_all(tensors)], []
        mode = fake_mode_of(self.model)
        known: dict[Hashable, Call] = {}
        with model_state_restored(self.model), mode or nullcontext():
            if mode is not None:
                tensors = tuple(mode.from_tensor(x) for x in tensors)
            for name, child in self._children:
                key = (module_key(child), forms[-1], specs[-1]) if mode is not None else name
                call = known.get(key) or call_child(name, child, tensors, forms[-1])
                if mode is not None:
                    known[key] = call
                tensors = call.tensors
                forms.append(call.form)
                specs.append(TensorSpec.of_all(tensors))
                calls.append(call)
        return forms, specs, calls


class _Slice(nn.Module):
    """Consecutive children as a stage; it copies its input if they write into it, because other layers read it too."""

    first = 0  # index of the first child in the chain
    at_layer: AtLayer | None = None
    sends = True

    def __init__(
        self, children: Sequence[tuple[str, nn.Module]], forms: tuple[Form, Form], *, copies_input: bool
    ) -> None:
        super().__init__()
        for name, child in children:
            self.add_module(name, child)
        self._given, self._gives = forms
        self._what = output_of(*children[-1])
        self._copies_input = copies_input

    def forward(self, *tensors: Tensor) -> Tensors:
        if self._copies_input:
            tensors = tuple(tensor.clone() for tensor in tensors)
        value: object = self._given.value(tensors)
        for layer, child in enumerate(self._modules.values(), self.first):
            assert child is not None
            if self.at_layer is not None:
                self.at_layer(layer)
            value = child(value)
        given = self._gives.tensors_of(value, what=self._what)
        return tuple(tensor.contiguous() for tensor in given) if self.sends else tuple(given)


def as_sequential(stages: Sequence[object]) -> nn.Sequential:
    """A list of stages as one model; raises ModelError for entries that are not modules."""
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ModelError(f"entry {index} of the list of stages is a {type(stage).__name__}; expected an nn.Module")
    if not stages:
        raise ModelError("the list of stages is empty; expected at least one nn.Module")
    return nn.Sequential(*(stage for stage in stages if isinstance(stage, nn.Module)))
