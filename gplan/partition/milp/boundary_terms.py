"""What crosses the cut after a stage, as expressions: bytes and seconds in both directions.

In a chain every cut is one of L-1 known ones, so what crosses it is a constant of the last layer before it. In a graph
each value crosses or not: with one last reader c[value, k] = y[producer, k] - y[reader, k], with several a variable of
at least each of these, so that a value that many read is sent once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from gplan.core import Link, Value, ValueCost
from gplan.cost.stage_table import StageTable
from gplan.graph.boundary import values_of
from gplan.graph.down_sets import Output, Way
from gplan.graph.layer_graph import LayerGraph, is_connected
from gplan.partition.milp.assignment import StageAssignment
from gplan.partition.milp.program import Expression, LinearProgram, total, weighted
from gplan.partition.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueGroup:
    """Values with the same producer and the same last readers, and their bytes for a micro-batch.

    They cross a cut while the producer is before it and any of the readers is not.
    """

    producer: int | None  # None: an input of the model
    readers: tuple[int, ...]  # those that no other reader must follow; L is the model's output
    activation_bytes: int
    gradient_bytes: int
    unsaved_bytes: int

    def bytes_of(self, way: str) -> int:
        """Bytes on the way forward ("activation") or back ("gradient")."""
        return self.activation_bytes if way == "activation" else self.gradient_bytes


def value_groups(costs: StageTable, graph: LayerGraph) -> tuple[ValueGroup, ...]:
    """All ways that values take."""
    together: dict[Way, list[ValueCost]] = {}
    for value in values_of(costs.profile):
        cost = value.costs[0]
        together.setdefault((value.producer, last_readers(value, graph)), []).append(cost)
    return tuple(
        ValueGroup(
            producer=producer,
            readers=readers,
            activation_bytes=sum(x.num_bytes for x in sizes),
            gradient_bytes=sum(x.gradient_bytes for x in sizes),
            unsaved_bytes=sum(x.unsaved_bytes for x in sizes),
        )
        for (producer, readers), sizes in together.items()
    )


def last_readers(value: Value, graph: LayerGraph) -> tuple[int, ...]:
    """The readers that decide whether a value crosses; the model's output, layer L, is read after all layers."""
    return (graph.num_layers,) if graph.num_layers in value.consumers else graph.last_of(value.consumers)


def always_sent(costs: StageTable, graph: LayerGraph, *, way: str) -> bool:
    """Whether bytes cross every cut: the values that have any join all layers, the model's inputs and its outputs.

    A cut then parts two that are joined, and what comes first lies before it.
    """
    field = "num_bytes" if way == "activation" else "gradient_bytes"
    edges = (
        (-1 if x.producer is None else x.producer, reader)
        for x in costs.profile.values or values_of(costs.profile)  # views too, as they join layers
        if getattr(x.costs[0], field)
        for reader in x.consumers
    )
    return is_connected(graph.num_layers, edges)


