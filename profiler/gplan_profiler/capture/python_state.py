"""State in Python, outside a model's modules, that a forward changes: a global list of auxiliary losses, a counter.

A trace runs a forward once, so in training the state stays as it was then; and each stage is in another process. What a
function can read is found by the names in its code: globals, closures, default arguments, and from there attributes,
entries of containers and the functions that it can call. Not found: names that code computes (`getattr`), and state
inside other libraries, of which `_NOT_FOLLOWED` are some.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

from gplan.core.errors import ModelError
from gplan_profiler.capture.authored_layers import OF_EVERY_MODULE, PLAIN, names_in
from gplan_profiler.capture.module_attributes import NOT_OF_A_FORWARD
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.model.error_location import is_authors
from gplan_profiler.torch_compat import FakeTensor

_MOST_VALUES = 20_000  # that are followed from one function
_MOST_ENTRIES = 1_000  # of one container
_LOGS = frozenset({
    "print", "warn", "debug", "info", "warning", "error", "critical", "log", "log_dict", "add_scalar", "add_scalars", "add_histogram",
})  # fmt: skip
_KEY_AT_END = re.compile(r"\['([^']+)'\]$")
_NUMBERS = (bool, int, float, complex, type(None))
_RESTORED = (list, dict, set, deque, defaultdict, OrderedDict)
_IN_CLASSES = (staticmethod, classmethod, property)  # beside functions
_CONTAINERS = (list, tuple, deque, set, frozenset)
_NOT_FOLLOWED = frozenset({"torch", "numpy", "transformers", "gplan", "gplan_profiler", *sys.stdlib_module_names})

State: TypeAlias = dict[str, tuple[object, object]]
"""By the path in Python: a number or a tensor, and what changes when it is written."""


_Functions: TypeAlias = list[tuple[FunctionType, set[str]]]
"""Each with its names: its own and those in classes."""


class StateError(ModelError):
    """A loss reads what a forward changes, or a forward counts its calls."""


@contextmanager
def changed_state_refused(loss: Callable[..., Any] | None, model: nn.Module) -> Iterator[None]:
    """Raise StateError after the block, which runs the model's forward, if it changed what the loss can read.

    The model's own modules are left out; see module_attributes.py.
    """
    roots = {} if loss is None else {"": loss}
    before = read_state(roots, model)
    yield
    changed = next(_changed(before, read_state(roots, model)), None)
    if changed is not None:
        raise StateError(
            f"the loss reads {changed}, which the forward of {type(model).__name__} changes, in a process of its own in training: "
            "return what the loss needs from the model's forward, as a second output"
        )


@contextmanager
def counters_refused(model: nn.Module) -> Iterator[None]:
    """Raise StateError after the block, which traces the model's forward, if that counts in a number and reads it."""
    roots = _code_of(model)
    before = {**read_state(roots, model), **_numbers_of(model)}
    yield
    after = {**read_state(roots, model), **_numbers_of(model)}
    functions: _Functions | None = None
    for path in _changed(before, after):
        if not all(isinstance(x[path][0], int | float) for x in (before, after) if path in x):
            continue
        functions = functions or _called(roots, model)
        line = _line_of_reading(functions, _last_name(path))
        if line is not None:
            raise StateError(
                f"the forward of {type(model).__name__} counts in {path} and reads it ({line}); layers are traced once, so "
                "that in training it would keep the value that it had then: pass the number to the model as an input, or "
                "keep it in a registered buffer that operations read, as in torch.where(self.step < 100, x, y)"
            )


@contextmanager
def containers_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards restore lists, dicts and sets that the model's code can reach, if they hold fake tensors of a trace then."""
    reached = (x for _, x in _reachable(_code_of(model), model) if type(x) in _RESTORED)
    before: list[tuple[Any, list[Any]]] = [(x, _entries(x)) for x in reached]
    try:
        yield
    finally:
        for container, entries in before:
            if any(isinstance(x, FakeTensor) for x in tensors_in(_entries(container))):
                container.clear()
                if isinstance(container, dict):
                    container.update(zip(entries[::2], entries[1::2], strict=True))
                else:
                    (container.update if isinstance(container, set) else container.extend)(entries)


def _entries(container: Any) -> list[Any]:
    """The entries; of a dict, keys and values by turns."""
    return [y for x in container.items() for y in x] if isinstance(container, dict) else list(container)


