"""An interrupt is found behind the errors that came of it."""

from __future__ import annotations

from gplan.core.errors import is_interrupt


def chained(inner: BaseException, *, explicit: bool) -> BaseException:
    """The error that a library makes of another one, two deep."""
    middle, outer = ImportError("half a module"), RuntimeError("not loaded")
    middle.__context__ = inner
    outer.__cause__, outer.__context__ = (middle, None) if explicit else (None, middle)
    return outer


def test_an_interrupt_is_found_behind_what_was_made_of_it() -> None:
    assert is_interrupt(KeyboardInterrupt())
    for explicit in (True, False):
        assert is_interrupt(chained(KeyboardInterrupt(), explicit=explicit))
        assert not is_interrupt(chained(ValueError(), explicit=explicit))
    assert not is_interrupt(None)