class BoundaryTerms(ABC):
    """The cut after each stage: bytes, and times in units. Nothing crosses before stage 0 and after the last.

    Nothing is sent, and no time is taken, where the stages on both sides are on one device.
    """

    def __init__(
        self, program: LinearProgram, problem: Problem, costs: StageTable, choices: StageAssignment, unit_s: float
    ) -> None:
        self._program, self._problem, self._costs, self._choices = program, problem, costs, choices
        self._unit_s, self._sending = unit_s, cache(self._add_sending)

    def activation_bytes(self, k: int) -> Expression:
        """Bytes sent forward."""
        return self._bytes(k, "activation_bytes") if self._is_sent(k) else 0.0

    def gradient_bytes(self, k: int) -> Expression:
        """Bytes sent back."""
        return self._bytes(k, "gradient_bytes") if self._is_sent(k) else 0.0

    def unsaved_bytes(self, k: int) -> Expression:
        """Of the activations, what no layer keeps."""
        return self._bytes(k, "unsaved_bytes") if self._is_inside(k) else 0.0

    def kept_bytes(self, k: int) -> Expression:
        """The activations; after the last stage the outputs that the loss keeps."""
        if k == self._choices.num_stages - 1:
            return float(self._costs.crossing.kept_bytes[-1])
        return self._bytes(k, "activation_bytes") if self._is_inside(k) else 0.0

    def activation_time(self, k: int) -> Expression:
        """To send the activations forward."""
        return self._time(k, "activation")

    def gradient_time(self, k: int) -> Expression:
        """To send the gradients back."""
        return self._time(k, "gradient")

    def activation_sending(self, k: int) -> Expression:
        """For how long sending the activations occupies the stage before the cut, on the profiled device."""
        return self._sending(k, "activation")

    def gradient_sending(self, k: int) -> Expression:
        """For how long sending the gradients occupies the stage after the cut, on the profiled device."""
        return self._sending(k, "gradient")

    def _is_inside(self, k: int) -> bool:
        return 0 <= k < self._choices.num_stages - 1

    def _is_sent(self, k: int) -> bool:
        return self._is_inside(k) and self._problem.boundaries(k).after

    def _time(self, k: int, way: str) -> Expression:
        return self._moved(k, way, f"{way}_{k}", self._problem.link_after(k)) if self._is_sent(k) else 0.0

    def _add_sending(self, k: int, way: str) -> Expression:
        engine = self._problem.costs.profile.engine
        return self._moved(k, way, f"{way}_sending_{k}", engine.sending) if engine and self._is_sent(k) else 0.0

    @abstractmethod
    def _bytes(self, k: int, field: str) -> Expression:
        """One of the fields of `Crossing` at the cut."""

    @abstractmethod
    def _moved(self, k: int, way: str, name: str, link: Link) -> Expression:
        """The time of a link for what goes that way over the cut."""


class ChainBoundaryTerms(BoundaryTerms):
    """The cuts of a chain: constants of the last layer before each."""

    def _bytes(self, k: int, field: str) -> Expression:
        return self._choices.at_cut(k, getattr(self._costs.crossing, field)[1:].tolist())

    def _moved(self, k: int, way: str, name: str, link: Link) -> Expression:
        num_bytes = getattr(self._costs.crossing, f"{way}_bytes")
        return self._choices.at_cut(k, (link.transfers_s(num_bytes) / self._unit_s)[1:].tolist())


