"""The comparison itself: layers matched by name, those that share their figures in both profiles taken as one.

The totals are of each profile's own layers, so what appeared or vanished is in them. Contention and the link are not
judged: they come without a spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from gplan import files
from gplan.alike import figures_key, grouped
from gplan.difference.changes import (
    BACKWARD,
    FORWARD,
    BytesChange,
    Difference,
    LayerDifference,
    SizeDifference,
    TimeChange,
    Verdict,
)
from gplan.difference.noise import Estimate, cut_off_noise_s, estimate, judged, total
from gplan.difference.remarks import remarks_on
from gplan.errors import UsageError
from gplan.nouns import Layer, LayerCost, Plan, Profile, Run, SharedWeight

LOSS = "(loss)"
PENDING = "pending"
"""What waits between the halves of a split backward; compared where both profiles know the halves."""

_BYTES: dict[str, Callable[[LayerCost], int]] = {
    "stash": lambda cost: cost.stash_bytes,
    "workspace": lambda cost: cost.workspace_bytes,
    "output": lambda cost: cost.output_bytes,
}


def profile_in(value: files.Value, *, name: str) -> Profile:
    """The profile that a file holds; raises UsageError that names what compares a plan or a run."""
    if isinstance(value, Plan):
        raise UsageError(
            f"{name} is a plan; expected a profile: `gplan show {name}` prints what a plan promises, `gplan run` holds it "
            "against what happens"
        )
    if isinstance(value, Run):
        raise UsageError(
            f"{name} is a run; expected a profile: a run already holds predicted against measured, and `gplan show {name}` "
            "prints both"
        )
    if not isinstance(value, Profile):
        noun = type(value).__name__.lower()
        raise UsageError(f"{name} is a {noun}; expected a profile: `gplan show {name}` prints what it holds")
    return value


def difference(old: Profile, new: Profile, *, microbatch_size: int | None = None) -> Difference:
    """Hold two profiles against each other at one micro-batch size, or at all that both have; O(layers).

    Raises UsageError where they have no layer or no such micro-batch size in common.
    """
    sizes = _sizes(old, new, microbatch_size)
    pairs = _pairs(old, new)
    known, kept = {i for i, _ in pairs}, {j for _, j in pairs}
    return Difference(
        old_model=old.model.name,
        new_model=new.model.name,
        old_created=old.created,
        new_created=new.created,
        old_link=old.link,
        new_link=new.link,
        remarks=tuple(remarks_on(old, new)),
        appeared=tuple(x.name for j, x in enumerate(new.layers) if j not in kept),
        vanished=tuple(x.name for i, x in enumerate(old.layers) if i not in known),
        sizes=tuple(_size_difference(old, new, pairs, size) for size in sizes),
    )


def _sizes(old: Profile, new: Profile, asked: int | None) -> tuple[int, ...]:
    common = tuple(size for size in old.microbatch_sizes if size in new.microbatch_sizes)
    if not common or (asked is not None and asked not in common):
        wanted = "a micro-batch size that both have" if asked is None else f"micro-batch size {asked} in both"
        raise UsageError(
            f"the old profile has micro-batch sizes {_listed(old.microbatch_sizes)}, the new one "
            f"{_listed(new.microbatch_sizes)}; expected {wanted}: `gplan profile --microbatch-size` measures it"
        )
    return common if asked is None else (asked,)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _pairs(old: Profile, new: Profile) -> list[tuple[int, int]]:
    """Old and new index of every layer that both have, in the new order."""
    places = {layer.name: i for i, layer in enumerate(old.layers)}
    pairs = [(places[layer.name], j) for j, layer in enumerate(new.layers) if layer.name in places]
    if not pairs:
        before, after = (f"{x.layers[0].name} to {x.layers[-1].name}" for x in (old, new))
        raise UsageError(
            f"no layer of the old profile ({before}) has the name of one of the new profile ({after}); expected two "
            "profiles of one model"
        )
    return pairs


def _size_difference(old: Profile, new: Profile, pairs: Sequence[tuple[int, int]], size: int) -> SizeDifference:
    at = old.microbatch_sizes.index(size), new.microbatch_sizes.index(size)
    cut_off_s = cut_off_noise_s(old, new)
    groups = grouped([(figures_key(old, i), figures_key(new, j)) for i, j in pairs])
    layers = [_layer(old, new, [pairs[m] for m in members], at, cut_off_s) for members in groups]
    if old.loss and new.loss:
        costs = old.loss[at[0]], new.loss[at[1]]
        memory = tuple(_byte_changes(*costs))
        layers.append(LayerDifference(names=(LOSS,), times=tuple(_time_changes(*costs, cut_off_s)), memory=memory))
    return SizeDifference(
        microbatch_size=size,
        times=tuple(_total_times(old, new, at, cut_off_s)),
        memory=tuple(_total_bytes(old, new, at)),
        layers=tuple(layers),
        median_change=_median_change(layers),
    )


def _layer(
    old: Profile, new: Profile, pairs: Sequence[tuple[int, int]], at: tuple[int, int], cut_off_s: float
) -> LayerDifference:
    """Layers that share their figures, as old and new indices; the first pair speaks for all."""
    before, after = old.layers[pairs[0][0]], new.layers[pairs[0][1]]
    costs = before.costs[at[0]], after.costs[at[1]]
    weights = (
        _bytes_change("weights", before.weight_bytes, after.weight_bytes),
        _bytes_change("gradients", before.gradient_bytes, after.gradient_bytes),
    )
    return LayerDifference(
        names=tuple(new.layers[j].name for _, j in pairs),
        times=tuple(_time_changes(*costs, cut_off_s)),
        memory=(*weights, *_byte_changes(*costs)),
    )


def _time_changes(old: LayerCost, new: LayerCost, cut_off_s: float) -> Iterator[TimeChange]:
    """Every time that both have."""
    for quantity, before in old.timings.items():
        if quantity in new.timings:
            yield judged(quantity, estimate(before), estimate(new.timings[quantity]), cut_off_s=cut_off_s)


def _byte_changes(old: LayerCost, new: LayerCost) -> Iterator[BytesChange]:
    for quantity, of in _BYTES.items():
        yield _bytes_change(quantity, of(old), of(new))
    if old.has_halves and new.has_halves:
        yield _bytes_change(PENDING, old.pending_bytes, new.pending_bytes)


def _bytes_change(quantity: str, old: int, new: int) -> BytesChange:
    verdict: Verdict = "same" if old == new else "more" if new > old else "less"
    return BytesChange(quantity=quantity, old_bytes=old, new_bytes=new, verdict=verdict)


def _total_times(old: Profile, new: Profile, at: tuple[int, int], cut_off_s: float) -> Iterator[TimeChange]:
    """The whole model as one stage, the optimizer, and both together: a step of one micro-batch."""
    sides = [_stage_times(profile, index) for profile, index in zip((old, new), at, strict=True)]
    for quantity in (FORWARD, BACKWARD):
        before, after = (side[quantity] for side in sides)
        yield judged(quantity, before, after, cut_off_s=cut_off_s)
    steps = [total([estimate(x.step.optimizer), estimate(x.step.zero_grad)]) for x in (old, new)]
    yield judged("optimizer", *steps)
    before, after = (total([*side.values(), step]) for side, step in zip(sides, steps, strict=True))
    yield judged("step", before, after, cut_off_s=cut_off_s)


def _stage_times(profile: Profile, index: int) -> dict[str, Estimate]:
    """Forward and backward of all layers and the loss, with a stage's overhead."""
    groups = grouped([figures_key(profile, i) for i in range(len(profile.layers))])
    counted = [(profile.layers[members[0]].costs[index], len(members)) for members in groups]
    counted += [(cost, 1) for cost in profile.loss[index : index + 1]]
    forward = total([estimate(cost.forward).times(n) for cost, n in counted], fixed_s=profile.overhead_s)
    backward = total([estimate(cost.backward).times(n) for cost, n in counted], fixed_s=profile.overhead_s)
    return {FORWARD: forward, BACKWARD: backward}


