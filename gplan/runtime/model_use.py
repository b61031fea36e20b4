"""Checks of what a script does with its model beside the pipeline, which stages would not see.

A loss must not read weights of other stages, or buffers that a forward writes: the process of the last stage has no current
values of them. A script must not change the model after it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gplan.core.errors import ModelError, UsageError
from gplan.runtime.capture_cache import CapturedModel, named_tensors
from gplan.runtime.stage_state import StateNames
from gplan_profiler.capture.chain import modules_that_train
from gplan_profiler.capture.module_attributes import attributes_read, changed_since
from gplan_profiler.capture.sequence import SequentialChain
from gplan_profiler.memory.allocations import tensors_in

_VALUES = ("item", "tolist", "__float__", "__bool__", "__int__")
_OF_SHAPES = ("to", "type_as")  # read only dtype and device of a second tensor


class LossReads(TorchFunctionMode):
    """Inside, reading a tensor that the last stage has no current values of raises ModelError.

    So does a leaf that needs a gradient and is none of the model's, where there are replicas, which would not average it.
    """

    def __init__(
        self,
        model: nn.Module,
        usual: CapturedModel,
        names: StateNames,
        *,
        copied: Collection[str],
        tensors: Mapping[str, Tensor],
        num_replicas: int,
    ) -> None:
        """`copied`: the names whose tensors stages do not compute with themselves, as master weights and sharded ones;
        `tensors`: those of this process.
        """
        self._own = {id(x): x for x in tensors.values()} if num_replicas > 1 else None
        self._known: set[int] = set()
        super().__init__()
        written = {id(x) for x in usual.chain.written}
        written |= {id(x) for norm in usual.chain.norms(0, len(usual.chain)) for x in norm.buffers}
        self._refused: dict[int, tuple[Tensor, str]] = {
            id(x): (x, "a tensor that a forward writes") for x in usual.chain.written
        }
        of_last = {*names.used_by_stage[-1]} - {*copied}
        state = named_tensors(model)
        for name, x in state.items():
            if id(x) in written:
                text = f"the buffer {name}, which a forward writes"
            elif isinstance(x, nn.Parameter) and x.requires_grad and name not in of_last:
                text = f"the parameter {name}, which is not on the last stage"
            else:
                continue
            for tensor in (x, tensors.get(name, x)):
                self._refused[id(tensor)] = tensor, text
        for name in of_last:
            x, trained = state[name], tensors.get(name)
            if trained is not None and trained is not x:
                self._refused[id(x)] = x, f"{name} of a model whose copy on {trained.device} is trained"

    def of(self, output: Any) -> LossReads:
        """The same, for the loss of an output of the model."""
        if self._own is not None:
            self._known = {*self._own, *map(id, tensors_in(output)), *self._refused}
        return self

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name.startswith("new_") or name.endswith("_like"):
            return output
        read = args[:1] if name in _OF_SHAPES else (*args, *(kwargs or {}).values())
        for value in read:
            for x in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(x, Tensor):
                    continue
                if self._own is not None and x.is_leaf and x.requires_grad and id(x) not in self._known:
                    raise ModelError(
                        f"the loss has a parameter of its own, of shape {tuple(x.shape)}, which each replica would train for "
                        "itself: make it a part of the model, which returns what the loss needs of it, or plan one replica"
                    )
                text = self._refused.get(id(x), (None, ""))[1]
                remedy = ", or use the optimizer's weight_decay" if isinstance(x, nn.Parameter) else ""
                if text and (name in _VALUES or any(True for _ in tensors_in(output))):
                    raise ModelError(
                        f"the loss reads {text}, so that the process of the loss does not have its current value: compute "
                        f"that part in the model's forward and return it as a second output{remedy}"
                    )
        return output


class UnchangedModel:
    """A model as it was captured: modes and hooks of its modules, its weights, and the attributes that its code reads."""

    def __init__(self, model: nn.Module, usual: CapturedModel) -> None:
        """Raises UsageError for hooks on the backward of a module that is traced."""
        self._model, self._trained = model, modules_that_train(model)
        self._names = {x: path or type(x).__name__ for path, x in model.named_modules()}
        is_run = isinstance(usual.chain, SequentialChain)  # by its own code, which reads all of them as they are
        self._attributes = [] if is_run else attributes_read(model)
        self._parts = {} if is_run else {x: _parts(x) for x in model.modules()}
        for module in self._parts:
            if module._backward_hooks or module._backward_pre_hooks:
                raise UsageError(
                    f"{self._names[module]} has a hook on its backward, which a stage would not run, as stages are traced "
                    "operations: put the hook on a parameter (x.register_hook), or write a torch.autograd.Function"
                )

    def check(self) -> None:
        """Raise UsageError if a script changed the model, or put it in evaluation mode."""
        if not self._model.training:
            raise UsageError(
                f"{type(self._model).__name__} is in evaluation mode; pipe.step expects training mode: call model.train() "
                "first; children that must not train: call their eval() after it, and before gplan.pipeline"
            )
        changed = [f"{path} was changed" for path in changed_since(self._attributes)]
        for module, trains in self._trained.items():
            if module.training != trains:
                changed.append(f"{self._names[module]} was put in {'evaluation' if trains else 'training'} mode")
        for module, parts in self._parts.items():
            if _parts(module) != parts:
                changed.append(f"the hooks, weights, children or the forward of {self._names[module]} were changed")
        if changed:
            raise UsageError(
                f"{changed[0]} after the pipeline was made, whose stages are as the model was then: change it before "
                "gplan.pipeline, make the pipeline again after the change, or pass a value that changes as an input of the model"
            )


def _parts(module: nn.Module) -> tuple[object, ...]:
    """What a call of a module runs and reads, but for its attributes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    held = (module._parameters, module._buffers, module._modules)
    ids = (id(x) for part in held for x in part.values())
    return (module.__dict__.get("forward"), *(tuple(x) for x in hooks if x), *ids)
