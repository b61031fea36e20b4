"""The one table of colours, names and order that every chart, the page and the trace use.

Computing is saturated (forward blue, backward orange, optimizer brown), waiting is pale; a hatch tells the causes of
waiting apart without colour. Neutral colours have a dark twin, which the page puts in their place on dark screens.
"""

from __future__ import annotations

from dataclasses import dataclass

from gplan.nouns import ActionKind, IdleCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one thing is drawn, and what legends call it."""

    name: str
    colour: str
    hatch: str = ""
    text: str = "#fffffe"  # on top of the colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Neutral:
    """A colour that carries no meaning of its own; `dark` replaces it on dark screens."""

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
HATCH = Neutral(name="hatch", light="#a3aebb", dark="#6c7886")
NEUTRALS = (PAPER, INK, FAINT, GRID, BAND, WARM_UP, DRAIN, IMBALANCE, EXPOSED, HATCH)

ACTIONS: dict[ActionKind, Look] = {
    ActionKind.FORWARD: Look(name="forward", colour="#397af2"),
    ActionKind.BACKWARD: Look(name="backward", colour="#f7a440", text="#3b2200"),
    ActionKind.OPTIMIZER: Look(name="optimizer", colour="#b8510f"),
}
RECOMPUTE = Look(name="recompute", colour="#fbd3a0", text="#3b2200")
COMMUNICATION = Look(name="communication", colour="#f2c230", text="#3b2f00")

IDLE: dict[IdleCause, Look] = {
    IdleCause.WARM_UP: Look(name="idle: warm-up", colour=WARM_UP.light),
    IdleCause.DRAIN: Look(name="idle: drain", colour=DRAIN.light, hatch="////"),
    IdleCause.IMBALANCE: Look(name="idle: imbalance", colour=IMBALANCE.light, hatch="xxxx"),
    IdleCause.COMMUNICATION: Look(name="idle: communication", colour=EXPOSED.light, hatch="\\\\\\\\"),
}

MEMORY: dict[str, Look] = {
    "weight_bytes": Look(name="parameters", colour="#3a62a5"),
    "gradient_bytes": Look(name="gradients", colour="#7ba7dc"),
    "optimizer_bytes": Look(name="optimizer state", colour="#b5805c"),
    "activation_bytes": Look(name="activations", colour="#3fa08c"),
    "workspace_bytes": Look(name="temporary", colour="#a9d8cc"),
    "buffer_bytes": Look(name="receive buffers", colour="#ecd074"),
}
MEASURED_PEAK = Look(name="measured peak", colour="#7f6fa6")
CAPACITY = Look(name="capacity", colour="#c62f3b")
