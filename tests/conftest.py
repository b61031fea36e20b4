"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the host does
settings.load_profile("untimed")
