"""Profiles, plans, runs and verifications as JSON files: versioned, checked, and written atomically.

Every file contains one value with a `format` such as "gplan.profile/8". Unknown keys, numbers out of bounds and plans
that do not fit their schedule are rejected; messages name the path inside the file, such as
`$.layers[3].costs[0].stash_bytes`. Files of older versions are not converted.
"""

from __future__ import annotations

import os
import re
import secrets
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from gplan.core import Plan, Profile, Run, Verification
from gplan.core.checks import bounds_of
from gplan.core.errors import FileError
from gplan.schedules.validate import action_mismatch, schedule_mismatch

_LEAST_SIMILAR = 0.85  # by difflib; gplan.plan.json and gplan.profile.json have 0.79

Value: TypeAlias = Profile | Plan | Run | Verification
ValueT = TypeVar("ValueT", Profile, Plan, Run, Verification)

FORMATS: dict[type[Value], str] = {
    Profile: "gplan.profile/8",
    Plan: "gplan.plan/7",
    Run: "gplan.run/9",
    Verification: "gplan.verification/6",
}
_MADE_BY = {
    Profile: "gplan profile",
    Plan: "gplan balance",
    Run: "gplan run",
    Verification: "gplan verify",
}
_ANY = "gplan profile, plan, run or verification"
_ANY_REMEDY = "name another file, or make it with the verb that writes it (`gplan --help` lists the verbs)"


def to_json(value: Value) -> bytes:
    """The value as indented JSON, with its format first."""
    content = {"format": FORMATS[type(value)], **cast(dict[str, Any], msgspec.to_builtins(value))}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def save(value: Value, path: Path) -> None:
    """Write a value to a file atomically; raises FileError if it cannot be written."""
    write_bytes(path, to_json(value))


def load(kind: type[ValueT], path: Path) -> ValueT:
    """Read a value of the given type; raises FileError with what was found, where in the file, and what to do."""
    return parse(
        kind, _read(path, expected=_type_text(kind), remedy=f"make one with `{_MADE_BY[kind]}`"), name=str(path)
    )


def load_any(path: Path) -> Value:
    """Read a value of any type, chosen by the format in the file; raises FileError for an unknown format."""
    text = _read(path, expected=_ANY, remedy=_ANY_REMEDY)
    found = _decoded(text, name=str(path), remedy=f"expected a {_ANY}; {_ANY_REMEDY}").get("format")
    kind = next((kind for kind, name in FORMATS.items() if found == name or _is_older(found, kind)), None)
    if kind is not None:
        return cast(Value, parse(cast(type[Any], kind), text, name=str(path)))
    raise FileError(f"{path} {_format_text(found)}; expected one of {', '.join(FORMATS.values())}; {_ANY_REMEDY}")


def parse(kind: type[ValueT], text: bytes, *, name: str) -> ValueT:
    """The value in `text`; error messages call its source `name`."""
    try:
        content = _content(kind, text, name=name)
        wrong = _out_of_bounds(content, field="")
        if wrong:
            raise FileError(f"{name} is not a valid {_type_text(kind)}: ${wrong}; {_remedy(kind)}")
        value = msgspec.convert(content, kind, str_keys=True)
        unknown = _unknown_key(content, msgspec.to_builtins(value), path="$")
    except msgspec.ValidationError as error:
        raise FileError(f"{name} is not a valid {_type_text(kind)}: {error}; {_remedy(kind)}") from error
    except RecursionError as error:
        raise FileError(f"{name} is nested too deeply to be read; {_remedy(kind)}") from error
    if unknown:
        raise FileError(f"{name} has an unknown key, {unknown}; remove it or {_remedy(kind)}")
    if wrong := _contradiction(value):
        raise FileError(f"{name} is not a valid {_type_text(kind)}: {wrong}; {_remedy(kind)}")
    return value


