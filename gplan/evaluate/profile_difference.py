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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias, TypeVar

from gplan.core import Layer, LayerCost, Link, Plan, Profile, Run, SharedWeight, Timing
from gplan.core.errors import UsageError
from gplan.core.layer_cost import quartiles_median_error
from gplan.core.precision import AS_MADE
from gplan.core.profile import group_equal
from gplan.core.units import counted
from gplan.files import json_files

Verdict: TypeAlias = Literal["slower", "faster", "more", "less", "same"]
"""Of a new time or size against the old one."""

FORWARD, BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """One time, old and new; "same" if they differ by no more than the noise."""

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
    """A layer, or several with equal figures in both profiles; the figures are of one of them."""

    names: tuple[str, ...]
    times: tuple[TimeChange, ...]
    memory: tuple[BytesChange, ...]

    @property
    def change_s(self) -> float:
        """Of forward and backward, all layers together; positive where they became slower."""
        return len(self.names) * sum(x.change_s for x in self.times if x.quantity in (FORWARD, BACKWARD))

    @property
    def change_bytes(self) -> int:
        """The sum of all sizes' absolute changes."""
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


_Z = 1.96
_DRIFT = 0.05
_OVERHEAD_SHARE = 0.5
_ROUNDING = 1e-9
LOSS = "(loss)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A time and its standard error."""

    seconds: float
    error_s: float = 0.0
    is_measured: bool = False

    def times(self, count: int) -> Estimate:
        """`count` layers that were measured as one, so their errors add up."""
        return Estimate(seconds=count * self.seconds, error_s=count * self.error_s, is_measured=self.is_measured)


def estimate(timing: Timing) -> Estimate:
    """A timing's median and its error; a timing without a number of samples counts as one sample.

    >>> round(estimate(Timing(median_s=10.0, low_s=9.0, high_s=11.7, num_samples=25)).error_s, 6)
    0.5
    """
    error_s = quartiles_median_error(timing.low_s, timing.high_s, max(1, timing.num_samples))
    return Estimate(seconds=timing.median_s, error_s=error_s, is_measured=timing.origin == "measured")


def total(estimates: Iterable[Estimate], *, fixed_s: float = 0.0) -> Estimate:
    """The sum of independent estimates and a time without error."""
    parts = list(estimates)
    return Estimate(
        seconds=fixed_s + sum(x.seconds for x in parts),
        error_s=math.hypot(*(x.error_s for x in parts)),
        is_measured=any(x.is_measured for x in parts),
    )


def time_change(quantity: str, old: Estimate, new: Estimate, *, overhead_s: float = 0.0) -> TimeChange:
    """Old and new with their noise; `overhead_s` is the part of the noise that comes from cutting layers apart."""
    larger_s = max(old.seconds, new.seconds)
    noise_s = _ROUNDING * larger_s
    if old.is_measured or new.is_measured:
        noise_s = _Z * math.hypot(old.error_s, new.error_s) + _DRIFT * larger_s + overhead_s
    change_s = new.seconds - old.seconds
    moved: Verdict = "slower" if change_s > 0 else "faster"
    verdict: Verdict = moved if abs(change_s) > noise_s else "same"
    return TimeChange(quantity=quantity, old_s=old.seconds, new_s=new.seconds, noise_s=noise_s, verdict=verdict)


