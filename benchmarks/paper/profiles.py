"""Profiles of the paper's models on its accelerators, computed on the meta device; deep ones from shallow ones.

A block that repeats costs the same wherever it stands among its like, so a profile of a few blocks says all of a model
of thousands (`grown`). Attention keeps its scores, as it did on the hardware of that time: torch is asked for its plain
implementation, unless `has_fused_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import gplan
from gplan.core import Granularity, Layer, Profile

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NUM_GROUPS = 3  # of normal cells in AmoebaNet
FEWEST_CELLS = 4  # of a group: two that read what is no normal cell, one between its like, a last one
FEWEST_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """For which accelerator to compute, and at which micro-batch sizes."""

    hardware: str
    microbatch_sizes: tuple[int, ...]
    has_fused_attention: bool = False
    granularity: Granularity = "layer"


def amoebanet_profile(num_layers: int, num_filters: int, target: Target, *, image_size: int = 224) -> Profile:
    """AmoebaNet-D(num_layers, num_filters) for 1000 classes; layers are a multiple of 3, at least 12."""
    per_group = num_layers // NUM_GROUPS
    shallow = _profile(
        "amoebanet_d",
        target,
        num_layers=NUM_GROUPS * FEWEST_CELLS,
        num_filters=num_filters,
        num_classes=1000,
        image_size=image_size,
    )
    repeated = [f"normal_{group * FEWEST_CELLS + FEWEST_CELLS - 1}" for group in range(NUM_GROUPS)]
    return grown(shallow, dict.fromkeys(repeated, per_group - FEWEST_CELLS))


def transformer_profile(num_layers: int, target: Target, **dimensions: int) -> Profile:
    """Transformer-L; the paper's dimensions where none are given."""
    settings = dimensions or {"paper": True}
    if target.granularity == "op":  # a block is then a pattern of several layers, and the graph has branches
        return _profile("transformer_l", target, num_layers=num_layers, **settings)
    shallow = _profile("transformer_l", target, num_layers=min(num_layers, FEWEST_BLOCKS), **settings)
    return grown(shallow, {"blocks.1": num_layers - FEWEST_BLOCKS}) if num_layers > FEWEST_BLOCKS else shallow


def grown(profile: Profile, copies: Mapping[str, int]) -> Profile:
    """The profile of a deeper chain: so many copies of a layer follow it, for each layer named.

    The optimizer's time and state grow with the bytes that are trained. Raises ValueError for a negative number of
    copies.
    """
    if min(copies.values()) < 0:
        raise ValueError(f"{copies} copies of layers; expected 0 or more: a deeper model than the profiled one")
    layers: list[Layer] = []
    places = list(accumulate((1 + copies.get(x.name, 0) for x in profile.layers), initial=0))
    for index, layer in enumerate(profile.layers):
        for copy in range(1 + copies.get(layer.name, 0)):
            name, like = (f"{layer.name}+{copy}", places[index]) if copy else (layer.name, None)
            layers.append(replace(_moved(layer, index, len(layers), places), name=name, same_as=like))
    share = sum(x.gradient_bytes for x in layers) / profile.trained_bytes
    step = replace(
        profile.step,
        optimizer=profile.step.optimizer.times(share),
        zero_grad=profile.step.zero_grad.times(share),
        state_bytes=round(profile.step.state_bytes * share),
    )
    return replace(profile, layers=tuple(layers), step=step)


def _moved(layer: Layer, index: int, place: int, places: Sequence[int]) -> Layer:
    """The layer at another place: what the next layer left, the next one does; the others are where they are now."""

    def distance(num_later: int) -> int:
        return 1 if num_later == 1 else places[index + num_later] - place

    return replace(layer, costs=tuple(x.renumbered(distance) for x in layer.costs))


def counted_as_in_the_paper(profile: Profile, bytes_per_parameter: int) -> Profile:
    """The same with so much state that a parameter takes that many bytes, its gradient among them."""
    state_bytes = bytes_per_parameter * profile.num_parameters - 2 * profile.trained_bytes
    if state_bytes < 0:
        raise ValueError(f"{bytes_per_parameter} bytes a parameter; weight and gradient alone take 8")
    return replace(profile, step=replace(profile.step, state_bytes=state_bytes))


def without_limit(profile: Profile) -> Profile:
    """The same on a device whose memory has no end."""
    return replace(profile, device=replace(profile.device, memory_bytes=None))


@lru_cache(maxsize=64)
def _profile(example: str, target: Target, **settings: int) -> Profile:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = contextlib.nullcontext() if target.has_fused_attention else sdpa_kernel(SDPBackend.MATH)
    with attention:
        return gplan.profile(
            str(EXAMPLES / f"{example}.py"),
            settings=settings,
            microbatch_sizes=target.microbatch_sizes,
            device="meta",
            hardware=target.hardware,
            granularity=target.granularity,
        )
