"""The layout of a language model from its configuration: all widths chosen for a machine, or the cut for widths given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np

from gplan.core import Link
from gplan.core.errors import UsageError
from gplan.core.units import bytes_text, parse_network
from gplan.interop.receivers import receiver_named
from gplan.interop.width_choices import Choice, check_num_stages
from gplan.interop.width_search import ChosenWidths, PlannedChoice, WidthSearch
from gplan.partition.even_cuts import EvenCut
from gplan.schedules.registry import default_num_microbatches
from gplan.strategy_search.planner import plan as best_plan
from gplan_profiler.analytic.decoder_config import ORDER, Widths, load_decoder, parse_settings
from gplan_profiler.analytic.decoder_profile import check_divisions, num_parameters
from gplan_profiler.analytic.hardware import Hardware, load_hardware

DIALS = ("tensor", "context", "expert", "data", "num_devices", "num_chunks", "microbatch_size", "recompute")
"""The widths of a layout (`num_devices` is that of a pipeline), and how they are run."""


def layout_of(
    config: str,
    *,
    receiver: str,
    hardware: str,
    num_gpus: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    batch_size: int | None = None,
    microbatches: int | None = None,
    sequence_length: int = 4096,
    expert_tensor: int = 0,
    order: str = ORDER,
    memory_bytes: int | None = None,
    settings: Sequence[str] = (),
    time_limit: float | None = None,
    on_start: Callable[[str], None] = lambda _: None,
    **dials: Any,
) -> ChosenWidths:
    """The layouts of a configuration: the best for all devices of a machine, or the one of the widths that are given.

    `dials` are those of `DIALS` that are given; None leaves one open.
    Raises UsageError, FileError or NoPlanError for what cannot be, with the nearest choice that can.
    """
    dials = {**dict.fromkeys(DIALS), **dials}
    decoder, device = load_decoder(config, parse_settings(settings)), load_hardware(hardware)
    total, active, predicting = num_parameters(decoder)
    each = f", {active / 1e9:.2f} billion of them for each token" if active < total else ""
    each += f", and {predicting / 1e9:.2f} billion of multi-token prediction" if predicting else ""
    on_start(f"{config}: {total / 1e9:.2f} billion parameters{each}")
    if gpus_per_node is not None:
        if gpus_per_node < 1:
            raise UsageError(f"--gpus-per-node is {gpus_per_node}; expected at least 1, such as 8")
        device = replace(device, devices_per_node=gpus_per_node)
    if network is not None:
        bytes_per_s, latency_s = parse_network(network, devices_per_node=device.devices_per_node)
        latency_s = device.network.latency_s if latency_s is None else latency_s
        device = replace(device, network=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))
    on_start(_machine_text(device, memory_bytes or device.memory_bytes, network))
    if num_gpus is not None and microbatches is not None:
        raise UsageError(
            "--microbatches follows from --batch-size where --gpus is given; leave it out, or give --pp alone"
        )
    if num_gpus is not None and expert_tensor > 1:
        raise UsageError(
            f"--expert-tensor is {expert_tensor}, and with --gpus each expert is on one rank; leave it out, or give --pp and the "
            "other widths"
        )
    if order != ORDER and receiver != "megatron":
        raise UsageError(f"{receiver} places groups as {ORDER}; leave --order out, or take --to megatron")
    trainer, tensor = receiver_named(receiver), dials["tensor"] or 1
    kv_heads, groups = min(x.kv_heads for x in decoder.variants), decoder.linear_num_key_heads
    if 0 < kv_heads < tensor and not trainer.copies_keys:
        raise UsageError(
            f"--tensor is {tensor}, and the model has {kv_heads} heads of keys and values, which {trainer.title} does not copy; take "
            f"--tensor {kv_heads}, or --to megatron, which does"
        )
    if tensor > 0 and groups % tensor and not trainer.serves:
        raise UsageError(
            f"--tensor is {tensor}, which does not divide the number of groups or key heads of the model's Mamba-2 or linear attention, "
            f"{groups}; take --tensor {gcd(groups, tensor)}"
        )
    if num_gpus is not None and trainer.serves:
        raise UsageError(
            f"--gpus chooses widths by the step of a training, and {trainer.title} serves; give the --pp and --tensor that it runs with"
        )
    fixed = {"pipeline" if x == "num_devices" else x: y for x, y in dials.items()}
    if time_limit is not None and not time_limit > 0:
        raise UsageError(f"--time-limit is {time_limit:g} seconds; expected more than 0")
    if num_gpus is not None and memory_bytes is not None:
        device, memory_bytes = replace(device, memory_bytes=memory_bytes), None
    search = WidthSearch(
        name=config, decoder=decoder, hardware=device, num_devices=1 if num_gpus is None else num_gpus, batch_size=1024 if batch_size is None else batch_size,
        sequence_length=sequence_length, receiver=receiver, memory_bytes=memory_bytes, order=order, fixed=fixed,
        time_limit_s=time_limit,
    )  # fmt: skip
    if num_gpus is None:
        whole = replace(search, memory_bytes=memory_bytes or device.memory_bytes)
        return _of_given_widths(whole, dials, expert_tensor, microbatches, batch_size)
    search.check()
    if hint := search.batch_hint():
        on_start(hint)
    return search.run()


def _machine_text(device: Hardware, memory_bytes: int | None, network: str | None) -> str:
    """What is assumed of a device and its links."""
    memory = f" with {bytes_text(memory_bytes)}" if memory_bytes else ""
    text = (
        f"machine: {device.name}{memory}, {device.devices_per_node} in a node; links of {device.link.bytes_per_s / 1e9:.3g} GB/s in a node, "
        f"network of {device.network.bytes_per_s / 1e9:.3g} GB/s for each device"
    )
    if network is None:
        return text
    rate, comma, latency = network.partition(",")
    return f"{text} ({network})" + ("" if "*" in rate else f"; if they share one card, write {rate}*1{comma}{latency}")


def _of_given_widths(
    search: WidthSearch, dials: dict[str, Any], expert_tensor: int, microbatches: int | None, batch_size: int | None
) -> ChosenWidths:
    """The layout of one setting, with the best cut; the model and the device are those of `search`."""
    if dials["num_devices"] is None:
        raise UsageError("give --gpus N to have all widths chosen for N devices, or --pp K for a pipeline of K devices")
    given = {name: dials[name] or 1 for name in ("tensor", "context", "expert", "data")}
    widths = Widths(
        **given, expert_tensor=expert_tensor, pipeline=dials["num_devices"], sequence_length=search.sequence_length, order=search.order,
    )  # fmt: skip
    sizes = {x: given[x] for x in ("tensor", "context", "expert")}
    check_divisions(search.decoder, **sizes, sequence_length=search.sequence_length)
    size = 1 if dials["microbatch_size"] is None else dials["microbatch_size"]
    if size < 1:
        raise UsageError(f"a micro-batch has {size} samples; expected at least 1")
    check_num_stages(search.decoder, widths.pipeline, dials["num_chunks"])
    count = default_num_microbatches(widths.pipeline) if microbatches is None else microbatches
    if batch_size is not None:
        if microbatches is not None:
            raise UsageError(
                "--batch-size and --microbatches both say how many micro-batches there are; leave one of them out"
            )
        count, rest = divmod(batch_size, size * widths.data)
        if rest or not count:
            near = max(1, round(batch_size / (size * widths.data))) * size * widths.data
            raise UsageError(
                f"a batch of {batch_size} samples is no multiple of {size} samples x {widths.data} replicas; the nearest that is: {near}"
            )
    choice = Choice(
        widths=widths, num_chunks=1 if dials["num_chunks"] is None else dials["num_chunks"], microbatch_size=size,
        recompute=dials["recompute"] or "never", num_microbatches=count,
    )  # fmt: skip
    profile = search.profile_of(widths, size)
    plan = best_plan(profile, replace(search.request(choice), time_limit_s=search.time_limit_s))
    ends = np.array([x.end_layer for x in plan.stages])
    one = PlannedChoice(
        choice=choice, cut=EvenCut(ends=ends, step_s=plan.prediction.step_s, peak_bytes=plan.peak_bytes)
    )
    return ChosenWidths(
        plan=plan, profile=profile, search=search, planned=(one,), lower_bound_s=plan.proof.lower_bound_s
    )
