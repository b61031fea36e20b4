"""Checks of what a user passes: loss, inputs, targets, options, and whether a plan can run here.

Everything is checked before anything is computed, so that all ranks fail alike and none waits. Inputs may differ in
shape from the plan's (a shorter sequence, a smaller batch), as each shape has its own capture. A different floating
dtype is refused, as the weights would not accept it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gplan.core import LossReduction, Plan, Precision
from gplan.core.errors import FileError, ModelError, UsageError
from gplan.core.units import bytes_text, counted
from gplan.partition.validation import check_sharding
from gplan.runtime.microbatches import count_rows, take_rows
from gplan.schedules.validate import schedule_mismatch
from gplan_profiler.capture.authored_layers import PLAIN
from gplan_profiler.capture.chain import call_arguments
from gplan_profiler.host.host_info import unused_gpu_notes
from gplan_profiler.model.data import fitting_reductions, loss_tolerance
from gplan_profiler.model.memory_budget import available_bytes
from gplan_profiler.torch_compat import pytree

Loss = Callable[[Any, Any], Tensor]
"""(the model's output, the target) of a micro-batch -> scalar, a mean or a sum over its samples."""


class LossError(ModelError):
    """The loss function of a script raised an error for one micro-batch."""


def check_reduction(
    loss: Loss, output: Any, target: Any, *, value: Tensor, num_rows: int, expected: LossReduction
) -> None:
    """Raise UsageError for a loss that keeps values from call to call, or is a sum where the plan expects a mean, or the
    other way round.

    The wrong reduction would scale the gradients wrongly. `value` is what the loss was for these arguments and random
    numbers. The loss is evaluated again for all `num_rows` samples, and for each half of them. A loss that is neither is taken
    for a mean if it lies between those of the halves, as a mean over tokens that count does; otherwise it passes. One that
    does not depend on the samples, or takes no other outputs, passes too.
    """
    half = num_rows // 2
    parts = (slice(0, half), slice(half, num_rows))
    try:
        with torch.no_grad():
            of_all = loss(output, target).detach()  # has a graph if the model computed the loss
            if abs(float(of_all) - float(value)) > (tolerance := loss_tolerance(of_all)):
                raise UsageError(
                    f"the loss is {float(value):.6g} and then {float(of_all):.6g} for the same output and targets: it keeps values from "
                    "call to call, or writes into them; keep such values in buffers of the model, which returns what the loss needs"
                )
            if num_rows < 2:
                return
            first, second = (
                float(loss(take_rows(output, x, num_rows), take_rows(target, x, num_rows)).detach()) for x in parts
            )
    except UsageError:
        raise
    except Exception:  # the loss takes only the model's own outputs, or only this many samples
        return
    whole = float(of_all)
    fitting = fitting_reductions(whole, [first, second], num_rows, tolerance=tolerance)
    if not fitting:  # a mean over what counts lies between those of the halves
        low, high = sorted((first, second))
        fitting = ["mean"] if low <= whole <= high else [expected]
    if expected in fitting or abs(first - second) <= tolerance * abs(second):
        return
    raise UsageError(
        f"the loss is a {fitting[0]} over the samples ({whole:.6g} for {num_rows}, {first:.6g} and {second:.6g} for both halves); "
        f"the plan is for a {expected}: pass the loss to gplan.profile too, with batches, or loss_reduction={fitting[0]!r}, and "
        "balance again"
    )


def num_samples(inputs: Any, *, usual: Any) -> int:
    """Return the number of samples of some inputs; `usual` are inputs that the model takes.

    Raises UsageError for inputs without tensors or samples in dimension 0, and for another floating dtype.
    """
    tensors = _tensors(inputs, what="the inputs")
    if not tensors:
        raise UsageError(
            f"the inputs are a {type(inputs).__name__} without a tensor; expected tensors: use torch.as_tensor(...)"
        )
    found = count_rows(tensors, what="the inputs")
    if found == 0:
        raise UsageError("the inputs hold no samples; expected at least one")
    by_place, usual_by_place = _by_place(inputs), _by_place(usual)
    for place in by_place.keys() & usual_by_place.keys():
        got, expected = by_place[place].dtype, usual_by_place[place].dtype
        if got != expected and (got.is_floating_point or expected.is_floating_point):
            raise UsageError(
                f"the inputs have dtype {got}; expected {expected}, as in the plan: x.to({expected}), or, for a model of "
                "that dtype, gplan.pipeline(..., inputs=x)"
            )
    return found


def check_targets(targets: Any, expected: int) -> None:
    """Raise UsageError for targets that are not tensors or have another number of samples than the inputs.

    A tensor without dimensions and a plain value, such as None or a number, apply to all samples.
    """
    for tensor in _tensors(targets, what="the targets"):
        if tensor.dim() and tensor.shape[0] != expected:
            raise UsageError(
                f"the targets have shape {tuple(tensor.shape)}, the inputs {expected} samples; expected as many in dimension 0 "
                "of both (values shared by all samples belong in the loss function)"
            )


def check_training(scale: float, *, trained: Collection[str], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError if a step could give no gradients, or other ones than the stages were made for.

    `trained`: parameters that needed gradients when the stages were made; `parameters`: those of this process.
    """
    if not torch.is_grad_enabled():
        raise UsageError(
            "step was called within torch.no_grad(), which forbids gradients; call it outside, or eval_step"
        )
    if not math.isfinite(scale) or scale == 0.0:
        raise UsageError(f"scale is {scale}; expected a finite number other than 0, such as 1/n for n steps")
    changed = [name for name, x in parameters.items() if x.requires_grad != (name in trained)]
    if changed:
        now = "frozen" if changed[0] in trained else "no longer frozen"
        raise UsageError(
            f"{changed[0]} is {now} since the pipeline was made; freeze parameters before you call gplan.pipeline, or make "
            "the pipeline again"
        )
    if not trained:
        raise UsageError("every parameter of the model is frozen; expected one that needs a gradient, or use eval_step")


def check_options(plan: object, *, loss: object, seed: object, timeout_s: float, precision: str | None) -> None:
    """Raise UsageError for arguments of `gplan.pipeline` of a wrong type or value."""
    if not isinstance(plan, Plan):
        raise UsageError(
            f"the plan is a {type(plan).__name__}; expected a Plan: gplan.load('plan.json'), or what gplan.balance returns"
        )
    if precision is not None and Precision.named(precision) != plan.precision:
        raise UsageError(
            f"the plan was made for precision {plan.precision.name}, not {precision}; leave the precision out, or profile with "
            f"precision={precision!r} and balance again"
        )
    if loss is not None and not callable(loss):
        raise UsageError(f"the loss is a {type(loss).__name__}; expected a function: loss(output, target)")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed is {seed!r}; expected a whole number from 0 to 2^63 - 1")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s}; expected more than 0 seconds")


def _tensors(value: Any, *, what: str) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            remedy = "use dict(...)" if isinstance(leaf, Mapping) else "use torch.as_tensor(...)"
            raise UsageError(
                f"{what} hold a {type(leaf).__name__}; expected tensors, alone or in tuples, lists or dicts: {remedy}"
            )
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise UsageError(
                f"{what} hold a tensor on the meta device, which has no values; expected one on the CPU or a GPU"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _by_place(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a call's arguments by their path."""
    paths, _ = pytree.tree_flatten_with_path(call_arguments(inputs))
    return {pytree.keystr(path): x for path, x in paths if isinstance(x, Tensor)}


def check_runnable(plan: Plan) -> None:
    """Raise UsageError for a plan that gplan cannot run, FileError for one that contradicts itself."""
    if plan.device.kind == "given":
        raise UsageError(
            f"the plan was made from {plan.model.name}, another planner's profile, which has no model to run; run a plan "
            "whose profile `gplan profile` made from a model file"
        )
    names = plan.layer_names
    twice = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise FileError(
            f"the plan has layer {twice[0]} {names.count(twice[0])} times; expected every layer once; balance again"
        )
    mismatch = schedule_mismatch(plan)
    if mismatch is not None:
        raise FileError(f"the plan cannot run: {mismatch.reason}; balance again with --schedule")
    check_sharding(plan.schedule, plan.sharding)
    selecting = [stage for stage in plan.stages if stage.recompute_layers]
    if selecting and plan.recompute != "selected":
        raise FileError(
            f"stage {selecting[0].index} names layers to recompute, the plan has recompute {plan.recompute!r}; expected "
            "'selected', or stages that name none; balance again"
        )


def check_hosts(plan: Plan, hosts: Sequence[str]) -> None:
    """Raise UsageError if a stage that was planned for one of these hosts would run on another; `hosts` is by rank.

    A machine file with other names of hosts describes hosts that are alike, or a machine that is not this one.
    """
    for stage in plan.stages if plan.num_replicas == 1 else ():
        planned, rank = stage.machine_device, stage.on_device
        if planned is not None and rank < len(hosts) and planned.host in hosts and hosts[rank] != planned.host:
            raise UsageError(
                f"stage {stage.index} was planned for host {planned.host}, its rank {rank} is on {hosts[rank]}; start the hosts in "
                "the order of the plan's stages (torchrun: --node-rank with a static rendezvous)"
            )


def host_bytes(plan: Plan, *, num_copies: int) -> int:
    """The host's memory that so many copies of all stages take together; none if they are on GPUs."""
    return 0 if runs_on_gpus(plan) else num_copies * sum(stage.memory.peak_bytes for stage in plan.stages)


def check_fits_here(plan: Plan, *, num_copies: int, num_checking: int = 0) -> None:
    """Raise UsageError if this host lacks the memory for so many copies of all stages: one for each replica at a time.

    `num_checking` processes compare their gradients with the plain model's: before the stages exist, each runs the whole
    model two or three times, once on the whole mini-batch; the gradients of one time stay beside the stages.
    """
    needed = host_bytes(plan, num_copies=num_copies)
    available = available_bytes()
    if needed > available:
        stages = counted(num_copies * plan.num_stages, "stage")
        raise UsageError(
            f"the plan's {stages} need {bytes_text(needed)} together, this host has {bytes_text(available)} left: run it on "
            "more hosts with torchrun, or balance with smaller micro-batches or --recompute always"
        )
    parts = [stage.parts for stage in plan.stages if stage.parts is not None]
    gradients = sum(x.gradient for x in parts)
    stashes = plan.num_replicas * plan.num_microbatches * sum(x.stash for x in parts)
    plain = num_checking * (sum(x.weight for x in parts) + 2 * gradients + stashes)
    with_check = max(plain, needed + num_checking * gradients)
    if num_checking and with_check > available:
        raise UsageError(
            f"--check needs {bytes_text(with_check)}, as {counted(num_checking, 'process')} "
            f"{'runs' if num_checking == 1 else 'run'} the plain model beside the stages; this host has "
            f"{bytes_text(available)} left: run without --check, or check a plan with fewer micro-batches"
        )


def runs_on_gpus(plan: Plan) -> bool:
    """Whether the plan's stages run on GPUs of this host; else they run on its cores."""
    return plan.device.kind == "cuda" and torch.cuda.is_available()


def notes_on_cores(plan: Plan, num_cores: int | None) -> tuple[str, ...]:
    """Note ranks that have fewer cores together than they need; None: as many as they need."""
    num_threads = plan.device.num_threads
    if num_cores is None or plan.num_ranks * num_threads <= num_cores:
        return ()
    shared = f"{plan.num_ranks} processes of {counted(num_threads, 'thread')} share {counted(num_cores, 'core')}"
    return (f"{shared}, so the times are not those of as many devices; --engine virtual times the stages apart",)


def notes_on_machine(plan: Plan) -> tuple[str, ...]:
    """Return notes on how this host differs from the plan's machine, if every stage runs on cores of this host."""
    if runs_on_gpus(plan):
        found = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        others = [] if plan.is_for_machine else [x for x in dict.fromkeys(found) if x != plan.device.name]
        return tuple(
            f"this host has GPUs of another kind than the profile: {x}, not {plan.device.name}; stages on it take other times: "
            "balance for a machine (`gplan cluster`) whose devices have their own speeds"
            for x in others
        )
    firsts = [plan.stages_of(i)[0] for i in range(plan.num_devices)]
    device, places = plan.device, [stage.machine_device for stage in firsts if stage.machine_device is not None]
    if device.kind != "cpu":
        made_for = f"{device.name} ({device.kind})"
    elif any(place.speed != 1.0 for place in places) or len({place.host for place in places}) > 1:
        made_for = ", ".join(f"{x.name} (host {x.host}, speed {x.speed:g})" for x in places)
    else:
        return unused_gpu_notes()
    return (
        *unused_gpu_notes(),
        f"the plan was made for another machine: {made_for}; every stage runs on cores of this host, so the measured "
        "run is not the predicted one",
    )
