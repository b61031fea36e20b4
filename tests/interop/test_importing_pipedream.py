"""PipeDream's graph.txt, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.core import Link, Profile
from gplan.core.errors import FileError
from gplan.interop.published.importing import import_profile


def node(name: str, description: str = "Linear(1, 1)", **given: object) -> str:
    fields = {"forward_compute_time": 1.0, "backward_compute_time": 2.0, "activation_size": 4.0, "parameter_size": 8.0}
    values = ", ".join(f"{key}={value}" for key, value in {**fields, **given}.items())
    return f"{name} -- {description} -- {values}"


def imported(*lines: str, folder: Path, link: Link | None = None) -> Profile:
    path = folder / "net.graph.txt"
    path.write_text("\n".join(lines))
    return import_profile(path, link=link)


def test_milliseconds_become_seconds_and_bytes_stay(tmp_path: Path) -> None:
    profile = imported(
        node("a", forward_compute_time=1.5, backward_compute_time=250, parameter_size="16.000"), node("b"), "\ta -- b",
        folder=tmp_path,
    )  # fmt: skip
    layer, cost = profile.layers[0], profile.layers[0].costs[0]
    assert (cost.forward.median_s, cost.backward.median_s) == (0.0015, 0.25)
    assert (layer.weight_bytes, layer.gradient_bytes, layer.num_parameters) == (16, 16, 4)
    assert (layer.name, layer.kind, cost.stash_bytes) == ("a", "Linear", 4)
    assert (profile.origin, cost.forward.origin, profile.device.kind) == ("given", "given", "given")
    assert profile.device.memory_bytes is None


def test_an_output_is_one_value_however_many_read_it(tmp_path: Path) -> None:
    profile = imported(
        node("a", activation_size="[4.0; 6.0]"), node("b"), node("c"), "\ta -- c", "\ta -- b", "\ta -- b", "\tb -- c",
        folder=tmp_path,
    )  # fmt: skip
    assert [(x.producer, x.consumers) for x in profile.values] == [(0, (1, 2)), (1, (2,))]
    cost = profile.values[0].costs[0]
    assert (cost.num_bytes, cost.gradient_bytes, profile.values[0].transfer_s) == (10, 10, None)
    assert [x.costs[0].output_bytes for x in profile.layers] == [10, 14, 0]
    assert profile.precedence == ((0, 1), (0, 2), (1, 2))


def test_layers_come_in_an_order_in_which_they_can_run_else_in_that_of_the_file(tmp_path: Path) -> None:
    profile = imported(node("z"), node("y"), node("x"), node("w"), "\tx -- z", "\tw -- y", folder=tmp_path)
    assert [x.name for x in profile.layers] == ["x", "z", "w", "y"]


def test_inputs_and_outputs_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    profile = imported(
        node("i", "Input0"), node("a", "LSTM(1)"), node("u", "__getitem__(1)"), node("g", "__getitem__(0)"), node("b"),
        node("j", "InputNorm(3)"), "\ti -- a", "\ta -- u", "\ta -- g", "\tg -- b", "\tb -- j",
        folder=tmp_path,
    )  # fmt: skip
    assert [x.name for x in profile.layers] == ["a", "g", "b", "j"]
    assert any(note.startswith("2 nodes are left out") for note in profile.notes)


def test_a_graph_that_its_optimizer_wrote_has_stages_behind_the_nodes(tmp_path: Path) -> None:
    profile = imported(node("a") + " -- stage_id=0", node("b") + " -- stage_id=1", "\ta -- b", folder=tmp_path)
    assert [x.name for x in profile.layers] == ["a", "b"]


def test_the_link_is_that_of_pipedreams_optimizer_unless_it_is_given(tmp_path: Path) -> None:
    lines, link = (node("a"), node("b"), "\ta -- b"), Link(latency_s=1.0, bytes_per_s=2.0)
    without, given = imported(*lines, folder=tmp_path), imported(*lines, folder=tmp_path, link=link)
    assert (without.link.bytes_per_s, given.link) == (1e9, link)
    assert any("nothing of the link" in note for note in without.notes)
    assert not any("nothing of the link" in note for note in given.notes)


def test_one_node_needs_no_edge(tmp_path: Path) -> None:
    assert len(imported(node("a"), folder=tmp_path).layers) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((node("a"), node("b"), "\ta -- b", "\tb -- a"), "has a cycle: (a -> b -> a|b -> a -> b); expected"),
        ((node("a"), "\ta -- a"), "has a cycle: a -> a"),
        ((node("a"), node("b"), "\ta -- bb"), "line 3: bb is not one of the 2 nodes"),
        ((node("a"), node("b"), node("a")), "line 3: a is there already"),
        ((node("a"), node("b")), "has 2 layers and no edge between them; expected edges: is it cut off?"),
        ((node("i", "Input"),), "has no node that takes part in the plan"),
        ((node("a"), node("b")[:-25], "\ta -- b"), "line 2 is 'b -- Linear.*expected a node, 'node1 -- "),
        ((node("a"), "\ta --"), "line 2 is '\\\\ta --'; expected a node"),
        ((node("a", forward_compute_time=-1.0),), "line 1: forward_compute_time is -1.0; expected a number from 0"),
        ((node("a", backward_compute_time="nan"),), "line 1: backward_compute_time is nan; expected a number"),
        ((node("a", parameter_size="inf"),), "line 1: parameter_size is inf; expected a number"),
        ((node("a", parameter_size=""),), "line 1: parameter_size is ''; expected a number"),
        ((node("a", activation_size="[1.0; -2.0]"),), "line 1: activation_size is -2.0; expected a number"),
        ((node("a", activation_size="[1.0; x]"),), "line 1: activation_size is '\\[1.0; x\\]'; expected a number, or"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(FileError, match=message):
        imported(*lines, folder=tmp_path)
