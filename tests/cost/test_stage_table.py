"""StageTable of candidate stages against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import EngineCost, LayerCost, Link, Profile, SharedWeight, Timing, Value, ValueCost, WholeModel
from gplan.core.errors import UsageError
from gplan.corrections import planned
from gplan.corrections.microbatch_size import cost_at
from gplan.cost.stage_table import DeviceBoundaries, StagePlace, StageTable
from gplan.graph.boundary import storages_of
from tests.graphs import Graph
from tests.made import FREE_LINK, make_profile
from tests.partition.graphs import graph_profiles


def test_a_stage_costs_its_overhead_and_the_sum_of_its_layers() -> None:
    profile = make_profile([1, 2, 4, 8], overhead_s=0.5, optimizer_s=30.0, weight_bytes=[4, 4, 8, 8])
    cost = StageTable(profile, 4).row(1, 3)
    assert (cost.forward_s, cost.backward_s, cost.recompute_s) == (6.5, 12.5, 6.0)
    assert cost.optimizer_s == pytest.approx(15.0)


def test_a_cut_costs_the_bytes_alive_across_it() -> None:
    profile = make_profile([1, 1, 1], output_bytes=[100, 200, 0], link=Link(latency_s=1.0, bytes_per_s=100.0))
    costs = StageTable(profile, 4)
    assert costs.row(0, 2).activation_s == 3.0
    assert costs.row(2, 3).activation_s == 0.0  # nothing follows the last stage


def test_the_loss_belongs_to_the_last_stage_and_is_not_recomputed() -> None:
    plain = make_profile([1, 1])
    loss = LayerCost(
        microbatch_size=1, forward=Timing.exactly(10.0), backward=Timing.exactly(20.0), stash_bytes=7,
        forward_workspace_bytes=0, backward_workspace_bytes=0, output_bytes=0, output_gradient_bytes=0,
        output_unsaved_bytes=0,
    )  # fmt: skip
    costs = StageTable(replace(plain, loss=(loss,)), 4)
    assert costs.row(0, 1).forward_s == 1.0
    last = costs.row(1, 2)
    assert (last.forward_s, last.backward_s, last.recompute_s) == (11.0, 22.0, 1.0)
    assert costs.row_parts(1, 2).stash == 7
    assert costs.row_parts(1, 2).checkpoint == 7
    assert costs.row_parts(0, 1).stash == 0


@pytest.mark.parametrize("unkept_bytes", [0, 3])
@pytest.mark.parametrize("loss_bytes", [3, 500])
def test_a_recomputing_backward_holds_the_stash_anew_once_that_of_the_loss_is_gone(
    loss_bytes: int, unkept_bytes: int
) -> None:
    plain = make_profile([1, 1, 1], stash_bytes=[10, 20, 30], workspace_bytes=[5, 50, 7], output_bytes=[2, 2, 4])
    loss = LayerCost(
        microbatch_size=1, forward=Timing.exactly(1.0), backward=Timing.exactly(1.0), stash_bytes=loss_bytes,
        forward_workspace_bytes=0, backward_workspace_bytes=11, output_bytes=0, output_gradient_bytes=0,
        output_unsaved_bytes=0, unkept_output_bytes=unkept_bytes,
    )  # fmt: skip
    costs = StageTable(replace(plain, loss=(loss,)), 4)
    first, last = costs.row_parts(0, 2), costs.row_parts(1, 3)
    assert (first.recomputed_stash, first.recomputing_workspace) == (10 + 20 + 2, 50)  # what it sent is still there
    assert last.recomputed_stash == 20 + 30
    kept_bytes = 4 - unkept_bytes  # of the model's outputs, by the loss
    assert last.checkpoint == kept_bytes + loss_bytes
    in_layers, in_loss = max(20 + 50, 20 + 30 + 7), kept_bytes + loss_bytes + 11
    assert last.recomputed_stash + last.recomputing_workspace == max(in_layers, in_loss)


def test_output_of_a_forward_that_is_recomputed_is_held_once() -> None:
    """It is in the checkpoint already."""
    profile = make_profile([1, 1, 1], stash_bytes=[10, 20, 30], workspace_bytes=[5, 7, 9], output_bytes=[4, 6, 0])
    costs = StageTable(profile, 4)
    found = [costs.row_parts(*x).recompute_workspace for x in ((0, 1), (1, 2), (0, 2), (1, 3))]
    assert found == [10 + 5 - 4, 20 + 7 - 6, 20 + 7 - 6, 30 + 9]


def with_costs(profile: Profile, **changes: object) -> Profile:
    """The same with these fields in the costs of every layer."""
    layers = tuple(replace(x, costs=tuple(replace(y, **changes) for y in x.costs)) for x in profile.layers)  # type: ignore[arg-type]
    return replace(profile, layers=layers)


def test_recomputing_costs_what_it_added_when_it_was_measured() -> None:
    costs = StageTable(with_costs(make_profile([1, 2]), recompute=Timing.exactly(1.5)), 4)
    assert costs.row(0, 1).recompute_s == pytest.approx(1.5)
    assert StageTable(make_profile([1, 2]), 4).row(0, 2).recompute_s == pytest.approx(3.0)


def test_each_micro_batch_has_its_share_of_what_the_first_backward_costs_more() -> None:
    profile = with_costs(make_profile([1, 1]), first_backward=Timing.exactly(6.0))
    assert StageTable(profile, 4).row(0, 1).backward_s == pytest.approx(2 + (6 - 2) / 4)
    assert StageTable(profile, 1).row(0, 1).backward_s == pytest.approx(6)


def test_the_halves_of_a_backward_each_pay_the_overhead_and_the_second_makes_the_gradients() -> None:
    halves = {"input_gradient": Timing.exactly(3.0), "weight_gradient": Timing.exactly(4.0), "pending_bytes": 7}
    profile = with_costs(make_profile([1, 1], overhead_s=0.5), first_backward=Timing.exactly(6.0), **halves)
    cost = StageTable(profile, 4).row(0, 2)
    assert cost.input_gradient_s == pytest.approx(2 * 3 + 0.5)
    assert cost.weight_gradient_s == pytest.approx(2 * (4 + (6 - 2) / 4) + 0.5)
    assert StageTable(profile, 4).row_parts(0, 2).pending == 14
    unknown = StageTable(make_profile([1, 1]), 4)
    assert (unknown.sums.has_halves, unknown.row(0, 2).input_gradient_s) == (False, None)


def test_a_layer_with_one_half_has_nothing_in_the_other_and_the_loss_is_all_in_the_first() -> None:
    profile = with_costs(make_profile([1, 2]), weight_gradient=Timing.exactly(4.0))
    cost = profile.layers[0].costs[0]
    costs = StageTable(replace(profile, loss=(replace(cost, weight_gradient=None),)), 4)
    assert (costs.row(0, 1).input_gradient_s, costs.row(0, 1).weight_gradient_s) == (0.0, 4.0)
    assert (costs.row(1, 2).input_gradient_s, costs.row(1, 2).weight_gradient_s) == (2.0, 4.0)


def test_neighbours_on_the_same_device_send_nothing_to_each_other() -> None:
    profile = with_costs(
        make_profile([1, 1, 1], output_bytes=[10, 20, 0], link=Link(latency_s=1.0, bytes_per_s=1.0)), pending_bytes=3
    )
    costs = StageTable(profile, 8)
    cost = costs.row(0, 2, StagePlace(link=profile.link, boundaries=DeviceBoundaries(after=False)))
    assert (cost.activation_bytes, cost.gradient_bytes, cost.activation_s, cost.gradient_s) == (0, 0, 0.0, 0.0)
    held = {
        (before, after): costs.row_parts(1, 2, DeviceBoundaries(before=before, after=after))
        for before in (True, False)
        for after in (True, False)
    }
    assert [(x.received_activation, x.received_gradient, x.sent, x.pending) for x in held.values()] == [
        (10, 20, 10, 3),
        (10, 0, 10, 3),
        (0, 20, 0, 3),
        (0, 0, 0, 3),
    ]
    assert {x.stash for x in held.values()} == {0}


def with_contention(profile: Profile, num_neighbours: int) -> Profile:
    step = replace(profile.step, slow_down=2.0)
    return replace(with_costs(profile, slow_down=1.5), num_neighbours=num_neighbours, step=step)


def test_stages_that_share_a_host_take_longer_by_the_contention_that_was_measured() -> None:
    profile = with_contention(make_profile([2, 2], optimizer_s=8.0, weight_bytes=4), num_neighbours=1)
    alone = StageTable(planned(profile), 4).row(1, 2)
    assert (alone.forward_s, alone.optimizer_s) == (2, 4)
    both = StageTable(planned(profile, num_devices=2), 4).row(1, 2)
    assert (both.forward_s, both.backward_s, both.recompute_s, both.optimizer_s) == pytest.approx((3, 6, 3, 8))


def test_the_stage_with_the_first_layer_updates_when_no_other_device_computes() -> None:
    """No other device runs a pass after its last backward."""
    profile = with_contention(make_profile([2, 2], optimizer_s=8.0, weight_bytes=4), num_neighbours=1)
    costs = StageTable(planned(profile, num_devices=2), 4)
    assert [costs.row(*span).optimizer_s for span in ((0, 1), (1, 2), (0, 2))] == pytest.approx([4, 8, 8])


def test_contention_grows_with_the_stages_up_to_the_company_it_was_measured_in() -> None:
    profile = with_contention(make_profile([1, 1, 1, 1, 1]), num_neighbours=4)
    first, end = np.array([0]), np.array([1])
    forward_s = [
        float(StageTable(planned(profile, num_devices=k), 4).sums.seconds("forward", first, end)[0])
        for k in (1, 3, 5, 9)
    ]
    assert forward_s == pytest.approx([1, 1.25, 1.5, 1.5])


def test_a_shared_weight_is_held_once_by_every_stage_that_uses_it() -> None:
    shared = SharedWeight(name="w", layers=(0, 2), num_parameters=25, weight_bytes=100, gradient_bytes=100)
    costs = StageTable(make_profile([1, 1, 1], weight_bytes=10, shared_weights=(shared,)), 4)
    weights = {span: costs.row_parts(*span).weight for span in ((0, 1), (0, 3), (1, 2), (2, 3))}
    assert weights == {(0, 1): 110, (0, 3): 130, (1, 2): 10, (2, 3): 110}


def viewed_bytes(profile: Profile, value: Value) -> int:
    """Of the gradient of a value, the views of the gradient of what its one reader makes for the layer after it."""
    layer, *others = value.consumers
    is_read = any((x.producer, x.consumers[0]) == (layer, layer + 1) for x in storages_of(profile))
    return 0 if others or not is_read else value.costs[0].viewed_bytes


@given(st.data())
def test_what_crosses_both_cuts_of_a_stage_was_made_before_it_and_is_read_after_it(data: st.DataObject) -> None:
    profile = data.draw(graph_profiles(max_layers=6, min_layers=3))
    num_layers, pairs = len(profile.layers), [*profile.precedence]
    stored = replace(profile, values=storages_of(profile))
    graph, chain = StageTable(profile, 4, Graph(num_layers, pairs).positions), StageTable(profile, 4)
    for costs in (graph, chain):
        downsets = costs.downsets
        before = [{v for v in range(num_layers) if downsets.is_before(v)[i]} for i in range(downsets.size)]
        stages = [(i, j) for i, j in product(range(downsets.size), repeat=2) if before[i] < before[j]]
        first, end = np.array(stages).T
        expected, expected_back, expected_returned = [], [], []
        for i, j in stages:
            is_inside = i > 0 and j < downsets.size - 1
            made = [x for x in stored.values if {x.producer} <= before[i] | {None}]
            pass_through = [x for x in made if is_inside and not {*x.consumers} <= before[j]]
            sizes = [(x.costs[0].num_bytes, x.costs[0].unsaved_bytes) for x in pass_through]
            expected.append([sum(column) for column in zip((0, 0), *sizes, strict=True)])
            unread = [x for x in pass_through if not {*x.consumers} & (before[j] - before[i])]
            copied = sum(x.costs[0].gradient_bytes - viewed_bytes(stored, x) for x in unread)
            after = {num_layers, *range(num_layers)} - before[j]
            views = [x for x in made if is_inside and x.consumers[0] + 1 in after]
            expected_returned.append(sum(x.costs[0].gradient_bytes for x in unread))
            expected_back.append(copied + sum(viewed_bytes(stored, x) for x in views))
        assert np.array(costs.pass_through.activation_bytes(first, end)).T.tolist() == expected
        assert costs.pass_through.gradient_bytes(first, end).tolist() == expected_back
        assert costs.pass_through.returned_bytes(first, end).tolist() == expected_returned
        for boundaries in (DeviceBoundaries(in_halves=True), DeviceBoundaries(in_halves=True, after=False)):
            whole, halves = (costs.parts(first, end, x) for x in (replace(boundaries, in_halves=False), boundaries))
            returned = [x * boundaries.after * costs.transfers.keeps_sent for x in expected_returned]
            assert (whole.sent - halves.sent).tolist() == returned
            assert (whole.pending == halves.pending).all()


def test_a_gradient_that_is_part_of_the_received_one_is_copied() -> None:
    """Layer 2 concatenates a skip from layer 0; the gradient that it hands back is a view."""
    sizes = {"num_bytes": 8, "gradient_bytes": 8}
    values = tuple(
        Value(producer=i, consumers=(j,), costs=(ValueCost(microbatch_size=1, **sizes, viewed_bytes=viewed),))
        for i, j, viewed in ((0, 1, 0), (0, 2, 8), (1, 2, 0), (2, 3, 0), (3, 4, 0))
    )
    costs = StageTable(replace(make_profile([1, 1, 1, 1, 1]), values=values), 4)
    stages = [(0, 3), (1, 2), (1, 3), (2, 3), (1, 4), (3, 4)]  # only some make the skip, pass it or end with layer 2
    copied = costs.pass_through.gradient_bytes(*np.array(stages).T)
    assert dict(zip(stages, copied.tolist(), strict=True)) == {
        (0, 3): 0, (1, 2): 8, (1, 3): 8, (2, 3): 8, (1, 4): 0, (3, 4): 0,
    }  # fmt: skip


def test_receive_buffers_are_of_one_micro_batch() -> None:
    costs = StageTable(make_profile([1, 1, 1], output_bytes=[10, 20, 0]), 8)
    first, middle = costs.row_parts(0, 1), costs.row_parts(1, 2)
    assert (middle.received_activation, middle.received_gradient) == (10, 20)
    assert (first.received_activation, first.received_gradient) == (0, 10)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_every_segment_is_the_sum_of_its_layers_and_peaks_where_one_of_them_runs(
    values: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(first + 1, len(values)))
    profile = make_profile([float(x) for x in values], stash_bytes=values, workspace_bytes=values)
    costs = StageTable(profile, 4)
    assert costs.sums.seconds("forward", np.array([first]), np.array([end])).item() == sum(values[first:end])
    assert costs.row_parts(first, end).stash == sum(values[first:end])
    inside = range(first, end)
    running = [sum(values[first : layer + 1]) + values[layer] for layer in inside]  # nothing after it is stashed
    assert costs.row_parts(first, end).backward_workspace == max(running) - sum(values[first:end])
    assert costs.row_parts(first, end).recompute_workspace == max(2 * values[layer] for layer in inside)


def test_between_two_profiled_sizes_costs_are_interpolated_and_said_to_be() -> None:
    profile = make_profile([1.0], stash_bytes=10, microbatch_sizes=(2, 6))
    cost = cost_at(profile.layers[0].costs, 3)
    assert (cost.forward.median_s, cost.stash_bytes, cost.forward.origin) == (3.0, 30, "computed")
    assert "interpolated" in planned(profile, microbatch_size=3).plan_notes[0]
    assert planned(profile, microbatch_size=6).plan_notes == ()


@pytest.mark.parametrize("size", [1, 7])
def test_outside_the_profiled_sizes_costs_are_refused(size: int) -> None:
    profile = make_profile([1.0], microbatch_sizes=(2, 6))
    with pytest.raises(UsageError, match=f"sizes 2, 6; asked for {size}; profile again with --microbatch-size"):
        cost_at(profile.layers[0].costs, size)


@pytest.mark.parametrize(("whole_s", "is_doubtful"), [(2.9, False), (6.0, True), (2.0, True)])
def test_layers_that_contradict_the_whole_model_are_not_relied_on_in_silence(whole_s: float, is_doubtful: bool) -> None:
    whole = WholeModel(microbatch_size=1, forward=Timing.exactly(whole_s), backward=Timing.exactly(6.0))
    profile = replace(make_profile([1.0, 2.0]), whole_model=(whole,))
    notes = planned(profile).plan_notes
    assert bool(notes) == is_doubtful
    assert all("forward" in note and "backward" not in note and "profile again" in note for note in notes)


def test_an_update_takes_a_fixed_time_and_its_layers_share_of_the_rest_and_the_engine_its_own_once() -> None:
    engine = EngineCost(action_s=0.0, sending=FREE_LINK, step_s=100.0)
    profile = make_profile([1] * 4, optimizer_s=26.0, fixed_s=2.0, weight_bytes=[4, 0, 4, 8], engine=engine)
    costs = StageTable(profile, 4)  # 24 s for 16 bytes
    stages = [costs.row(0, 2), costs.row(2, 3), costs.row(3, 4)]
    assert [x.optimizer_s for x in stages] == pytest.approx([2 + 6, 2 + 6, 2 + 12])
    assert [x.around_s for x in stages] == [100.0, 0.0, 0.0]


def test_measured_updates_of_layers_count_in_place_of_their_bytes() -> None:
    """The shared weight is updated on every stage that holds it."""
    tied = SharedWeight(name="t", layers=(0, 2), num_parameters=1, weight_bytes=4, gradient_bytes=4, update_s=0.25)
    profile = make_profile([1] * 3, optimizer_s=2.0, weight_bytes=[4, 4, 8])
    layers = tuple(replace(x, update_s=s) for x, s in zip(profile.layers, (0.25, 0.0, 0.5), strict=True))
    costs = StageTable(replace(profile, layers=layers, shared_weights=(tied,)), 4)
    assert [costs.row(i, i + 1).optimizer_s for i in range(3)] == pytest.approx([1.0, 0.0, 1.5])
    with pytest.raises(
        ValueError, match="a has no update_s; expected it for every layer and shared weight, or for none"
    ):
        replace(profile, layers=(profile.layers[0], *layers[1:]))


def test_an_update_takes_no_more_than_was_measured() -> None:
    profile = make_profile([1, 1], optimizer_s=3.0, fixed_s=4.0, weight_bytes=[4, 12])
    assert [StageTable(profile, 4).row(i, i + 1).optimizer_s for i in (0, 1)] == [3.0, 3.0]


def test_a_recompute_ends_at_the_last_saved_tensor() -> None:
    """The head saves nothing but its input: it is not run again where it is the last layer of its stage."""
    profile = make_profile([4, 4, 10, 2])
    head = replace(profile.layers[2].costs[0], recompute=Timing.exactly(12.0), last_recompute=Timing.exactly(0.5))
    layers = [replace(x, costs=(head,)) if i == 2 else x for i, x in enumerate(profile.layers)]
    costs = StageTable(replace(profile, layers=tuple(layers)), 4)
    first, end = np.array([(0, 2), (0, 3), (2, 3), (2, 4), (0, 4)]).T
    assert costs.sums.recompute_s(first, end).tolist() == [8.0, 8.5, 0.5, 14.0, 22.0]
    assert costs.sums.layer_s("last_recompute").tolist() == [4.0, 4.0, 0.5, 2.0]
    assert float(costs.sums.seconds("last_recompute", np.array([0]), np.array([4]))[0]) == 10.5


@pytest.mark.parametrize("seed", range(20))
def test_a_head_alone_is_not_run_again_whatever_sums_round_to(seed: int) -> None:
    rng = Random(seed)
    seconds, slow_down = [rng.random() for _ in range(4)], 1.0 + rng.random()
    profile = with_costs(make_profile(seconds), slow_down=slow_down)
    head = replace(profile.layers[3].costs[0], last_recompute=Timing.exactly(0.0))
    layers = (*profile.layers[:3], replace(profile.layers[3], costs=(head,)))
    costs = StageTable(planned(replace(profile, layers=layers, num_neighbours=1), num_devices=2), 4)
    assert costs.sums.recompute_s(np.array([3]), np.array([4])).tolist() == [0.0]
    assert costs.row(2, 4).recompute_s == pytest.approx(slow_down * seconds[2])


def test_the_update_works_in_multiples_of_the_largest_tensor() -> None:
    shared = SharedWeight(name="w", layers=(0, 2), num_parameters=25, weight_bytes=100, gradient_bytes=100)
    profile = make_profile([1, 1, 1, 1], weight_bytes=[100, 60, 100, 40], shared_weights=(shared,))
    layers = [replace(x, largest_trained_bytes=y) for x, y in zip(profile.layers, (30, 60, 30, 40), strict=True)]
    step = replace(profile.step, workspace_bytes=40, largest_workspace=2.0)
    costs = StageTable(replace(profile, layers=tuple(layers), step=step), 4)
    found = {x: costs.row_parts(*x).optimizer_workspace for x in ((0, 1), (1, 2), (3, 4), (0, 4))}
    assert found == {(0, 1): 200 + 20, (1, 2): 120 + 6, (3, 4): 80 + 4, (0, 4): 200 + 40}


def test_gradients_of_a_weight_used_twice_wait_on_the_stage() -> None:
    shared = SharedWeight(name="w", layers=(0, 2), num_parameters=25, weight_bytes=100, gradient_bytes=100)
    costs = StageTable(make_profile([1, 1, 1, 1], shared_weights=(shared,)), 4)
    workspaces = {x: costs.row_parts(*x).backward_workspace for x in ((0, 2), (0, 3), (0, 4), (1, 3), (2, 4))}
    assert workspaces == {(0, 2): 0, (0, 3): 100, (0, 4): 100, (1, 3): 0, (2, 4): 0}


def test_a_gradient_waits_between_the_uses_of_its_weight() -> None:
    shared = SharedWeight(name="w", layers=(0, 2), num_parameters=25, weight_bytes=100, gradient_bytes=100)
    costs = StageTable(make_profile([1, 1, 1, 1], stash_bytes=[0, 20, 0, 70], shared_weights=(shared,)), 4)
    workspaces = {x: costs.row_parts(*x).backward_workspace for x in ((0, 2), (0, 3), (0, 4))}
    assert workspaces == {(0, 2): 0, (0, 3): 100, (0, 4): 30}  # when layer 3's stash is gone
