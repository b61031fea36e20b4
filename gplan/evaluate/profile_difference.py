"""The difference of two profiles: layers matched by name, each time judged against its noise.

A time has changed if old and new differ by more than

    1.96 sqrt(e_old^2 + e_new^2) + 5 % of the larger + half of the larger overhead_s

The first part is the 95 % band of a difference of two medians: e = 1.25 sigma / sqrt(n) is the standard error of a median
of n normal samples, sigma = (interquartile range) / 1.35. From one profile to the next, clock rate, memory placement and
other work move all medians of an unchanged model by several percent, which no sample shows: the second part. A layer's
time excludes the mean overhead of cutting layers apart, which varies between profiles: the third part. Drift moves
layers together, so the parts are added, not squared. Computed and given times have no noise, except against measured ones.

Totals are of each profile's own layers. Contention and the link come without a spread and are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from gplan.core import Layer, LayerCost, Link, Profile, SharedWeight, Timing
from gplan.core.errors import UsageError
from gplan.core.layer_cost import quartiles_median_error
from gplan.core.precision import AS_MADE
from gplan.core.profile import group_equal
from gplan.core.units import counted

Verdict: TypeAlias = Literal["slower", "faster", "more", "less", "same"]
"""Of a new time or size against the old one."""

FORWARD, BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"
LOSS = "(loss)"
_Z = 1.96
_DRIFT = 0.05
_OVERHEAD_SHARE = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One time or size, old and new; "same" where they differ by no more than the noise. Sizes are exact."""

    quantity: str
    unit: Literal["seconds", "bytes"]
    old: float
    new: float
    noise: float = 0.0
    verdict: Verdict

    @property
    def change(self) -> float:
        """Positive where it became slower or larger."""
        return self.new - self.old


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer, or several with equal figures in both profiles; the figures are of one of them."""

    names: tuple[str, ...]
    changes: tuple[Change, ...]  # times, then sizes

    @property
    def change_s(self) -> float:
        """Of forward and backward, all layers together; positive where they became slower."""
        return len(self.names) * sum(x.change for x in self.changes if x.quantity in (FORWARD, BACKWARD))

    @property
    def change_bytes(self) -> float:
        """The sum of all sizes' absolute changes."""
        return len(self.names) * sum(abs(x.change) for x in self.changes if x.unit == "bytes")

    @property
    def is_changed(self) -> bool:
        """Whether a time changed beyond the noise, or a size at all."""
        return any(x.verdict != "same" for x in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDifference:
    """Two profiles at one micro-batch size: the whole model, and the layers that both have, in the new one's order."""

    microbatch_size: int
    whole_model: tuple[Change, ...]  # on one device; the step is one of one micro-batch
    layers: tuple[LayerDifference, ...]  # the loss last
    median_change: float  # share, of the layers' forwards and backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The differences of two profiles at one or several common micro-batch sizes."""

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


class Estimate(NamedTuple):
    """A time and its standard error."""

    seconds: float
    error_s: float
    is_measured: bool


def total(timings: Iterable[tuple[Timing, int]], *, fixed_s: float = 0.0) -> Estimate:
    """The sum of timings and of a time without error; a timing that stands for n layers counts n times.

    A timing's error counts n times too, other errors are independent. One without a number of samples is one sample.

    >>> timing = Timing(median_s=10.0, low_s=9.0, high_s=11.7, num_samples=25)
    >>> round(total([(timing, 1)]).error_s, 6), round(total([(timing, 3)]).error_s, 6)
    (0.5, 1.5)
    """
    parts = list(timings)
    errors_s = [n * quartiles_median_error(x.low_s, x.high_s, max(1, x.num_samples)) for x, n in parts]
    seconds = fixed_s + sum(n * x.median_s for x, n in parts)
    return Estimate(seconds, math.hypot(*errors_s), any(x.origin == "measured" for x, _ in parts))


def time_change(quantity: str, old: Estimate, new: Estimate, *, overhead_s: float = 0.0) -> Change:
    """Old and new with their noise; `overhead_s` is the part of the noise that comes from cutting layers apart."""
    larger_s = max(old.seconds, new.seconds)
    noise_s = _ROUNDING * larger_s
    if old.is_measured or new.is_measured:
        noise_s = _Z * math.hypot(old.error_s, new.error_s) + _DRIFT * larger_s + overhead_s
    change_s = new.seconds - old.seconds
    verdict: Verdict = "same" if abs(change_s) <= noise_s else "slower" if change_s > 0 else "faster"
    return Change(quantity=quantity, unit="seconds", old=old.seconds, new=new.seconds, noise=noise_s, verdict=verdict)


def profile_difference(old: Profile, new: Profile, *, microbatch_size: int | None = None) -> Difference:
    """The differences at one micro-batch size, or at all that both profiles have; O(layers).

    Raises UsageError where the profiles have too few layers, or not that micro-batch size, in common.
    """
    sizes, pairs = _sizes(old, new, microbatch_size), _pairs(old, new)
    in_old, in_new = {i for i, _ in pairs}, {j for _, j in pairs}
    return Difference(
        old_model=old.model.name,
        new_model=new.model.name,
        old_created=old.created,
        new_created=new.created,
        old_link=old.link,
        new_link=new.link,
        remarks=tuple(_remarks(old, new)),
        appeared=tuple(x.name for j, x in enumerate(new.layers) if j not in in_new),
        vanished=tuple(x.name for i, x in enumerate(old.layers) if i not in in_old),
        sizes=tuple(_size_difference(old, new, pairs, size) for size in sizes),
    )


def _remarks(old: Profile, new: Profile) -> Iterator[str]:
    """Other differences that may change a time (machine, versions, settings), then each profile's own notes."""
    before, after = (
        {
            "model": x.model.name,
            "digest of layers and parameters": x.model.digest,
            **{f"setting {name}": value for name, value in x.model.settings},
            "machine": f"{x.device.name} ({x.device.kind})",
            "threads": str(x.device.num_threads),
            **{f"version of {name}": version for name, version in x.versions},
            "micro-batch sizes": ", ".join(map(str, x.microbatch_sizes)),
            "optimizer": x.step.optimizer_name,
            "loss over the samples": x.loss_reduction if x.loss else "none",
            "figures": x.origin,
            "precision": "as made" if x.precision == AS_MADE else x.precision.name,
            "processes beside the measured one": str(x.num_neighbours),
        }
        for x in (old, new)
    )
    for name in dict.fromkeys([*before, *after]):
        found, expected = after.get(name, "none"), before.get(name, "none")
        if found != expected:
            yield f"{name}: {expected} → {found}"
    notes = {"old": old.all_notes, "new": new.all_notes}
    for note in dict.fromkeys((*notes["old"], *notes["new"])):
        sides = [side for side, found in notes.items() if note in found]
        yield f"of the {' and the '.join(sides)} profile: {note}"


def _sizes(old: Profile, new: Profile, wanted_size: int | None) -> tuple[int, ...]:
    common = tuple(size for size in old.microbatch_sizes if size in new.microbatch_sizes)
    if not common or (wanted_size is not None and wanted_size not in common):
        wanted = (
            "a micro-batch size that both have" if wanted_size is None else f"micro-batch size {wanted_size} in both"
        )
        before, after = (", ".join(map(str, x.microbatch_sizes)) for x in (old, new))
        raise UsageError(
            f"the old profile has micro-batch sizes {before}, the new one {after}; expected {wanted}: "
            "`gplan profile --microbatch-size` measures it"
        )
    return common if wanted_size is None else (wanted_size,)


def _pairs(old: Profile, new: Profile) -> list[tuple[int, int]]:
    """The old and the new index of every layer that both have, in the new order."""
    indices = {layer.name: i for i, layer in enumerate(old.layers)}
    pairs = [(indices[layer.name], j) for j, layer in enumerate(new.layers) if layer.name in indices]
    if 2 * len(pairs) < min(len(old.layers), len(new.layers)):
        before, after = (f"{x.model.name}, {counted(len(x.layers), 'layer')}" for x in (old, new))
        found = f"only {counted(len(pairs), 'layer')}" if pairs else "no layer"
        raise UsageError(
            f"{found} of the old profile ({before}) has the name of a layer of the new profile ({after}); expected two "
            "profiles of one model, with at least half of the layers of the smaller one in common"
        )
    return pairs


def _size_difference(old: Profile, new: Profile, pairs: list[tuple[int, int]], size: int) -> SizeDifference:
    sides = [(x, x.microbatch_sizes.index(size)) for x in (old, new)]
    overhead_s = _OVERHEAD_SHARE * max(old.overhead_s, new.overhead_s)

    def changes(times: Sequence[Mapping[str, Estimate]], sizes: Sequence[Mapping[str, int]]) -> tuple[Change, ...]:
        """Of what both sides have, old and new."""
        of_times = (
            time_change(name, x, times[1][name], overhead_s=0.0 if name == _OPTIMIZER else overhead_s)
            for name, x in times[0].items()
            if name in times[1]
        )
        of_sizes = (_bytes_change(name, x, sizes[1][name]) for name, x in sizes[0].items() if name in sizes[1])
        return (*of_times, *of_sizes)

    def layer_difference(names: tuple[str, ...], costs: list[LayerCost], weights: list[Layer]) -> LayerDifference:
        times = [{name: total([(timing, 1)]) for name, timing in cost.timings.items()} for cost in costs]
        own = [_weight_bytes([x]) for x in weights] or [{}, {}]
        sizes = [{**x, **_cost_bytes(cost), "output": cost.output_bytes} for x, cost in zip(own, costs, strict=True)]
        return LayerDifference(names=names, changes=changes(times, sizes))

    layers = []
    for members in group_equal([(old.cost_key(i), new.cost_key(j)) for i, j in pairs]):
        both = [x.layers[place] for (x, _), place in zip(sides, pairs[members[0]], strict=True)]
        names = tuple(new.layers[pairs[m][1]].name for m in members)
        costs = [layer.costs[at] for layer, (_, at) in zip(both, sides, strict=True)]
        layers.append(layer_difference(names, costs, both))
    if old.loss and new.loss:
        layers.append(layer_difference((LOSS,), [x.loss[at] for x, at in sides], []))
    whole_times = [_whole_times(x, at) for x, at in sides]
    whole_bytes = [  # for one micro-batch; shared weights once, the largest workspace
        {
            **_weight_bytes([*x.layers, *x.shared_weights]),
            "optimizer state": x.step.state_bytes,
            **_cost_bytes(*x.costs_at(at)),
        }
        for x, at in sides
    ]
    shares = [
        x.new / x.old - 1.0
        for layer in layers
        for x in layer.changes
        for _ in layer.names
        if x.quantity in (FORWARD, BACKWARD) and x.old
    ]
    return SizeDifference(
        microbatch_size=size,
        whole_model=changes(whole_times, whole_bytes),
        layers=tuple(layers),
        median_change=median(shares) if shares else 0.0,
    )


def _bytes_change(quantity: str, old: int, new: int) -> Change:
    verdict: Verdict = "same" if old == new else "more" if new > old else "less"
    return Change(quantity=quantity, unit="bytes", old=old, new=new, verdict=verdict)


def _whole_times(profile: Profile, index: int) -> dict[str, Estimate]:
    """The whole model as one stage with its overhead, the optimizer, and a step of one micro-batch."""
    alike = group_equal([profile.cost_key(i) for i in range(len(profile.layers))])
    costs = [(profile.layers[x[0]].costs[index], len(x)) for x in alike]
    costs += [(cost, 1) for cost in profile.loss[index : index + 1]]
    forward, backward = ([(getattr(cost, name), n) for cost, n in costs] for name in (FORWARD, BACKWARD))
    optimizer = [(profile.step.optimizer, 1), (profile.step.zero_grad, 1)]
    overhead_s = profile.overhead_s
    return {
        FORWARD: total(forward, fixed_s=overhead_s),
        BACKWARD: total(backward, fixed_s=overhead_s),
        _OPTIMIZER: total(optimizer),
        "step": total([*forward, *backward, *optimizer], fixed_s=2 * overhead_s),
    }


def _weight_bytes(parts: Iterable[Layer | SharedWeight]) -> dict[str, int]:
    weights = list(parts)
    return {"weights": sum(x.weight_bytes for x in weights), "gradients": sum(x.gradient_bytes for x in weights)}


def _cost_bytes(*costs: LayerCost) -> dict[str, int]:
    """Stash and workspace; bytes pending between the halves of a backward only where the halves are known."""
    pending = {"pending": sum(x.pending_bytes for x in costs)} if any(x.has_halves for x in costs) else {}
    return {"stash": sum(x.stash_bytes for x in costs), "workspace": max(x.workspace_bytes for x in costs), **pending}
