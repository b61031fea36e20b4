"""Building a part of a model: its parameters have the values of the plain build, all others end without memory.

The model is built twice. The first time without weights (profiler/model/lazy_build.py), which shows under which names the
parameters end that the code creates one after the other. The second time for real, from the seed; but a parameter that
is not wanted becomes absent (profiler/model/lazy_build.py) as soon as a module gets it. All random numbers are drawn as in
the plain build, so this takes its time but not its memory: that of the wanted parameters and of the last one written.
Parameters that the code drops again, and those of which kept ones are copies, stay real meanwhile.
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
from profiler.model.materialise import on_meta

Origin: TypeAlias = nn.Module | nn.Parameter  # of a parameter: the module that gets it, or what it is a copy of
See: TypeAlias = Callable[[Origin, str, nn.Parameter], Any]  # gives a parameter to take its place, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Birth:
    """A parameter as a module gets it, or a copy of one, which belongs to no module yet."""

    origin: Origin
    name: str
    parameter: nn.Parameter
    description: str  # by which the same one is known in another build


def build_part(build: Callable[[], nn.Module], *, keep: Collection[str], seed: int, what: str) -> nn.Module:
    """The model that `torch.manual_seed(seed); build()` gives,
    its parameters on the meta device but for those in `keep`.

    `keep` has names as `named_parameters(remove_duplicate=False)` gives them; a tied parameter is kept if one of its
    names is. Kept parameters and all buffers have exactly the values of the plain build, and torch, Python and numpy
    draw afterwards what they would draw after it; when this fails, what they would have drawn before. Raises
    ModelError, in which `what` names the model, for code whose kept values depend on parameters that are dropped, and
    for a model that is not built by `build` or in another way each time.
    """

    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return build()

    births, outline = _outline(seeded, what)
    unknown = sorted(set(keep) - outline.keys())
    if unknown:
        raise ModelError(f"{what} has no parameter {unknown[0]}; expected names such as {', '.join([*outline][:3])}")
    restore_random_state = random_state()
    try:
        model = _second_build(seeded, births, absent=_unwanted(births, outline, keep))
        _check(model, outline, keep)
    except (Exception, SystemExit) as error:
        restore_random_state()
        raise ModelError(
            f"{what} cannot be built in part: {_reason(error)}; build it as a whole, or load its weights from a file"
        ) from error
    _put_on_meta(model, keep)
    return model


def _outline(build: Callable[[], nn.Module], what: str) -> tuple[list[_Birth], dict[str, nn.Parameter]]:
    """Births in their order, and the parameters by their names, of a build without weights."""
    births: list[_Birth] = []

    def note(origin: Origin, name: str, parameter: nn.Parameter) -> None:
        description = _description(origin, name, parameter)
        births.append(_Birth(origin=origin, name=name, parameter=parameter, description=description))

    def noted() -> nn.Module:
        births.clear()  # of an attempt that failed
        with _births_seen_by(note):
            return build()

    model = build_without_weights(noted, what=what)
    return births, dict(model.named_parameters(remove_duplicate=False))


def _description(origin: Origin, name: str, parameter: nn.Parameter) -> str:
    return f"{type(origin).__name__}.{name or 'copy'} {tuple(parameter.shape)}"


def _unwanted(births: Sequence[_Birth], outline: Mapping[str, nn.Parameter], keep: Collection[str]) -> set[int]:
    """The births, by number, whose parameters end under names, but not under those of `keep`, and have no kept copies.

    And those that end under none because a tied parameter takes their place, as an embedding's does that of a head's.
    """
    needed = {id(outline[name]) for name in keep}
    for birth in reversed(births):  # a copy of a copy comes after the copy
        if id(birth.parameter) in needed:
            needed.add(id(birth.origin))
    num_names = Counter(id(x) for x in outline.values())

    def is_unwanted(birth: _Birth) -> bool:
        if id(birth.parameter) in num_names:
            return id(birth.parameter) not in needed
        successor = birth.origin._parameters.get(birth.name) if isinstance(birth.origin, nn.Module) else None
        return num_names[id(successor)] > 1

    return {number for number, birth in enumerate(births) if is_unwanted(birth)}


def _second_build(build: Callable[[], nn.Module], births: Sequence[_Birth], *, absent: set[int]) -> nn.Module:
    """The real build, the births numbered in `absent` left without memory."""
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

        with _births_seen_by(replace):
            model = build()
    expected = [x.description for x in births]
    if descriptions != expected:
        pairs = zip_longest(descriptions, expected, fillvalue="nothing")
        made, without_weights = next((a, b) for a, b in pairs if a != b)
        raise RefusedError(f"its code makes {made} where, built without weights, it made {without_weights}")
    return model


@contextmanager
def _births_seen_by(see: See) -> Iterator[None]:
    """Within it `see` is called with each parameter that a module gets or that is copied, and may give another."""
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
    """Raise RefusedError unless the model has the outline's parameters,
    and values for what it is to have values for."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if parameters.keys() != outline.keys():
        name = min(parameters.keys() ^ outline.keys())
        raise RefusedError(f"its code makes {name} in one of two builds only")
    if any(parameters[name] is outline[name] for name in parameters):
        raise RefusedError("it is there before it is built; expected a function or a class that builds it")
    kept = [(name, parameters[name]) for name in keep]
    lost = [name for name, tensor in (*kept, *model.named_buffers()) if tensor.is_meta]
    if lost:
        raise RefusedError(f"its code computes {lost[0]} from parameters that are not kept")


def _put_on_meta(model: nn.Module, keep: Collection[str]) -> None:
    """What is not kept and has memory still, for it was never given to a module or is of a special kind, loses it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(parameters[name]) for name in keep}
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or id(parameter) in kept:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(on_meta(parameter), requires_grad=parameter.requires_grad)
                vars(moved[id(parameter)]).update(vars(parameter))
            module._parameters[name] = moved[id(parameter)]


def _reason(error: BaseException) -> str:
    if not isinstance(error, RefusedError):
        return describe(root_cause(error))
    line = None if error.__cause__ is None else author_line(error.__cause__)
    return str(error) if line is None else f"{error} ({line})"
