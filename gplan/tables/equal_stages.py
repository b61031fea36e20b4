"""The bubble of equal stages with free transfers as text: alone where a law gives it, else with what it depends on.

By a law K, M and the chunks alone decide. Elsewhere, as where K does not divide the M of interleaved 1F1B, it also
matters how much longer a backward is than a forward, so that two profiles have two such bubbles.
"""

from __future__ import annotations

from gplan.nouns import ActionKind, Timeline
from gplan.trial import Law
from gplan.units import percent_text


def equal_stages_text(bubble: float, law: Law | None, timeline: Timeline) -> str:
    """The bubble of equal stages; where no law holds, with what the step's backwards take for each forward."""
    if law is not None:
        return percent_text(bubble)
    forward_s = sum(x.duration_s for x in timeline.loop_spans if x.action.kind is ActionKind.FORWARD)
    backward_s = sum(x.duration_s for x in timeline.loop_spans) - forward_s
    if not forward_s or not bubble:
        return percent_text(bubble)
    return f"{percent_text(bubble)}, where a backward takes {backward_s / forward_s:.3g} × a forward"
