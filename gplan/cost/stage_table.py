"""The table of stage costs: what every stage that a profile can be cut into takes and holds.

A row is a stage [first, end), two positions of `downsets` (for a chain its first layer and the layer after its last), on a
place. `seconds` and `parts` give any number of rows at once, as arrays with an entry for each: searches, bounds, programs,
single stages of a plan and reports all read them. The profile is corrected (`gplan/corrections`).

A pass of a stage takes `overhead_s` plus the sum of its layers, plus the loss where it holds the last layer; of a split
backward each half pays the overhead. Optimizer state and workspace are shared out by the bytes that are trained, the
optimizer's time by the measured times of the layers' updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gplan.core import Link, Profile, Sharding, StageBytes, StageCost, StageTimes
from gplan.core.profile import BUCKET_BYTES
from gplan.corrections.sharding import EXCHANGED
from gplan.cost.layer_sums import LayerSums, SecondsOf
from gplan.cost.part_table import PartTable, first_of, parts_of, rows_of
from gplan.cost.workspaces import Workspaces
from gplan.graph.boundary import Crossing, PassThrough, crossing_of, saved_outputs, unsaved_outputs
from gplan.graph.down_sets import Bools, DownSets, Floats, Ints, Output, Prefixes, Waiting
from gplan.schedules.transfers import RECEIVES_AHEAD

_MOST_POSITIONS = 400  # of a chain whose stages are few enough to look at all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMemory:
    """What an engine holds of what stages send and receive. All have a buffer for each receive from when it is posted."""

    receives_ahead: int = 0  # passes before the one that needs it that a receive is posted
    keeps_sent: bool = False  # outputs until their backward, and gradients for a while after they were sent
    frees_outputs: bool = False  # whether an output that only later stages keep is freed once it is sent


GPLAN = TransferMemory(receives_ahead=RECEIVES_AHEAD, keeps_sent=True)
"""gplan's own engines (`gplan/schedules/transfers.py`)."""

MEGATRON = TransferMemory(frees_outputs=True)
"""Megatron-LM's: an activation is received when its forward is next, a gradient when its backward is, what is sent is waited
for, and the elements of an output are freed then (`deallocate_output_tensor` in pipeline_parallel/schedules.py)."""

