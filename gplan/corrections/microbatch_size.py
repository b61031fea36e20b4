"""A profile at one micro-batch size; between two profiled sizes by linear interpolation, never extrapolated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from gplan.core.errors import UsageError
from gplan.core.layer_cost import TIMINGS, LayerCost, Leftover, Lifetime, Timing
from gplan.core.profile import Profile, ValueCost

_NUMBERS = tuple(x.name for x in fields(LayerCost) if x.name.endswith("_bytes"))
_FACTORS = tuple(x.name for x in fields(LayerCost) if x.type == "float")


def at_microbatch_size(profile: Profile, microbatch_size: int) -> Profile:
    """The profile with the costs of this size alone, and in `plan_notes` all that a reader of a plan must know.

    Raises UsageError for a size outside the profiled ones.
    """
    sizes = profile.microbatch_sizes
    notes = (*profile.plan_notes, *profile.doubts)
    if microbatch_size not in sizes:
        notes = (f"costs at micro-batch size {microbatch_size} are interpolated between {sizes}", *notes)
    if sizes == (microbatch_size,):
        return replace(profile, plan_notes=notes, whole_model=())
    return replace(
        profile,
        layers=tuple(replace(x, costs=(cost_at(x.costs, microbatch_size),)) for x in profile.layers),
        loss=(cost_at(profile.loss, microbatch_size),) if profile.loss else (),
        values=tuple(replace(x, costs=(value_cost_at(x.costs, microbatch_size),)) for x in profile.values),
        plan_notes=notes,
        whole_model=(),
    )


def cost_at(costs: tuple[LayerCost, ...], microbatch_size: int) -> LayerCost:
    """A layer's costs at a micro-batch size, interpolated between the two nearest profiled sizes.

    Raises UsageError for a size outside the profiled ones.
    """
    sizes = [cost.microbatch_size for cost in costs]
    if microbatch_size in sizes:
        return costs[sizes.index(microbatch_size)]
    above = next((i for i, size in enumerate(sizes) if size > microbatch_size), 0)
    if above == 0:
        raise UsageError(
            f"the profile has micro-batch sizes {', '.join(map(str, sizes))}; asked for {microbatch_size}; "
            f"profile again with --microbatch-size {','.join(map(str, sorted([*sizes, microbatch_size])))}"
        )
    return _between(costs[above - 1], costs[above], microbatch_size)


def value_cost_at(costs: tuple[ValueCost, ...], microbatch_size: int) -> ValueCost:
    """The size of a value at a micro-batch size, interpolated like a layer's costs; it must be within the profiled ones."""
    above = next(i for i, cost in enumerate(costs) if cost.microbatch_size >= microbatch_size)
    high = costs[above]
    if high.microbatch_size == microbatch_size:
        return high
    low = costs[above - 1]
    share = (microbatch_size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
    names = (x.name for x in fields(ValueCost) if x.name != "microbatch_size")
    numbers = {x: round(_mixed(getattr(low, x), getattr(high, x), share)) for x in names}
    return ValueCost(microbatch_size=microbatch_size, **numbers)


def _between(low: LayerCost, high: LayerCost, microbatch_size: int) -> LayerCost:
    share = (microbatch_size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
    pairs = {x: (getattr(low, x), getattr(high, x)) for x in _NUMBERS}
    numbers = {x: round(_mixed(*pair, share)) for x, pair in pairs.items() if None not in pair}
    timings = {x: _timing_between(getattr(low, x), getattr(high, x), share) for x in TIMINGS}
    return LayerCost(
        microbatch_size=microbatch_size,
        forward_waits=low.forward_waits or high.forward_waits,
        backward_waits=low.backward_waits or high.backward_waits,
        leftovers=tuple(_leftovers_between(low.leftovers, high.leftovers, share)),
        tensors=_tensors_between(low.tensors, high.tensors, share, microbatch_size / high.microbatch_size),
        num_forward_times=high.num_forward_times,
        **numbers,  # type: ignore[arg-type]
        **{x: _mixed(getattr(low, x), getattr(high, x), share) for x in _FACTORS},  # type: ignore[arg-type]
        **timings,  # type: ignore[arg-type]
    )


def _leftovers_between(low: Sequence[Leftover], high: Sequence[Leftover], share: float) -> Iterator[Leftover]:
    """A leftover that one of the sizes lacks counts as 0 bytes there."""
    few, many = ({x.num_later: x.num_bytes for x in some} for some in (low, high))
    for num_later in sorted({**few, **many}):
        num_bytes = round(_mixed(few.get(num_later, 0), many.get(num_later, 0), share))
        yield Leftover(num_later=num_later, num_bytes=num_bytes)


def _tensors_between(
    low: Sequence[Lifetime], high: Sequence[Lifetime], share: float, of_high: float
) -> tuple[Lifetime, ...]:
    """The tensors of both sizes where these are the same; else those of the larger size, as samples take their bytes."""
    if [x[1:] for x in low] == [x[1:] for x in high]:
        return tuple(
            b._replace(num_bytes=round(_mixed(a.num_bytes, b.num_bytes, share))) for a, b in zip(low, high, strict=True)
        )
    return tuple(x._replace(num_bytes=max(1, round(of_high * x.num_bytes))) for x in high)


def _timing_between(low: Timing | None, high: Timing | None, share: float) -> Timing | None:
    if low is None or high is None:
        return None
    return Timing(
        median_s=_mixed(low.median_s, high.median_s, share),
        low_s=_mixed(low.low_s, high.low_s, share),
        high_s=_mixed(low.high_s, high.high_s, share),
        num_samples=min(low.num_samples, high.num_samples),
        origin="computed",
    )


def _mixed(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
