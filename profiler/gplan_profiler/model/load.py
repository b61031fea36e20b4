"""Load a model file: the model, and its inputs, loss, optimizer, scheduler and batches.

The model of a file is an nn.Module, a list of modules, a class, or a function that returns `model` or
`(model, inputs)`. A setting is passed to every function of the file with a parameter of that name. `loss_reduction`,
"mean" or "sum", may state how the loss combines samples. Batches that are dicts hold the inputs by name. Without a `loss`
in the file, a scalar that the model returns is the loss: alone, as `loss`, or as the only scalar of a tuple or dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gplan.core import LossReduction, ModelId, Precision
from gplan.core.errors import ModelError, UsageError
from gplan.core.units import counted
from gplan_profiler.capture.chain import Chain, autocast, call_arguments, model_state_restored
from gplan_profiler.capture.sequence import as_sequential
from gplan_profiler.model.compiled import compiled_once, uncompiled, unwrapped
from gplan_profiler.model.error_location import describe, is_out_of_memory, own_gradients_text
from gplan_profiler.model.lazy_build import (
    build_without_weights,
    fake_mode_of,
    lost_values_note,
    random_state_kept,
    seed_everything,
    to_fake_tensors,
)
from gplan_profiler.model.model_reference import (
    SettingValue,
    describe_inputs,
    file_digest,
    locate,
    materialise_inputs,
    parse_input_shapes,
    resize_inputs,
)
from gplan_profiler.torch_compat import pytree

Batch: TypeAlias = tuple[Any, Any]  # inputs as the model is called with, target as the loss wants it

Returned = TypeVar("Returned")

_KINDS: dict[type, str] = {
    torch.optim.Optimizer: "a torch.optim.Optimizer",
    LRScheduler: "a torch.optim.lr_scheduler.LRScheduler",
}
_REDUCTIONS = get_args(LossReduction)
_FUNCTIONS = {"example_inputs": 1, "loss": 2, "optimizer": 1, "scheduler": 1, "batches": 1}
"""The functions of a model file beside its model, and how many arguments gplan passes to each."""
_REMEDIES = {
    "example_inputs": "def example_inputs(batch_size):\n    return torch.randn(batch_size, 3, 32, 32)",
    "loss": "def loss(output, target):\n    return torch.nn.functional.cross_entropy(output, target)",
    "optimizer": "def optimizer(parameters):\n    return torch.optim.AdamW(parameters, lr=1e-3)",
    "scheduler": "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
    "batches": "def batches(batch_size):\n    while True:\n        yield inputs, target",
}


class ModelTooLargeError(ModelError):
    """There is not enough memory to build the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A loaded model and the functions defined beside it."""

    name: str  # as the user named it
    model: nn.Module
    settings: tuple[tuple[str, str], ...]
    functions: Mapping[str, Callable[..., Any]]  # with their settings bound
    fixed_inputs: Any = None  # inputs returned with the model, or None
    in_memory: bool = False  # passed as an object, not as a file
    loss_reduction: LossReduction | None = None  # as stated by the file
    notes: tuple[str, ...] = ()  # for readers of figures of this model
    precision: Precision = field(default_factory=Precision)  # of the model; see gplan_profiler/model/precision.py
    lost: tuple[str, ...] = ()  # buffers and other tensors that have lost the values computed by the code

    @property
    def is_lazy(self) -> bool:
        """Whether weights of the model are fake tensors without memory."""
        return fake_mode_of(self.model) is not None

    def example_inputs(self, batch_size: int) -> Any:
        """Inputs for one micro-batch of `batch_size` samples, on the CPU."""
        if "example_inputs" in self.functions:
            return self._call("example_inputs", batch_size, expected=object)
        if self.fixed_inputs is not None:
            return resize_inputs(self.fixed_inputs, batch_size)
        if "batches" in self.functions:
            return next(self.batches(batch_size))[0]
        otherwise = ", or describe the inputs with --input-shape 8,3,224,224"
        raise ModelError(self._missing_text("example_inputs", otherwise))

    def identity(self, chain: Chain) -> ModelId:
        """The model's identity in a profile, with the digest of its layers and parameters."""
        with random_state_kept():
            inputs = describe_inputs(self.example_inputs(1))
        return ModelId(
            name=self.name,
            settings=self.settings,
            digest=chain.digest(),
            in_memory=self.in_memory,
            traced=chain.traced,
            divided=chain.divided,
            inputs=inputs,
            file_digest=file_digest(self.name),
        )

    def forward(self, inputs: Any) -> Any:
        """The model's output, in its precision."""
        args, kwargs = call_arguments(inputs)
        with autocast(self.precision, self._device_type):
            return self.model(*args, **kwargs)

    @property
    def _device_type(self) -> str:
        return next((x.device.type for x in self.model.parameters()), "cpu")

    def loss(self, output: Any, target: Any) -> Tensor:
        """The loss of one micro-batch, checked to be a scalar tensor."""
        with autocast(self.precision, self._device_type):
            value = self._call("loss", output, target, expected=object)
        has_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(output))
        return checked_loss(value, what=f"loss in {self.name}", trains=torch.is_grad_enabled() and has_gradient)

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The file's optimizer over some of the model's parameters."""
        made = self._call("optimizer", list(parameters), expected=torch.optim.Optimizer)
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ModelError(
                f"optimizer in {self.name} returned {type(made).__name__}, whose step calls a closure that computes the loss "
                "again; expected an optimizer whose step() needs no argument, such as AdamW or SGD"
            )
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """The file's learning-rate scheduler for its optimizer, stepped after every step; None if it defines none."""
        if not self.has("scheduler"):
            return None
        made: LRScheduler = self._call("scheduler", optimizer, expected=LRScheduler)
        if isinstance(made, ReduceLROnPlateau):
            raise ModelError(
                f"scheduler in {self.name} returned ReduceLROnPlateau, whose step takes a measured loss; expected a scheduler "
                "whose step() needs no argument, such as CosineAnnealingLR; your own script can call it (gplan.pipeline)"
            )
        return made

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Pairs of inputs and target; a finite source starts again when it ends."""
        while True:
            source, empty = self._call("batches", batch_size, expected=object), True
            for batch in self._guarded(source):
                empty = False
                if isinstance(batch, Mapping):
                    yield dict(batch), batch.get("labels")
                elif isinstance(batch, tuple | list) and len(batch) == 2:
                    yield batch[0], batch[1]
                else:
                    raise ModelError(
                        f"batches in {self.name} gave a {type(batch).__name__}; expected (inputs, target), or a dict of inputs "
                        "for a model that computes its loss itself"
                    )
            if empty:
                raise ModelError(f"batches in {self.name} gave nothing; expected (inputs, target) pairs")

    def _guarded(self, source: Any) -> Iterator[Any]:
        """The items of the file's batches; their errors name the file and the line."""
        try:
            yield from iter(source)
        except Exception as error:
            raise ModelError(f"batches in {self.name} failed: {describe(error)}") from error

    def has(self, function: str) -> bool:
        """Whether the file defines the function."""
        return function in self.functions

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss and data to compute it from."""
        return self.has("loss") and self.has("batches")

    @property
    def notes_on_missing(self) -> tuple[str, ...]:
        """What plans leave out because the file does not define it."""
        return tuple(
            f"{self.name} defines no {name}: {what} are in no plan, and a run needs the {name}"
            for name, what in self._missing_parts.items()
        )

    @property
    def _missing_parts(self) -> dict[str, str]:
        """What plans leave out, by the missing function."""
        parts = {"optimizer": "its states and its time", "loss": "its time and its memory"}
        if self.has("loss"):
            parts["batches"] = "time and memory of the loss"
        return {name: what for name, what in parts.items() if not self.has(name)}

    def require(self, *functions: str) -> None:
        """Raise ModelError, with example code, if functions are missing."""
        missing = [x for x in functions if not self.has(x)]
        if missing:
            then = "\nthen profile and balance again" if self._missing_parts.keys() & missing else ""
            raise ModelError("\n".join(map(self._missing_text, missing)) + then)

    def _call(self, function: str, *args: Any, expected: type[Returned]) -> Returned:
        self.require(function)
        try:
            value = self.functions[function](*args)
        except ModelError:
            raise
        except Exception as error:
            try:
                inspect.signature(self.functions[function]).bind(*args)
            except TypeError:
                takes = f"cannot be called with {counted(len(args), 'argument')}: {error}; expected"
                raise ModelError(f"{function} in {self.name} {takes}\n{_REMEDIES[function]}") from error
            except ValueError:
                pass  # a function in C may have no signature
            reason = (own_gradients_text(error) if function == "loss" else None) or describe(error)
            raise ModelError(f"{function} in {self.name} failed: {reason}") from error
        if not isinstance(value, expected):
            raise ModelError(
                f"{function} in {self.name} returned a {type(value).__name__}; expected {_KINDS[expected]}"
            )
        return value

    def _missing_text(self, function: str, otherwise: str = "") -> str:
        return f"{self.name} defines no {function}; add it{otherwise}:\n{_REMEDIES[function]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """An imported model file whose model is not built yet."""

    name: str
    target: Any  # of the reference: a model, or what builds one
    settings: Mapping[str, SettingValue]
    functions: Mapping[str, Callable[..., Any]]
    input_shapes: str | None  # of random inputs instead of the file's
    loss_reduction: LossReduction | None

    @uncompiled()
    def load(self, *, seed: int = 0, lazy: bool = False) -> ModelFile:
        """Build the model with weights drawn from `seed`. The random state stays as it is.

        If `lazy`, the weights are fake tensors (gplan_profiler/model/lazy_build.py) without memory.
        Seeded are the generators of torch, Python's `random` and numpy (and so scipy's).
        Raises ModelError for a model that cannot be built, ModelTooLargeError if there is not enough memory.
        """

        def build() -> tuple[nn.Module, Any]:
            with random_state_kept():
                seed_everything(seed)
                model, inputs = _built(self.target, self.settings, self.name)
                return model, inputs if self.input_shapes is None else parse_input_shapes(self.input_shapes)

        model, inputs = build_without_weights(build, what=self.name) if lazy else build()
        return _built_file(
            model,
            name=self.name,
            settings=tuple(sorted((key, str(value)) for key, value in self.settings.items())),
            functions=self.functions,
            fixed_inputs=materialise_inputs(inputs),
            loss_reduction=self.loss_reduction,
        )


def open_model_file(
    reference: str, *, settings: Mapping[str, SettingValue] | None = None, input_shapes: str | None = None
) -> OpenedFile:
    """Import the file of `reference` and bind the settings to its functions.

    Raises ModelError for a file that cannot be imported or has no model, UsageError for unknown settings.
    """
    settings = dict(settings or {})
    module, target = locate(reference)
    functions = {x: f for x in _FUNCTIONS if callable(f := getattr(module, x, None))}
    taken = [_taken(f, settings, n) for f, n in ((target, 0), *((f, _FUNCTIONS[x]) for x, f in functions.items()))]
    if unknown := [key for key in settings if not any(key in some for some, _ in taken)]:
        choices = ", ".join(sorted({name for _, known in taken for name in known})) or "no settings at all"
        raise UsageError(f"--set {unknown[0]}: no function in {reference} has this parameter; expected {choices}")
    bound = {x: _with_settings(f, settings, _FUNCTIONS[x]) for x, f in functions.items()}
    if input_shapes is not None:
        if "batches" in bound:
            raise UsageError(f"--input-shape {input_shapes}: {reference} defines batches, which have inputs; omit it")
        bound.pop("example_inputs", None)
    return OpenedFile(
        name=reference,
        target=target,
        settings=settings,
        functions=bound,
        input_shapes=input_shapes,
        loss_reduction=_checked_reduction(getattr(module, "loss_reduction", None), reference),
    )


@uncompiled()
def model_in_memory(
    model: nn.Module,
    *,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    batches: Callable[..., Any] | None = None,
    loss_reduction: str | None = None,
) -> ModelFile:
    """A ModelFile from objects in memory; `inputs` may be a function of the batch size.

    A model on the meta device becomes lazy.
    """
    name = type(unwrapped(model)[0]).__name__
    given = {"loss": loss, "optimizer": optimizer, "batches": batches}
    given["example_inputs"] = inputs if callable(inputs) else None
    return _built_file(
        model,
        name=name,
        settings=(),
        functions={key: function for key, function in given.items() if function is not None},
        fixed_inputs=None if callable(inputs) else inputs,
        in_memory=True,
        loss_reduction=_checked_reduction(loss_reduction, name),
    )


def _built_file(model: nn.Module, *, name: str, **fields: Any) -> ModelFile:
    """The file of a model that was built; if it defines batches and no loss, with the loss that the model returns."""
    model, compiled = unwrapped(model)
    _check_can_be_used(model, name)
    lost = to_fake_tensors(model)
    file = ModelFile(name=name, model=model, notes=(*lost_values_note(lost), *compiled), lost=lost, **fields)
    if file.has("loss") or not file.has("batches"):
        return file
    notes, own = file.notes, {**file.functions, "loss": loss_of_output}
    with random_state_kept(), suppress(Exception):  # an error is reported when the batches or the model are needed
        batch = next(iter(file.functions["batches"](1)))
        if not isinstance(batch, Mapping) and batch[1] is not None:
            mode, inputs = fake_mode_of(file.model), batch[0]
            if mode is not None:  # a model without weights
                inputs = pytree.tree_map_only(Tensor, mode.from_tensor, inputs)
            with model_state_restored(file.model), torch.no_grad(), mode or nullcontext():
                file.model.eval()
                loss_of_output(file.forward(inputs))
            notes = (
                *notes,
                f"{file.name} defines no loss: the model returns one, and the targets of batches are not used",
            )
        return replace(file, functions=own, notes=notes)
    return file


def checked_loss(loss: Any, *, what: str, trains: bool) -> Tensor:
    """Return a loss that is a scalar tensor and, if it `trains`, has a gradient; raises ModelError for anything else."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"{what} returned a {found}; expected a tensor with a single number for all samples together: end it with .mean()"
        )
    if trains and not (loss.requires_grad and loss.is_floating_point()):
        raise ModelError(
            f"{what} returned a {loss.dtype} tensor that has no gradient; expected one computed from the model's output "
            "without detach(), item(), argmax() or no_grad()"
        )
    return loss


