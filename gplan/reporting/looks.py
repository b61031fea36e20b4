"""Colours and names of everything that charts, the page and the trace draw.

Compute is saturated (forward blue; backward orange, its halves cyan and light green; optimizer brown), idle time is pale,
with a hatch per cause. A device's chunks have the same hue, the first ones darker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gplan.core import ActionKind, IdleCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one thing is drawn, and its name in legends."""

    name: str
    colour: str
    hatch: str = ""
    text: str = "#fffffe"  # on top of the colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Neutral:
    """A colour without a meaning of its own; `dark` replaces it on dark screens."""

    name: str
    light: str
    dark: str


PAPER = Neutral(name="paper", light="#ffffff", dark="#1b2027")
INK = Neutral(name="ink", light="#1f2933", dark="#e4e8ed")
FAINT = Neutral(name="faint", light="#66717d", dark="#9aa5b1")
GRID = Neutral(name="grid", light="#e3e7ec", dark="#323a44")
BAND = Neutral(name="band", light="#f4f6f9", dark="#222931")
WARM_UP = Neutral(name="warm-up", light="#e9edf2", dark="#2b333d")
DRAIN = Neutral(name="drain", light="#dfe4eb", dark="#353e49")
IMBALANCE = Neutral(name="imbalance", light="#cfd6df", dark="#46505d")
EXPOSED = Neutral(name="exposed", light="#fff0c4", dark="#4d421f")
OPTIMIZER_WAIT = Neutral(name="optimizer-wait", light="#f3e6dc", dark="#47392f")
ENGINE = Neutral(name="engine", light="#e3dcf0", dark="#3c3550")
HATCH = Neutral(name="hatch", light="#a3aebb", dark="#6c7886")
NEUTRALS = (PAPER, INK, FAINT, GRID, BAND, WARM_UP, DRAIN, IMBALANCE, EXPOSED, OPTIMIZER_WAIT, ENGINE, HATCH)

ACTIONS: dict[ActionKind, Look] = {
    ActionKind.FORWARD: Look(name="forward", colour="#397af2"),
    ActionKind.BACKWARD: Look(name="backward", colour="#f7a440", text="#3b2200"),
    ActionKind.INPUT_GRADIENT: Look(name="input gradient", colour="#44d3da", text="#06373a"),
    ActionKind.WEIGHT_GRADIENT: Look(name="weight gradient", colour="#a5dd8b", text="#1d3a10"),
    ActionKind.OPTIMIZER: Look(name="optimizer", colour="#b8510f"),
}
ANY_ACTION = Look(name="first to last stage of a device", colour="#8a9099")
RECOMPUTE = Look(name="recompute", colour="#fbd3a0", text="#3b2200")
COMMUNICATION = Look(name="communication", colour="#f2c230", text="#3b2f00")

IDLE: dict[IdleCause, Look] = {
    IdleCause.WARM_UP: Look(name="idle: warm-up", colour=WARM_UP.light),
    IdleCause.DRAIN: Look(name="idle: drain", colour=DRAIN.light, hatch="////"),
    IdleCause.IMBALANCE: Look(name="idle: imbalance", colour=IMBALANCE.light, hatch="xxxx"),
    IdleCause.COMMUNICATION: Look(name="idle: communication", colour=EXPOSED.light, hatch="\\\\\\\\"),
    IdleCause.ENGINE: Look(name="idle: engine", colour=ENGINE.light, hatch="||||"),
    IdleCause.OPTIMIZER: Look(name="idle: optimizer", colour=OPTIMIZER_WAIT.light, hatch="...."),
}

BEFORE = Look(name="before the first action", colour=BAND.light, hatch="----")

MEMORY: dict[str, Look] = {  # from the bottom of a stack, permanent memory first
    "weight_bytes": Look(name="parameters", colour="#3a62a5"),
    "optimizer_bytes": Look(name="optimizer state", colour="#b5805c"),
    "buffer_bytes": Look(name="receive buffers", colour="#ecd074"),
    "gradient_bytes": Look(name="gradients", colour="#7ba7dc"),
    "activation_bytes": Look(name="activations", colour="#3fa08c"),
    "workspace_bytes": Look(name="temporary", colour="#a9d8cc"),
}
MEASURED_PEAK = Look(name="measured peak", colour="#7f6fa6")
CAPACITY = Look(name="capacity", colour="#c62f3b")

_SHADES = {  # of the first and of the last of a device's stages, where it has several
    "forward": ("#2b5cb6", "#7ba8f9"),
    "backward": ("#ee8b1e", "#fcd09a"),
    "input gradient": ("#21a6b0", "#8fe6ea"),
    "weight gradient": ("#79b35e", "#c5ebb2"),
    "first to last stage of a device": ("#6b717b", "#b4b9c1"),
}
_LIGHT_ENOUGH = 0.24  # the luminance from which dark text is easier to read than light


def of_chunk(look: Look, chunk: int, *, num_chunks: int) -> Look:
    """The look for one of a device's chunks, lighter for later ones; unchanged if the device has only one.

    >>> [of_chunk(ACTIONS[ActionKind.FORWARD], chunk, num_chunks=3).colour for chunk in range(3)]
    ['#2b5cb6', '#5382d8', '#7ba8f9']
    """
    if num_chunks == 1 or look.name not in _SHADES:
        return look
    first, last = ([int(shade[i : i + 2], 16) for i in (1, 3, 5)] for shade in _SHADES[look.name])
    share = chunk / (num_chunks - 1)
    mixed = [round((1 - share) * x + share * y) for x, y in zip(first, last, strict=True)]
    # WCAG 2's relative luminance, without its gamma's straight part
    luminance = sum(part * (x / 255) ** 2.2 for part, x in zip((0.2126, 0.7152, 0.0722), mixed, strict=True))
    text = "#14202e" if luminance >= _LIGHT_ENOUGH else "#fffffe"
    return replace(look, colour="#" + "".join(f"{x:02x}" for x in mixed), text=text)


def shades_of(look: Look, num_chunks: int) -> list[Look]:
    """The looks for all of a device's chunks."""
    return [of_chunk(look, chunk, num_chunks=num_chunks) for chunk in range(num_chunks)]
