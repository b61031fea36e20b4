"""Roofline model: counted work to seconds on a device, and calibration of its efficiencies by a measured profile.

Operations of one kind take max(FLOPs / peak, bytes / bandwidth), each times the efficiency of the kind (Williams et al.,
Roofline, CACM 2009); kinds add up. A product whose shape has a measured share of the peak on the device takes its FLOPs
at that share instead, and a kernel with rates of its own takes those. Each operation costs one launch: added on a CPU;
on a GPU or TPU, where launches run ahead, their sum is a lower bound. Left out: caches, overlap of kinds, and small
operations that leave a device idle, whose mean effect calibration finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from gplan.core import OperationKind, Profile, StepCost, Work
from gplan.core.errors import UsageError
from profiler.analytic.hardware import KINDS, Efficiency, Hardware, KernelName
from profiler.analytic.shapes import Shape

LEAST_SAMPLES = 8  # forwards and backwards of different layers, for as many figures to be fitted
_PRIOR = 1e-2  # weight of a given efficiency relative to one measured layer
_LEAST_FACTOR = 0.1  # of the seconds by the given figures
_SMALL_ERROR = 0.05  # below it errors count by their squares, above it by their size
_MOST_ROUNDS = 50
_MEASURED_DTYPE = "float32"  # of the products of a measured model

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Operations of one kind that were counted: one, or some that are alike."""

    work: Work
    dtype: str = "bfloat16"  # of its first operand
    shape: Shape | None = None  # of a product
    kernel: KernelName | None = None  # whose rates count, where the hardware has them
    time: int = 0  # when it ended, on the counter's clock


def total_work(operations: Iterable[Operation]) -> tuple[Work, ...]:
    """The total work of some operations by kind."""
    totals: dict[OperationKind, Work] = {}
    for operation in operations:
        kind = operation.work.kind
        totals[kind] = totals[kind] + operation.work if kind in totals else operation.work
    return tuple(totals[kind] for kind in KINDS if kind in totals)


def kind_seconds(work: Work, hardware: Hardware, *, dtype: str, kernel: KernelName | None = None) -> float:
    """Seconds of the operations of one kind without launches; `dtype` is that of the products.

    Raises UsageError if the hardware has no flop rate for it.
    """
    reached = hardware.efficiency(work.kind, kernel)
    flops_s = work.num_flops / (hardware.peak_flops_per_s(work.kind, dtype) * reached.flops)
    bytes_s = work.num_bytes / (hardware.bytes_per_s * reached.bandwidth)
    return max(flops_s, bytes_s) + work.num_operations * reached.latency_s


def roofline_seconds(work: Sequence[Work], hardware: Hardware, *, dtype: str) -> float:
    """Seconds of all operations of a layer in one direction, with their launches."""
    device_s = sum(kind_seconds(x, hardware, dtype=dtype) for x in work)
    return _with_launches(device_s, sum(x.num_operations for x in work), hardware)


def operations_seconds(operations: Sequence[Operation], hardware: Hardware, *, dtype: str) -> float:
    """As `roofline_seconds`, with shares by shape and rates by kernel where the hardware has them."""
    own_s, others = 0.0, list[Operation]()
    for x in operations:
        share = hardware.shapes.share(x.shape) if x.shape else None
        if x.shape is not None and share is not None:
            rate = hardware.peak_flops_per_s(x.work.kind, x.shape.dtype) * share
            own_s += x.work.num_operations * x.shape.num_flops / rate
        elif x.kernel in hardware.kernels:
            own_s += kind_seconds(x.work, hardware, dtype=dtype, kernel=x.kernel)
        else:
            others.append(x)
    device_s = own_s + sum(kind_seconds(x, hardware, dtype=dtype) for x in total_work(others))
    return _with_launches(device_s, sum(x.work.num_operations for x in operations), hardware)


