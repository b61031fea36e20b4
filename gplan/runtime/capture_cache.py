"""Captures of a model, one for every kind of input, cut into the plan's stages.

A capture is valid for micro-batches of one shape, in training or evaluation, under one autocast setting. All
captures of a model share its parameters and buffers. A model without weights is captured with fake tensors, which
are replaced by the real tensors of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from gplan.core import Plan, RecomputeMode
from gplan.core.errors import FileError, ModelError
from gplan.core.units import some_names
from gplan.runtime.random_streams import seed_key
from gplan.runtime.stage_module import GatheredLayers, LayerInfo, ParameterGroup, StageModule, make_segments
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import AtLayer, Chain, TensorSpec, modules_that_train
from gplan_profiler.capture.module_attributes import AssignedAttribute
from gplan_profiler.capture.moving_averages import RunningNorm
from gplan_profiler.model.materialise import is_meta_or_fake
from gplan_profiler.model.model_reference import describe_inputs
from gplan_profiler.torch_compat import pytree

_MAX_KEPT = 8  # captures besides the first


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """The layers of a model in the plan's order, for one kind of micro-batch."""

    chain: Chain
    starts: tuple[int, ...]  # K+1: the first layer of each stage, and the number of layers
    layer_info: tuple[LayerInfo, ...]  # of each layer

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.starts[stage], self.starts[stage + 1])

    def boundary(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that enter a stage; for stage K, those that leave the last one."""
        return self.chain.specs(self.starts[stage])


class CaptureCache:
    """All captures of one model for one plan."""

    def __init__(
        self, model: nn.Module, plan: Plan, *, name: str, device: torch.device, loss: Callable[..., Any] | None = None
    ) -> None:
        """`loss` is refused where it reads state in Python that a forward of the model changes."""
        self._loss = loss
        self.model, self.plan, self._name, self._device = model, plan, name, device
        self.assigned: frozenset[AssignedAttribute] = frozenset()  # that the forward of any capture sets on modules
        self.usual_inputs = ""  # description of the inputs that were captured first
        self._captures: dict[Hashable, CapturedModel] = {}
        self._segments: dict[tuple[CapturedModel, int, RecomputeMode, bool], tuple[nn.Module, ...]] = {}
        self._norms: dict[tuple[CapturedModel, int], tuple[RunningNorm, ...]] = {}
        self._real: dict[int, Tensor] = {}
        self._groups: Mapping[int, ParameterGroup] = {}
        self._around_capture: Callable[[], AbstractContextManager[object]] = nullcontext
        self._trained = modules_that_train(model)

    def for_inputs(self, inputs: Any, *, training: bool) -> CapturedModel:
        """Return the capture for micro-batches like `inputs`; captures the model if there is none."""
        leaves, structure = pytree.tree_flatten(inputs)
        autocast = tuple((x, torch.get_autocast_dtype(x)) for x in ("cpu", "cuda") if torch.is_autocast_enabled(x))
        specs = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
        key = (str(structure), specs, training, autocast)
        self.usual_inputs = self.usual_inputs or describe_inputs(inputs)
        if key not in self._captures:
            self._captures[key] = self._captured(inputs, training)
        if len(self._captures) > 1 and key != next(iter(self._captures)):
            self._captures[key] = self._captures.pop(key)  # least recently used first, after the plan's own
        return self._captures[key]

    def evict(self) -> list[CapturedModel]:
        """Drop the least recently used captures and return them, so that many input shapes do not fill the memory."""
        keys = list(self._captures)[1 : max(1, len(self._captures) - _MAX_KEPT)]
        old = [self._captures.pop(key) for key in keys]
        self._segments = {key: segments for key, segments in self._segments.items() if key[0] not in old}
        self._norms = {key: norms for key, norms in self._norms.items() if key[0] not in old}
        return old

    def set_tensors(
        self,
        tensors: Mapping[str, Tensor],
        groups: Mapping[int, ParameterGroup],
        *,
        around_capture: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Use real tensors for the model's parameters and buffers of these names.

        Those in `groups`, by the tensor's id, are gathered around each layer that uses them. A capture, which may compute
        with parameters that have no memory now, is inside `around_capture()`.
        """
        self._groups, self._around_capture = groups, around_capture
        ids = {name: id(x) for name, x in named_tensors(self.model).items()}
        self._real.update({ids[name]: tensor for name, tensor in tensors.items()})
        self._norms.clear()

    @contextmanager
    def training_mode(self, *, training: bool) -> Iterator[None]:
        """Set the model to training or evaluation mode in the block; afterwards each module is as before.

        Modules that were in evaluation mode in a training model, when it was passed, do not train.
        """
        changed = [x for x, trains in self._trained.items() if x.training != (training and trains)]
        for module in changed:
            module.training = not module.training
        try:
            yield
        finally:
            for module in changed:
                module.training = not module.training

    def norms(self, captured: CapturedModel, stage: int) -> tuple[RunningNorm, ...]:
        """Return the norms with moving averages of a stage, on their real buffers."""
        key = captured, stage
        if key not in self._norms:
            layers = captured.layers(stage)
            self._norms[key] = tuple(x.backed_by(self._real) for x in captured.chain.norms(layers.start, layers.stop))
        return self._norms[key]

    def segments(
        self, captured: CapturedModel, module: StageModule, recompute: RecomputeMode, *, by_layer: bool = False
    ) -> tuple[nn.Module, ...]:
        """Return the modules that a stage runs, or one for each layer; raises ModelError for a tensor without memory."""
        key = captured, module.index, recompute, by_layer
        if key not in self._segments:
            stage = self.plan.stages[module.index]
            segments = make_segments(
                captured.chain,
                captured.layers(module.index),
                recompute="selected" if by_layer else recompute,
                selected=captured.chain.names if by_layer else stage.recompute_layers,
                make_layers=lambda first, end: self._layers(captured.chain, first, end, module.enter_layer),
            )
            for segment in segments:
                self._fill(segment)
                set_device(segment, self._device)
            self._segments[key] = segments
        return self._segments[key]

    def _layers(self, chain: Chain, first: int, end: int, at_layer: AtLayer) -> nn.Module:
        """Return layers [first, end) as one module; where layers gather their parameters, as a module of each."""
        if not self._groups:
            return chain.stage(first, end, at_layer=at_layer)
        groups: list[list[ParameterGroup]] = []
        for layer in range(first, end):
            ids = [id(self._real.get(id(x), x)) for x in chain.state(layer).values()]
            groups.append(list(dict.fromkeys(self._groups[x] for x in ids if x in self._groups)))
        return GatheredLayers([chain.stage(x, x + 1, at_layer=at_layer) for x in range(first, end)], groups)

    def _fill(self, segment: nn.Module) -> None:
        """Replace fake tensors by real ones."""
        for path, module in segment.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    held[name] = self._real[id(tensor)] if id(tensor) in self._real else tensor.to(self._device)
                    if is_meta_or_fake(held[name]):
                        raise ModelError(
                            f"{path}.{name} of {self._name} has no values; expected a parameter or a buffer that the "
                            "model's code fills"
                        )

    def _captured(self, inputs: Any, training: bool) -> CapturedModel:
        with self.training_mode(training=training), self._around_capture():
            chain = capture(
                self.model,
                inputs,
                granularity=self.plan.granularity,
                training=training,
                traced=self.plan.model.traced,
                divided=self.plan.model.divided,
                precision=self.plan.precision,
                loss=self._loss,
            )
        self.assigned |= {*chain.assigned}
        chain, starts = _in_plan_order(chain, self.plan, self._name, is_like_plan=training)
        place = {layer: i for i, layer in enumerate(self.plan.layer_names)}
        numbers = _carried([place.get(layer) for layer in chain.names])
        layer_info = tuple(
            LayerInfo(layer, max(0, numbers[i]), seed_key(layer) if chain.draws(i) else None)
            for i, layer in enumerate(chain.names)
        )
        return CapturedModel(chain, starts, layer_info)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer once, by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def set_device(segment: nn.Module, device: torch.device) -> None:
    """Replace the device in every operation of a graph captured on the CPU, of new tensors and of copies alike.

    A copy to the CPU that the author wrote is replaced too: the graph does not show the difference.
    """
    if device.type == "cpu":
        return

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for module in segment.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
            module.recompile()


def _in_plan_order(chain: Chain, plan: Plan, name: str, *, is_like_plan: bool) -> tuple[Chain, tuple[int, ...]]:
    """Return the layers in the plan's order, and the layer at which each stage begins.

    An evaluation may lack layers and have other ones; these stay with the layer before them. Raises FileError if the
    plan was made for other layers.
    """
    if is_like_plan:
        _check_layers(chain, plan, name)
    stage_of = {layer: stage.index for stage in plan.stages for layer in stage.layer_names}
    stages = [max(0, stage) for stage in _carried([stage_of.get(layer) for layer in chain.names])]
    rank = {layer: i for i, layer in enumerate(plan.layer_names)}
    position = _carried([rank.get(layer) for layer in chain.names])
    order = sorted(range(len(chain)), key=lambda i: (stages[i], position[i], i))
    try:
        ordered = chain if order == list(range(len(chain))) else chain.reordered(order)
    except ModelError as error:
        raise FileError(f"the plan's order of layers is impossible: {error}; balance again") from error
    counts = [stages.count(stage.index) for stage in plan.stages]
    return ordered, (0, *accumulate(counts))


def _carried(values: Sequence[int | None]) -> list[int]:
    """Replace each None by the value before it."""
    carried: list[int] = []
    for value in values:
        carried.append(value if value is not None else carried[-1] if carried else -1)
    return carried


def _check_layers(chain: Chain, plan: Plan, name: str) -> None:
    there, planned = {*chain.names}, {*plan.layer_names}
    if there != planned:
        found, made_for = (f"{len(x)} layers ({x[0]} to {x[-1]})" for x in (chain.names, plan.layer_names))
        settings = "".join(f" --set {key}={value}" for key, value in plan.model.settings)
        lacking = [x for x in plan.layer_names if x not in there]
        unplanned = [x for x in chain.names if x not in planned]
        odd = {"plan": lacking, "model": unplanned}
        only = "; ".join(f"only the {where} has {some_names(names)}" for where, names in odd.items() if names)
        raise FileError(
            f"the plan was made for {plan.model.name}{settings} with {made_for}; {name} has {found}; {only}; "
            "build the model with the plan's settings, or profile and balance again"
        )
    if chain.digest() != plan.model.digest:
        dtypes = " and ".join(sorted({str(x.dtype).removeprefix("torch.") for x in chain.model.parameters()}))
        raise FileError(
            f"the plan was made for a {plan.model.name} with other parameters (digest "
            f"{plan.model.digest}, now {chain.digest()} in {dtypes}); profile and balance again with the same settings"
        )
