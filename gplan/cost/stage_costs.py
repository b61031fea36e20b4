"""From a profile to the cost and the memory of every candidate stage, a pair of positions, at a micro-batch size.

A stage costs `overhead_s` plus the sum of its layers, plus the loss where it holds the last layer. Optimizer state and
workspace are shared out by the bytes that are trained, the optimizer's time by the measured times of the layers' updates.
The halves of a backward are known where the profile has them; each that runs pays the overhead. A stage is [first, end), two positions of `downsets`: for a chain, its first layer and
the layer after its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gplan.core import LayerCost, Link, Profile, Sharding, StageBytes, StageCost, StageTimes, Timing
from gplan.core.profile import BUCKET_BYTES
from gplan.corrections.sharding import EXCHANGED
from gplan.cost.part_table import PartTable, first_of
from gplan.cost.stage_bytes import MEGATRON, MicrobatchTerms, TransferMemory, microbatch_bytes, transfer_memory
from gplan.cost.workspaces import Workspaces
from gplan.graph.boundary import Crossing, PassThrough, crossing_of, saved_outputs, unsaved_outputs
from gplan.graph.down_sets import Bools, DownSets, Floats, Ints, Output, Prefixes, Waiting

_MOST_POSITIONS = 400  # of a chain whose stages are few enough to look at all of them
_ROUNDING = 1e-9  # the share of seconds below which a difference of sums is nothing


def layer_seconds(cost: LayerCost, *, num_microbatches: int, has_halves: bool) -> dict[str, float]:
    """Seconds of a layer, or of the loss, for one micro-batch of M in a step, by what they are of.

    The first backward of a step makes the gradients and costs more; each of the M gets its share of the difference. Of a
    split backward that belongs to the second half.
    """
    once_s = (cost.first_backward or cost.backward).median_s - cost.backward.median_s
    forward_s, backward_s = cost.forward.median_s, cost.backward.median_s + once_s / num_microbatches
    first, second = first_half(cost), cost.weight_gradient
    first_s = first.median_s if first is not None else 0.0
    second_s = max(0.0, second.median_s + once_s / num_microbatches) if second is not None else 0.0
    least_backward_s = min(backward_s, first_s + second_s) if has_halves else backward_s
    return {
        "forward": forward_s,
        "backward": backward_s,
        "input_gradient": first_s,
        "weight_gradient": second_s,
        "least_backward": least_backward_s,
        "least_first_half": min(backward_s, first_s),
        "compute": forward_s + backward_s,
        "least_compute": forward_s + least_backward_s,
        "recompute": cost.recompute_s,
        "last_recompute": cost.last_recompute_s,
        "unfinished": cost.recompute_s - cost.last_recompute_s,
    }


def first_half(cost: LayerCost) -> Timing | None:
    """The first half of a split backward; None where there is none.

    What has only a second half is before all weights; what has neither, as the loss, has no weights.
    """
    if cost.input_gradient is None and cost.weight_gradient is not None:
        return None
    return cost.input_gradient or cost.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBoundaries:
    """Whether the stages before and after one are on other devices: else nothing is sent, received or kept for that.

    Also whether the stage splits all its backwards.
    """

    before: bool = True
    after: bool = True
    in_halves: bool = False  # whether every backward of the stage is split, so that gradients pass without a copy

    @property
    def returns(self) -> bool:
        """Whether gradients that only pass the stage are sent out of the receive buffers."""
        return self.before and self.after and self.in_halves


ALL_BOUNDARIES = DeviceBoundaries()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a stage runs: the device's speed, its neighbours, and who shares its gradients."""

    link: Link  # to the next stage
    boundaries: DeviceBoundaries = ALL_BOUNDARIES
    speed: float = 1.0  # times the profiled device's
    tied_links: tuple[Link, ...] = ()  # that gradients of tied weights may cross to be summed; the slowest counts