def _with_launches(device_s: float, num_operations: int, hardware: Hardware) -> float:
    launch_s = hardware.launch_s * num_operations
    return device_s + launch_s if _launches_add(hardware) else max(device_s, launch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Absolute relative errors of computed seconds."""

    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCalibration:
    """A device with efficiencies fitted to a measured profile, and the errors before and after."""

    hardware: Hardware
    profile_name: str  # of the model that was measured
    num_samples: int
    kinds: tuple[OperationKind, ...]  # those in the profile; all others keep their efficiencies
    before: Fit
    after: Fit
    step: StepCost  # as it was measured
    trained_bytes: int  # of that model


def calibrated(hardware: Hardware, profile: Profile) -> RooflineCalibration:
    """Scale the efficiencies by kind, and launch_s, so that the roofline fits the measured seconds of a profile.

    Minimizes absolute relative errors over the forward and backward of every measured layer and size, by iteratively
    reweighted least squares, with a weak prior on the given figures; no kind becomes more than ten times as fast as
    given. The measured products are assumed to be float32. Raises UsageError for a profile that was not measured, has
    no counted work, or has fewer than 8 samples.
    """
    samples = _samples(profile)
    terms = np.array([_terms(work, hardware) for work, _ in samples])
    measured = np.array([seconds for _, seconds in samples])
    factors = _fitted(terms, measured, adds=_launches_add(hardware))
    found = _scaled(hardware, factors)
    before, after = (
        [abs(roofline_seconds(work, x, dtype=_MEASURED_DTYPE) / s - 1) for work, s in samples]
        for x in (hardware, found)
    )
    return RooflineCalibration(
        hardware=found,
        profile_name=profile.model.name,
        num_samples=len(samples),
        kinds=tuple(kind for kind, column in zip(KINDS, terms.T, strict=False) if column.any()),
        before=Fit(median_error=float(np.median(before)), worst_error=max(before)),
        after=Fit(median_error=float(np.median(after)), worst_error=max(after)),
        step=profile.step,
        trained_bytes=profile.trained_bytes,
    )


def _launches_add(hardware: Hardware) -> bool:
    return hardware.kind == "cpu"


def _samples(profile: Profile) -> list[tuple[tuple[Work, ...], float]]:
    """Work and measured seconds of every forward and backward that has both."""
    if profile.origin != "measured":
        raise UsageError(
            f"the profile of {profile.model.name} is {profile.origin}; expected a measured one to calibrate by"
        )
    costs = [*(cost for layer in profile.layers if layer.same_as is None for cost in layer.costs), *profile.loss]
    pairs = [
        pair for x in costs for pair in ((x.forward_work, x.forward.median_s), (x.backward_work, x.backward.median_s))
    ]
    if not any(work for work, _ in pairs):
        raise UsageError(
            f"the profile of {profile.model.name} carries no counted work; measure the model again with this version"
        )
    found = [(work, seconds) for work, seconds in pairs if work and seconds > 0]
    if len(found) < LEAST_SAMPLES:
        raise UsageError(
            f"the profile of {profile.model.name} has {len(found)} layer timings with work; expected at least "
            f"{LEAST_SAMPLES}: measure a model with more layers, or at more micro-batch sizes"
        )
    return found


def _terms(work: Sequence[Work], hardware: Hardware) -> list[float]:
    """Seconds by kind and, last, of the launches."""
    by_kind = {x.kind: kind_seconds(x, hardware, dtype=_MEASURED_DTYPE) for x in work}
    return [*(by_kind.get(kind, 0.0) for kind in KINDS), hardware.launch_s * sum(x.num_operations for x in work)]


def _fitted(terms: _Numbers, measured: _Numbers, *, adds: bool) -> _Numbers:
    """A factor for the seconds of every column.

    Errors are relative to the geometric mean of computed and measured seconds, so that errors by the same factor in
    either direction are equal. Where launches are a lower bound, each row is launch-bound or not by the last factors.
    """
    factors = np.ones(terms.shape[1])
    is_launch = np.arange(terms.shape[1]) == terms.shape[1] - 1
    for _ in range(_MOST_ROUNDS):
        device_s, launch_s = terms[:, :-1] @ factors[:-1], terms[:, -1] * factors[-1]
        floored = launch_s > device_s
        computed = device_s + launch_s if adds else np.maximum(device_s, launch_s)
        used = terms if adds else np.where(floored[:, None] == is_launch[None, :], terms, 0.0)
        scale = np.sqrt(computed * measured)
        errors = np.abs(computed - measured) / scale
        scale = scale * np.sqrt(np.maximum(errors, _SMALL_ERROR))
        found = _least_squares(used / scale[:, None], measured / scale)
        if np.allclose(found, factors, rtol=1e-6):
            break
        factors = found
    return factors


def _least_squares(terms: _Numbers, wanted: _Numbers) -> _Numbers:
    """Factors x >= 0.1 that minimize |terms @ x - wanted|^2 with a weak prior at 1; exact, by enumerating active sets."""
    num_columns = terms.shape[1]
    rows = np.vstack([terms, np.sqrt(_PRIOR) * np.eye(num_columns)])
    wanted = np.concatenate([wanted, np.full(num_columns, np.sqrt(_PRIOR))])
    best, least = np.ones(num_columns), np.inf
    for size in range(1, num_columns + 1):
        for free in combinations(range(num_columns), size):
            factors = np.full(num_columns, _LEAST_FACTOR)
            bound = [x for x in range(num_columns) if x not in free]
            target = wanted - rows[:, bound] @ factors[bound]
            factors[list(free)] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
            error = float(np.sum((rows @ factors - wanted) ** 2))
            if factors.min() >= _LEAST_FACTOR and error < least:
                best, least = factors, error
    return best


def _scaled(hardware: Hardware, factors: _Numbers) -> Hardware:
    """The hardware with every kind `factor` times slower."""
    scaled = {
        kind: Efficiency(
            flops=x.flops / float(factor),
            bandwidth=x.bandwidth / float(factor),
            latency_s=x.latency_s * float(factor),
        )
        for (kind, x), factor in zip(hardware.efficiencies.items(), factors, strict=False)
    }
    return replace(hardware, efficiencies=scaled, launch_s=hardware.launch_s * float(factors[-1]))
