"""A model file to what can be measured and trained: the model, and beside it inputs, loss, optimizer and batches.

The model is named `model.py`, `model.py:NAME` or `package.module:NAME`; NAME (by default `model`) is an nn.Module, a
list of modules, a class, or a function that returns `model` or `(model, inputs)`. Settings go to every function of the
file that has a parameter of that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gplan.errors import ModelError, UsageError
from profiler.sequence import as_sequential
from profiler.settings import Setting

Batch: TypeAlias = tuple[Any, Any]  # inputs as the model is called with, target as the loss wants it

_FUNCTIONS = ("example_inputs", "loss", "optimizer", "batches")
_REMEDIES = {
    "example_inputs": "def example_inputs(batch_size):\n    return torch.randn(batch_size, 3, 32, 32)",
    "loss": "def loss(output, target):\n    return torch.nn.functional.cross_entropy(output, target)",
    "optimizer": "def optimizer(parameters):\n    return torch.optim.AdamW(parameters, lr=1e-3)",
    "batches": "def batches(batch_size):\n    while True:\n        yield inputs, target",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A loaded model and the functions defined beside it."""

    name: str  # as the user named it
    model: nn.Module
    settings: tuple[tuple[str, str], ...]
    functions: Mapping[str, Callable[..., Any]]  # with their settings filled in
    fixed_inputs: Any = None  # inputs that came with the model, or None
    in_memory: bool = False  # handed over as an object, not as a file

    def example_inputs(self, batch_size: int) -> Any:
        """Inputs for one micro-batch of `batch_size` samples, on the CPU."""
        if "example_inputs" in self.functions:
            return self._call("example_inputs", batch_size)
        if self.fixed_inputs is not None:
            return _resized(self.fixed_inputs, batch_size)
        if "batches" in self.functions:
            return next(self.batches(batch_size))[0]
        raise self._missing("example_inputs", ", or describe the inputs with --input-shape 8,3,224,224")

    def loss(self, output: Any, target: Any) -> Tensor:
        """The loss of one micro-batch, checked to be a scalar tensor."""
        value = self._call("loss", output, target)
        if not isinstance(value, Tensor):
            raise ModelError(f"loss in {self.name} returned a {type(value).__name__}; expected a scalar tensor")
        if value.dim() != 0:
            shape = tuple(value.shape)
            raise ModelError(f"loss in {self.name} returned shape {shape}; expected a scalar, (); use .mean()")
        return value

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The file's optimizer over some of the model's parameters."""
        found = self._call("optimizer", list(parameters))
        if not isinstance(found, torch.optim.Optimizer):
            kind = type(found).__name__
            raise ModelError(f"optimizer in {self.name} returned a {kind}; expected a torch.optim.Optimizer")
        return found

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Pairs of inputs and target; a finite source begins again when it ends."""
        while True:
            source, empty = self._call("batches", batch_size), True
            for batch in self._guarded(source):
                empty = False
                if not (isinstance(batch, tuple | list) and len(batch) == 2):
                    raise ModelError(f"batches in {self.name} gave a {type(batch).__name__}; expected (inputs, target)")
                yield batch[0], batch[1]
            if empty:
                raise ModelError(f"batches in {self.name} gave nothing; expected (inputs, target) pairs")

    def _guarded(self, source: Any) -> Iterator[Any]:
        """What the file's batches give; their errors name the file and the line."""
        try:
            yield from iter(source)
        except Exception as error:
            raise ModelError(f"batches in {self.name} failed: {describe(error)}") from error

    def has(self, function: str) -> bool:
        """Whether the file defines the function."""
        return function in self.functions

    @property
    def gives_loss(self) -> bool:
        """Whether there is a loss and data to compute it from."""
        return self.has("loss") and self.has("batches")

    def require(self, *functions: str) -> None:
        """Raise ModelError, with the lines that would supply it, for the first function that is missing."""
        for function in functions:
            if function not in self.functions:
                raise self._missing(function)

    def _call(self, function: str, *args: Any) -> Any:
        self.require(function)
        try:
            return self.functions[function](*args)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{function} in {self.name} failed: {describe(error)}") from error

    def _missing(self, function: str, otherwise: str = "") -> ModelError:
        return ModelError(f"{self.name} defines no {function}; add it{otherwise}:\n{_REMEDIES[function]}")


def load_model_file(
    reference: str, *, settings: Mapping[str, Setting] | None = None, input_shapes: str | None = None, seed: int = 0
) -> ModelFile:
    """Load what `reference` names and build the model with `settings`, weights drawn from `seed`.

    Raises ModelError for a file that cannot be imported or has no model, UsageError for settings nobody takes.
    """
    settings = dict(settings or {})
    module, attribute = _module_of(reference)
    target = _attribute(module, attribute, reference)
    functions = {x: f for x in _FUNCTIONS if callable(f := getattr(module, x, None))}
    _check_settings(settings, [target, *functions.values()], reference)
    torch.manual_seed(seed)
    model, inputs = _built(target, settings, reference)
    bound = {name: _with_settings(function, settings) for name, function in functions.items()}
    if input_shapes is not None:
        inputs = parse_input_shapes(input_shapes)
        if "batches" in bound:
            raise UsageError(f"--input-shape {input_shapes}: {reference} gives its own inputs by batches; leave it out")
        bound.pop("example_inputs", None)
    return ModelFile(
        name=reference,
        model=model,
        settings=tuple(sorted((key, str(value)) for key, value in settings.items())),
        functions=bound,
        fixed_inputs=inputs,
    )