def checked_profile(value: json_files.Value, *, name: str) -> Profile:
    """The profile that a file holds; raises UsageError for another value, with the command to use for it."""
    if isinstance(value, Profile):
        return value
    noun, command = type(value).__name__.lower(), f"`gplan show {name}`"
    if isinstance(value, Plan):
        remedy = f"{command} prints the plan's prediction, and `gplan run` compares it with a measurement"
    elif isinstance(value, Run):
        remedy = f"a run already holds predicted against measured, and {command} prints both"
    else:
        remedy = f"{command} prints what it holds"
    raise UsageError(f"{name} is a {noun}; expected a profile: {remedy}")


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
    old_at, new_at = old.microbatch_sizes.index(size), new.microbatch_sizes.index(size)
    overhead_s = _OVERHEAD_SHARE * max(old.overhead_s, new.overhead_s)

    def layer_difference(names: tuple[str, ...], costs: list[LayerCost], weights: list[Layer]) -> LayerDifference:
        estimates = [{name: estimate(timing) for name, timing in cost.timings.items()} for cost in costs]
        sizes = [_weight_bytes([x]) for x in weights] or [{}, {}]
        memory = [{**x, **_cost_bytes(cost), "output": cost.output_bytes} for x, cost in zip(sizes, costs, strict=True)]
        times = tuple(time_change(x, y, z, overhead_s=overhead_s) for x, y, z in _in_both(*estimates))
        return LayerDifference(names=names, times=times, memory=_byte_changes(*memory))

    layers = []
    for members in group_equal([(old.cost_key(i), new.cost_key(j)) for i, j in pairs]):
        i, j = pairs[members[0]]
        before, after = old.layers[i], new.layers[j]
        names = tuple(new.layers[pairs[m][1]].name for m in members)
        layers.append(layer_difference(names, [before.costs[old_at], after.costs[new_at]], [before, after]))
    if old.loss and new.loss:
        layers.append(layer_difference((LOSS,), [old.loss[old_at], new.loss[new_at]], []))
    times = _in_both(_whole_times(old, old_at), _whole_times(new, new_at))
    memory = [  # of the whole model on one device for one micro-batch; shared weights once, the largest workspace
        {
            **_weight_bytes([*x.layers, *x.shared_weights]),
            "optimizer state": x.step.state_bytes,
            **_cost_bytes(*x.costs_at(at)),
        }
        for x, at in ((old, old_at), (new, new_at))
    ]
    shares = [
        time.new_s / time.old_s - 1.0
        for layer in layers
        for time in layer.times
        for _ in layer.names
        if time.quantity in (FORWARD, BACKWARD) and time.old_s
    ]
    return SizeDifference(
        microbatch_size=size,
        times=tuple(time_change(x, y, z, overhead_s=0.0 if x == _OPTIMIZER else overhead_s) for x, y, z in times),
        memory=_byte_changes(*memory),
        layers=tuple(layers),
        median_change=median(shares) if shares else 0.0,
    )


def _in_both(old: Mapping[str, Item], new: Mapping[str, Item]) -> Iterator[tuple[str, Item, Item]]:
    return ((quantity, value, new[quantity]) for quantity, value in old.items() if quantity in new)


def _byte_changes(old: Mapping[str, int], new: Mapping[str, int]) -> tuple[BytesChange, ...]:
    return tuple(
        BytesChange(quantity=x, old_bytes=a, new_bytes=b, verdict="same" if a == b else "more" if b > a else "less")
        for x, a, b in _in_both(old, new)
    )


def _whole_times(profile: Profile, index: int) -> dict[str, Estimate]:
    """The whole model as one stage with its overhead, the optimizer, and a step of one micro-batch."""
    alike = group_equal([profile.cost_key(i) for i in range(len(profile.layers))])
    costs = [(profile.layers[x[0]].costs[index], len(x)) for x in alike]
    costs += [(cost, 1) for cost in profile.loss[index : index + 1]]
    forward = total([estimate(cost.forward).times(n) for cost, n in costs], fixed_s=profile.overhead_s)
    backward = total([estimate(cost.backward).times(n) for cost, n in costs], fixed_s=profile.overhead_s)
    optimizer = total([estimate(profile.step.optimizer), estimate(profile.step.zero_grad)])
    step = total([forward, backward, optimizer])
    return {FORWARD: forward, BACKWARD: backward, _OPTIMIZER: optimizer, "step": step}


def _weight_bytes(parts: Iterable[Layer | SharedWeight]) -> dict[str, int]:
    weights = list(parts)
    return {"weights": sum(x.weight_bytes for x in weights), "gradients": sum(x.gradient_bytes for x in weights)}


def _cost_bytes(*costs: LayerCost) -> dict[str, int]:
    """Stash and workspace; bytes pending between the halves of a backward only where the halves are known."""
    pending = {"pending": sum(x.pending_bytes for x in costs)} if any(x.has_halves for x in costs) else {}
    return {"stash": sum(x.stash_bytes for x in costs), "workspace": max(x.workspace_bytes for x in costs), **pending}