class GraphBoundaryTerms(BoundaryTerms):
    """The cuts of a graph, by the values that its layers hand to each other."""

    def __init__(
        self, program: LinearProgram, problem: Problem, costs: StageTable, choices: StageAssignment, unit_s: float
    ) -> None:
        super().__init__(program, problem, costs, choices, unit_s)
        self._groups = value_groups(costs, choices.graph)
        self._always = {way: always_sent(costs, choices.graph, way=way) for way in ("activation", "gradient")}
        self._crossing, self._is_any = cache(self._add_crossing), cache(self._add_is_any)

    def _bytes(self, k: int, field: str) -> Expression:
        sizes = ((getattr(group, field), group) for group in self._groups)
        return weighted((size, self._crossing(group, k)) for size, group in sizes if size)

    def _moved(self, k: int, way: str, name: str, link: Link) -> Expression:
        amount = Amount(
            num_bytes=self._bytes(k, f"{way}_bytes"),
            is_any=1 if self._always[way] else self._is_any(k, way),
            most_bytes=sum(group.bytes_of(way) for group in self._groups),
        )
        return transfer(self._program, name, link=link, amount=amount, unit_s=self._unit_s)

    def _add_is_any(self, k: int, way: str) -> Expression:
        crossing = (self._crossing(group, k) for group in self._groups if group.bytes_of(way))
        return self._program.at_least(f"any_{way}_{k}", crossing, high=1)

    def _add_crossing(self, group: ValueGroup, k: int) -> Expression:
        """c[group, k]: whether what takes this way crosses the cut after stage k."""
        y, producer = self._choices.up_to, group.producer
        made = 1 if producer is None else y(producer, k)
        differences = [weighted([(1.0, made), (-1.0, y(x, k))]) for x in group.readers]
        if len(differences) == 1:
            return differences[0]
        return self._program.at_least(f"crossing_{self._groups.index(group)}_{k}", differences, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What is sent: bytes, whether there are any (0 or 1), and above which number they never are."""

    num_bytes: Expression
    is_any: Expression
    most_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A linear piece of a link's time from size `start`, a share of the largest here: `seconds` there, then by `slope`."""

    start: float
    seconds: float
    slope: float


def transfer(program: LinearProgram, name: str, *, link: Link, amount: Amount, unit_s: float) -> Expression:
    """The time of one transfer, in units, or, where the program minimises it, a variable of at least that.

    Exact: a latency is paid where anything is sent. With measured points the seconds are piecewise linear in the bytes;
    where the slopes rise, every piece is a row, and where they do not, a binary for each piece selects one.
    """
    most = amount.most_bytes
    if not most:
        return 0.0
    pieces = _pieces(link, most, unit_s)
    sent = weighted([(1.0 / most, amount.num_bytes)])
    if len(pieces) == 1:
        return weighted([(pieces[0].seconds, amount.is_any), (pieces[0].slope, sent)])
    if all(one.slope <= other.slope for one, other in pairwise(pieces)):
        rows = (_line(piece, sent, amount.is_any) for piece in pieces)
        return program.at_least(name, rows)
    return _chosen(program, name, pieces, sent, amount.is_any)


def _pieces(link: Link, most_bytes: float, unit_s: float) -> list[_Piece]:
    """The pieces of a link up to the most bytes; of a share of them, in units of time."""
    if not link.points:
        return [_Piece(start=0.0, seconds=link.latency_s / unit_s, slope=most_bytes / link.bytes_per_s / unit_s)]
    sizes = [0, *(x.num_bytes for x in link.points)]
    seconds = [link.points[0].seconds, *(x.seconds for x in link.points)]
    rates = [(s - r) / (n - m) for (m, r), (n, s) in pairwise(zip(sizes, seconds, strict=True))]
    return [
        _Piece(start=size / most_bytes, seconds=at_s / unit_s, slope=rate * most_bytes / unit_s)
        for size, at_s, rate in zip(sizes, seconds, [*rates, 1 / link.bytes_per_s], strict=True)
        if size < most_bytes
    ]


def _line(piece: _Piece, sent: Expression, is_any: Expression) -> Expression:
    """The line of a piece, 0 where nothing is sent."""
    return weighted([(piece.seconds - piece.slope * piece.start, is_any), (piece.slope, sent)])


def _chosen(
    program: LinearProgram, name: str, pieces: list[_Piece], sent: Expression, is_any: Expression
) -> Expression:
    """The time by the one piece that is chosen, which must reach as far as what is sent."""
    ends = [*(x.start for x in pieces[1:]), 1.0]
    chosen = [program.variable(f"{name}_piece_{j}", is_binary=True) for j in range(len(pieces))]
    beyond = [program.variable(f"{name}_beyond_{j}", high=1) for j in range(len(pieces))]
    for piece, end, is_chosen, more in zip(pieces, ends, chosen, beyond, strict=True):
        program.require(weighted([(end - piece.start, is_chosen)]), at_least=more)
    program.require_equal(total(chosen), is_any)
    reached = [(x.start, choice) for x, choice in zip(pieces, chosen, strict=True)] + [(1.0, more) for more in beyond]
    program.require(weighted(reached), at_least=sent)
    times = [(x.seconds, choice) for x, choice in zip(pieces, chosen, strict=True)]
    return weighted(times + [(x.slope, more) for x, more in zip(pieces, beyond, strict=True)])


class PassThroughTerms:
    """Bytes that cross both cuts of a stage: activations, held once, and gradients to which it adds nothing, copied.

    For each group of values and each stage k a variable says that the activation does not pass,
        n >= 1 - y[producer, k-1]                                 not made before the stage
        n >= y[reader, k] + ... + y[last reader, k] - (R - 1)     read by all R before the next one
    and one that the gradient does, a row for each reader r that may come behind the stage while no other q is on it:
        m >= y[producer, k-1] - y[r, k] - sum of (y[q, k] - y[q, k-1]) over all q but r
    The first half of a split backward returns such a gradient without a copy. A variable says that it is not returned:
    at least the rows of n, and
        o >= y[q, k] - y[q, k-1]                                  read on the stage, for each reader q
    """

    def __init__(self, program: LinearProgram, problem: Problem, costs: StageTable, choices: StageAssignment) -> None:
        self._program, self._problem, self._choices = program, problem, choices
        self._groups = value_groups(costs, choices.graph)
        self._gradients = list(zip(*costs.pass_through.gradient_ways, strict=True))
        self._returned = list(zip(*costs.pass_through.returned_ways, strict=True))
        self._stays, self._copied = cache(self._add_stays), cache(self._add_copied)
        self._not_returned = cache(self._add_not_returned)

    def activation_bytes(self, k: int) -> Expression:
        """Of the activations that cross both cuts of stage k, where the stage before is on another device."""
        return self._activations(k, [x.activation_bytes for x in self._groups])

    def unsaved_bytes(self, k: int) -> Expression:
        """Of them, what no layer keeps."""
        return self._activations(k, [x.unsaved_bytes for x in self._groups])

    def gradient_bytes(self, k: int) -> Expression:
        """Of the gradients that only pass stage k."""
        if not self._is_inside(k):
            return 0.0
        return weighted(
            (float(size), self._copied(i, k)) for i, (way, size) in enumerate(self._gradients) if self._may_pass(way)
        )

    def returned_bytes(self, k: int) -> Expression:
        """Of the gradients that stage k sends back as it received them."""
        if not self._is_inside(k) or not self._problem.boundaries(k).returns:
            return 0.0
        returned = ((i, float(size)) for i, (way, size) in enumerate(self._returned) if self._may_pass(way))
        return weighted(x for i, size in returned for x in ((size, 1.0), (-size, self._not_returned(i, k))))

    def _activations(self, k: int, sizes: list[int]) -> Expression:
        if not self._is_inside(k) or not self._problem.boundaries(k).before:
            return 0.0
        pass_through = (i for i, x in enumerate(self._groups) if sizes[i] and self._may_pass((x.producer, x.readers)))
        return weighted(
            x for i in pass_through for x in ((float(sizes[i]), 1.0), (-float(sizes[i]), self._stays(i, k)))
        )

    def _is_inside(self, k: int) -> bool:
        return 0 < k < self._problem.num_stages - 1

    def _may_pass(self, way: Way) -> bool:
        """Of a chain only what is read further on."""
        made, read = way
        return not self._choices.graph.is_chain or max(read) > (-1 if made is None else made) + 1

    def _add_stays(self, group: int, k: int) -> Expression:
        way = self._groups[group].producer, self._groups[group].readers
        return self._program.at_least(f"stays_{group}_{k}", self._staying(way, k), high=1)

    def _staying(self, way: Way, k: int) -> list[Expression]:
        """The rows of a value that does not cross both cuts of stage k."""
        (producer, readers), y = way, self._choices.up_to
        not_made = 0.0 if producer is None else weighted([(1.0, 1.0), (-1.0, y(producer, k - 1))])
        read = weighted([*((1.0, y(x, k)) for x in readers), (1.0 - len(readers), 1.0)])
        return [not_made, read]

    def _add_not_returned(self, way: int, k: int) -> Expression:
        value_way, _ = self._returned[way]
        here = [self._choices.is_on(x, k) for x in value_way[1] if x < self._choices.graph.num_layers]
        return self._program.at_least(f"ends_{way}_{k}", [*self._staying(value_way, k), *here], high=1)

    def _add_copied(self, way: int, k: int) -> Expression:
        (producer, readers), _ = self._gradients[way]
        made = 1.0 if producer is None else self._choices.up_to(producer, k - 1)
        on_stage = {x: self._choices.is_on(x, k) for x in readers if x < self._choices.graph.num_layers}
        rows = [
            weighted([
                (1.0, made),
                (-1.0, self._choices.up_to(reader, k)),
                *((-1.0, is_on) for other, is_on in on_stage.items() if other != reader),
            ])
            for reader in readers
        ]  # fmt: skip
        return self._program.at_least(f"returns_{way}_{k}", rows, high=1)


class OutputTerms:
    """Outputs of a stage's layers that later stages read, as the part of the layers' stash that they are.

    For each value and each stage k a variable says that the value leaves the stage, a row for each reader r,
        e >= x[producer, k] - y[r, k]
    and one that a recompute makes it again, as its first reader is on the stage too:
        n >= x[producer, k] + y[r, k] - 1
    In a chain, a value that the next layer reads leaves where the cut is right behind its producer.
    """

    def __init__(self, program: LinearProgram, costs: StageTable, choices: StageAssignment) -> None:
        self._program, self._costs, self._choices = program, costs, choices
        self._leaves, self._remade = cache(self._add_leaves), cache(self._add_remade)

    def left_by(self, v: int, k: int, *, only_later: bool) -> Expression:
        """Bytes of the outputs of layer v that leave stage k; with `only_later` of those that only later stages keep."""
        if k == self._choices.num_stages - 1:
            return 0.0
        outputs = self._saved_later if only_later else self._saved
        return weighted((float(num_bytes), self._leaves(way, k)) for way, num_bytes in outputs.get(v, ()))

    def saved_later_bytes(self, k: int) -> Expression:
        """Bytes that leave stage k and that only later stages keep: a recompute does not make them again."""
        if k == self._choices.num_stages - 1:
            return 0.0
        every = [(v, way, float(num_bytes)) for v, some in self._saved_later.items() for way, num_bytes in some]
        return weighted(
            term
            for v, way, num_bytes in every
            for term in ((num_bytes, self._choices.is_on(v, k)), (-num_bytes, self._remade(way, k)))
        )

    @cached_property
    def _saved(self) -> dict[int, list[Output]]:
        return _by_producer(self._costs.workspaces.held_outputs)

    @cached_property
    def _saved_later(self) -> dict[int, list[Output]]:
        return _by_producer(self._costs.saved_outputs(only_later=True))

    def _add_leaves(self, way: Way, k: int) -> Expression:
        (producer, readers), y = way, self._choices.up_to
        assert producer is not None
        if self._is_read_next(way):
            return weighted([(1.0, y(producer, k)), (-1.0, y(readers[0], k))])
        rows = [weighted([(1.0, self._choices.is_on(producer, k)), (-1.0, y(x, k))]) for x in readers]
        return self._program.at_least(f"leaves_{self._name(way)}_{k}", rows, high=1)

    def _add_remade(self, way: Way, k: int) -> Expression:
        (producer, readers), is_on = way, self._choices.is_on
        assert producer is not None
        if self._is_read_next(way):
            return weighted([(1.0, is_on(producer, k)), (-1.0, self._leaves(way, k))])
        row = weighted([(1.0, is_on(producer, k)), (1.0, self._choices.up_to(readers[0], k)), (-1.0, 1.0)])
        return self._program.at_least(f"remade_{self._name(way)}_{k}", [row], high=1)

    def _is_read_next(self, way: Way) -> bool:
        producer, readers = way
        return self._choices.graph.is_chain and producer is not None and readers == (producer + 1,)

    def _name(self, way: Way) -> str:
        producer, readers = way
        return "_".join(map(str, (producer, *readers)))


def _by_producer(outputs: Iterable[Output]) -> dict[int, list[Output]]:
    found: dict[int, list[Output]] = {}
    for (producer, readers), num_bytes in outputs:
        if producer is not None:
            found.setdefault(producer, []).append(((producer, readers), num_bytes))
    return found