def model_in_memory(
    model: nn.Module,
    *,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
) -> ModelFile:
    """What a model file would give, from objects at hand. `inputs` may be a function of the batch size."""
    given = {"loss": loss, "optimizer": optimizer, "batches": batches}
    given["example_inputs"] = inputs if callable(inputs) else None
    return ModelFile(
        name=type(model).__name__,
        model=model,
        settings=(),
        functions={name: function for name, function in given.items() if function is not None},
        fixed_inputs=None if callable(inputs) else inputs,
        in_memory=True,
    )


def parse_input_shapes(text: str) -> Any:
    """Random tensors from a description: `8,512:int64` or, for several inputs, `8,3,32,32;8,10`.

    Raises UsageError for a shape or dtype that cannot be read.
    """
    tensors = tuple(_described_tensor(part) for part in text.split(";"))
    return tensors if len(tensors) > 1 else tensors[0]


def describe(error: BaseException) -> str:
    """An exception in one line, with the author's line it arose at."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "site-packages" not in x.filename]
    ours = (str(Path(__file__).parent), "<frozen")
    own = [x for x in frames if not x.filename.startswith(ours)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}{where}"


def _module_of(reference: str) -> tuple[ModuleType, str]:
    place, _, attribute = reference.partition(":")
    path = Path(place)
    try:
        if path.suffix == ".py":
            return _module_from_path(path), attribute
        if path.exists():
            raise ModelError(f"{place} is not a Python file; expected model.py, model.py:NAME or package.module:NAME")
        return importlib.import_module(place), attribute
    except ModelError:
        raise
    except ModuleNotFoundError as error:
        if error.name == place.split(".")[0]:
            raise ModelError(f"no module or file is named {place}; expected model.py or package.module:NAME") from error
        raise ModelError(f"{place} does not import: {describe(error)}; install it or mend the import") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"{place} does not import: {describe(error)}") from error


def check_is_there(path: Path) -> None:
    """Raise ModelError, with the folder that was looked in, for a model file that does not exist."""
    if not path.is_file():
        where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise ModelError(
            f"{path} is not there{where}; name a Python file that defines a model: gplan VERB PATH/model.py"
        )


def _module_from_path(path: Path) -> ModuleType:
    check_is_there(path)
    spec = importlib.util.spec_from_file_location(f"gplan_model_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _attribute(module: ModuleType, attribute: str, reference: str) -> Any:
    found = getattr(module, attribute or "model", None)
    if found is not None:
        return found
    own = [name for name, value in vars(module).items() if _could_be_model(value, module)]
    candidates = f"; it has {', '.join(own)}: write {reference.partition(':')[0]}:{own[0]}" if own else ""
    raise ModelError(f"{reference} has no {attribute or 'model'}{candidates or '; define a function model()'}")


def _could_be_model(value: object, module: ModuleType) -> bool:
    if isinstance(value, nn.Module):
        return True
    defined_here = getattr(value, "__module__", None) == module.__name__
    return defined_here and inspect.isclass(value) and issubclass(value, nn.Module)


def _built(target: Any, settings: Mapping[str, Setting], reference: str) -> tuple[nn.Module, Any]:
    """The model, and the inputs that came with it or None."""
    made = target
    if not isinstance(target, nn.Module | list | tuple):
        if not callable(target):
            kind = type(target).__name__
            raise ModelError(f"{reference} is a {kind}; expected an nn.Module, a class, a function or a list")
        try:
            made = _with_settings(target, settings)()
        except (Exception, SystemExit) as error:
            raise ModelError(f"{reference} could not build its model: {describe(error)}") from error
    inputs = None
    if isinstance(made, tuple) and len(made) == 2 and not isinstance(made[1], nn.Module):
        made, inputs = made
    if isinstance(made, list | tuple):
        made = as_sequential(made)
    if not isinstance(made, nn.Module):
        raise ModelError(f"{reference} gave a {type(made).__name__}; expected an nn.Module, or (model, inputs)")
    return made, inputs


def _accepted(function: Any) -> tuple[set[str], bool]:
    """The keyword parameters of a function, and whether it takes any keyword."""
    if isinstance(function, nn.Module) or not callable(function):
        return set(), False
    parameters = inspect.signature(function).parameters.values()
    named = {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
    return named, any(x.kind is x.VAR_KEYWORD for x in parameters)


def _with_settings(function: Callable[..., Any], settings: Mapping[str, Setting]) -> Callable[..., Any]:
    named, takes_all = _accepted(function)
    own = {key: value for key, value in settings.items() if takes_all or key in named}
    return lambda *args: function(*args, **own)


def _check_settings(settings: Mapping[str, Setting], functions: Sequence[Any], reference: str) -> None:
    accepted = [_accepted(function) for function in functions]
    known = set().union(*(named for named, _ in accepted)) - {"batch_size", "output", "target", "parameters"}
    unknown = [key for key in settings if key not in known]
    if unknown and not any(takes_all for _, takes_all in accepted):
        choices = ", ".join(sorted(known)) or "no settings at all"
        raise UsageError(f"--set {unknown[0]}: nothing in {reference} takes it; expected {choices}")


def _described_tensor(text: str) -> Tensor:
    shape, _, kind = text.strip().partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input-shape {text!r}: {kind!r} is not a torch dtype; expected int64, float32 or the like")
    try:
        sizes = tuple(int(size) for size in shape.split(","))
        if min(sizes) < 1:
            raise ValueError
    except ValueError as error:
        raise UsageError(f"--input-shape {text!r}: {shape!r} is not a shape; write it like 8,3,224,224") from error
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, dtype=dtype)
    return torch.randint(0, 2, sizes, dtype=dtype)


def _resized(inputs: Any, batch_size: int) -> Any:
    """The same inputs with another number of samples: rows repeated or left out."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value[torch.arange(batch_size) % value.shape[0]]

    return torch.utils._pytree.tree_map(resize, inputs)
