"""From a model's name to what it names: `model.py`, `model.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch import nn

from gplan.core.errors import ModelError
from profiler.model.error_location import describe

# The text of a setting (`--set key=value`) to its value: a Python literal, true or false, or else the text itself.


Setting: TypeAlias = bool | int | float | str | None


def parse_setting(text: str) -> Setting:
    """The value that a setting's text stands for.

    >>> parse_setting("12"), parse_setting("1e-3"), parse_setting("true"), parse_setting("None"), parse_setting("adam")
    (12, 0.001, True, None, 'adam')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str | None) else text


def locate(reference: str) -> tuple[ModuleType, Any]:
    """The module that `reference` names, imported, and what it names in it (by default `model`).

    Raises ModelError for a file that is not there, is not Python, cannot be imported or has no such name.
    """
    module, attribute = _module_of(reference)
    return module, _attribute(module, attribute, reference)


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
