"""Closed-form lower bounds of the step of any partition; they rule out most settings of a search. An estimate orders it.

With t_s the compute of a micro-batch on stage s, W the sum of all, C the least transfers over all cuts:
    any     T >= W + C                                        (of a split backward its first half)
            T >= (M W + idle time of the devices, or all optimizers and the replicas' all-reduces) / K
            T >= the work of the j smallest of the (j-1) K + h longest layers, and the h-th smallest wait of a device, as h
                 devices have j of them; or one has j + 1
    GPipe   T >= W + C + (M-1) max t
    1F1B    T >= W + C + (M-1) t_s - (w_s - 1) min(f_s, b_s)       w_s = min(M, K - s) warm-up forwards hide at most that
            T >= M t_s + sum_{i<s} t_i                        both together bound the t_s that a T allows
    eager   as 1F1B with w_s = min(M, 2 (K - s) - 1)
The largest t is at least that of the best partition by compute alone. Of a chain, stages that a T and the memory allow are
filled with whole layers, one stage after the other: the T is too short where layers are left over.

Within a memory, of a schedule with at least n_d micro-batches of every stage of device d in flight at once: a device
computes at most x = T / M for each of them, so what it keeps of it, k_d, is at most rho x, with rho the most bytes that a
second of compute keeps; and sum n_d k_d is at most what is left beside weights and state. All that is kept, or what is not
kept recomputed, must fit into that.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gplan.core.machine import num_messages
from gplan.corrections.sharding import EXCHANGED
from gplan.graph.down_sets import Floats
from gplan.partition.bounds import least_before_s, least_transfers_s, shared_step_s, through_all_s
from gplan.partition.memory_feasibility import bytes_before
from gplan.partition.problem import Problem, compute_sums_s, layers_compute_s, num_recomputed
from gplan.schedules.one_f_one_b import NUM_WARMUP

_MOST_BYTES = np.iinfo(np.int64).max
_SLACK = 1e-9
_HALVINGS = 30
_HALVINGS_OF_STEP = 14  # between the bounds of a step by its stages one after the other
_SHARE_OF_STASH = 0.9  # of what all layers keep, that those have which keep least for their time


@dataclass(frozen=True)
class SettingBounds:
    """Bounds over all partitions of a problem on equal devices; of their memory only what a method is given counts."""

    problem: Problem

    @cached_property
    def step_s(self) -> float:
        """A lower bound of the simulated step."""
        through_s = self._around_all_s
        again_s = self._num_again * self._whole_again_s / self.problem.num_devices
        bounds = [through_s, again_s + shared_step_s(self.problem, tail_s=self.tail_s), self._packed_s]
        if self.problem.schedule == "gpipe":
            bounds += [through_s + (self._num - 1) * self.largest_s, self._one_by_one_s(through_s)]
        elif self.problem.schedule in NUM_WARMUP:
            share, fixed_s = self._hides[0]
            beside_s = through_s + max(0.0, (self._num - 1 - share) * self.largest_s - fixed_s)
            bounds += [beside_s, self._one_by_one_s(through_s)]
        elif not self.problem.has_chunks:
            bounds.append(self._num * self.largest_s)
        return max(bounds) * (1 - _SLACK)

    @property
    def estimate_s(self) -> float:
        """An estimate of a good plan's step, which proves nothing: equal stages, in their bubble, and memory enough."""
        problem = self.problem
        num_devices, num_chunks = problem.num_devices, problem.num_stages / problem.num_devices
        share = 1 / 3 if problem.splits_backward else 1.0  # a wait of one pass of three, not of all
        waits = share * (num_devices - 1) / num_chunks
        # recomputing is in both, where all stages do
        largest_s = self.largest_s if num_chunks == 1 else 0.0
        loop_s = (self._num + waits) * max(self.through_s / num_devices, largest_s) + self.transfers_s / num_chunks
        return max(loop_s + self.tail_s / num_devices, self.step_s)

    def exceeds_memory(self, memory_bytes: int) -> bool:
        """Whether all stages together hold more than all devices have, after the last backward or forward; or some device's
        layers more than it has, as so many devices cannot share them out evenly."""
        problem, costs = self.problem, self.problem.costs
        whole = costs.whole_parts
        lasting = whole.weight + whole.optimizer
        held = lasting + whole.gradient
        if problem.recompute == "never":
            in_flight = least_in_flight(problem.schedule, problem.num_devices, self._num)
            num_sent = sum(problem.boundaries(stage).after for stage in range(problem.num_stages - 1))
            crossing = int(costs.crossing.activation_bytes[1:-1].min(initial=_MOST_BYTES)) if num_sent else 0
            received = 0 if costs.transfers.frees_outputs else num_sent * crossing
            held = max(held, lasting + (1 if in_flight is None else int(in_flight[0])) * (whole.stash + received))
        if held > problem.num_devices * memory_bytes:
            return True
        if costs.given_downsets is not None:
            return False
        layers = bytes_before(costs)
        of_layers = np.diff(layers["weight"] + layers["gradient"] + layers["optimizer"])
        return self._packed(of_layers - 1.0) > memory_bytes  # the state of a stage is a whole number of bytes

    def within_s(self, memory_bytes: int) -> float:
        """A lower bound of the step of plans whose devices have this memory; infinite where what is kept cannot fit.

        Beside `exceeds_memory`, which looks at what lasts.
        """
        problem, costs = self.problem, self.problem.costs
        in_flight = least_in_flight(problem.schedule, problem.num_devices, self._num)
        if in_flight is None or costs.transfers.frees_outputs:
            return self.step_s
        least_s = self.step_s
        if problem.schedule in ("gpipe", *NUM_WARMUP) and costs.given_downsets is None:
            least_s = max(least_s, self._one_by_one_s(self._around_all_s, memory_bytes) * (1 - _SLACK))
        if problem.recompute not in ("never", "selected"):
            return least_s
        stash = np.array([x.stash_bytes for x in costs.sums.costs], dtype=np.float64)
        compute_s, again_s = layers_compute_s(problem), costs.sums.layer_s("last_recompute")
        per_s = np.divide(stash, compute_s, out=np.full_like(stash, np.inf), where=compute_s > 0)
        order = np.argsort(per_s)
        place = int(np.searchsorted(np.cumsum(stash[order]), _SHARE_OF_STASH * stash.sum()))
        rho = float(per_s[order[min(place, len(order) - 1)]])
        some = (per_s <= rho) & (stash > 0)  # not those that keep most for their time, such as an embedding
        if not some.any() or not np.isfinite(rho):
            return least_s
        kept, whole_s = float(stash[some].sum()), float(compute_s.sum())
        left = problem.num_devices * memory_bytes - costs.whole_parts.weight - costs.whole_parts.optimizer
        whole_again_s, saved_s = (
            float(again_s[some].sum()),
            float((again_s[some] / stash[some]).max()),
        )  # of a byte kept

        def is_possible(x: float) -> bool:
            most = np.minimum(rho * x, memory_bytes / in_flight)
            used = np.concatenate([[0.0], np.cumsum(in_flight * most)])  # the devices with the fewest in flight first
            most_kept = float(np.clip((left - used[:-1]) / in_flight, 0.0, most).sum())
            if problem.recompute == "never":
                return most_kept >= kept
            return problem.num_devices * x + saved_s * most_kept >= whole_s + whole_again_s

        low, high = whole_s / problem.num_devices, whole_s + float(again_s.sum())
        if not is_possible(high):
            return float("inf")
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        return max(least_s, self._num * low * (1 - _SLACK))

    @property
    def _num(self) -> int:
        return self.problem.num_microbatches

    @cached_property
    def _around_all_s(self) -> float:
        """W + C."""
        return through_all_s(self.problem) + self._again_s

    @cached_property
    def _again_s(self) -> float:
        """What recomputing all stages adds to every micro-batch; 0 where not every one is recomputed."""
        return self._whole_again_s if self._num_again == self._num else 0.0

    @cached_property
    def _whole_again_s(self) -> float:
        """What recomputing all stages takes for a micro-batch."""
        return float(self.problem.costs.sums.seconds("last_recompute", *self.problem.costs.all_layers)[0])

    @cached_property
    def _sums_s(self) -> Floats:
        """[P]: compute of the layers before each position."""
        costs, sums = self.problem.costs, compute_sums_s(self.problem)
        return sums + costs.sums.seconds("last_recompute", *costs.prefixes) if self._again_s else sums

    @cached_property
    def _sums_list(self) -> list[float]:
        return [float(x) for x in self._sums_s]

    @cached_property
    def _overhead_s(self) -> float:
        return self.problem.costs.microbatch_overhead_s

    @property
    def through_s(self) -> float:
        """W."""
        return float(self._sums_s[-1]) + self.problem.num_stages * self._overhead_s

    @property
    def transfers_s(self) -> float:
        """C."""
        return float(least_transfers_s(self.problem).sum())

    @cached_property
    def largest_s(self) -> float:
        """A lower bound of the largest stage's compute; exact for a chain, up to rounding."""
        num_stages, costs = self.problem.num_stages, self.problem.costs
        lone_s = float(layers_compute_s(self.problem).max()) + self._overhead_s
        low, high = max(self.through_s / num_stages, lone_s), self.through_s
        if costs.given_downsets is not None:
            return low
        return _least_largest_s(self._sums_s.tobytes(), low, high, self._overhead_s, num_stages)

    @property
    def tail_s(self) -> float:
        """Seconds of all updates by themselves and, at least, of the replicas' all-reduces.

        Tied weights may lie together.
        """
        costs, replicas = self.problem.costs, self.problem.num_replicas
        reduced = 0.0
        for kind, field in EXCHANGED[costs.sharding] if replicas > 1 else ():
            num_bytes = int(costs.sums.held(field, *costs.all_layers)[0]) / replicas
            link = costs.profile.link.of_replicas.ring_message(kind, replicas)
            reduced += num_messages(kind, replicas) * num_bytes * link.least_s_per_byte
        return reduced + float(costs.update_alone_s(*costs.all_layers)[0]) + costs.around_s

    @property
    def _num_again(self) -> int:
        """Micro-batches that all stages recompute."""
        return 0 if self.problem.recompute == "selected" else num_recomputed(self.problem)

    @property
    def _packed_s(self) -> float:
        """What the layers of some device take in a step, and what it waits for beside them."""
        again_s = self.problem.costs.sums.layer_s("last_recompute")
        work_s = self._num * layers_compute_s(self.problem) + self._num_again * again_s
        first = [stages[0] for stages in self.problem.stages_by_device]
        return self._packed(work_s, np.sort(sum(least_s[first] for least_s in least_before_s(self.problem))))

    def _packed(self, of_layers: Floats, beside: Floats | None = None) -> float:
        """The sum over the layers of some device, at least, as so many devices cannot share them out evenly.

        Of the (j-1) K + h largest, some device has j + 1, or h devices have j. Of h devices one has at least the h-th
        smallest of what devices have `beside`, [K].
        """
        num_devices, sums = self.problem.num_devices, np.concatenate([[0.0], np.cumsum(np.sort(of_layers)[::-1])])
        count = np.arange(1, len(of_layers) + 1)
        each, more = (count - 1) // num_devices + 1, (count - 1) % num_devices
        least = sums[count] - sums[count - each]
        if beside is not None:
            with_one_more = np.where(each < count, sums[count] - sums[np.maximum(count - each - 1, 0)], np.inf)
            least = np.minimum(least + beside[more], with_one_more)
        return float(least.max())

    @cached_property
    def _forward_share(self) -> float:
        """The largest share that the forward has in a layer's compute, or a half; the last stage hides nothing."""
        costs = self.problem.costs
        if costs.given_downsets is not None or costs.num_layers == 1 or costs.profile.has_host:
            return 0.5
        every = np.arange(costs.num_layers - 1)
        forward, whole = costs.sums.seconds("forward", every, every + 1), np.diff(self._sums_s)[:-1]
        share = np.divide(forward, whole, out=np.zeros_like(whole), where=whole > 0)
        return min(0.5, float(share.max()))

    @cached_property
    def _hides(self) -> list[tuple[float, float]]:
        """For each stage (a, b): warm-up hides at most a t + b of a stage that computes t seconds; of GPipe nothing."""
        num_stages, share, schedule = self.problem.num_stages, self._forward_share, self.problem.schedule
        if schedule == "gpipe":
            return [(0.0, 0.0)] * num_stages
        hidden = [min(self._num, NUM_WARMUP[schedule](num_stages - stage)) - 1 for stage in range(num_stages)]
        return [(count * share, count * (0.5 - share) * self._overhead_s) for count in hidden]

    def _one_by_one_s(self, through_s: float, memory_bytes: int | None = None) -> float:
        """The least T for which stages may be large enough for all layers together; with a memory infinite where none is."""
        whole_s, low = self.through_s, through_s
        high = through_s + self._num * (whole_s + self._whole_again_s)
        if memory_bytes is not None and not self._are_large_enough(high, through_s, whole_s, memory_bytes):
            return float("inf")
        for _ in range(_HALVINGS_OF_STEP):
            middle = 0.5 * (low + high)
            is_enough = self._are_large_enough(middle, through_s, whole_s, memory_bytes)
            low, high = (low, middle) if is_enough else (middle, high)
        return low

    def _are_large_enough(self, step_s: float, through_s: float, whole_s: float, memory_bytes: int | None) -> bool:
        """Whether stages that a step of this length allows may hold all layers: of a chain whole ones, in the memory."""
        num, overhead_s, before_s, position = self._num, self._overhead_s, 0.0, 0
        sums, is_chain = self._sums_list, self.problem.costs.given_downsets is None
        for stage, (share, fixed_s) in enumerate(self._hides):
            beside_s = step_s - through_s + fixed_s
            most_s = (step_s - before_s) / num
            if num - 1 - share > 0:
                most_s = min(most_s, beside_s / (num - 1 - share))
            if is_chain:
                end = bisect_right(sums, (sums[position] + most_s - overhead_s) * (1 + _SLACK)) - 1
                while memory_bytes is not None and end > position:
                    again_s = self._least_again_s(stage, position, end, memory_bytes)
                    seconds = sums[end] - sums[position] + overhead_s
                    others_s = (num - 1) * (seconds + again_s) - share * seconds
                    if num * (seconds + again_s) + before_s <= step_s and others_s <= beside_s:
                        break
                    end -= 1
                if end <= position:
                    return False
                position, before_s = end, sums[end] + (stage + 1) * overhead_s
            else:
                before_s += most_s
            if before_s >= whole_s * (1 - _SLACK) or position == len(sums) - 1:
                return True
        return False

    def _least_again_s(self, stage: int, first: int, end: int, memory_bytes: int) -> float:
        """What selected layers of a stage take to recompute, at least; of others 0, or infinite where it cannot fit."""
        lasting, stash, kept_anyway, again_s, most_per_byte = self._held
        warmup = NUM_WARMUP.get(self.problem.schedule)
        num_held = self._num if warmup is None else min(self._num, warmup(self.problem.num_stages - stage))
        num_held = max(1, min(num_held, self._num - 1))  # while gradients are there
        left, kept = memory_bytes + 1 - (lasting[end] - lasting[first]), stash[end] - stash[first]
        if self.problem.recompute == "selected":
            left, kept = left - num_held * (kept_anyway[end] - kept_anyway[first]), 0.0
            if left >= 0:
                return max(0.0, again_s[end] - again_s[first] - most_per_byte[end] * left / num_held)
        if self.problem.recompute == "never":
            kept *= num_held
        return 0.0 if kept <= left else float("inf")

    @cached_property
    def _held(self) -> tuple[list[float], ...]:
        """[P] each, of the layers before each position: what lasts, with gradients where there are two micro-batches; the
        stash, and what of it layers keep that are recomputed; seconds to recompute, and the most of them that a byte saves."""
        costs = self.problem.costs
        layers = bytes_before(costs)
        lasting = layers["weight"] + layers["optimizer"] + (layers["gradient"] if self._num > 1 else 0.0)
        stash = np.array([x.stash_bytes for x in costs.sums.costs], dtype=np.float64)
        saved = np.clip(self.problem.selector.saved_at_most, 0, stash).astype(np.float64)
        again_s = np.where(saved > 0, costs.sums.layer_s("last_recompute"), 0.0)
        per_byte = np.divide(again_s, saved, out=np.zeros_like(saved), where=saved > 0)
        sums = (np.concatenate([[0.0], np.cumsum(x)]).tolist() for x in (stash, stash - saved, again_s))
        return (lasting.tolist(), *sums, np.concatenate([[0.0], np.maximum.accumulate(per_byte)]).tolist())


