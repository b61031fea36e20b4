"""State in Python that a forward changes: a counter, a list that grows, an iterator, a global list of auxiliary losses.

A trace runs a forward once, so in training the state stays as it was then; a child of a sequence runs for each
micro-batch, and again where it is recomputed; and each stage is in another process. What code can read is found by the
names in it: globals, closures, default arguments, and from there attributes, entries of containers and the functions
that it can call. A forward is refused for state that every call changes, also with inputs that it had just before, and
that its code reads by name, or by a name that it computes (`getattr`). A cache or a last result settles, and is accepted.
Not found is state inside other libraries, of which `_NOT_FOLLOWED` are some.
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
from dataclasses import dataclass
from functools import partial
from itertools import count
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
_END_OF_PATH = re.compile(r"([^.\[\]]+)(?:\[[^\[\]]*\])*?(?:\[([^\[\]]*)\])?$")  # a name, and the key of an entry
_MOST_CHARACTERS = 40  # of a key
_RESTORED = (list, dict, set, deque, defaultdict, OrderedDict)
_IN_CLASSES = (staticmethod, classmethod, property)  # beside functions
_CONTAINERS = (list, tuple, deque, set, frozenset)
_NOT_FOLLOWED = frozenset({  # "_pytest" is what an assert calls in a test's module
    "torch", "numpy", "transformers", "gplan", "gplan_profiler", "_pytest", *sys.stdlib_module_names,
})  # fmt: skip

State: TypeAlias = dict[str, tuple[object, object]]
"""By the path in Python: a plain value, a tensor, a container or an iterator, and what changes when it does."""


_Functions: TypeAlias = list[tuple[FunctionType, set[str]]]
"""Each with its names: its own and those in classes."""


class StateError(ModelError):
    """A loss reads what a forward changes, or a forward what it changes at every call."""


@contextmanager
def changed_state_refused(loss: Callable[..., Any] | None, model: nn.Module) -> Iterator[None]:
    """Raise StateError after the block, which runs the model's forward, if it changed what the loss can read.

    The model's own modules are left out; see module_attributes.py.
    """
    roots = {} if loss is None else {"": loss}
    before = read_state(roots, model)
    yield
    for changed, value in _changed(before, read_state(roots, model)):
        if isinstance(value, Iterator):
            continue
        raise StateError(
            f"the loss reads {changed}, which the forward of {type(model).__name__} changes, in a process of its own in training: "
            "return what the loss needs from the model's forward, as a second output"
        )


@contextmanager
def readings_of_changes(model: nn.Module) -> Iterator[dict[str, str]]:
    """Inside, the model's forward runs once; then the dict has the state that it changed and reads: path to line."""
    found: dict[str, str] = {}
    before = state_of(model)
    yield found
    roots = _code_of(model)
    functions: _Functions | None = None
    for path, value in _changed(before, read_state(roots, model)):
        if not isinstance(value, Tensor):
            functions = functions or _called(roots, model)
            line = _line_of_reading(functions, path, is_written=isinstance(value, Iterator))
            if line is not None:
                found[path] = line


def state_of(model: nn.Module) -> State:
    """What the code of a model can read now."""
    return read_state(_code_of(model), model)