def loss_of_output(output: Any, _target: object = None) -> Tensor:
    """The loss that a model computed itself: its output, or `loss`, the first or the only scalar of its output.

    A scalar is a floating-point tensor of 0 dimensions. Raises ModelError for an output without one.
    """

    def is_scalar(x: object) -> bool:
        return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()

    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = list(output.values()) if isinstance(output, Mapping) else output
    parts = list(parts) if isinstance(parts, list | tuple) else []
    scalars = [x for x in parts if is_scalar(x)]
    first = parts[0] if isinstance(output, list | tuple) and parts else None
    for found in (output, named, first, *(scalars if len(scalars) == 1 else ())):
        if is_scalar(found):
            return cast(Tensor, found)
    what = f"{len(scalars)} scalars and none named `loss`" if scalars else "no scalar `loss`"
    raise ModelError(
        f"the model's output, a {type(output).__name__}, has {what}; give the model what it computes the loss from, "
        "such as labels, among its inputs, or define a loss:\n" + _REMEDIES["loss"]
    )


def _built(target: Any, settings: Mapping[str, SettingValue], reference: str) -> tuple[nn.Module, Any]:
    """The model, and the inputs returned with it or None."""
    made = target = compiled_once(target)
    if not isinstance(target, nn.Module | list | tuple):
        if not callable(target):
            kind = type(target).__name__
            raise ModelError(f"{reference} is a {kind}; expected an nn.Module, a class, a function or a list")
        try:
            made = _with_settings(target, settings, 0)()
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise ModelTooLargeError(
                    f"{reference}: there is not enough memory to build the model ({describe(error)}); build a smaller one, "
                    'or build it without weights, with torch.device("meta"), to measure it layer by layer'
                ) from error
            own = inspect.signature(target).parameters if settings else {}
            given = ", ".join(
                f"--set {key}={value}"
                + (f" (default: {own[key].default!r})" if key in own and own[key].default is not own[key].empty else "")
                for key, value in settings.items()
            )
            raise ModelError(
                f"{reference} could not build its model{given and f' with {given}'}: {describe(error)}"
            ) from error
    inputs, made = None, compiled_once(made)
    if isinstance(made, tuple) and len(made) == 2 and not isinstance(compiled_once(made[1]), nn.Module):
        made, inputs = compiled_once(made[0]), made[1]
    if isinstance(made, list | tuple):
        made = as_sequential(made)
    if not isinstance(made, nn.Module):
        raise ModelError(f"{reference} gave a {type(made).__name__}; expected an nn.Module, or (model, inputs)")
    return made, inputs


