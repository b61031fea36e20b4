"""The blocks of a model that are alike, so that one of them may speak for the others while the model is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from profiler.capture.layers import unit_paths
from profiler.capture.likeness import OF_EVERY_MODULE, module_key


@dataclass(frozen=True, slots=True)
class Unit:
    """A block that has likes; `group` is equal for blocks that are alike."""

    path: str
    module: nn.Module
    group: tuple[Hashable, Hashable]  # the key of the module, and that of its tensors
    own: tuple[tuple[str, Tensor], ...]  # parameters, buffers and tensor attributes by local name, in a fixed order

    @property
    def num_attributes(self) -> int:
        """Tensors that are neither parameter nor buffer."""
        registered = {id(x) for x in (*self.module.parameters(), *self.module.buffers())}
        return sum(id(tensor) not in registered for _, tensor in self.own)


def alike_units(model: nn.Module) -> list[Unit]:
    """The units of a model of which there are several alike, in the model's order."""
    if any(
        hooks for name, hooks in vars(hooks_of_all).items() if name.startswith("_global") and name.endswith("_hooks")
    ):
        return []
    modules = [(path, model.get_submodule(path)) for path in dict.fromkeys(unit_paths(model).values())]
    times = Counter(id(module) for _, module in modules)
    groups: dict[tuple[Hashable, Hashable], list[Unit]] = {}
    for path, module in modules:
        if times[id(module)] == 1 and not any(_has_hooks(x) for x in module.modules()):
            own = tuple(_own_tensors(module, ""))
            group = module_key(module), _tensors_key([tensor for _, tensor in own])
            groups.setdefault(group, []).append(Unit(path, module, group, own))
    return [unit for units in groups.values() if len(units) > 1 for unit in units]


def _has_hooks(module: nn.Module) -> bool:
    hooks = (value for name, value in module.__dict__.items() if name.endswith("_hooks") and "state_dict" not in name)
    return any(hooks)


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module and of those inside it, in an order that is the same for modules that are alike."""
    attributes = {name: value for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE}
    for values in (module._parameters, module._buffers, dict(sorted(attributes.items()))):
        for name, value in values.items():
            yield from ((prefix + name, x) for x in _tensors_in(value))
    for name, child in module._modules.items():
        if child is not None:
            yield from _own_tensors(child, f"{prefix}{name}.")


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for x in inner:
        yield from _tensors_in(x)


def modules_outside(module: nn.Module, hidden: Container[int]) -> Iterator[nn.Module]:
    """A module and all inside it that are reached without passing through a hidden unit, named by its __dict__'s id."""
    yield module
    for child in module._modules.values():
        if child is not None and id(child.__dict__) not in hidden:
            yield from modules_outside(child, hidden)


def _tensors_key(tensors: Sequence[Tensor]) -> Hashable:
    """Which of some tensors are one, where they are and of which class."""
    return same_as(tensors), tuple((x.device, type(x)) for x in tensors)


def same_as(values: Sequence[object]) -> tuple[int, ...]:
    """For each value the place of the first that is the very same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(value), place) for place, value in enumerate(values))
