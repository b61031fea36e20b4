"""Parse the texts that describe a model on the command line: its reference, its settings and the shapes of its inputs.

A reference is `model.py`, `model.py:NAME` or `package.module:NAME`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError, UsageError
from gplan.files.json_files import similar_file_text
from gplan_profiler.model.error_location import describe
from gplan_profiler.model.materialise import real_like
from gplan_profiler.torch_compat import pytree

SettingValue: TypeAlias = bool | int | float | str | None


def parse_setting(text: str) -> SettingValue:
    """The value of `--set key=TEXT`: a Python literal, true or false, or else the text itself.

    >>> parse_setting("12"), parse_setting("1e-3"), parse_setting("true"), parse_setting("None"), parse_setting("adam")
    (12, 0.001, True, None, 'adam')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, bool | int | float | str | None) else text


def locate(reference: str) -> tuple[ModuleType, Any]:
    """The imported module of `reference`, and the named object in it (by default `model`).

    Raises ModelError for a file that does not exist, is not Python, cannot be imported or has no such name.
    """
    place, _, attribute = reference.partition(":")
    path, wanted = Path(place), attribute or "model"
    try:
        if path.suffix == ".py":
            check_is_there(path)
            spec = importlib.util.spec_from_file_location(f"gplan_model_{path.stem}", path.resolve())
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            with _searched(path.resolve().parent):
                spec.loader.exec_module(module)
            itself = sys.modules.get(path.stem)  # what an import of the file's name found
            is_used = any(x is itself for x in vars(module).values())
            if is_used and getattr(itself, "__file__", None) == str(path.resolve()):
                raise _imports_itself(path)
        elif path.exists():
            raise ModelError(
                f"{place} is not a Python file; expected model.py, model.py:NAME or package.module:NAME (a plan that gplan layout "
                "makes of a configuration goes to gplan export)"
            )
        else:
            with _searched(Path.cwd()):
                module = importlib.import_module(place)
    except ModelError:
        raise
    except ModuleNotFoundError as error:
        if path.suffix == ".py" and (error.name or "").startswith(f"{path.stem}."):
            raise _imports_itself(path) from error
        if error.name == place.split(".")[0]:
            raise ModelError(f"no module or file is named {place}; expected model.py or package.module:NAME") from error
        package, _, last = place.rpartition(".")
        remedy = (
            f"write {package}:{last}"
            if error.name == place and package in sys.modules
            else "install it or fix the import"
        )
        raise ModelError(f"{place} cannot be imported: {describe(error)}; {remedy}") from error
    except (Exception, SystemExit) as error:
        if path.suffix == ".py" and isinstance(error, ImportError) and error.name == path.stem:
            raise _imports_itself(path) from error
        remedy = (
            ""
            if isinstance(error, SyntaxError)
            else "; the file is run to find its model: keep training under `if __name__ == '__main__'`"
        )
        if isinstance(error, ImportError) and "relative import" in str(error):  # a file alone has no package
            folder, names = path.resolve().parent.parent, [path.resolve().parent.name, path.stem]
            while (folder / "__init__.py").exists():
                folder, names = folder.parent, [folder.name, *names]
            remedy = f"; in the folder {folder}, name the module of the package instead: {'.'.join(names)}"
        raise ModelError(f"{place} cannot be imported: {describe(error)}{remedy}") from error
    found = getattr(module, wanted, None)
    if found is not None:
        return module, found
    classes = {name for name, x in vars(module).items() if inspect.isclass(x) and issubclass(x, nn.Module)}
    defined = {name for name, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__}
    models = {name for name, x in vars(module).items() if isinstance(x, nn.Module)}
    own = [name for name in vars(module) if name in models or name in classes & defined]
    callables = [name for name in vars(module) if name in models | defined and callable(getattr(module, name))]
    imported = [name for name in classes - defined if not own or name.lower() == wanted.lower()]
    if close := _most_alike(wanted, callables) or _most_alike(wanted, imported):
        raise ModelError(f"{reference} has no {wanted}, but {close}: rename it, or write {place}:{close}")
    own = list(dict.fromkeys([*(x for x in callables if x == "model"), *own]))
    candidates = f"; it has {', '.join(own)}: write {place}:{own[0]}" if own else ""
    raise ModelError(f"{reference} has no {wanted}{candidates or '; define a function model()'}")


def _imports_itself(path: Path) -> ModelError:
    return ModelError(f"{path} imports {path.stem}, which is the file itself: give the file another name")


def file_digest(reference: str) -> str:
    """A digest of the text of this file, not of what it imports; "" where `reference` names no file."""
    path = Path(reference.partition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.suffix == ".py" and path.is_file() else ""


def check_is_there(path: Path, *, named_by: str = "") -> None:
    """Raise ModelError, with the folder searched, for a model file that does not exist."""
    if not path.is_file():
        where = "" if path.is_absolute() else f" (searched in {Path.cwd()})"
        named = f", which {named_by} names," if named_by else ""
        raise ModelError(
            f"{path}{named} is not there{where}{similar_file_text(path)}; name a Python file that defines a model: "
            "gplan VERB PATH/model.py"
        )


@contextmanager
def _searched(folder: Path) -> Iterator[None]:
    """Inside, modules are imported from the folder first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _most_alike(wanted: str, names: Iterable[str]) -> str | None:
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[x] for x in get_close_matches(wanted.lower(), by_lower, n=1)), None)


def parse_input_shapes(text: str) -> Any:
    """Random tensors by a description: `8,512:int64`, `8,3,32,32;8,10` for several, `ids=8,512:int64` by name.

    Raises UsageError for a shape or dtype that cannot be parsed.
    """
    parts = [part.rpartition("=") for part in text.split(";")]
    tensors = tuple(_described_tensor(shape) for _, _, shape in parts)
    names = [name.strip() for name, _, _ in parts]
    if any(names):
        if not all(names):
            raise UsageError(f"--input-shape {text!r} names some inputs and not others; name all of them or none")
        return dict(zip(names, tensors, strict=True))
    return tensors if len(tensors) > 1 else tensors[0]


def describe_inputs(inputs: Any) -> str:
    """The description of a tensor, or of a tuple or dict of tensors, for `parse_input_shapes`; "" for anything else.

    >>> describe_inputs({"ids": torch.zeros(4, 32, dtype=torch.int64), "mask": torch.zeros(4, 32)})
    'ids=4,32:int64;mask=4,32:float32'
    """
    if isinstance(inputs, Tensor) and inputs.dim():
        return f"{','.join(map(str, inputs.shape))}:{str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, dict):
        texts = [f"{name}={describe_inputs(x)}" for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()]
        return ";".join(texts) if len(texts) == len(inputs) else ""
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        texts = [describe_inputs(x) for x in inputs if isinstance(x, Tensor)]
        return ";".join(texts) if len(texts) == len(inputs) and all(texts) else ""
    return ""


def resize_inputs(inputs: Any, batch_size: int) -> Any:
    """The inputs with another number of samples: rows are repeated or left out."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value[torch.arange(batch_size) % value.shape[0]]

    return pytree.tree_map(resize, inputs)


def materialise_inputs(inputs: Any) -> Any:
    """The inputs with random values for meta tensors, as built together with a model without weights."""

    def real(value: Any) -> Any:
        is_meta = isinstance(value, Tensor) and value.is_meta
        return real_like([value], seed=0)[0] if is_meta else value

    return pytree.tree_map(real, inputs)


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
