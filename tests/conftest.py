"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # some benchmarks have tests

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for work spin, on cores that other tests need
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and it decides where the tables break

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the host does
settings.load_profile("untimed")
