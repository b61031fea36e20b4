"""Which layer of the author's a traced operation belongs to.

The unit is what the author wrote as one: a block of a ModuleList, a child of a Sequential, or a child of the model.
From the model downwards a module is opened, not kept whole, if it is
  the model itself; a Sequential, ModuleList or ModuleDict; the only child with parameters of an opened module; or a
  child of an opened module that holds a ModuleList (GPT-2's `transformer`, BERT's `encoder`), unless it is itself an
  entry of a list.
"""

from __future__ import annotations

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def unit_paths(model: nn.Module) -> dict[str, str]:
    """For the path of every module inside a unit, the path of its unit; opened modules are left out."""
    units: dict[str, str] = {}
    _open(model, "", units)
    return units


def _open(module: nn.Module, path: str, units: dict[str, str]) -> None:
    children = dict(module.named_children())
    weighty = [name for name, child in children.items() if next(child.parameters(), None) is not None]
    for name, child in children.items():
        child_path = f"{path}.{name}" if path else name
        if _is_opened(child, in_list=isinstance(module, _LISTS), is_only=weighty == [name]):
            _open(child, child_path, units)
        else:
            units.update({_join(child_path, inner): child_path for inner, _ in child.named_modules()})


def _is_opened(module: nn.Module, *, in_list: bool, is_only: bool) -> bool:
    if not any(True for _ in module.children()):
        return False
    if isinstance(module, _LISTS):
        return True
    if in_list:
        return False
    return is_only or any(isinstance(inner, nn.ModuleList) and len(inner) > 1 for inner in module.modules())


def _join(path: str, inner: str) -> str:
    return f"{path}.{inner}" if inner else path