def _check_can_be_used(model: nn.Module, name: str) -> None:
    """Raise ModelError for names that cannot be printed, weights without a shape, and batches without values."""
    for place, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{place or 'the model'} of {name} is a ScriptModule, whose layers cannot be traced; expected the nn.Module that "
                "torch.jit.script or torch.jit.trace was given"
            )
        for own in (place, *module._parameters, *module._buffers):
            if not own.isprintable():
                raise ModelError(
                    f"{name} has a module, parameter or buffer of the name {own!r}; expected names without control characters, "
                    "such as line breaks, which could put code into exported files: rename it"
                )
        if any(is_lazy(x) for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ModelError(
                f"{place or 'the model'} of {name} is a {type(module).__name__}, whose weights have no shape before its first "
                "forward; expected weights with shapes: give the layer its input size, or call the model on an example before "
                "it is returned"
            )
    if torch.get_default_device().type == "meta":
        raise ModelError(
            f'{name} sets the default device to "meta", on which batches have no values; expected the CPU: leave '
            'torch.set_default_device out, and build the model inside `with torch.device("meta"):`'
        )


def _checked_reduction(value: object, owner: str) -> LossReduction | None:
    if value is not None and value not in _REDUCTIONS:
        raise ModelError(f'loss_reduction of {owner} is {value!r}; expected "mean" or "sum"')
    return cast(LossReduction | None, value)


def _taken(
    function: Any, settings: Mapping[str, SettingValue], num_passed: int
) -> tuple[dict[str, SettingValue], list[str]]:
    """The settings that a function takes, and the names that it has for some; gplan passes its first arguments."""
    if isinstance(function, nn.Module) or not callable(function):
        return {}, []
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function in C may have no signature
        return {}, []
    by_place = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    by_name = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    passed = set(by_place[:num_passed])
    known = [name for name in by_name if name not in passed]
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters)
    return {x: y for x, y in settings.items() if x in known or (takes_all and x not in passed)}, known


def _with_settings(
    function: Callable[..., Any], settings: Mapping[str, SettingValue], num_passed: int
) -> Callable[..., Any]:
    return partial(function, **_taken(function, settings, num_passed)[0])
