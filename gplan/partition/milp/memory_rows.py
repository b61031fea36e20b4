"""The memory of the devices as rows: one for every device and moment of its order, a sum over its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gplan.core import StageBytes
from gplan.core.profile import BUCKET_BYTES
from gplan.cost.microbatch_bytes import MicrobatchBytes, MicrobatchTerms, microbatch_bytes
from gplan.cost.part_table import PARTS
from gplan.partition.device_memory import counts_of
from gplan.partition.milp.assignment import StageAssignment
from gplan.partition.milp.boundary_terms import BoundaryTerms, OutputTerms, PassThroughTerms
from gplan.partition.milp.coefficients import LayerSeconds, ParameterBytes
from gplan.partition.milp.program import Expression, LinearProgram, total, weighted

_WORKSPACES = (
    "forward_workspace", "backward_workspace", "input_workspace", "weight_workspace", "recompute_workspace",
    "recomputing_workspace",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryRows:
    """Writes the memory limits into a program."""

    program: LinearProgram
    choices: StageAssignment
    cuts: BoundaryTerms
    weights: ParameterBytes
    pass_through: PassThroughTerms
    outputs: OutputTerms
    figures: LayerSeconds

    def add(self) -> None:
        """The stages of every device fit it."""
        problem = self.figures.problem
        for device, stages in enumerate(problem.stages_by_device):
            limit_bytes = problem.memory_of(stages[0])
            if limit_bytes is None:
                continue
            counts, parts = counts_of(problem, device), []
            for each, k in enumerate(stages):
                used = {name for name, most in zip(PARTS, counts[:, each].max(axis=0).tolist(), strict=True) if most}
                of_stage = self._parts(k, limit_bytes, used=used)
                parts += [getattr(of_stage, name) for name in PARTS]
            limit = 1.0 + len(stages) / limit_bytes  # a byte is left for rounding in each share of the optimizer
            for moment in counts.reshape(len(counts), -1).tolist():
                held = weighted((count / limit_bytes, part) for count, part in zip(moment, parts, strict=True) if count)
                self.program.require(limit, at_least=held)

    def _parts(self, k: int, limit_bytes: int, *, used: set[str]) -> StageBytes[Expression]:
        """The parts of the memory of stage k, as `Costs.parts` has them."""
        costs, step = self.figures.costs, self.figures.costs.profile.step
        share, held = self.weights.trained_share(k), self._microbatch_bytes(k)
        return StageBytes(
            weight=self.weights.held_sum(k, "weight_bytes"),
            gradient=self.weights.held_sum(k, "gradient_bytes"),
            optimizer=weighted([(step.state_bytes, share)]),
            stash=held.stash,
            checkpoint=held.checkpoint,
            recomputed_stash=held.recomputed_stash,
            pending=held.pending,
            sent=held.sent,
            optimizer_workspace=self._optimizer_workspace(k, limit_bytes),
            buffer=weighted([(costs.num_buffers, held.received)]),
            **{name: self._workspace(k, name, limit_bytes) if name in used else 0.0 for name in _WORKSPACES},
        )

    def _optimizer_workspace(self, k: int, limit_bytes: int) -> Expression:
        """The most that the update of stage k takes, or the exchange of its gradients, as `Costs` has it."""
        costs, weights, step = self.figures.costs, self.weights, self.figures.costs.profile.step
        update = [(float(step.workspace_bytes), weights.trained_share(k))]
        if step.largest_workspace:
            update.append((step.largest_workspace, weights.largest_bytes(k, "largest_trained_bytes")))
        if costs._averaging_factor:
            rows = [weighted((x / limit_bytes, term) for x, term in update), self._averaging(k, limit_bytes)]
            return weighted([(limit_bytes, self.program.at_least(f"exchange_{k}", rows))])
        if not costs.is_sharded:
            return weighted(update)
        update += [(1.0, weights.held_sum(k, "updated_bytes")), (-1.0, weights.held_sum(k, "gradient_bytes"))]
        is_whole = costs.sharding == "optimizer"  # gradients are reduced of the whole stage, and all parameters freed
        copied = weights.held_sum(k, "reduced_bytes") if is_whole else weights.largest_bytes(k, "reduced_bytes")
        rows = [weighted((x / limit_bytes, term) for x, term in some) for some in (update, [(1.0, copied)])]
        most = self.program.at_least(f"exchange_{k}", rows)
        return weighted([(limit_bytes, most), (-1.0 if is_whole else 0.0, weights.held_sum(k, "gathered_bytes"))])

    def _averaging(self, k: int, limit_bytes: int) -> Expression:
        """What stage k holds above its gradients while replicas average them, in limits.

        The copy has the bytes of all small gradients or, with a binary that is 1, those of a bucket.
        """
        costs, held_sum = self.figures.costs, self.weights.held_sum
        factor, everything = costs._averaging_factor, (*costs.profile.layers, *costs.profile.shared_weights)
        excess = max(0.0, factor * sum(x.copied_bytes for x in everything) - BUCKET_BYTES) / limit_bytes
        is_full = self.program.variable(f"full_{k}", is_binary=True) if excess else 0.0
        all_copied = weighted([(factor / limit_bytes, held_sum(k, "copied_bytes")), (-excess, is_full)])
        copied = self.program.at_least(f"copied_{k}", [all_copied, weighted([(BUCKET_BYTES / limit_bytes, is_full)])])
        return weighted([(1.0, copied), ((factor - 1.0) / limit_bytes, held_sum(k, "gradient_bytes"))])

    def _microbatch_bytes(self, k: int) -> MicrobatchBytes[Expression]:
        """What stage k holds for one micro-batch."""
        cuts, costs, loss = self.cuts, self.figures.costs, self.figures.costs.sums.loss
        is_last, pass_through = k == self.choices.stages[-1], self.pass_through.activation_bytes(k)
        stash, pending = (
            self.choices.sum_on(k, [getattr(x, name) for x in costs.sums.costs])
            for name in ("stash_bytes", "pending_bytes")
        )
        return microbatch_bytes(
            MicrobatchTerms(
                layers_stash=stash,
                layers_pending=total([pending, loss.pending_bytes if loss and is_last else 0.0]),
                loss_stash=loss.stash_bytes if loss and is_last else 0,
                received_activation=cuts.activation_bytes(k - 1),
                sent_gradient=weighted(
                    [(1.0, cuts.gradient_bytes(k - 1)), (-1.0, self.pass_through.returned_bytes(k))]
                ),
                sent_activation=cuts.activation_bytes(k),
                received_gradient=cuts.gradient_bytes(k),
                output=cuts.kept_bytes(k),
                output_before_loss=0 if is_last else cuts.kept_bytes(k),
                output_unsaved=self._unsaved_sent(k),
                output_saved_later=self.outputs.saved_later_bytes(k),
                pass_through=pass_through,
                passing_sent=pass_through if self.figures.problem.boundaries(k).after else 0,
            ),
            costs.transfers,
        )

    def _unsaved_sent(self, k: int) -> Expression:
        """What the engine holds of the outputs of stage k and no layer keeps, without what only passes."""
        if not self.figures.costs.transfers.keeps_sent:
            return 0.0
        return weighted([(1.0, self.cuts.unsaved_bytes(k)), (-1.0, self.pass_through.unsaved_bytes(k))])

    def _workspace(self, k: int, name: str, limit_bytes: int) -> Expression:
        if name == "recompute_workspace":
            return self._alone(k, limit_bytes)
        if name == "recomputing_workspace":
            return self._above_recomputed_stash(k, limit_bytes)
        if name == "input_workspace":
            return self._of_first_half(k, limit_bytes)
        if name == "weight_workspace":
            return weighted([(limit_bytes, self._above_layers(k, "second_half_workspace_bytes", limit_bytes))])
        return self._above_stash(k, f"{name}_bytes", limit_bytes)

    def _of_first_half(self, k: int, limit_bytes: int) -> Expression:
        """The most that stage k holds above its stash in the first half of a split backward, in bytes.

        Layer by layer, each at least what was held before and what it leaves, and its own workspace.
        """
        costs, held = self.figures.costs, 0.0
        for v, cost in enumerate(costs.sums.costs):
            sizes = cost.grown_bytes, cost.first_half_workspace_bytes
            grown, own = (weighted([(x / limit_bytes, self.choices.is_on(v, k))]) for x in sizes)
            held = self.program.at_least(f"first_half_{v}_{k}", [total([held, grown]), own])
        if costs.sums.loss and k == self.choices.stages[-1]:
            grown, own = (
                x / limit_bytes for x in (costs.sums.loss.grown_bytes, costs.sums.loss.first_half_workspace_bytes)
            )
            held = self.program.at_least(f"first_half_loss_{k}", [total([held, grown]), own])
        return weighted([(limit_bytes, held)])

    def _above_recomputed_stash(self, k: int, limit_bytes: int) -> Expression:
        """The most that stage k holds above `recomputed_stash` in a backward that recomputes.

        In its layers, or before that in the loss.
        """
        costs, fields = self.figures.costs, ("forward_workspace_bytes", "backward_workspace_bytes")
        rows = [self._above_layers(k, field, limit_bytes, prefix="again_") for field in fields]
        if costs.sums.loss and k == self.figures.problem.num_stages - 1:
            at_loss = (
                costs.crossing.kept_bytes[-1] + costs.sums.loss.stash_bytes + costs.sums.loss.backward_workspace_bytes
            )
            rows.append(
                weighted(
                    [
                        (float(at_loss) / limit_bytes, 1.0),
                        (-1.0 / limit_bytes, self._microbatch_bytes(k).recomputed_stash),
                    ]
                )
            )
        return weighted([(limit_bytes, self.program.at_least(f"again_{k}", rows))])

    def _above_layers(self, k: int, field: str, limit_bytes: int, *, prefix: str = "") -> Expression:
        """The most that stage k holds while a layer runs, above the stash of all of them, in limits.

        Layer by layer, each at least what was held before without the layer's own stash, and the layer's workspace.
        What leaves the stage is there all the time: in a recompute, with `prefix`, beside what is made again.
        """
        is_backward, costs = field == "backward_workspace_bytes", self.figures.costs.sums.costs
        is_forward, is_second = field == "forward_workspace_bytes", field == "second_half_workspace_bytes"
        held: Expression = 0.0
        for v, cost in enumerate(costs):
            is_on = self.choices.is_on(v, k)
            left = self.outputs.left_by(v, k, only_later=bool(prefix)) if prefix or is_backward else 0.0
            kept_bytes = cost.between_bytes if is_second else cost.stash_bytes
            after = weighted([(1.0, held), (-kept_bytes / limit_bytes, is_on), (1.0 / limit_bytes, left)])
            own = weighted([(getattr(cost, field) / limit_bytes, is_on), *self._absent(v, k, field, limit_bytes)])
            if is_forward:
                own = self._less_from_elsewhere(own, v, k, limit_bytes)
            if prefix and is_backward and cost.gathering_bytes:  # but for the last layer of the stage
                own = self._less_if_last(own, v, k, cost.gathering_bytes / limit_bytes)
            waiting = 0.0 if is_forward else weighted([(1.0 / limit_bytes, self.weights.waiting_bytes(v, k))])
            rows = [after, own] if isinstance(waiting, float) else [after, total([own, waiting]), waiting]
            held = self.program.at_least(f"{prefix}{field}_{v}_{k}", rows)
        if not is_backward:
            return held
        return weighted([(1.0, held), (1.0 / limit_bytes, self.pass_through.gradient_bytes(k))])

    def _less_if_last(self, own: Expression, v: int, k: int, share: float) -> Expression:
        """Less a share where no later layer than v is on stage k."""
        return weighted([(1.0, own), (share, self._later(k)[v]), (-share, 1.0)]) if share else own

    def _less_from_elsewhere(self, own: Expression, v: int, k: int, limit_bytes: int) -> Expression:
        """Less what layer v's forward workspace has of layers that are not on stage k; below 0 where v is not on it."""
        terms: list[tuple[float, Expression]] = [(1.0, own)]
        for (made, read), num_bytes in self.figures.costs.workspaces.unsaved:
            if made is not None and made < v <= read[-1]:
                share = num_bytes / limit_bytes
                terms += [(-share, 1.0), (share, self.choices.is_on(made, k))]
        return weighted(terms)

    def _later(self, k: int) -> Sequence[Expression]:
        """[L]: whether a layer after each is on stage k."""
        if k not in self._known_later:
            found: list[Expression] = [0.0]
            for v in range(len(self.figures.costs.sums.costs) - 1, 0, -1):
                found.append(self.program.at_least(f"later_{v - 1}_{k}", [self.choices.is_on(v, k), found[-1]]))
            self._known_later[k] = found[::-1]
        return self._known_later[k]

    @cached_property
    def _known_later(self) -> dict[int, Sequence[Expression]]:
        return {}

    def _absent(self, v: int, k: int, field: str, limit_bytes: int) -> Iterator[tuple[float, Expression]]:
        """What layer v's backward has less, where it is on stage k, as later stages have the layers that make it."""
        if field != "backward_workspace_bytes" or k == self.figures.problem.num_stages - 1:
            return
        for leftover in self.figures.costs.sums.costs[v].leftovers:
            share = leftover.num_bytes / limit_bytes
            is_here = 1.0 if share > 0 else self.choices.is_on(v, k)  # elsewhere the row must not ask for anything
            yield from ((-share, is_here), (share, self.choices.up_to(v + leftover.num_later, k)))

    def _above_stash(self, k: int, field: str, limit_bytes: int) -> Expression:
        """As `_above_layers`, with the loss behind the layers, in bytes."""
        loss, held = self.figures.costs.sums.loss, self._above_layers(k, field, limit_bytes)
        unsaved = self._unsaved_sent(k) if field == "forward_workspace_bytes" else 0.0
        if unsaved != 0.0:
            less = weighted([(1.0, held), (-1.0 / limit_bytes, unsaved)])
            held = self.program.at_least(f"{field}_unsent_{k}", [less])
        if loss:
            is_last = k == self.choices.stages[-1]
            after = weighted([(1.0, held), (-loss.stash_bytes / limit_bytes, is_last)])
            own = weighted([(getattr(loss, field) / limit_bytes, is_last)])
            held = self.program.at_least(f"{field}_loss_{k}", [after, own])
        return weighted([(limit_bytes, held)])

    def _alone(self, k: int, limit_bytes: int) -> Expression:
        """The most that a layer of stage k, or the loss, holds above the checkpoint in a forward that keeps nothing else."""
        costs = self.figures.costs
        rows: list[Expression] = []
        for v, (cost, output_bytes) in enumerate(zip(costs.sums.costs, costs.workspaces.checkpointed, strict=True)):
            num_bytes = cost.stash_bytes + cost.forward_workspace_bytes
            own = weighted([(num_bytes / limit_bytes, self.choices.is_on(v, k))])
            own = self._less_from_elsewhere(own, v, k, limit_bytes)
            rows.append(self._less_if_last(own, v, k, float(output_bytes) / limit_bytes))
        loss_bytes = costs.sums.loss.forward_workspace_bytes if costs.sums.loss else 0
        at_loss = weighted([(loss_bytes / limit_bytes, k == self.choices.stages[-1])])
        return weighted([(limit_bytes, self.program.at_least(f"alone_{k}", [*rows, at_loss]))])