def _code_of(model: nn.Module) -> dict[str, object]:
    """The classes of a model's modules, their hooks, and attributes such as functions and lists."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        if _is_followed(type(module).__module__):
            found[type(module).__name__] = type(module)
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = {
            name: x for name, x in module.__dict__.items() if name not in OF_EVERY_MODULE and not isinstance(x, PLAIN)
        }
        own.update((f"a hook of {path or type(module).__name__}", x) for x in hooks)
        found.update((f"{path}.{name}".lstrip("."), x) for name, x in own.items())
    return found


def _numbers_of(model: nn.Module) -> State:
    """The modules' attributes that are numbers, by path."""
    return {
        f"{path}.{name}".lstrip("."): (value, (type(value), repr(value)))
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, _NUMBERS)
    }


def _last_name(path: str) -> str:
    """The attribute, or the key of the entry, at the end of a path in Python."""
    key = _KEY_AT_END.search(path)
    return path.rpartition(".")[2] if key is None else key[1]


def _called(roots: Mapping[str, object], model: nn.Module) -> _Functions:
    """Functions that others may call: not methods whose names no code has, such as one for the training script."""
    reached = [x for _, x in _reachable(roots, model)]
    functions = [x for x in reached if isinstance(x, FunctionType)]
    holders = (x for x in reached if not isinstance(x, (type, FunctionType, *_IN_CLASSES)))
    held = {id(x) for x in (*roots.values(), *(y for x in holders for _, y in _parts("", x)))}
    named = {x for function in functions for x in (*names_in(function.__code__), *_texts_in(function))}
    named.add("forward")
    names = {id(x): {x.__name__} for x in functions}
    for kind in (x for x in reached if isinstance(x, type)):
        for path, x in _parts("", kind):
            wrapped = [y for _, y in _parts(path, x)] if isinstance(x, _IN_CLASSES) else [x]
            for function in wrapped:
                names.get(id(function), set()).add(_last_name(path))
    while True:
        called = [
            (x, names[id(x)])
            for x in functions
            if not names[id(x)] <= NOT_OF_A_FORWARD
            and (id(x) in held or _is_no_method(x) or names[id(x)] & named or x.__name__.startswith("__"))
        ]
        inner = {id(y) for x, _ in called for _, y in _of_function(x)}  # such as what a decorator was given
        if inner <= held:
            return called
        held |= inner


def _texts_in(function: FunctionType) -> Iterator[str]:
    """The constant texts in a function's own code, which `getattr` may be given."""
    return (x for x in function.__code__.co_consts if isinstance(x, str))


def _is_no_method(function: FunctionType) -> bool:
    owner = function.__qualname__.rpartition(".")[0]
    return not owner or owner.endswith("<locals>")


def _line_of_reading(functions: _Functions, name: str) -> str | None:
    """Where one of some functions reads a name by which one of them counts (`x += 1`, `x = x + 1`); None: nowhere.

    Reading it for a message alone does not count, unless the author's own code takes the message.
    """
    counts, line = False, None
    logs = _LOGS.difference(*(names for x, names in functions if is_authors(x.__code__.co_filename)))
    for function, _ in functions:
        try:
            lines, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):  # code without a file
            continue
        updates = [x for x in ast.walk(tree) if _is_update(x, name)]
        counts |= bool(updates)
        without_effect = [*updates, *(x for x in ast.walk(tree) if isinstance(x, ast.stmt) and _only_logs(x, logs))]
        own = {id(y) for x in without_effect for y in ast.walk(x)}
        found = next((x for x in ast.walk(tree) if id(x) not in own and _is_read(x, name)), None)
        if found is not None and line is None:
            place = first + getattr(found, "lineno", 1) - 1
            line = f"{Path(function.__code__.co_filename).name}, line {place}"
    return line if counts else None


def _only_logs(statement: ast.stmt, logs: Set[str]) -> bool:
    """Whether a statement only writes messages, such as `if self.step % 100 == 0: print(self.step)`."""
    if isinstance(statement, ast.If):
        return all(_only_logs(x, logs) for x in (*statement.body, *statement.orelse))
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _name_of(call.func) in logs


