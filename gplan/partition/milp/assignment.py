"""Which layer is on which stage: the program's only choices, and the rows that make them a chain of down-sets.

The binary y[v, k] says that layer v is on a stage up to k:
    y[v, k+1] >= y[v, k]        what is before a cut stays before the later ones
    y[u, k] >= y[v, k]          where layer u must come before layer v
so that x[v, k] = y[v, k] - y[v, k-1] says that layer v is on stage k. No stage is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import Constraints, Profile
from gplan.graph.layer_graph import LayerGraph
from gplan.partition.milp.program import Expression, LinearProgram, total, weighted

_WHOLE = 1e-4  # from a whole number, within which a solver's answer counts as one


class StageAssignment:
    """The variables y of a program; layers are v, stages k."""

    def __init__(self, program: LinearProgram, graph: LayerGraph, *, num_stages: int) -> None:
        self.graph, self.num_stages = graph, num_stages
        self._program = program
        self._reached: dict[tuple[int, int], Expression] = {}
        self._open = {
            (v, k): program.variable(f"y_{v}_{k}", is_binary=True)
            for k in range(num_stages - 1)
            for v in range(graph.num_layers)
            if self._settled(v, k) is None
        }
        self._add_order()

    @property
    def layers(self) -> range:
        """0, ..., L-1."""
        return range(self.graph.num_layers)

    @property
    def stages(self) -> range:
        """0, ..., K-1."""
        return range(self.num_stages)

    def up_to(self, v: int, k: int) -> Expression:
        """y[v, k]; nothing is before stage 0, and there is no layer L."""
        if (v, k) in self._open:
            return self._open[v, k]
        if v == self.graph.num_layers:
            return 0
        return self._settled(v, k)

    def is_on(self, v: int, k: int) -> Expression:
        """x[v, k]."""
        return weighted([(1.0, self.up_to(v, k)), (-1.0, self.up_to(v, k - 1))])

    def sum_on(self, k: int, values: Sequence[float]) -> Expression:
        """The sum of values[L] over the layers of stage k."""
        return weighted(
            (sign * value, self.up_to(v, stage))
            for sign, stage in ((1.0, k), (-1.0, k - 1))
            for v, value in enumerate(values)
            if value
        )

    def at_cut(self, k: int, values: Sequence[float]) -> Expression:
        """Of values[L] the one of the last layer before the cut after stage k; only where there is one order."""
        return weighted(
            term
            for v, value in enumerate(values)
            if value
            for term in ((value, self.up_to(v, k)), (-value, self.up_to(v + 1, k)))
        )

    def of_last(self, k: int, values: Sequence[float]) -> Expression:
        """Of values[L] the one of the last layer of stage k, by number."""
        if k == self.num_stages - 1 and self.graph.is_chain:
            return values[-1]
        if self.graph.is_chain:
            return self.at_cut(k, values)
        return weighted(
            term
            for v, value in enumerate(values)
            if value
            for term in ((value, self._reaches(v, k)), (-value, self._reaches(v + 1, k)))
        )

    def _reaches(self, v: int, k: int) -> Expression:
        """z[v, k]: whether stage k has layer v or a later one, by x[v, k] <= z[v, k] <= x[v, k] + z[v+1, k]."""
        if v == self.graph.num_layers:
            return 0
        if (v, k) not in self._reached:
            here, later = self.is_on(v, k), self._reaches(v + 1, k)
            reached = self._program.at_least(f"z_{v}_{k}", [here, later], high=1)
            self._program.require(total([here, later]), at_least=reached)
            self._reached[v, k] = reached
        return self._reached[v, k]

    def values_for(self, stages: Sequence[Sequence[int]]) -> dict[Expression, int]:
        """The values of the variables for these stages."""
        stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
        return {choice: int(stage_of[v] <= k) for (v, k), choice in self._open.items()}

    def stages_found(self) -> tuple[tuple[int, ...], ...] | None:
        """The layers of the stages that a solver has found; None where its values are not those of a partition."""
        found = {key: choice.value() for key, choice in self._open.items()}
        if any(x is None or abs(x - round(x)) > _WHOLE for x in found.values()):
            return None
        first = [self._first_stage(v, found) for v in self.layers]
        stages = tuple(tuple(v for v in self.layers if first[v] == k) for k in self.stages)
        return stages if self.are_stages(stages) else None

    def are_stages(self, stages: Sequence[Sequence[int]]) -> bool:
        """Whether these are all layers in an order in which they can run, on as many stages as there should be."""
        stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
        return (
            all(stages)
            and sorted(v for layers in stages for v in layers) == list(self.layers)
            and all(stage_of[before] <= stage_of[after] for before, after in self.graph.reduced_edges)
            and len(stages) == self.num_stages
        )

    def forbid(self, stages: Sequence[Sequence[int]]) -> None:
        """Exclude this partition."""
        values = self.values_for(stages)
        differs = total(weighted([(1.0, 1), (-1.0, x)]) if value else x for x, value in values.items())
        self._program.require(differs, at_least=1)

    def _first_stage(self, v: int, found: dict[tuple[int, int], float]) -> int:
        return next(k for k in self.stages if round(found.get((v, k), self._settled(v, k) or 0)))

    def _settled(self, v: int, k: int) -> int | None:
        """y[v, k] where it follows from the count of stages; None where it is open."""
        if k < 0 or k >= self.num_stages - 1:
            return int(k >= 0)
        num_others = self.graph.num_layers - 1
        if num_others - self.graph.num_before[v] < self.num_stages - 1 - k:
            return 0
        return 1 if num_others - self.graph.num_after[v] < k + 1 else None

    def _add_order(self) -> None:
        for k in self.stages[:-1]:
            for before, after in self.graph.reduced_edges:
                self._program.require(self.up_to(before, k), at_least=self.up_to(after, k))
        for k in self.stages[1:-1]:
            for v in self.layers:
                self._program.require(self.up_to(v, k), at_least=self.up_to(v, k - 1))
            for u, v in self.graph.fixed_steps:
                self._program.require(self.up_to(v, k), at_least=self.up_to(u, k - 1))  # stage k is not empty
        for k in self.stages:
            self._program.require(total(self.is_on(v, k) for v in self.layers), at_least=1)


def add_constraints(
    program: LinearProgram, choices: StageAssignment, *, profile: Profile, constraints: Constraints
) -> None:
    """Rows that satisfy all constraints; "up to" and "between" are in the profile's order."""
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    for name in dict.fromkeys(constraints.cut_after):
        _add_cut(program, choices, index[name] + 1)
    for one, other in constraints.keep_together:
        for v in range(index[one], index[other]):
            for k in choices.stages[:-1]:
                program.require_equal(choices.up_to(v, k), choices.up_to(v + 1, k))
    for pin in constraints.pins:
        program.require(choices.is_on(index[pin.layer], pin.stage), at_least=1)