def check_writable(path: Path, kind: type[Value] | None = None) -> None:
    """Raise FileError if a file could not be written, or holds a value of another kind; called before long computations."""
    handle, aside = _aside(path)
    os.close(handle)
    aside.unlink()
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except OSError:  # it is not there, or may be written but not read
        head = b""
    found = re.match(rb'\s*{\s*"format":\s*"(gplan\.[a-z]+/)', head)
    other = next((x for x in FORMATS if found and FORMATS[x].startswith(found[1].decode()) and x is not kind), None)
    if other is not None:
        raise FileError(f"{path} is a {_type_text(other)}, which would be lost; name another file, or remove it")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: a reader sees the old file or the new one, never a part."""
    handle, aside = _aside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}; name another place with --output") from error
    finally:
        aside.unlink(missing_ok=True)


def _aside(path: Path) -> tuple[int, Path]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        return os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), aside
    except OSError as error:
        file = next((x for x in path.parents if x.is_file()), None)
        reason = error.strerror if file is None else f"{file} is a file; expected a folder"
        raise FileError(f"{path} cannot be written: {reason}; name another place with --output") from error


def similar_file_text(path: Path) -> str:
    """The end of "PATH is not there": the most similar file name in the same folder, or ""."""
    try:
        names = [x.name for x in path.parent.iterdir() if x.is_file()]
    except OSError:
        return ""
    similar = get_close_matches(path.name, names, n=1, cutoff=_LEAST_SIMILAR)
    return f", but {path.with_name(similar[0])} is" if similar else ""


def _read(path: Path, *, expected: str, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"{path} is not there{similar_file_text(path)}; expected a {expected}; {remedy}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected a {expected}") from error


def _format_text(found: object) -> str:
    return "has no format" if found is None else f"has format {found!r}"


def _content(kind: type[Value], text: bytes, *, name: str) -> dict[str, Any]:
    content = _decoded(text, name=name, remedy=_remedy(kind))
    found = content.pop("format", None)
    if found != FORMATS[kind]:
        if _is_older(found, kind):
            raise FileError(
                f"{name} was written by an older gplan (format {found}; this one reads {FORMATS[kind]}); "
                f"{_remedy(kind)}"
            )
        remedy = f"make one with `{_MADE_BY[kind]}`" if found in FORMATS.values() else _remedy(kind)
        raise FileError(f"{name} {_format_text(found)}; expected {FORMATS[kind]!r}, a {_type_text(kind)}; {remedy}")
    return content


def _is_older(found: object, kind: type[Value]) -> bool:
    """Whether a format is an earlier version of the one for this type."""
    name, version = FORMATS[kind].split("/")
    return found in [f"{name}/{earlier}" for earlier in range(1, int(version))]


def _decoded(text: bytes, *, name: str, remedy: str) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(text)
    except RecursionError as error:
        raise FileError(f"{name} is nested too deeply to be read; {remedy}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if name.endswith(".py"):
            raise FileError(
                f"{name} is a Python file, not what gplan makes of it; begin with `gplan profile {name}`"
            ) from error
        raise FileError(f"{name} is cut off or is not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise FileError(f"{name} holds a JSON {type(content).__name__}, not an object; {remedy}")
    return content


def _out_of_bounds(content: object, *, field: str) -> str:
    """The first number outside the bounds of its unit, with its path; "" if there is none."""
    if isinstance(content, int | float):
        wrong = bounds_of(field, is_integer=isinstance(content, int)).violation(content)
        return f" is {wrong}" if wrong else ""
    if isinstance(content, dict):
        for key, x in content.items():
            if isinstance(x, int | float | dict | list) and (wrong := _out_of_bounds(x, field=key)):
                return f".{key}{wrong}"
    if isinstance(content, list):
        for i, x in enumerate(content):
            if wrong := _out_of_bounds(x, field=field):
                return f"[{i}]{wrong}"
    return ""


def _unknown_key(found: object, known: object, *, path: str) -> str | None:
    """The path of the first key in `found` that is not in `known`, the parsed value as plain objects."""
    if isinstance(found, dict) and isinstance(known, dict):
        pairs = [(f"{path}.{key}", found[key], known.get(key)) for key in found]
        extra = [f"{path}.{key}" for key in found if key not in known]
    elif isinstance(found, list) and isinstance(known, list | tuple):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, known, strict=True))]
        extra = []
    else:
        return None
    nested = (_unknown_key(a, b, path=where) for where, a, b in pairs)
    return next(iter(extra), None) or next((hit for hit in nested if hit), None)


def _contradiction(value: Value, *, path: str = "$") -> str:
    """How a plan contradicts its schedule, or a run its plan, with the path; "" if neither does."""
    if isinstance(value, Verification):
        runs = (_contradiction(x.run, path=f"{path}.contenders[{i}].run") for i, x in enumerate(value.contenders))
        return next(filter(None, runs), "")
    if isinstance(value, Plan):
        found = schedule_mismatch(value)
        return f"{found.reason} - at `{path}{found.path}`" if found else ""
    if not isinstance(value, Run):
        return ""
    if wrong := _contradiction(value.plan, path=f"{path}.plan"):
        return wrong
    devices = dict(enumerate(value.plan.devices))
    for i, span in enumerate(value.timeline.spans):
        if devices.get(span.action.stage) != span.device:
            where = f"`{path}.timeline.spans[{i}]`"
            return f"{span.action} is on device {span.device}, but the plan has its stage on another - at {where}"
    for name, timelines in (("timeline", (value.timeline,)), ("step_timelines", value.step_timelines)):
        for timeline in timelines:
            if wrong := action_mismatch(timeline, num_stages=value.plan.num_stages):
                return f"{wrong} - at `{path}.{name}`"
    return ""


def _type_text(kind: type[Value]) -> str:
    return f"gplan {kind.__name__.lower()}"


def _remedy(kind: type[Value]) -> str:
    return f"make it again with `{_MADE_BY[kind]}`"