def _total_bytes(old: Profile, new: Profile, at: tuple[int, int]) -> Iterator[BytesChange]:
    sides = [_stage_bytes(profile, index) for profile, index in zip((old, new), at, strict=True)]
    for quantity in sides[0]:
        if quantity in sides[1]:
            yield _bytes_change(quantity, sides[0][quantity], sides[1][quantity])


def _stage_bytes(profile: Profile, index: int) -> dict[str, int]:
    """What the whole model holds on one device for one micro-batch, shared weights once; the largest workspace."""
    parts: list[Layer | SharedWeight] = [*profile.layers, *profile.shared_weights]
    costs = [*(x.costs[index] for x in profile.layers), *profile.loss[index : index + 1]]
    pending = {PENDING: sum(x.pending_bytes for x in costs)} if any(x.has_halves for x in costs) else {}
    return {
        "weights": sum(x.weight_bytes for x in parts),
        "gradients": sum(x.gradient_bytes for x in parts),
        "optimizer state": profile.step.state_bytes,
        "stash": sum(x.stash_bytes for x in costs),
        "workspace": max(x.workspace_bytes for x in costs),
        **pending,
    }


def _median_change(layers: Iterable[LayerDifference]) -> float:
    shares = [
        time.new_s / time.old_s - 1.0
        for layer in layers
        for time in layer.times
        for _ in layer.names
        if time.quantity in (FORWARD, BACKWARD) and time.old_s
    ]
    return median(shares) if shares else 0.0
