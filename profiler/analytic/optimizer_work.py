"""What an optimizer's step costs on hardware that is not at hand: the file's optimizer, run on fake parameters.

Parameters of the same shape and dtype cost alike, so one of each is given an optimizer of its own and stands for all.
That holds for optimizers that treat each parameter by itself. For a GPU the optimizer works on lists of parameters
("foreach"), as torch lets it do there by default: few launches, and the temporary tensors of all parameters at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gplan.core import StepCost, Timing, Work
from gplan.core.errors import ModelError
from profiler.analytic.hardware import Hardware
from profiler.analytic.roofline import Calibration, roofline_seconds
from profiler.analytic.work import WorkCounter, total_work
from profiler.memory.allocations import Ledger, optimizer_state_bytes
from profiler.model.error_location import describe
from profiler.model.load import ModelFile


def calibrated_step(step: StepCost, calibration: Calibration, *, trained: Sequence[nn.Parameter]) -> StepCost:
    """A computed step with the time that the same optimizer was measured to take, by the tensors and bytes it trains."""
    measured = calibration.step
    if measured.optimizer_name != step.optimizer_name or not calibration.trained_bytes:
        return step
    by_bytes = sum(x.nbytes for x in trained) / calibration.trained_bytes
    grown = measured.grown(by_bytes, num_tensors=max(1, calibration.num_trained), num_all=len(trained))
    optimizer, zero_grad = (
        Timing.exactly(timing.median_s, origin="computed") for timing in (grown.optimizer, grown.zero_grad)
    )
    return replace(step, optimizer=optimizer, zero_grad=zero_grad, tensor_s=grown.tensor_s)


def computed_step(file: ModelFile, hardware: Hardware) -> StepCost:
    """zero_grad and the optimizer's step over all parameters that are trained.

    Raises ModelError for an optimizer that cannot take a step on its own, or that decides by values.
    """
    trained = [x for x in file.model.parameters() if x.requires_grad]
    if not file.has("optimizer") or not trained:
        return StepCost.none(origin="computed")
    as_list = hardware.kind == "cuda"
    alike = Counter((tuple(x.shape), x.dtype) for x in trained)
    steps = [(count, _step(file, shape, dtype, as_list=as_list)) for (shape, dtype), count in alike.items()]
    workspaces = [(count if as_list else 1) * step.workspace_bytes for count, step in steps]
    return StepCost(
        optimizer=_timing(hardware, [(count, step.work) for count, step in steps], as_list=as_list),
        zero_grad=_timing(hardware, [(count, step.zero_grad_work) for count, step in steps], as_list=as_list),
        optimizer_name=steps[0][1].name,
        state_bytes=sum(count * step.state_bytes for count, step in steps),
        workspace_bytes=sum(workspaces) if as_list else max(workspaces),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The second step of an optimizer with one parameter: the first one makes its state."""

    name: str
    state_bytes: int
    workspace_bytes: int
    work: tuple[Work, ...]
    zero_grad_work: tuple[Work, ...]


def _step(file: ModelFile, shape: tuple[int, ...], dtype: torch.dtype, *, as_list: bool) -> _Step:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
        optimizer = file.optimizer([parameter])
        for group in optimizer.param_groups:
            if as_list and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
            with Ledger() as ledger, WorkCounter(ledger.now) as counter:
                optimizer.step()
                end = ledger.now()
                optimizer.zero_grad()
        except Exception as error:
            raise ModelError(
                f"the optimizer of {file.name} cannot take a step on its own and without values: {describe(error)}"
            ) from error
        return _Step(
            name=type(optimizer).__name__,
            state_bytes=optimizer_state_bytes(optimizer),
            workspace_bytes=ledger.trace().peak_bytes(0, end),
            work=total_work(counter.between(0, end)),
            zero_grad_work=total_work(counter.between(end, ledger.now())),
        )


def _timing(hardware: Hardware, works: Sequence[tuple[int, tuple[Work, ...]]], *, as_list: bool) -> Timing:
    """Seconds of the same work for several parameters; as a list they all share the launches of the first."""
    scaled = [
        replace(
            work,
            num_operations=work.num_operations * (index == 0 if as_list else count),
            num_flops=work.num_flops * count,
            num_bytes=work.num_bytes * count,
        )
        for index, (count, parts) in enumerate(works)
        for work in parts
    ]
    return Timing.exactly(roofline_seconds(scaled, hardware, dtype="float32"), origin="computed")
