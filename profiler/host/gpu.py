"""What state the host's GPUs are in: clocks, power limit and temperature, as nvidia-smi tells them.

Only read: no setting is changed. A GPU that is warm or held to a lower power runs slower, so a measurement notes this.
"""

from __future__ import annotations

import subprocess

_FIELDS = (
    ("name", "name"),
    ("driver", "driver_version"),
    ("SM clock", "clocks.sm"),
    ("memory clock", "clocks.mem"),
    ("power limit", "power.limit"),
    ("temperature, degrees C", "temperature.gpu"),
)
_LONGEST_S = 10.0


def gpu_state() -> tuple[tuple[str, str], ...]:
    """What each GPU of the host is and how it stands, as name and value;
    empty where nvidia-smi is not there or fails."""
    query = ",".join(field for _, field in _FIELDS)
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpu_state(done.stdout)


def parse_gpu_state(text: str) -> tuple[tuple[str, str], ...]:
    """The values of nvidia-smi's lines, one line a GPU; what a GPU does not tell is left out.

    >>> parse_gpu_state("NVIDIA T4, 550.54, 1590 MHz, 5000 MHz, 70.00 W, 34")[2:5]
    (('SM clock', '1590 MHz'), ('memory clock', '5000 MHz'), ('power limit', '70.00 W'))
    """
    lines = [line for line in text.splitlines() if line.count(",") == len(_FIELDS) - 1]
    found = []
    for index, line in enumerate(lines):
        prefix = f"GPU {index} " if len(lines) > 1 else ""
        values = (value.strip() for value in line.split(","))
        pairs = zip(_FIELDS, values, strict=True)
        found += [(prefix + name, value) for (name, _), value in pairs if value and not value.startswith("[")]
    return tuple(found)