def check_settled(model: nn.Module, before: State, after: State, readings: Mapping[str, str]) -> None:
    """Raise StateError if one of some states differs before and after a call with inputs that the model had just before."""
    for path, _ in _changed(before, after):
        if path in readings:
            raise StateError(
                f"the forward of {type(model).__name__} changes {path} at every call and reads it ({readings[path]}); layers are "
                "traced once, or run again for every micro-batch and recompute, so that in training it would have another value: "
                "pass it to the model as an input, or keep it in a registered buffer that operations read, as in "
                "torch.where(self.step < 100, x, y)"
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
        own = {name: x for name, x in module.__dict__.items() if name not in OF_EVERY_MODULE}
        own.update((f"a hook of {path or type(module).__name__}", x) for x in hooks)
        found.update((f"{path}.{name}".lstrip("."), x) for name, x in own.items())
    return found


def _called(roots: Mapping[str, object], model: nn.Module) -> _Functions:
    """Functions that others may call: not methods whose names no code has, such as one for the training script."""
    reached = [x for _, x in _reachable(roots, model)]
    functions = [x for x in reached if isinstance(x, FunctionType)]
    holders = (x for x in reached if not isinstance(x, (type, FunctionType, *_IN_CLASSES)))
    held = {id(x) for x in (*roots.values(), *(y for x in holders for _, y in _parts("", x)))}
    named = {"forward"}  # and what code names, also in texts, which `getattr` may be given
    for function in functions:
        named |= names_in(function.__code__) | {x for x in function.__code__.co_consts if isinstance(x, str)}
    names = {id(x): {x.__name__} for x in functions}
    for kind in (x for x in reached if isinstance(x, type)):
        for path, x in _parts("", kind):
            wrapped = [y for _, y in _parts(path, x)] if isinstance(x, _IN_CLASSES) else [x]
            for y in wrapped:
                names.get(id(y), set()).add(path.rpartition(".")[2])

    def is_no_method(function: FunctionType) -> bool:
        owner = function.__qualname__.rpartition(".")[0]
        return not owner or owner.endswith("<locals>")

    while True:
        called = [
            (x, names[id(x)])
            for x in functions
            if not names[id(x)] <= NOT_OF_A_FORWARD
            and (id(x) in held or is_no_method(x) or names[id(x)] & named or x.__name__.startswith("__"))
        ]
        inner = {id(y) for x, _ in called for _, y in _of_function(x)}  # such as what a decorator was given
        if inner <= held:
            return called
        held |= inner


def _line_of_reading(functions: _Functions, path: str, *, is_written: bool) -> str | None:
    """Where one of some functions reads the state at the end of a path; unless `is_written` by name, also a computed name.

    Reading it to change it (`x += 1`, `x.append(y)`) does not count, nor for a message, unless the author's own code takes
    the message.
    """
    end = _END_OF_PATH.search(path)
    state = _Named(*end.groups()) if end else _Named(path, None)
    lines = dict[bool, str]()
    logs = _LOGS.difference(*(names for x, names in functions if is_authors(x.__code__.co_filename)))
    for function, _ in functions:
        try:
            source, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(source)))
        except (OSError, TypeError, SyntaxError):  # code without a file
            continue
        nodes = [*ast.walk(tree)]
        is_written |= any(state.is_changed_by(x) for x in nodes)
        without_effect = [x for x in nodes if state.has_no_effect(x, logs)]
        own = {id(y) for x in without_effect for y in ast.walk(x)} | {
            id(_read_from(x)) for x in nodes if state.is_other(x)
        }
        for node in nodes:
            is_computed = _is_computed(node)
            if id(node) not in own and (is_computed or state.is_read_by(node)) and is_computed not in lines:
                place = first + getattr(node, "lineno", 1) - 1
                lines[is_computed] = f"{Path(function.__code__.co_filename).name}, line {place}"
    return lines.get(False) or (None if is_written else lines.get(True))


@dataclass(frozen=True, slots=True)
class _Named:
    """State as code names it: a variable, an attribute, or an entry of one."""

    name: str
    key: str | None  # as Python writes it

    def is_meant_by(self, node: ast.AST) -> bool:
        """Whether an expression is the state, or may be."""
        if isinstance(node, ast.Subscript):
            key = _constant(node.slice)
            is_ours = self.key is not None and self.key[:1] in "'\"" and key == self.key  # of a container by any name
            return is_ours or (key in (None, self.key) and self.is_meant_by(node.value))
        return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) == self.name

    def is_other(self, node: ast.AST) -> bool:
        """Whether a node reads another entry of the same container."""
        key = _constant(node.slice) if isinstance(node, ast.Subscript) else _constant_argument(node, "get", 0)
        return key not in (None, self.key)

    def is_changed_by(self, node: ast.AST) -> bool:
        """Whether a node changes the state and nothing else."""
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            return self.is_meant_by(node.target)
        if isinstance(node, ast.Assign | ast.Delete):
            return all(map(self.is_meant_by, node.targets))
        call = node.value if isinstance(node, ast.Expr) else node
        if not isinstance(call, ast.Call):
            return False
        is_dropped = call is not node and isinstance(call.func, ast.Attribute)
        return self._is(_constant_argument(call, "setattr", 1)) or (is_dropped and self.is_meant_by(_read_from(call)))

    def is_read_by(self, node: ast.AST) -> bool:
        """Whether a node reads the state."""
        if self._is(_constant_argument(node, "getattr", 1)) or self._is(_constant_argument(node, "get", 0)):
            return True
        return isinstance(getattr(node, "ctx", None), ast.Load) and self.is_meant_by(node)

    def has_no_effect(self, node: ast.AST, logs: Set[str]) -> bool:
        """Whether a node only changes the state or writes messages, as `if self.step % 100 == 0: print(self.step)`."""
        if isinstance(node, ast.If):
            return all(self.has_no_effect(x, logs) for x in (*node.body, *node.orelse))
        call = node.value if isinstance(node, ast.Expr) else None
        is_log = isinstance(call, ast.Call) and _name_of(call.func) in logs
        return (
            is_log
            or self.is_changed_by(node)
            or (_is_call(node, "setattr", 2) and _constant_argument(node, "setattr", 1) is None)
        )

    def _is(self, text: str | None) -> bool:
        return text is not None and text in (self.key, repr(self.name))


