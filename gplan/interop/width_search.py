"""Which widths of a machine's devices train a language model fastest: tensor, context, expert, pipeline, chunks and data.

Every combination of widths that divide the devices, heads, experts and tokens is a setting, with each micro-batch size
that divides the batch, and with recompute or without. A tensor group stays inside a node. A setting is bounded from
below in closed form: with T seconds of a micro-batch on all layers together, K devices of v chunks and M micro-batches,
a step takes at least T / K * (M + (K - 1) / v), as every stage of a 1F1B order waits for those before it at the start
and for those behind it at the end, and at least M times the smallest possible load of the device with the largest, as
blocks are whole. A setting is left out where 1 / K of the state of all layers and of the stash that the first device
holds at once are more than the memory. In the order of their bounds, settings are cut exactly for the trainer, until no
bound is below the fastest plan or the time is out; the smallest bound that is left proves the gap.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from gplan.core import Link, Plan, Profile
from gplan.core.errors import NoPlanError, UsageError
from gplan.core.units import parse_link
from gplan.cost.reserved_bytes import CONTEXT_BYTES, RESERVED_SHARE
from gplan.interop.planning import ForReceiver, best_for_receiver
from gplan.interop.receivers import RECEIVERS
from gplan.partition.balance import problem_of
from gplan.partition.plan_evaluation import price
from gplan.partition.solve import solve
from gplan.schedules.registry import default_num_microbatches
from gplan.schedules.request import PlanRequest
from gplan_profiler.analytic.decoder_config import Decoder, Widths, load_decoder, parse_settings
from gplan_profiler.analytic.decoder_profile import DecoderProfile, check_widths, num_parameters
from gplan_profiler.analytic.hardware import Hardware, load_hardware

_MICROBATCH_SIZES = (1, 2, 4, 8)
_MOST_TENSOR, _MOST_CHUNKS = 8, 10
_EACH_S = 3.0  # of one exact cut
_NUM_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting: widths, and how they are run."""

    widths: Widths
    num_chunks: int
    microbatch_size: int
    recompute: str
    num_microbatches: int

    def __str__(self) -> str:
        split = self.widths
        found = [f"tensor {split.tensor}", f"pipeline {split.pipeline}", f"data {split.data}"]
        found += [f"context {split.context}"] * (split.context > 1)
        found += [f"expert {split.expert}"] * (split.expert > 1)
        found += [f"{self.num_chunks} stages a device"] * (self.num_chunks > 1)
        found += [f"micro-batches of {self.microbatch_size}"]
        return ", ".join(found + ["recompute"] * (self.recompute == "always"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A planned setting."""

    choice: Choice
    plan: Plan
    profile: Profile
    receiver: str

    @property
    def exported(self) -> Plan:
        """The plan as a trainer counts it: replicas that have batches of their own, whose sharding is the trainer's."""
        widths = self.choice.widths
        replicas = widths.data if RECEIVERS[self.receiver].replicas else 1
        return replace(self.plan, num_replicas=replicas, sharding="none")

    @property
    def step_s(self) -> float:
        """Predicted."""
        return self.plan.prediction.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthSearch:
    """A model on a machine; a dial that is None is open."""

    name: str
    decoder: Decoder
    hardware: Hardware
    num_devices: int
    batch_size: int
    sequence_length: int
    receiver: str
    memory_bytes: int | None = None
    time_limit_s: float = 20.0
    fixed: dict[str, int | str | None] = field(default_factory=dict)  # dials that are given, by their names
    _profiles: dict[tuple[Widths, int], Profile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def usable_bytes(self) -> int:
        """For tensors on a device."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(RESERVED_SHARE * ((self.hardware.memory_bytes or 10**15) - CONTEXT_BYTES))

    def _values(self, name: str, choices: Sequence[int]) -> Sequence[int]:
        given = self.fixed.get(name)
        return choices if given is None else (int(given),)

    def choices(self) -> Iterator[Choice]:
        """Every setting whose counts fit together."""
        model, num_devices = self.decoder, self.num_devices
        heads = model.num_key_value_heads or model.num_attention_heads
        most_tensor = min(_MOST_TENSOR, self.hardware.devices_per_node)
        is_long = self.sequence_length >= 16384
        for tensor in self._values(
            "tensor", [x for x in _divisors(num_devices) if x <= most_tensor and heads % x == 0]
        ):
            for context in self._values("context", [x for x in _divisors(num_devices) if x <= 16] if is_long else [1]):
                for pipeline in self._values(
                    "pipeline", [x for x in _divisors(num_devices) if x <= model.num_hidden_layers]
                ):
                    data, rest = divmod(num_devices, tensor * context * pipeline)
                    if rest or not data or self.fixed.get("data") not in (None, data):
                        continue
                    for expert in self._values("expert", self._experts(tensor * context * data)):
                        yield from self._runs(Widths(
                            tensor=tensor, context=context, expert=expert, expert_tensor=1 if expert > 1 else 0, data=data,
                            pipeline=pipeline, sequence_length=self.sequence_length,
                        ))  # fmt: skip

    def _experts(self, num_ranks: int) -> list[int]:
        experts = self.decoder.routed_experts
        return [x for x in _divisors(num_ranks) if experts % x == 0] if experts else [1]

    def _runs(self, widths: Widths) -> Iterator[Choice]:
        most = min(_MOST_CHUNKS, self.decoder.num_hidden_layers // widths.pipeline)
        for size in self._values("microbatch_size", _MICROBATCH_SIZES):
            num_microbatches, rest = divmod(self.batch_size, size * widths.data)
            if rest or not num_microbatches:
                continue
            for chunks in self._values("num_chunks", range(1, most + 1)):
                if chunks > 1 and (widths.pipeline == 1 or num_microbatches % widths.pipeline):
                    continue
                for recompute in (
                    ("never", "always") if self.fixed.get("recompute") is None else (self.fixed["recompute"],)
                ):
                    yield Choice(
                        widths=widths, num_chunks=chunks, microbatch_size=size, recompute=str(recompute),
                        num_microbatches=num_microbatches,
                    )  # fmt: skip

    def profile_of(self, widths: Widths, size: int) -> Profile:
        """The computed profile of some widths."""
        if (widths, size) not in self._profiles:
            made = DecoderProfile(
                name=self.name, decoder=self.decoder, widths=widths, hardware=self.hardware, fuses_cross_entropy=True,
                divides_state=widths.replicas == 1,
            )  # fmt: skip
            self._profiles[widths, size] = made.profile((size,))
        return self._profiles[widths, size]

    def bound_s(self, choice: Choice) -> float:
        """No plan of a setting is faster; infinite for one whose even cut needs too much memory."""
        profile, devices = self.profile_of(choice.widths, choice.microbatch_size), choice.widths.pipeline
        costs = [x.costs[0] for x in profile.layers]
        seconds = self._seconds(choice)
        held: float = (
            sum(x.weight_bytes + x.gradient_bytes for x in profile.layers)
            + profile.step.state_bytes // choice.widths.replicas
        )
        if choice.recompute == "never":  # the first device holds most micro-batches, in chunks
            chunks = choice.num_chunks
            warm = devices if chunks == 1 else (chunks - 1) * devices + 2 * devices - 1
            held += sum(x.stash_bytes for x in costs) / chunks * min(warm, choice.num_microbatches * chunks)
        if held / devices > self.usable_bytes:
            return float("inf")
        evenly_s = sum(seconds) / devices * (choice.num_microbatches + (devices - 1) / choice.num_chunks)
        return max(evenly_s, choice.num_microbatches * _least_load_s(seconds, devices))

    def _seconds(self, choice: Choice) -> list[float]:
        """Of a micro-batch on each layer."""
        costs = [x.costs[0] for x in self.profile_of(choice.widths, choice.microbatch_size).layers]
        passes = 1 + (choice.recompute == "always")
        return [passes * x.forward.median_s + x.backward.median_s for x in costs]

    def planned(self, choice: Choice) -> Plan | None:
        """The best cut of a setting; None where none fits the memory."""
        rules = ForReceiver.of(self.receiver, self.profile_of(choice.widths, choice.microbatch_size))
        schedule = rules.default_schedule if choice.num_chunks == 1 else f"interleaved-1f1b:{choice.num_chunks}"
        counts = self.counts_of(choice)
        rules.check(schedule, **{x: counts[x] for x in ("num_devices", "num_microbatches", "recompute")})
        request = PlanRequest(
            schedule=schedule, constraints=rules.constraints, memory_bytes=self.usable_bytes, **counts
        )
        started = time.perf_counter()
        problem = problem_of(self.profile_of(choice.widths, choice.microbatch_size), request)
        solution = solve(problem, solver="auto", time_limit_s=_EACH_S)
        return None if solution is None else price(problem, solution, solve_s=time.perf_counter() - started)

    def counts_of(self, choice: Choice) -> dict[str, Any]:
        """A setting as arguments of the planner."""
        replicas = choice.widths.replicas
        return {
            "num_devices": choice.widths.pipeline, "num_microbatches": choice.num_microbatches,
            "microbatch_size": choice.microbatch_size, "recompute": choice.recompute,
            "num_replicas": replicas, "sharding": "optimizer" if replicas > 1 else "none",
        }  # fmt: skip

    def run(self) -> Widest:
        """The fastest settings; raises UsageError where no counts fit, NoPlanError where no setting fits the memory."""
        started = time.perf_counter()
        choices = list(self.choices())
        if not choices:
            raise UsageError(self._no_choice_text())
        bounds = sorted((self.bound_s(x), i) for i, x in enumerate(choices))
        open_bounds = [x for x in bounds if x[0] < float("inf")]
        found, others, ruled_out = list[Found](), list[tuple[Choice, float]](), Counter[str]()
        ruled_out["too large for the memory, by state and stash of an even cut"] = len(bounds) - len(open_bounds)
        best_s = float("inf")
        for bound, index in open_bounds:
            late = bool(found) and time.perf_counter() - started > self.time_limit_s
            if bound >= best_s:
                ruled_out["slower than the best by their bounds"] += 1
                others.append((choices[index], bound))
            elif late:
                ruled_out["not planned within the time"] += 1
                others.append((choices[index], bound))
            else:
                try:
                    plan = self.planned(choices[index])
                except NoPlanError:
                    ruled_out["no cut found within its time that fits the memory"] += 1
                    others.append((choices[index], bound))
                    continue
                except UsageError as error:
                    ruled_out[str(error)[:80]] += 1
                    continue
                if plan is None:
                    ruled_out["no cut fits the memory"] += 1
                    continue
                profile = self.profile_of(choices[index].widths, choices[index].microbatch_size)
                found.append(Found(choice=choices[index], plan=plan, profile=profile, receiver=self.receiver))
                best_s = min(best_s, found[-1].step_s)
        if not found:
            raise NoPlanError(self._nothing_text(choices))
        found.sort(key=lambda x: x.step_s)
        bounds_s = [best_s, *(x.plan.proof.lower_bound_s for x in found), *(x for _, x in others)]
        return Widest(
            found=tuple(found), others=tuple(others[:_NUM_SHOWN]), lower_bound_s=min(bounds_s), ruled_out=+ruled_out,
            num_choices=len(choices),
        )  # fmt: skip

    def _no_choice_text(self) -> str:
        """Why no counts fit together, with the nearest that may."""
        given = {name: value for name, value in self.fixed.items() if isinstance(value, int)}
        whole = prod(given.get(x, 1) for x in ("tensor", "context", "pipeline", "data"))
        if self.num_devices % whole:
            return (
                f"the widths that are given need a multiple of {whole} devices, not {self.num_devices}; try "
                f"{-(-self.num_devices // whole) * whole} devices, or leave a width open"
            )
        return (
            f"no widths divide {self.num_devices} devices, {self.decoder.num_attention_heads} heads and a batch of {self.batch_size} "
            f"samples{' with ' + ', '.join(f'{x} {y}' for x, y in given.items()) if given else ''}; try a batch that is a multiple "
            f"of {self.num_devices}"
        )

    def _nothing_text(self, choices: Sequence[Choice]) -> str:
        """What the model needs at least, where nothing fits."""
        least = min(
            sum(x.weight_bytes + x.gradient_bytes for x in profile.layers) / widths.pipeline
            + profile.step.state_bytes / widths.replicas / widths.pipeline
            for widths in {x.widths for x in choices}
            for profile in (self.profile_of(widths, _MICROBATCH_SIZES[0]),)
        )
        more = -(-int(least * self.num_devices * 1.3) // self.usable_bytes)
        return (
            f"{self.name} fits on no split of {self.num_devices} devices with {self.usable_bytes / 2**30:.0f} GiB for tensors; weights, "
            f"gradients and optimizer alone take {least / 2**30:.0f} GiB a device; try some {max(more, 2 * self.num_devices)} devices"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Widest:
    """What a search found, fastest first."""

    found: tuple[Found, ...]
    others: tuple[tuple[Choice, float], ...]  # not planned, with their bounds in seconds
    lower_bound_s: float
    ruled_out: Counter[str]
    num_choices: int

    @property
    def gap(self) -> float:
        """By how much the fastest may be improved at most, as a share of its step."""
        return 1 - self.lower_bound_s / self.found[0].step_s


def _least_load_s(seconds: Sequence[float], num_devices: int) -> float:
    """The smallest possible largest sum of a device, if its layers could be any ones: blocks are whole, and the ends are
    on two devices."""
    first, last, block = seconds[0], seconds[-1], min(seconds[1:-1])
    if num_devices == 1 or not block:
        return sum(seconds) / num_devices
    count = len(seconds) - 2
    loads = sorted({extra + i * block for extra in (first, last, 0.0) for i in range(count + 1)})

    def fits(load: float) -> bool:
        ends = [load - first, load - last, *[load] * (num_devices - 2)]
        return min(ends) >= 0 and sum(int(x / block + 1e-9) for x in ends) >= count

    return loads[bisect_left(loads, True, key=fits)]


def _divisors(number: int) -> list[int]:
    return [x for x in range(1, number + 1) if number % x == 0]


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
    memory_bytes: int | None = None,
    settings: Sequence[str] = (),
    time_limit: float | None = None,
    on_start: Callable[[str], None] = lambda _: None,
    **dials: Any,
) -> Widest:
    """The layouts of a configuration: the best for all devices of a machine, or the one of the widths that are given.

    `dials` are tensor, context, expert, data, num_devices (of a pipeline), num_chunks, microbatch_size and recompute.
    Raises UsageError, FileError or NoPlanError for what cannot be, with the nearest choice that can.
    """
    decoder, device = load_decoder(config, parse_settings(settings)), load_hardware(hardware)
    total, active = num_parameters(decoder)
    each = f", {active / 1e9:.2f} billion of them for each token" if active < total else ""
    on_start(f"{config}: {total / 1e9:.2f} billion parameters{each}")
    if gpus_per_node is not None:
        if gpus_per_node < 1:
            raise UsageError(f"--gpus-per-node is {gpus_per_node}; expected at least 1, such as 8")
        device = replace(device, devices_per_node=gpus_per_node)
    if network is not None:
        bytes_per_s, latency_s = parse_link(network)
        device = replace(device, network=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))
    fixed = {**dials, "pipeline": dials["num_devices"]}
    search = WidthSearch(
        name=config, decoder=decoder, hardware=device, num_devices=num_gpus or 1, batch_size=batch_size or 1024,
        sequence_length=sequence_length, receiver=receiver, memory_bytes=memory_bytes, fixed=fixed,
        time_limit_s=20.0 if time_limit is None else time_limit,
    )  # fmt: skip
    if num_gpus is None:
        whole = replace(search, memory_bytes=memory_bytes or device.memory_bytes)
        return _of_given_widths(whole, dials, expert_tensor, microbatches, time_limit)
    if num_gpus < 1:
        raise UsageError(f"asked for {num_gpus} devices; expected at least 1")
    return search.run()


def _of_given_widths(
    search: WidthSearch, dials: dict[str, Any], expert_tensor: int, microbatches: int | None, time_limit_s: float | None
) -> Widest:
    """The layout of one setting, with the best cut; `search` says the model and the device."""
    if dials["num_devices"] is None:
        raise UsageError("give --gpus N to have all widths chosen for N devices, or --pp K for a pipeline of K devices")
    given = {name: dials[name] or 1 for name in ("tensor", "context", "expert", "data")}
    widths = Widths(
        **given, expert_tensor=expert_tensor, pipeline=dials["num_devices"], sequence_length=search.sequence_length
    )
    check_widths(search.decoder, widths)
    count = default_num_microbatches(widths.pipeline) if microbatches is None else microbatches
    size = dials["microbatch_size"] or 1
    if size < 1:
        raise UsageError(f"a micro-batch has {size} samples; expected at least 1")
    choice = Choice(
        widths=widths, num_chunks=1 if dials["num_chunks"] is None else dials["num_chunks"], microbatch_size=size,
        recompute=dials["recompute"] or "never", num_microbatches=count,
    )  # fmt: skip
    profile = search.profile_of(widths, size)
    plan = best_for_receiver(
        profile, receiver=search.receiver, num_chunks=choice.num_chunks, memory_bytes=search.usable_bytes,
        time_limit_s=time_limit_s, **search.counts_of(choice),
    )  # fmt: skip
    one = Found(choice=choice, plan=plan, profile=profile, receiver=search.receiver)
    bound_s = plan.proof.lower_bound_s
    return Widest(found=(one,), others=(), lower_bound_s=bound_s, ruled_out=Counter(), num_choices=1)
