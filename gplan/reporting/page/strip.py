"""The partition as a strip: every layer as wide as its time, a block for each stage, a gap at each cut."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gplan.nouns import Plan, Stage
from gplan.reporting.canvas import layers_text, shortened
from gplan.units import bytes_text, counted, seconds_text

_FEW_STAGES, _MANY_LAYERS = 8, 40
_CHARACTERS = 140  # that fit side by side
_LEAST_SHARE = 0.002  # of the strip, so that no layer is lost to sight


def strip(plan: Plan) -> str:
    """The HTML of the strip; its layers show their names and times to whoever points at them."""
    all_s = sum(map(_stage_s, plan.stages))
    blocks = "".join(_block(plan, stage, all_s) for stage in plan.stages)
    kinds = ["strip", *["few"] * (plan.num_stages <= _FEW_STAGES), *["dense"] * (len(plan.layer_names) > _MANY_LAYERS)]
    return f'<ol class="{" ".join(kinds)}">{blocks}</ol>'


def _block(plan: Plan, stage: Stage, all_s: float) -> str:
    own_s, least_s = _stage_s(stage), _LEAST_SHARE * (all_s or 1.0)
    grow = sum(max(least_s, time_s) for _, time_s in _layers(stage)) / (all_s or 1.0)
    share = f" ({100 * own_s / all_s:.0f} %)" if all_s else ""
    layers = "".join(_layer(words, max(least_s, time_s) / (all_s or 1.0)) for words, time_s in _layers(stage))
    ends = " … ".join(dict.fromkeys((stage.layer_names[0], stage.layer_names[-1])))
    words = "\n".join(
        (f"stage {stage.index} on device {plan.devices[stage.index]}", f"{_stage_text(stage)}: {ends}",
         f"{seconds_text(own_s)} per micro-batch{share}", *_cut_words(plan, stage))
    )  # fmt: skip
    return (
        f'<li style="flex-grow:{1000 * grow:.2f}"><div class="layers">{layers}</div>'
        f'<button type="button" class="stage" title="{escape(words)}"><b>{stage.index}</b>'
        f"<span>{escape(counted(stage.num_layers, 'layer'))}</span><span>{seconds_text(own_s)}</span></button></li>"
    )


def _layer(words: str, share: float) -> str:
    """A layer of so much of the strip, with its name where there is room."""
    name = shortened(words.partition("\n")[0], 14)
    shown = f"<span>{escape(name)}</span>" if share * _CHARACTERS > len(name) + 2 else ""
    return f'<i style="flex-grow:{1000 * share:.2f}" title="{escape(words)}">{shown}</i>'


def _layers(stage: Stage) -> Iterator[tuple[str, float]]:
    """Each layer in words, and the seconds that a micro-batch takes there."""
    times = zip(stage.layer_names, stage.layer_forward_s, stage.layer_backward_s, strict=True)
    for name, forward_s, backward_s in times:
        again = "\nrecomputed in the backward" if name in stage.recompute_layers else ""
        what = f"forward {seconds_text(forward_s)}, backward {seconds_text(backward_s)}"
        yield f"{name}\n{what}\nstage {stage.index}{again}", forward_s + backward_s


def _stage_s(stage: Stage) -> float:
    """Seconds of all layers of a stage for one micro-batch."""
    return sum(stage.layer_forward_s) + sum(stage.layer_backward_s)


def _stage_text(stage: Stage) -> str:
    return f"{counted(stage.num_layers, 'layer')}, {layers_text(stage.first_layer, stage.end_layer).split(' ')[1]}"


def _cut_words(plan: Plan, stage: Stage) -> tuple[str, ...]:
    if stage.index == plan.num_stages - 1:
        return ()
    sent, back = bytes_text(stage.cost.activation_bytes), bytes_text(stage.cost.gradient_bytes)
    return (f"cut after {stage.layer_names[-1]}: {sent} forward, {back} back",)
