"""The text of a setting (`--set key=value`) to its value: a Python literal, true or false, or else the text itself."""

from __future__ import annotations

import ast
from typing import TypeAlias

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