def _is_computed(node: ast.AST) -> bool:
    """Whether a node reads an attribute by a name that code computes."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__"
    return _is_call(node, "vars", 1) or (
        _is_call(node, "getattr", 2) and _constant_argument(node, "getattr", 1) is None
    )


def _read_from(node: ast.AST) -> ast.AST:
    """The container of an entry, or the object of a method's call."""
    return (
        node.func.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        else getattr(node, "value", node)
    )


def _is_call(node: ast.AST, name: str, num_arguments: int) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) == name and len(node.args) >= num_arguments


def _name_of(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _constant(node: ast.AST) -> str | None:
    """A constant as Python writes it; None for other expressions."""
    return f"{node.value!r:.{_MOST_CHARACTERS}}" if isinstance(node, ast.Constant) else None


def _constant_argument(node: ast.AST, name: str, place: int) -> str | None:
    """The argument at a place of a call of a function or method of this name."""
    return _constant(node.args[place]) if _is_call(node, name, place + 1) else None  # type: ignore[attr-defined]


def read_state(roots: Mapping[str, object], model: nn.Module) -> State:
    """All plain values, tensors, containers and iterators that can be read from some objects."""
    found: State = {}
    for path, value in _reachable(roots, model):
        if isinstance(value, Tensor):
            found.setdefault(path, (value, (id(value), 0 if value.is_inference() else value._version)))
        elif isinstance(value, PLAIN):
            found.setdefault(path, (value, (type(value), repr(value))))
        elif isinstance(value, (dict, *_CONTAINERS)):
            found.setdefault(path, (value, len(value)))
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__") and path[-1:] != "]":
            # iterators of Python itself do not show their place, but for counters, as of ids in a library
            found.setdefault(path, (value, repr(value) if isinstance(value, count) else object()))
    return found


def _changed(before: State, after: State) -> Iterator[tuple[str, object]]:
    """Paths with another value than before, or with one that was not there; and the value."""
    for path, (value, mark) in after.items():
        if path not in before or before[path][1] != mark:
            yield path, value


def _reachable(roots: Mapping[str, object], model: nn.Module) -> Iterator[tuple[str, object]]:
    """Every value that can be reached, with its path, the nearest first."""
    seen: dict[int, object] = {id(x): x for x in model.modules()}  # the objects too, so that no id is used again
    most = len(seen) + _MOST_VALUES
    queue = deque(roots.items())
    while queue and len(seen) < most:
        path, value = queue.popleft()
        if isinstance(value, PLAIN):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        queue.extend(_parts(path, value))


def _parts(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """What can be read from a value at once."""
    if isinstance(value, Tensor | ModuleType):
        return
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from ((path, x) for x in (value.__func__, value.__self__))
    elif isinstance(value, BuiltinMethodType):
        yield f"{path}.__self__", value.__self__  # called by its name, not read
    elif isinstance(value, partial):
        yield from ((path, x) for x in (value.func, value.args, value.keywords))
    elif isinstance(value, staticmethod | classmethod):
        yield path, value.__func__
    elif isinstance(value, property):
        yield from ((path, x) for x in (value.fget,) if x is not None)
    elif isinstance(value, ContextVar):
        yield value.name, value.get(None)
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
            yield from ((f"{path}[{key!r:.{_MOST_CHARACTERS}}]", x) for key, x in entries)
        elif isinstance(value, _CONTAINERS):
            entries = list(value)[:_MOST_ENTRIES]
            yield from ((f"{path}[{place}]", x) for place, x in enumerate(entries))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}".lstrip("."), x) for name, x in list(attributes.items()))
        for kind in filter(lambda x: _is_followed(x.__module__), type(value).__mro__):
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(value, name):
                    yield f"{path}.{name}".lstrip("."), getattr(value, name)
        yield path or type(value).__name__, type(value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What the code of a function names, and what is kept with it."""
    if not _is_followed(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
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