def are_satisfied(constraints: Constraints, *, profile: Profile, stages: Sequence[Sequence[int]]) -> bool:
    """Whether some stages satisfy all constraints."""
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    stage_of = {v: k for k, layers in enumerate(stages) for v in layers}
    cuts = [set[int]().union(*stages[:k]) for k in range(1, len(stages))]
    return (
        all(set(range(index[name] + 1)) in cuts for name in constraints.cut_after)
        and all(len({stage_of[v] for v in range(index[a], index[b] + 1)}) == 1 for a, b in constraints.keep_together)
        and all(stage_of[index[pin.layer]] == pin.stage for pin in constraints.pins)
    )


def _add_cut(program: LinearProgram, choices: StageAssignment, num_before: int) -> None:
    """One of the cuts lies right after the first layers.

    Its indicators need not be binary: where one is above 0, whole numbers y are those of that cut.
    """
    is_here = [program.variable(f"cut_{num_before}_{k}", high=1) for k in choices.stages[:-1]]
    program.require(total(is_here), at_least=1)
    for k, here in enumerate(is_here):
        for v in choices.layers:
            if v < num_before:
                program.require(choices.up_to(v, k), at_least=here)
            else:
                program.require(weighted([(1.0, 1), (-1.0, choices.up_to(v, k))]), at_least=here)