@dataclass(frozen=True)
class Costs:
    """Costs of every stage that a profile can be cut into, with M micro-batches a step."""

    profile: Profile  # corrected (`gplan/corrections`): of one micro-batch size, and all its times hold
    num_microbatches: int
    given_downsets: DownSets | None = None  # None: the layers stay in the profile's order
    num_replicas: int = 1  # R, that average their gradients over the profile's link
    sharding: Sharding = "none"  # over the replicas

    @cached_property
    def downsets(self) -> DownSets:
        """Where the model may be cut."""
        return self.given_downsets or Prefixes(self.num_layers)

    @property
    def is_sharded(self) -> bool:
        """Whether replicas divide stages among them; the profile is then that of one of them (`sharded`)."""
        return self.num_replicas > 1 and self.sharding != "none"

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.profile.layers)

    @property
    def num_positions(self) -> int:
        """P: position 0 is before all layers, P-1 after them."""
        return self.downsets.size

    @cached_property
    def all_layers(self) -> tuple[Ints, Ints]:
        """[1] each: where the stage of all layers begins and ends."""
        return np.array([0]), np.array([self.num_positions - 1])

    @cached_property
    def prefixes(self) -> tuple[Ints, Ints]:
        """[P] each: where the stages begin and end that have all layers before each position."""
        ends = np.arange(self.num_positions)
        return np.zeros_like(ends), ends

    @property
    def is_short_chain(self) -> bool:
        """Whether the layers stay in the profile's order, and are few enough to look at all stages."""
        return self.given_downsets is None and self.num_positions <= _MOST_POSITIONS

    @cached_property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Each layer's costs."""
        return tuple(layer.costs[0] for layer in self.profile.layers)

    @cached_property
    def loss(self) -> LayerCost | None:
        """The loss's costs."""
        return self.profile.loss[0] if self.profile.loss else None

    def forward_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of the forward of stages without overhead; the loss is in the last layer."""
        return self._seconds("forward", first, end)

    def backward_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: mean seconds of a step's backwards of stages, without recompute and overhead."""
        return self._seconds("backward", first, end)

    @property
    def gap_s(self) -> float:
        """What the engine takes of the device after every action."""
        engine = self.profile.engine
        return engine.action_s if engine else 0.0

    @property
    def overhead_s(self) -> float:
        """What every action of a stage takes beside its layers: the stage's own overhead and the engine's."""
        return self.profile.overhead_s + self.gap_s

    @cached_property
    def activation_sending_s(self) -> Floats:
        """[P]: for how long sending the activations over the cut at each position keeps the sender; 0 at both ends."""
        return self._sending_s(self.activation_bytes)

    @cached_property
    def gradient_sending_s(self) -> Floats:
        """[P]: for how long sending the gradients back over the cut keeps the sender; 0 at both ends."""
        return self._sending_s(self.gradient_bytes)

    @cached_property
    def has_halves(self) -> bool:
        """Whether the profile has times of the two halves of a split backward."""
        return any(x.input_gradient or x.weight_gradient for x in self.layer_costs)

    def input_gradient_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of the first half of a split backward, as `backward_s`; only with `has_halves`."""
        return self._seconds("input_gradient", first, end)

    def weight_gradient_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: mean seconds of the second halves of a step; only with `has_halves`."""
        return self._seconds("weight_gradient", first, end)

    def least_backward_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: lower bound of the backward of stages, whole or in two halves; only with `has_halves`."""
        return self._seconds("least_backward", first, end)

    def least_first_half_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: lower bound of the time until the input gradient of stages is ready, split or not; only with `has_halves`."""
        return self._seconds("least_first_half", first, end)

    def recompute_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds that recomputing whole stages adds; the loss is not recomputed."""
        seconds = self.full_recompute_s(first, end)
        if not self.unfinished_s.any():
            return seconds
        left = seconds - self.unfinished_s[self.downsets.last_layers(first, end)]
        return np.where(left > _ROUNDING * seconds, left, 0.0)

    def full_recompute_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of recomputing all layers of stages to their ends; a recompute leaves out `unfinished_s`."""
        return self._seconds("recompute", first, end)

    def least_recompute_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: lower bound of the sum of `recompute_s`, however these layers are divided among stages."""
        return self._seconds("last_recompute", first, end)

    @cached_property
    def unfinished_s(self) -> Floats:
        """[L]: seconds that a recompute leaves out where it ends with this layer, at the last tensor that is saved."""
        return self._of_layers("unfinished")

    def update_alone_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of the updates of stages by themselves: zero_grad, the optimizer's step on what a replica updates,
        moving averages."""
        step = self.profile.step
        return step.fixed_part_s + step.spread_s * self.update_share(first, end)

    @cached_property
    def layer_compute_s(self) -> Floats:
        """[L]: seconds of forward and backward of each layer, without the loss."""
        return self._of_layers("compute")

    @cached_property
    def layer_least_compute_s(self) -> Floats:
        """[L]: seconds of forward and backward of each layer at least, whether the backward is split or not."""
        return self._of_layers("least_compute")

    @cached_property
    def layer_recompute_s(self) -> Floats:
        """[L]: seconds that recomputing each layer by itself adds."""
        return self._of_layers("last_recompute")

    @property
    def around_s(self) -> float:
        """What the engine takes of a step before its first action and after its last."""
        engine = self.profile.engine
        return engine.step_s if engine else 0.0

    @cached_property
    def transfers(self) -> TransferMemory:
        """How long the engine holds what is sent and received, by the trainer, or the version of torch, of the profile."""
        return (
            MEGATRON if self.profile.is_for_megatron else transfer_memory(dict(self.profile.versions).get("torch", ""))
        )

    @property
    def num_buffers(self) -> int:
        """Micro-batches for which a stage has receive buffers."""
        return self.transfers.num_buffers(self.num_microbatches)

    @cached_property
    def crossing(self) -> Crossing:
        """What crosses the cut at each position; nothing at both ends."""
        return crossing_of(self.profile, self.layer_costs, self.loss, self.downsets)

    @cached_property
    def pass_through(self) -> PassThrough:
        """What only passes stages."""
        return PassThrough(
            profile=self.profile,
            downsets=self.downsets,
            saved_later=self.saved_outputs(only_later=True),
        )

    @cached_property
    def workspaces(self) -> Workspaces:
        """What stages hold for a moment."""
        return Workspaces(
            layer_costs=self.layer_costs,
            loss=self.loss,
            downsets=self.downsets,
            pass_through=self.pass_through,
            held_outputs=self.held_outputs,
            saved_later=self.saved_outputs(only_later=True),
            unsaved=unsaved_outputs(self.profile),
            waiting=self.waiting,
            kept_output_bytes=int(self.crossing.kept_bytes[-1]),
            keeps_sent=self.transfers.keeps_sent,
        )

    @property
    def activation_bytes(self) -> Ints:
        """[P]: bytes that cross the cut at each position on the way forward; 0 at both ends."""
        return self.crossing.activation_bytes

    @property
    def gradient_bytes(self) -> Ints:
        """[P]: bytes that cross the cut at each position on the way back; 0 at both ends."""
        return self.crossing.gradient_bytes

    def activation_s(self, link: Link) -> Floats:
        """[P]: seconds to send the activations across the cut at each position; 0 at both ends."""
        return self._transfers_s(link)[0]

    def gradient_s(self, link: Link) -> Floats:
        """[P]: seconds to send the gradients back across the cut at each position; 0 at both ends."""
        return self._transfers_s(link)[1]

    def _transfers_s(self, link: Link) -> tuple[Floats, Floats]:
        if link not in self._transfers:
            self._transfers[link] = (
                link.transfers_s(self.activation_bytes),
                link.transfers_s(self.gradient_bytes),
            )
        return self._transfers[link]

    @cached_property
    def _transfers(self) -> dict[Link, tuple[Floats, Floats]]:
        return {}

    def parts(self, first: Ints, end: Ints, boundaries: DeviceBoundaries = ALL_BOUNDARIES) -> StageBytes[Ints]:
        """The parts of the memory of stages, each [E]; every stage must have a layer. Of a short chain from a table."""
        if not self.is_short_chain:
            return self.computed_parts(first, end, boundaries)
        if boundaries not in self._part_tables:
            self._part_tables[boundaries] = PartTable(
                self.num_positions, partial(self.computed_parts, boundaries=boundaries)
            )
        return self._part_tables[boundaries].parts(first, end)

    @cached_property
    def _part_tables(self) -> dict[DeviceBoundaries, PartTable]:
        return {}

    def computed_parts(self, first: Ints, end: Ints, boundaries: DeviceBoundaries) -> StageBytes[Ints]:
        """The parts of the memory of stages, each [E], computed without a table: for stages that are needed once."""
        trained, crossing = self.trained_share(first, end), self.crossing
        pass_through, passing_unsaved = (x * boundaries.before for x in self.pass_through.activation_bytes(first, end))
        unsaved = self.unsaved_sent(end, passing_unsaved)
        is_last = end == self.num_positions - 1
        returned = self.pass_through.returned_bytes(first, end) if boundaries.returns else 0
        held = microbatch_bytes(
            MicrobatchTerms(
                layers_stash=self.stash_sums[end] - self.stash_sums[first],
                layers_pending=self.pending_sums[end] - self.pending_sums[first],
                loss_stash=np.where(is_last, self.loss.stash_bytes if self.loss else 0, 0),
                received_activation=self.activation_bytes[first] * boundaries.before,
                sent_gradient=self.gradient_bytes[first] * boundaries.before - returned,
                sent_activation=self.activation_bytes[end] * boundaries.after,
                received_gradient=self.gradient_bytes[end] * boundaries.after,
                output=crossing.kept_bytes[end],
                output_before_loss=np.where(is_last, 0, crossing.kept_bytes[end]),
                output_unsaved=unsaved,
                output_saved_later=crossing.saved_later_bytes[end] - self.pass_through.saved_later_bytes(first, end),
                pass_through=pass_through,
                passing_sent=pass_through * boundaries.after,
            ),
            self.transfers,
        )
        return StageBytes(
            weight=self.held_sum("weight_bytes", first, end),
            gradient=self.held_sum("gradient_bytes", first, end),
            optimizer=np.rint(trained * self.profile.step.state_bytes).astype(np.int64),
            stash=held.stash,
            checkpoint=held.checkpoint,
            recomputed_stash=held.recomputed_stash,
            pending=held.pending,
            sent=held.sent,
            forward_workspace=self.workspaces.above_stash("forward", first, end, unsaved_sent=unsaved),
            backward_workspace=self.workspaces.above_stash("backward", first, end),
            input_workspace=self.workspaces.of_first_half(first, end),
            weight_workspace=self.workspaces.above_between(first, end),
            recompute_workspace=self.workspaces.alone(first, end),
            recomputing_workspace=self.workspaces.above_recomputed_stash(first, end, held.recomputed_stash),
            optimizer_workspace=self._optimizer_workspace(first, end),
            buffer=self.num_buffers * held.received,
        )

    def unsaved_sent(self, end: Ints, passing_unsaved: Ints) -> Ints:
        """[E]: what the engine holds of the outputs of stages and no layer keeps, without what only passes."""
        found: Ints = (self.crossing.unsaved_bytes[end] - passing_unsaved) * self.transfers.keeps_sent
        return found

    def tied_bytes(self, first: Ints, end: Ints) -> Ints:
        """[E]: bytes of the gradients, on stages, of shared weights that other stages use too."""
        total = np.zeros(len(first), dtype=np.int64)
        for used, num_bytes in self._held_sums("gradient_bytes")[1]:
            here = used[end] - used[first]
            total += np.where((here > 0) & (here < used[-1]), num_bytes, 0)
        return total

    def _optimizer_workspace(self, first: Ints, end: Ints) -> Ints:
        """[E]: temporary bytes of the update: by the trained bytes of stages, and by their largest trained tensor.

        With replicas, the most at the update or, before it, while gradients are averaged. Where they divide stages, above
        all gradients and gathered parameters, though not all are there.
        """
        step = self.profile.step
        num_bytes = self.trained_share(first, end) * step.workspace_bytes
        if step.largest_workspace:
            num_bytes = num_bytes + step.largest_workspace * self._largest("largest_trained_bytes", first, end)
        found: Ints = np.rint(num_bytes).astype(np.int64)
        if self.averaging_factor:
            copied = np.minimum(self.averaging_factor * self.held_sum("copied_bytes", first, end), BUCKET_BYTES)
            more = (self.averaging_factor - 1.0) * self.held_sum("gradient_bytes", first, end)
            found = np.maximum(found, np.rint(more + copied).astype(np.int64))
        if not self.is_sharded:
            return found
        found = found + self.held_sum("updated_bytes", first, end) - self.held_sum("gradient_bytes", first, end)
        if self.sharding == "weights":
            return np.maximum(found, self._largest("reduced_bytes", first, end))
        reduced, gathered = (self.held_sum(field, first, end) for field in ("reduced_bytes", "gathered_bytes"))
        exchanged: Ints = np.maximum(found, reduced) - gathered
        return exchanged

    @cached_property
    def averaging_factor(self) -> float:
        """Bytes of a gradient while whole replicas average it over those before: more where master weights have another type.

        0 where nothing is averaged in copies: without whole replicas, and in Megatron-LM, which has gradients in one buffer.
        """
        if self.num_replicas == 1 or self.is_sharded or self.profile.is_for_megatron:
            return 0.0
        return max(1.0, self.profile.step.master_bytes / (self._trained_total_bytes or 1))

    def _largest(self, field: str, first: Ints, end: Ints) -> Ints:
        """[E]: the largest of the layers and shared weights of stages."""
        own = np.array([getattr(x, field) for x in self.profile.layers], dtype=np.int64)
        largest = self.downsets.running_peaks(first, end, kept=np.zeros_like(own), own=own)
        for users, num_bytes in self._held_sums(field)[1]:
            largest = np.maximum(largest, np.where(users[end] > users[first], num_bytes, 0))
        return largest

    def gathered_at_once(self, first: int, end: int) -> int:
        """Bytes of parameters that a replica of one stage gathers at a time: of all its layers, or the most of one."""
        gathered = self._largest if self.sharding == "weights" else self.held_sum
        return int(gathered("gathered_bytes", np.array([first]), np.array([end]))[0]) if self.is_sharded else 0

    def saved_outputs(self, *, only_later: bool) -> list[Output]:
        """The part of the layers' stash that is output: all of it, or what only its readers keep."""
        return saved_outputs(self.profile, self.layer_costs, only_later=only_later)

    @cached_property
    def held_outputs(self) -> list[Output]:
        """The part of the layers' stash that the engine holds through a backward: outputs, unless it releases them."""
        return self.saved_outputs(only_later=False) if self.transfers.keeps_sent else []

    @cached_property
    def waiting(self) -> list[Waiting]:
        """The layers that share trained weights and the bytes of their gradients.

        On a stage, the gradient of a later use waits in the backward until the first use's is added to it.
        """
        found: dict[tuple[int, ...], int] = {}
        for x in self.profile.shared_weights:
            found[x.layers] = found.get(x.layers, 0) + x.gradient_bytes
        return [x for x in found.items() if x[1]]

    def trained_share(self, first: Ints, end: Ints) -> Floats:
        """[E]: which share of the model's trained bytes a replica of stages updates."""
        share: Floats = self.held_sum("updated_bytes", first, end) / (self._trained_total_bytes or 1)
        return share

    def update_share(self, first: Ints, end: Ints) -> Floats:
        """[E]: which share of the model's `StepCost.spread_s` a replica of stages takes."""
        amounts: Floats = self.held_sum("update_amount", first, end)
        return np.maximum(amounts, 0.0) / self._whole_update_amount  # rounding may leave less than 0

    def columns(
        self,
        first: Ints,
        end: Ints,
        place: StagePlace | None = None,
        *,
        halves: bool | None = None,
        recomputes: bool = True,
    ) -> StageTimes[Floats]:
        """[E] each: the times of stages on one place, by default the profiled device with the profile's link.

        With `halves` those of a split backward are there; None: where the profile has them. Without `recomputes`, the
        recompute of whole stages counts as 0.
        """
        place = place or StagePlace(link=self.profile.link)
        before, after, speed = place.boundaries.before, place.boundaries.after, place.speed
        has_halves = self.has_halves if halves is None else halves
        tied = self.tied_bytes(first, end) > 0 if place.tied_links else np.zeros(len(first), dtype=np.bool_)

        def of_pass(seconds_of: Callable[[Ints, Ints], Floats]) -> Floats:
            return (seconds_of(first, end) + self.profile.overhead_s) / speed

        return StageTimes(
            forward_s=of_pass(self.forward_s),
            backward_s=of_pass(self.backward_s),
            recompute_s=self.recompute_s(first, end) / speed if recomputes else np.zeros(len(first)),
            optimizer_s=self._update_s(first, end, tied) / speed,
            activation_s=self.activation_s(place.link)[end] * after,
            gradient_s=self.gradient_s(place.link)[end] * after,
            input_gradient_s=of_pass(self.input_gradient_s) if has_halves else None,
            weight_gradient_s=of_pass(self.weight_gradient_s) if has_halves else None,
            all_reduce_s=self._all_reduce_s(first, end, place.tied_links),
            gap_s=np.full(len(first), self.gap_s / speed),
            forward_sending_s=self.activation_sending_s[end] * after / speed,
            backward_sending_s=self.gradient_sending_s[first] * before / speed,
            around_s=np.where(first == 0, self.around_s / speed, 0.0),
            is_tied=tied.astype(np.float64) if place.tied_links else None,
        )

    def _update_s(self, first: Ints, end: Ints, tied: Bools) -> Floats:
        """[E]: `optimizer_s` beside the passes of other devices; where another device holds one of the weights, beside its
        update.

        No pass runs beside the update of the stage with the first layer, which ends the last backward, nor beside those
        that wait for it: the first stage is taken to hold one of the tied weights.
        """
        step, alone_s = self.profile.step, self.update_alone_s(first, end)
        beside_s = np.where(first == 0, alone_s, step.contention * alone_s)
        return np.where(tied, alone_s + step.tied_update_s, beside_s)

    def _all_reduce_s(self, first: Ints, end: Ints, tied_links: Sequence[Link]) -> Floats:
        """[E]: seconds in which gradients of stages are summed once per step, by their bytes alone.

        First with those of the other device that holds the same weights, then with the replicas'. Replicas count as ready
        when the stage is.
        """
        seconds = np.zeros(len(first))
        if tied_links:
            tied_bytes = self.tied_bytes(first, end)
            seconds = np.maximum.reduce([link.collectives_s("all_reduce", tied_bytes, 2) for link in tied_links])
        if self.num_replicas > 1:
            for kind, field in EXCHANGED[self.sharding]:
                num_bytes = self.held_sum(field, first, end)
                seconds = seconds + self.profile.link.collectives_s(kind, num_bytes, self.num_replicas)
        return seconds

    def stage_cost(self, first: int, end: int, place: StagePlace | None = None) -> StageCost:
        """The seconds of one stage, and what crosses the cut after it."""
        found = self.columns(np.array([first]), np.array([end]), place)
        after = place.boundaries.after if place else True
        return StageCost(
            **{name: float(seconds[0]) for name, seconds in found.present.items()},
            activation_bytes=int(self.activation_bytes[end]) * after,
            gradient_bytes=int(self.gradient_bytes[end]) * after,
        )

    def one_stage_bytes(self, first: int, end: int, boundaries: DeviceBoundaries = ALL_BOUNDARIES) -> StageBytes[int]:
        """The parts of the memory of one stage."""
        return first_of(self.parts(np.array([first]), np.array([end]), boundaries))

    @cached_property
    def _trained_total_bytes(self) -> int:
        return self.profile.trained_bytes

    @cached_property
    def _whole_update_amount(self) -> float:
        return self.profile.whole_update_amount

    @cached_property
    def stash_sums(self) -> Ints:
        """[P]: bytes that the layers before each position stash for a micro-batch, without the loss."""
        return self.downsets.sums(np.array([x.stash_bytes for x in self.layer_costs], dtype=np.int64))

    @cached_property
    def pending_sums(self) -> Ints:
        """[P]: bytes that the layers before each position keep between the halves of a backward, with the loss."""
        sums = self.downsets.sums(np.array([x.pending_bytes for x in self.layer_costs], dtype=np.int64))
        sums[-1] += self.loss.pending_bytes if self.loss else 0
        return sums

    def _sending_s(self, num_bytes: Ints) -> Floats:
        engine = self.profile.engine
        return engine.sending.transfers_s(num_bytes) if engine else np.zeros(self.num_positions)

    def _seconds(self, name: str, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of the layers of stages by `layer_seconds`, with the loss."""
        if name not in self._second_sums:
            sums = self.downsets.sums(self._of_layers(name))
            if self.loss and not name.endswith("recompute"):
                sums[-1] += self._seconds_of(self.loss)[name]
            self._second_sums[name] = sums
        sums = self._second_sums[name]
        return np.maximum(sums[end] - sums[first], 0.0)

    @cached_property
    def _second_sums(self) -> dict[str, Floats]:
        """[P] by name: of the layers before each position."""
        return {}

    def _of_layers(self, name: str) -> Floats:
        """[L]: seconds of each layer, by a name of `layer_seconds`."""
        return np.array([x[name] for x in self._layer_seconds])

    @cached_property
    def _layer_seconds(self) -> list[dict[str, float]]:
        return [self._seconds_of(x) for x in self.layer_costs]

    def _seconds_of(self, cost: LayerCost) -> dict[str, float]:
        return layer_seconds(cost, num_microbatches=self.num_microbatches, has_halves=self.has_halves)

    def held_sum(self, field: str, first: Ints, end: Ints) -> NDArray[Any]:
        """[E]: a field of layers and shared weights, summed over those of stages; a shared one once where it is held."""
        own, shared = self._held_sums(field)
        total: NDArray[Any] = own[end] - own[first]
        for users, number in shared:
            total = total + np.where(users[end] > users[first], number, 0)
        return total

    def _held_sums(self, field: str) -> tuple[NDArray[Any], list[tuple[Ints, Any]]]:
        """[P] of the layers' own, and for each shared weight its users [P] and its number."""
        if field not in self._known_sums:
            own = np.array([getattr(x, field) for x in self.profile.layers])
            numbers = (getattr(x, field) for x in self.profile.shared_weights)
            self._known_sums[field] = self.downsets.sums(own), list(zip(self._users_of_shared, numbers, strict=True))
        return self._known_sums[field]

    @cached_property
    def _known_sums(self) -> dict[str, tuple[NDArray[Any], list[tuple[Ints, Any]]]]:
        return {}

    @cached_property
    def _users_of_shared(self) -> list[Ints]:
        """For each shared weight, [P]: how many layers before each position use it."""
        every = np.arange(self.num_layers)
        return [self.downsets.sums(np.isin(every, x.layers).astype(np.int64)) for x in self.profile.shared_weights]
