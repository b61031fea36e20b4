"""Build a part of a model: kept parameters have the values of a plain build, all others have no memory.

The model is built twice. The first build, without weights (profiler/model/lazy_build.py), finds the final names of the
parameters in the order in which the code creates them. The second build is real and starts from the seed; a parameter
that is not kept becomes absent as soon as a module registers it. All random numbers are drawn as in the plain build.
Memory is that of the kept parameters and the last one written, plus parameters that are discarded or copied by the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from gplan.core.errors import ModelError
from profiler.host.host_info import large_blocks_returned
from profiler.model.error_location import author_line, describe, root_cause
from profiler.model.lazy_build import RefusedError, absent_tensors, build_without_weights, random_state
from profiler.model.materialise import on_meta, parameter_as

Origin: TypeAlias = nn.Module | nn.Parameter  # the module that registers a parameter, or the parameter it is a copy of
Observer: TypeAlias = Callable[[Origin, str, nn.Parameter], Any]  # returns a replacement for the parameter, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Creation:
    """A parameter when a module registers it, or a copy of a parameter, which belongs to no module yet."""

    origin: Origin
    name: str
    parameter: nn.Parameter
    description: str  # equal for the same parameter in another build


def build_part(build: Callable[[], nn.Module], *, keep: Collection[str], seed: int, what: str) -> nn.Module:
    """The model of `torch.manual_seed(seed); build()`, with all parameters except `keep` on the meta device.

    `keep` are names as in `named_parameters(remove_duplicate=False)`; a tied parameter is kept if one of its names is.
    Kept parameters and all buffers have exactly the values of the plain build, and the random state afterwards is that
    of the plain build, or unchanged after a failure. Raises ModelError, with `what` as the model's name, if kept values
    depend on other parameters, or if `build` returns an existing model or a different one each time.
    """

    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return build()

    creations, outline = _outline(seeded, what)
    unknown = sorted(set(keep) - outline.keys())
    if unknown:
        raise ModelError(f"{what} has no parameter {unknown[0]}; expected names such as {', '.join([*outline][:3])}")
    restore_random_state = random_state()
    try:
        model = _second_build(seeded, creations, absent=_unwanted(creations, outline, keep))
        _check(model, outline, keep)
    except (Exception, SystemExit) as error:
        restore_random_state()
        raise ModelError(
            f"{what} cannot be built in part: {_reason(error)}; build all of it, or load its weights from a file"
        ) from error
    _put_on_meta(model, keep)
    return model


def _outline(build: Callable[[], nn.Module], what: str) -> tuple[list[_Creation], dict[str, nn.Parameter]]:
    """The creations in their order, and the parameters by name, of a build without weights."""
    creations: list[_Creation] = []

    def note(origin: Origin, name: str, parameter: nn.Parameter) -> None:
        description = _description(origin, name, parameter)
        creations.append(_Creation(origin=origin, name=name, parameter=parameter, description=description))

    def recorded() -> nn.Module:
        creations.clear()  # of an attempt that failed
        with _observed(note):
            return build()

    model = build_without_weights(recorded, what=what)
    return creations, dict(model.named_parameters(remove_duplicate=False))


def _description(origin: Origin, name: str, parameter: nn.Parameter) -> str:
    return f"{type(origin).__name__}.{name or 'copy'} {tuple(parameter.shape)}"


def _unwanted(creations: Sequence[_Creation], outline: Mapping[str, nn.Parameter], keep: Collection[str]) -> set[int]:
    """The indices of creations whose parameters are in the final model, but neither in `keep` nor copied into it.

    Also those that are replaced by a tied parameter, as the weight of a head by that of an embedding.
    """
    needed = {id(outline[name]) for name in keep}
    for creation in reversed(creations):  # a copy of a copy comes after the copy
        if id(creation.parameter) in needed:
            needed.add(id(creation.origin))
    num_names = Counter(id(x) for x in outline.values())

    def is_unwanted(creation: _Creation) -> bool:
        if id(creation.parameter) in num_names:
            return id(creation.parameter) not in needed
        successor = creation.origin._parameters.get(creation.name) if isinstance(creation.origin, nn.Module) else None
        return num_names[id(successor)] > 1

    return {number for number, creation in enumerate(creations) if is_unwanted(creation)}


def _second_build(build: Callable[[], nn.Module], creations: Sequence[_Creation], *, absent: set[int]) -> nn.Module:
    """The real build, in which the creations in `absent` have no memory."""
    descriptions: list[str] = []
    replaced: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()
    with large_blocks_returned(), absent_tensors() as memory:

        def replace(origin: Origin, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            descriptions.append(_description(origin, name, parameter))
            if len(descriptions) - 1 not in absent or type(parameter) is not nn.Parameter:
                return None
            if parameter not in replaced:
                replaced[parameter] = memory.parameter(parameter)
            return replaced[parameter]

        with _observed(replace):
            model = build()
    expected = [x.description for x in creations]
    if descriptions != expected:
        pairs = zip_longest(descriptions, expected, fillvalue="nothing")
        made, without_weights = next((a, b) for a, b in pairs if a != b)
        raise RefusedError(f"its code creates {made} where, built without weights, it created {without_weights}")
    return model


@contextmanager
def _observed(see: Observer) -> Iterator[None]:
    """Inside, `see` is called with each parameter that is registered or copied, and may return a replacement."""
    plain_copy = nn.Parameter.__deepcopy__

    def copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if id(parameter) in memo:
            return cast(nn.Parameter, memo[id(parameter)])
        made: nn.Parameter = plain_copy(parameter, memo)  # type: ignore[no-untyped-call]
        other = see(parameter, "", made)
        memo[id(parameter)] = made if other is None else other
        return cast(nn.Parameter, memo[id(parameter)])

    hook = register_module_parameter_registration_hook(see)
    nn.Parameter.__deepcopy__ = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = plain_copy  # type: ignore[method-assign]
        hook.remove()


def _check(model: nn.Module, outline: Mapping[str, nn.Parameter], keep: Collection[str]) -> None:
    """Raise RefusedError unless the model has the outline's parameters, and values for `keep` and all buffers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if parameters.keys() != outline.keys():
        name = min(parameters.keys() ^ outline.keys())
        raise RefusedError(f"its code creates {name} in one of two builds only")
    if any(parameters[name] is outline[name] for name in parameters):
        raise RefusedError("it exists before it is built; expected a function or a class that builds it")
    kept = [(name, parameters[name]) for name in keep]
    lost = [name for name, tensor in (*kept, *model.named_buffers()) if tensor.is_meta]
    if lost:
        raise RefusedError(f"its code computes {lost[0]} from parameters that are not kept")


def _put_on_meta(model: nn.Module, keep: Collection[str]) -> None:
    """Move parameters to the meta device that still have memory: never registered, or of a special class."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(parameters[name]) for name in keep}
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or id(parameter) in kept:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = parameter_as(on_meta(parameter), parameter)
            module._parameters[name] = moved[id(parameter)]


def _reason(error: BaseException) -> str:
    if not isinstance(error, RefusedError):
        return describe(root_cause(error))
    line = None if error.__cause__ is None else author_line(error.__cause__)
    return str(error) if line is None else f"{error} ({line})"