NANOTRON = TransferMemory()
"""nanotron's: the same, but an output is kept until its backward (`PipelineTrainBatchState` in pipeline_parallel/state.py)."""


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
class StageTable:
    """The costs of every stage of a profile, with M micro-batches a step."""

    profile: Profile
    num_microbatches: int
    given_downsets: DownSets | None = None  # None: the layers stay in the profile's order
    num_replicas: int = 1  # R, that average their gradients over the profile's link of replicas
    sharding: Sharding = "none"  # over the replicas; the profile is then that of one of them

    def with_microbatches(self, num_microbatches: int) -> StageTable:
        """The table of so many micro-batches, the same whenever it is asked for."""
        if num_microbatches not in self._others:
            self._others[num_microbatches] = replace(self, num_microbatches=num_microbatches)
        return self._others[num_microbatches]

    @cached_property
    def _others(self) -> dict[int, StageTable]:
        return {self.num_microbatches: self}

    # --- the layers and where they can be cut

    @cached_property
    def downsets(self) -> DownSets:
        """Where the model may be cut."""
        return self.given_downsets or Prefixes(self.num_layers)

    @cached_property
    def sums(self) -> LayerSums:
        """What the layers of stages add up to."""
        return LayerSums(self.profile, self.downsets, self.num_microbatches)

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

    @cached_property
    def _whole_update_amount(self) -> float:
        return self.profile.whole_update_amount

    @cached_property
    def _trained_bytes(self) -> int:
        return self.profile.trained_bytes or 1

    # --- seconds

    def seconds(
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
        has_halves = self.sums.has_halves if halves is None else halves
        tied = self.sums.tied_bytes(first, end) > 0 if place.tied_links else np.zeros(len(first), dtype=np.bool_)
        there_s, back_s = self.transfers_s(place.link)

        def of_pass(name: SecondsOf) -> Floats:
            return (self.sums.seconds(name, first, end) + self.profile.overhead_s) / speed

        return StageTimes(
            forward_s=of_pass("forward"),
            backward_s=of_pass("backward"),
            recompute_s=self.sums.recompute_s(first, end) / speed if recomputes else np.zeros(len(first)),
            optimizer_s=self._update_s(first, end, tied) / speed,
            activation_s=there_s[end] * after,
            gradient_s=back_s[end] * after,
            input_gradient_s=of_pass("input_gradient") if has_halves else None,
            weight_gradient_s=of_pass("weight_gradient") if has_halves else None,
            all_reduce_s=self._all_reduce_s(first, end, place.tied_links),
            gap_s=np.full(len(first), self.gap_s / speed),
            forward_sending_s=self._sending_s[0][end] * after / speed,
            backward_sending_s=self._sending_s[1][first] * before / speed,
            around_s=np.where(first == 0, self.around_s / speed, 0.0),
            is_tied=tied.astype(np.float64) if place.tied_links else None,
        )

    def row(self, first: int, end: int, place: StagePlace | None = None) -> StageCost:
        """The seconds of one stage, and what crosses the cut after it."""
        found = self.seconds(np.array([first]), np.array([end]), place)
        after = place.boundaries.after if place else True
        return StageCost(
            **{name: float(seconds[0]) for name, seconds in found.present.items()},
            activation_bytes=int(self.crossing.activation_bytes[end]) * after,
            gradient_bytes=int(self.crossing.gradient_bytes[end]) * after,
        )

    @property
    def gap_s(self) -> float:
        """What the engine takes of the device after every action."""
        return self.profile.engine.action_s if self.profile.engine else 0.0

    @property
    def overhead_s(self) -> float:
        """What every action of a stage takes beside its layers: the stage's own overhead and the engine's."""
        return self.profile.overhead_s + self.gap_s

    @property
    def microbatch_overhead_s(self) -> float:
        """What a forward and a backward of a stage take beside its layers."""
        return 2 * self.overhead_s

    @property
    def around_s(self) -> float:
        """What the engine takes of a step before its first action and after its last."""
        return self.profile.engine.step_s if self.profile.engine else 0.0

    def transfers_s(self, link: Link) -> tuple[Floats, Floats]:
        """[P] each: seconds to send activations, and gradients back, across the cut at each position; 0 at both ends."""
        if link not in self._transfers_s:
            crossing = self.crossing
            sent = link.transfers_s(crossing.activation_bytes), link.transfers_s(crossing.gradient_bytes)
            self._transfers_s[link] = sent
        return self._transfers_s[link]

    @cached_property
    def _transfers_s(self) -> dict[Link, tuple[Floats, Floats]]:
        return {}

    @cached_property
    def _sending_s(self) -> tuple[Floats, Floats]:
        """[P] each: for how long sending activations, and gradients back, keeps the sender; 0 at both ends."""
        engine = self.profile.engine
        return self.transfers_s(engine.sending) if engine else (np.zeros(self.num_positions),) * 2

    def update_alone_s(self, first: Ints, end: Ints) -> Floats:
        """[E]: seconds of the updates of stages by themselves: zero_grad, and the optimizer's step on what a replica
        updates."""
        step, amounts = self.profile.step, self.sums.held("update_amount", first, end)
        share = np.maximum(amounts, 0.0) / self._whole_update_amount  # rounding may leave less than 0
        seconds: Floats = step.fixed_part_s + step.spread_s * share
        return seconds

    def _update_s(self, first: Ints, end: Ints, tied: Bools) -> Floats:
        """[E]: `optimizer_s` beside the passes of other devices; where another device holds one of the weights, beside its
        update.

        No pass runs beside the update of the stage with the first layer, which ends the last backward, nor beside those
        that wait for it: the first stage is taken to hold one of the tied weights.
        """
        step, alone_s = self.profile.step, self.update_alone_s(first, end)
        beside_s = np.where(first == 0, alone_s, step.slow_down * alone_s)
        return np.where(tied, alone_s + step.tied_update_s, beside_s)

    def _all_reduce_s(self, first: Ints, end: Ints, tied_links: Sequence[Link]) -> Floats:
        """[E]: seconds in which gradients of stages are summed once per step, by their bytes alone.

        First with those of the other device that holds the same weights, then with the replicas'. Replicas count as ready
        when the stage is.
        """
        seconds = np.zeros(len(first))
        if tied_links:
            tied_bytes = self.sums.tied_bytes(first, end)
            seconds = np.maximum.reduce([link.collectives_s("all_reduce", tied_bytes, 2) for link in tied_links])
        if self.num_replicas > 1:
            for kind, field in EXCHANGED[self.sharding]:
                num_bytes = self.sums.held(field, first, end)
                seconds = seconds + self.profile.link.of_replicas.collectives_s(kind, num_bytes, self.num_replicas)
        return seconds

    # --- bytes

    @cached_property
    def transfers(self) -> TransferMemory:
        """What the engine that the profile is for holds of what is sent and received."""
        if self.profile.is_for_megatron:
            return MEGATRON
        return NANOTRON if self.profile.sums_in_place else GPLAN

    @cached_property
    def crossing(self) -> Crossing:
        """What crosses the cut at each position; nothing at both ends."""
        return crossing_of(self.profile, self.sums.costs, self.sums.loss, self.downsets)

    @cached_property
    def pass_through(self) -> PassThrough:
        """What only passes stages."""
        later = self.saved_outputs(only_later=True)
        return PassThrough(profile=self.profile, downsets=self.downsets, saved_later=later)

    @cached_property
    def workspaces(self) -> Workspaces:
        """What stages hold for a moment."""
        return Workspaces(
            layer_costs=self.sums.costs,
            loss=self.sums.loss,
            downsets=self.downsets,
            pass_through=self.pass_through,
            held_outputs=self.saved_outputs(only_later=False) if self.transfers.keeps_sent else [],
            saved_later=self.pass_through.saved_later,
            unsaved=unsaved_outputs(self.profile),
            waiting=self._waiting,
            kept_output_bytes=int(self.crossing.kept_bytes[-1]),
            keeps_sent=self.transfers.keeps_sent,
        )

    def saved_outputs(self, *, only_later: bool) -> list[Output]:
        """The part of the layers' stash that is output: all of it, or what only its readers keep."""
        return saved_outputs(self.profile, self.sums.costs, only_later=only_later)

    @cached_property
    def _waiting(self) -> list[Waiting]:
        """The layers that share trained weights and the bytes of their gradients.

        On a stage, the gradient of a later use waits in the backward until the first use's is added to it.
        """
        found: dict[tuple[int, ...], int] = {}
        for x in self.profile.shared_weights:
            found[x.layers] = found.get(x.layers, 0) + x.gradient_bytes
        return [x for x in found.items() if x[1]]

    def parts(self, first: Ints, end: Ints, boundaries: DeviceBoundaries = ALL_BOUNDARIES) -> StageBytes[Ints]:
        """The parts of the memory of stages, each [E]."""
        return parts_of(self.part_rows(first, end, boundaries))

    def part_rows(self, first: Ints, end: Ints, boundaries: DeviceBoundaries = ALL_BOUNDARIES) -> Ints:
        """[parts, E]: the parts of the memory of stages; every stage must have a layer. Of a short chain looked up."""
        if not self.is_short_chain:
            return rows_of(self._computed_bytes(first, end, boundaries), first.shape)
        if boundaries not in self._part_tables:

            def compute(first: Ints, end: Ints) -> Ints:
                return rows_of(self._computed_bytes(first, end, boundaries), first.shape)

            self._part_tables[boundaries] = PartTable(self.num_positions, compute)
        return self._part_tables[boundaries].rows(first, end)

    @property
    def is_short_chain(self) -> bool:
        """Whether stages are so few that all of them can be looked at."""
        return self.given_downsets is None and self.num_positions <= _MOST_POSITIONS

    @cached_property
    def whole_parts(self) -> StageBytes[int]:
        """The parts of the memory of a stage with all layers."""
        return self.row_parts(0, self.num_positions - 1)

    def row_parts(self, first: int, end: int, boundaries: DeviceBoundaries = ALL_BOUNDARIES) -> StageBytes[int]:
        """The parts of the memory of one stage."""
        return first_of(self.parts(np.array([first]), np.array([end]), boundaries))

    @cached_property
    def _part_tables(self) -> dict[DeviceBoundaries, PartTable]:
        return {}

    def _computed_bytes(self, first: Ints, end: Ints, boundaries: DeviceBoundaries) -> StageBytes[Ints]:
        """[E] each: what stages hold at all times, for each micro-batch by what crosses their two cuts, and for a moment.

        After the last stage the output is what the loss keeps of the model's outputs. There the backward of the loss comes
        before the layers run again. What only passes a stage lies in the receive buffers.
        """
        sums, crossing, workspaces, transfers = self.sums, self.crossing, self.workspaces, self.transfers
        passing, passing_unsaved = (x * boundaries.before for x in self.pass_through.activation_bytes(first, end))
        unsaved = self.unsaved_sent(end, passing_unsaved)
        is_last = end == self.num_positions - 1
        layers_stash = sums.stash[end] - sums.stash[first]
        loss_stash = np.where(is_last, sums.loss.stash_bytes if sums.loss else 0, 0)
        saved_later = crossing.saved_later_bytes[end] - self.pass_through.saved_later_bytes(first, end)
        received = crossing.activation_bytes[first] * boundaries.before
        if transfers.keeps_sent:
            stash = layers_stash + unsaved + loss_stash
            checkpoint = crossing.kept_bytes[end] - passing + loss_stash
            again = layers_stash - saved_later + np.where(is_last, 0, crossing.kept_bytes[end]) - passing
            returned = self.pass_through.returned_bytes(first, end) if boundaries.returns else 0
            sent = crossing.gradient_bytes[first] * boundaries.before - returned
        else:
            again = layers_stash - saved_later
            stash = (again if transfers.frees_outputs else layers_stash) + loss_stash
            checkpoint, sent, received = loss_stash, np.zeros_like(again), received - passing
        return StageBytes(
            weight=sums.held("weight_bytes", first, end),
            gradient=sums.held("gradient_bytes", first, end),
            optimizer=np.rint(self.trained_share(first, end) * self.profile.step.state_bytes).astype(np.int64),
            stash=stash,
            checkpoint=checkpoint,
            recomputed_stash=again,
            pending=sums.pending[end] - sums.pending[first],
            sent=sent,
            received_activation=received,
            received_gradient=crossing.gradient_bytes[end] * boundaries.after,
            forward_workspace=workspaces.above_stash("forward", first, end, unsaved_sent=unsaved),
            backward_workspace=workspaces.above_stash("backward", first, end),
            input_workspace=workspaces.of_first_half(first, end),
            weight_workspace=workspaces.above_between(first, end),
            recompute_workspace=workspaces.alone(first, end),
            recomputing_workspace=workspaces.above_recomputed_stash(first, end, again),
            optimizer_workspace=self._optimizer_workspace(first, end),
        )

    def unsaved_sent(self, end: Ints, passing_unsaved: Ints) -> Ints:
        """[E]: what the engine holds of the outputs of stages and no layer keeps, without what only passes."""
        found: Ints = (self.crossing.unsaved_bytes[end] - passing_unsaved) * self.transfers.keeps_sent
        return found

    def trained_share(self, first: Ints, end: Ints) -> Floats:
        """[E]: which share of the model's trained bytes a replica of stages updates."""
        share: Floats = self.sums.held("updated_bytes", first, end) / self._trained_bytes
        return share

    def _optimizer_workspace(self, first: Ints, end: Ints) -> Ints:
        """[E]: temporary bytes of the update: by the trained bytes of stages, and by their largest trained tensor.

        With replicas, the most at the update or, before it, while gradients are averaged. Where they divide stages, above
        all gradients and gathered parameters, though not all are there.
        """
        step, held = self.profile.step, self.sums.held
        num_bytes = self.trained_share(first, end) * step.workspace_bytes
        if step.largest_workspace:
            num_bytes = num_bytes + step.largest_workspace * self.sums.largest("largest_trained_bytes", first, end)
        found: Ints = np.rint(num_bytes).astype(np.int64)
        if factor := self._averaging_factor:
            copied = np.minimum(factor * held("copied_bytes", first, end), BUCKET_BYTES)
            found = np.maximum(found, np.rint((factor - 1.0) * held("gradient_bytes", first, end) + copied).astype(int))
        if not self.is_sharded:
            return found
        found = found + held("updated_bytes", first, end) - held("gradient_bytes", first, end)
        if self.sharding == "weights":
            return np.maximum(found, self.sums.largest("reduced_bytes", first, end))
        exchanged: Ints = np.maximum(found, held("reduced_bytes", first, end)) - held("gathered_bytes", first, end)
        return exchanged

    @property
    def is_sharded(self) -> bool:
        """Whether replicas divide stages among them."""
        return self.num_replicas > 1 and self.sharding != "none"

    @property
    def _averaging_factor(self) -> float:
        """Bytes of a gradient while whole replicas average it over those before: more where master weights have another type.

        0 where nothing is averaged in copies: without whole replicas, and in Megatron-LM, which has gradients in one buffer.
        """
        if self.num_replicas == 1 or self.is_sharded or self.profile.sums_in_place:
            return 0.0
        return max(1.0, self.profile.step.master_bytes / self._trained_bytes)

    def gathered_at_once(self, first: int, end: int) -> int:
        """Bytes of parameters that a replica of one stage gathers at a time: of all its layers, or the most of one."""
        gathered = self.sums.largest if self.sharding == "weights" else self.sums.held
        return int(gathered("gathered_bytes", np.array([first]), np.array([end]))[0]) if self.is_sharded else 0