def _is_update(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return _name_of(node.target) == name
    if isinstance(node, ast.Assign):
        return any(_name_of(x) == name for x in node.targets) and any(_is_read(x, name) for x in ast.walk(node.value))
    if isinstance(node, ast.Call) and _name_of(node.func) == "setattr":
        return _text_at(node, 1) == name and any(_is_read(x, name) for x in ast.walk(node))
    return False


def _is_read(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and _name_of(node.func) in ("getattr", "get"):
        return name in (_text_at(node, 0), _text_at(node, 1))
    return isinstance(getattr(node, "ctx", None), ast.Load) and _name_of(node) == name


def _name_of(node: ast.AST) -> str | None:
    """The name of a variable or an attribute, or the key of an entry."""
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else None
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _text_at(call: ast.Call, place: int) -> str | None:
    """The argument at a place if it is a constant text."""
    found = call.args[place] if place < len(call.args) else None
    return found.value if isinstance(found, ast.Constant) and isinstance(found.value, str) else None


def read_state(roots: Mapping[str, object], model: nn.Module) -> State:
    """All numbers and tensors that can be read from some objects."""
    found: State = {}
    for path, value in _reachable(roots, model):
        if isinstance(value, Tensor):
            found.setdefault(path, (value, (id(value), 0 if value.is_inference() else value._version)))
        elif isinstance(value, _NUMBERS):
            found.setdefault(path, (value, (type(value), repr(value))))
    return found


def _changed(before: State, after: State) -> Iterator[str]:
    """Paths with another value than before, or with one that was not there."""
    for path, (_, mark) in after.items():
        if path not in before or before[path][1] != mark:
            yield path


def _reachable(roots: Mapping[str, object], model: nn.Module) -> Iterator[tuple[str, object]]:
    """Every value that can be reached, with its path, the nearest first."""
    seen: dict[int, object] = {id(x): x for x in model.modules()}  # the objects too, so that no id is used again
    queue = deque(roots.items())
    for _ in range(_MOST_VALUES):
        if not queue:
            return
        path, value = queue.popleft()
        if isinstance(value, _NUMBERS):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        queue.extend(_parts(path, value))


def _parts(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """What can be read from a value at once."""
    if isinstance(value, (Tensor, str, bytes, ModuleType)):
        return
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from ((path, x) for x in (value.__func__, value.__self__))
    elif isinstance(value, BuiltinMethodType):
        yield path, value.__self__
    elif isinstance(value, partial):
        yield from ((path, x) for x in (value.func, value.args, value.keywords))
    elif isinstance(value, staticmethod | classmethod):
        yield path, value.__func__
    elif isinstance(value, property):
        yield from ((path, x) for x in (value.fget,) if x is not None)
    elif isinstance(value, ContextVar):
        yield f"{value.name}.get()", value.get(None)
    elif isinstance(value, type):
        if not _is_followed(value.__module__):
            return
        for kind in value.__mro__:
            if _is_followed(kind.__module__):
                yield from ((f"{path}.{name}", x) for name, x in list(vars(kind).items()) if not name.startswith("__"))
        yield from ((f"{path}.__call__", x) for x in (vars(value).get("__call__"),) if x is not None)
    else:
        if isinstance(value, dict):
            entries = list(value.items())[:_MOST_ENTRIES]
            yield from ((f"{path}[{key!r:.40}]", x) for key, x in entries)
        elif isinstance(value, _CONTAINERS):
            entries = list(value)[:_MOST_ENTRIES]
            yield from ((f"{path}[{place}]", x) for place, x in enumerate(entries))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}".lstrip("."), x) for name, x in list(attributes.items()))
        for kind in type(value).__mro__:
            for name in _slots_of(kind):
                if hasattr(value, name):
                    yield f"{path}.{name}".lstrip("."), getattr(value, name)
        yield path or type(value).__name__, type(value)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ()) if _is_followed(kind.__module__) else ()
    return (slots,) if isinstance(slots, str) else tuple(x for x in slots if not x.startswith("__"))


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What the code of a function names, and what is kept with it."""
    if not _is_followed(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from (("a default argument", x) for x in (function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((f"{function.__name__}.{name}", x) for name, x in list(vars(function).items()))
    names = names_in(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield name, value
        elif _is_followed(value.__name__):
            yield from ((f"{name}.{x}", vars(value)[x]) for x in sorted(names & vars(value).keys()))


def _is_followed(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_FOLLOWED