@lru_cache(maxsize=4096)
def least_in_flight(schedule: str, num_devices: int, num_microbatches: int) -> Floats | None:
    """[K], rising: of how many micro-batches each device keeps all its stages at once, at least; None: not known."""
    left = np.arange(1, num_devices + 1)  # devices from this one on
    name = schedule.partition(":")[0]
    if name in ("gpipe", "looped-bfs"):
        left = np.full(num_devices, num_microbatches)
    elif name in NUM_WARMUP:
        left = np.array([NUM_WARMUP[name](int(x)) for x in left])
    elif name == "interleaved-1f1b":
        left = np.minimum(num_devices, 2 * left - 1)
    elif name not in ("zb-h1", "zb-v"):
        return None
    return np.minimum(left, num_microbatches).astype(np.float64)


@lru_cache(maxsize=4096)
def _least_largest_s(sums: bytes, low: float, high: float, overhead_s: float, num_stages: int) -> float:
    """The least seconds, from low to high, within which so many stages hold all layers; settings share it."""
    before_s = np.frombuffer(sums).tolist()
    for _ in range(_HALVINGS):
        middle, position = 0.5 * (low + high), 0
        for _ in range(num_stages):  # each filled with as many layers as it can have
            most_s = (middle - overhead_s) * (1 + _SLACK)
            position = bisect_right(before_s, before_s[position] + most_s, position) - 1
            if position >= len(before_s) - 1:
                break
        low, high = (low, middle) if position >= len(before_s) - 1 else (middle, high)
    return low
