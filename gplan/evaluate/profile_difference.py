"""The comparison itself: layers matched by name, those that share their figures in both profiles taken as one.

The totals are of each profile's own layers, so what appeared or vanished is in them. Contention and the link are not
judged: they come without a spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from gplan.core import Layer, LayerCost, Link, Plan, Profile, Run, SharedWeight, Timing
from gplan.core.errors import UsageError
from gplan.core.profile import group_equal
from gplan.core.units import counted
from gplan.files import json_files

# Two profiles held against each other: what became slower or faster, beyond the noise, and what became larger.


# The values of a comparison of two profiles: a change of a time or of a size, a layer's changes, the whole.


Verdict: TypeAlias = Literal["slower", "faster", "more", "less", "same"]
"""Of a time or a size, new against old."""

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """One time, old and new; they are the same where they differ by no more than the noise."""

    quantity: str
    old_s: float
    new_s: float
    noise_s: float
    verdict: Verdict

    @property
    def change_s(self) -> float:
        """Positive where it became slower."""
        return self.new_s - self.old_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesChange:
    """One size, old and new; both are exact."""

    quantity: str
    old_bytes: int
    new_bytes: int
    verdict: Verdict

    @property
    def change_bytes(self) -> int:
        """Positive where it became larger."""
        return self.new_bytes - self.old_bytes


Change: TypeAlias = TimeChange | BytesChange


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer, or several that share their figures in both profiles; the figures are those of one of them."""

    names: tuple[str, ...]
    times: tuple[TimeChange, ...]
    memory: tuple[BytesChange, ...]

    @property
    def change_s(self) -> float:
        """Forward and backward, of all of them; positive where they became slower."""
        return len(self.names) * sum(x.change_s for x in self.times if x.quantity in (FORWARD, BACKWARD))

    @property
    def change_bytes(self) -> int:
        """Of all sizes, up or down."""
        return len(self.names) * sum(abs(x.change_bytes) for x in self.memory)

    @property
    def is_changed(self) -> bool:
        """Whether a time changed beyond the noise, or a size at all."""
        return self.change_bytes > 0 or any(x.verdict != "same" for x in self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDifference:
    """Two profiles at one micro-batch size: the whole model, and the layers that both have, in the new one's order."""

    microbatch_size: int
    times: tuple[TimeChange, ...]  # of the whole model as one stage; the step is one of one micro-batch
    memory: tuple[BytesChange, ...]
    layers: tuple[LayerDifference, ...]  # the loss last
    median_change: float  # of the layers' forwards and backwards, a share: what happened to all of them alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two profiles held against each other, at one or several micro-batch sizes that both have."""

    old_model: str
    new_model: str
    old_created: str
    new_created: str
    old_link: Link
    new_link: Link
    remarks: tuple[str, ...]  # what else differs: machine, versions, settings
    appeared: tuple[str, ...]  # layers of the new profile only
    vanished: tuple[str, ...]
    sizes: tuple[SizeDifference, ...]


# Whether a time has changed: old and new differ by more than
#
#     1.96 sqrt(e_old^2 + e_new^2) + 5 % of the larger + half of the larger overhead_s
#
# The first part is the 95 % band of a difference of two medians: e = 1.25 sigma / sqrt(n) is the standard error of a
# median of n normal samples, sigma = (distance of the quartiles) / 1.35. It holds within one profile. From one profile to
# the next the clock rate, the place in memory and other work on the host change for all samples at once: medians of an
# unchanged model move by several percent while the quartiles of each stay within one or two, and no number of samples
# shows it. Hence the second part. What a layer costs for being cut off is a mean over all layers that was taken off each
# of them, differs from profile to profile, and decides for layers of a few microseconds. Hence the third part.
#
# The parts are added, not squared, as drift moves all layers together. Of twenty layers that did not change one may still
# be called slower or faster, and of a drift beyond 5 % all of them. Computed and given times have no noise, except
# against measured ones.


_Z = 1.96
_MEDIAN_ERROR = 1.25 / 1.35  # standard error of a median, in distances of the quartiles over sqrt(n)
_DRIFT = 0.05
_OVERHEAD_SHARE = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A time and the standard error of it."""

    seconds: float
    error_s: float = 0.0
    is_measured: bool = False

    def times(self, count: int) -> Estimate:
        """`count` layers that were measured as one: their errors are one error."""
        return Estimate(seconds=count * self.seconds, error_s=count * self.error_s, is_measured=self.is_measured)


def estimate(timing: Timing) -> Estimate:
    """A timing's median; one without a count of its samples is taken as one sample.

    >>> round(estimate(Timing(median_s=10.0, low_s=9.0, high_s=11.7, num_samples=25)).error_s, 6)
    0.5
    """
    error_s = _MEDIAN_ERROR * (timing.high_s - timing.low_s) / math.sqrt(max(1, timing.num_samples))
    return Estimate(seconds=timing.median_s, error_s=error_s, is_measured=timing.origin == "measured")


def total(parts: Iterable[Estimate], *, fixed_s: float = 0.0) -> Estimate:
    """The sum of estimates that are independent of each other, and of a time that is known."""
    found = list(parts)
    return Estimate(
        seconds=fixed_s + sum(x.seconds for x in found),
        error_s=math.hypot(*(x.error_s for x in found)),
        is_measured=any(x.is_measured for x in found),
    )


def cut_off_noise_s(old: Profile, new: Profile) -> float:
    """What the cost of being cut off leaves unknown of a layer's time."""
    return _OVERHEAD_SHARE * max(old.overhead_s, new.overhead_s)


def judged(quantity: str, old: Estimate, new: Estimate, *, cut_off_s: float = 0.0) -> TimeChange:
    """Old and new with the noise between them; `cut_off_s` as from `cut_off_noise_s`, 0 for what was never cut off."""
    larger_s = max(old.seconds, new.seconds)
    noise_s = _ROUNDING * larger_s
    if old.is_measured or new.is_measured:
        noise_s = _Z * math.hypot(old.error_s, new.error_s) + _DRIFT * larger_s + cut_off_s
    change_s = new.seconds - old.seconds
    moved: Verdict = "slower" if change_s > 0 else "faster"
    verdict: Verdict = moved if abs(change_s) > noise_s else "same"
    return TimeChange(quantity=quantity, old_s=old.seconds, new_s=new.seconds, noise_s=noise_s, verdict=verdict)


# What else differs between two profiles: where it does, a time may have changed without the model.


def remarks_on(old: Profile, new: Profile) -> Iterator[str]:
    """Machine, versions, settings and what else is not alike, then what either profile notes of itself."""
    before, after = _facts(old), _facts(new)
    for name in dict.fromkeys([*before, *after]):
        found, expected = after.get(name, "none"), before.get(name, "none")
        if found != expected:
            yield f"{name}: {expected} → {found}"
    for note in dict.fromkeys([*old.notes, *new.notes]):
        sides = [side for side, profile in (("old", old), ("new", new)) if note in profile.notes]
        yield f"of the {' and the '.join(sides)} profile: {note}"


def _facts(profile: Profile) -> dict[str, str]:
    """What should be alike for the times to speak of the model alone."""
    device = profile.device
    return {
        "model": profile.model.name,
        "digest of layers and parameters": profile.model.digest,
        **{f"setting {name}": value for name, value in profile.model.settings},
        "machine": f"{device.name} ({device.kind})",
        "threads": str(device.num_threads),
        **{f"version of {name}": version for name, version in profile.versions},
        "micro-batch sizes": ", ".join(map(str, profile.microbatch_sizes)),
        "optimizer": profile.step.optimizer_name,
        "loss over the samples": profile.loss_reduction if profile.loss else "none",
        "figures": profile.origin,
        "processes beside the measured one": str(profile.num_neighbours),
    }


LOSS = "(loss)"
PENDING = "pending"
"""What waits between the halves of a split backward; compared where both profiles know the halves."""

_BYTES: dict[str, Callable[[LayerCost], int]] = {
    "stash": lambda cost: cost.stash_bytes,
    "workspace": lambda cost: cost.workspace_bytes,
    "output": lambda cost: cost.output_bytes,
}


def profile_in(value: json_files.Value, *, name: str) -> Profile:
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
    if 2 * len(pairs) < min(len(old.layers), len(new.layers)):
        before, after = (f"{x.model.name}, {counted(len(x.layers), 'layer')}" for x in (old, new))
        found = f"only {counted(len(pairs), 'layer')}" if pairs else "no layer"
        raise UsageError(
            f"{found} of the old profile ({before}) has the name of a layer of the new profile ({after}); expected two "
            "profiles of one model, with at least half of the layers of the smaller one in common"
        )
    return pairs


def _size_difference(old: Profile, new: Profile, pairs: Sequence[tuple[int, int]], size: int) -> SizeDifference:
    at = old.microbatch_sizes.index(size), new.microbatch_sizes.index(size)
    cut_off_s = cut_off_noise_s(old, new)
    groups = group_equal([(old.cost_key(i), new.cost_key(j)) for i, j in pairs])
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
    groups = profile.layers_with_equal_costs()
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
