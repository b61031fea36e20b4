"""What stages hold while their layers run backward, against a story of each layer in turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Profile, Value, ValueCost
from gplan.corrections.sharding import sharded
from gplan.cost.stage_table import StageTable
from tests.graphs import Graph
from tests.made import make_profile
from tests.partition.graphs import graph_profiles
from tests.partition.problems import profiles, with_costs_by_layer


def told_second_half(costs: StageTable, stage: set[int]) -> int:
    """The most that a stage with these layers holds in the second half of a backward, above what is there before it."""
    peak = 0
    for v in stage:
        cost = costs.sums.costs[v]
        own = cost.backward_workspace_bytes if cost.weight_workspace_bytes is None else cost.weight_workspace_bytes
        for shared in costs.profile.shared_weights:
            used = stage & {*shared.layers}
            own += shared.gradient_bytes * bool(used and min(used) <= v < max(used))
        later = [costs.sums.costs[u] for u in stage if u > v]
        peak = max(peak, own - sum(x.stash_bytes + x.pending_bytes for x in later))
    return peak


def told_first_half(costs: StageTable, stage: set[int]) -> int:
    """The most that a stage with these layers holds in the first half of a backward, above its stash."""
    made = peak = 0
    for v in sorted(stage, reverse=True):
        cost = costs.sums.costs[v]
        own = cost.backward_workspace_bytes if cost.input_workspace_bytes is None else cost.input_workspace_bytes
        peak = max(peak, made + own)
        made += cost.grown_bytes
    return peak


def made_elsewhere(costs: StageTable, v: int, stage: set[int]) -> int:
    """What layers of other stages made of the forward workspace of layer v."""
    return sum(
        num_bytes
        for (producer, readers), num_bytes in costs.workspaces.unsaved
        if producer is not None and producer < v <= max(readers) and producer not in stage
    )


def told_forward(costs: StageTable, v: int, stage: set[int]) -> int:
    """What layer v needs in a forward of the stage."""
    return max(0, costs.sums.costs[v].forward_workspace_bytes - made_elsewhere(costs, v, stage))


def told_forward_above_stash(costs: StageTable, stage: set[int], unsaved_sent: int) -> int:
    """The most that a stage holds in a forward above its stash, which has the outputs that no layer keeps too."""
    stashes = {v: costs.sums.costs[v].stash_bytes for v in stage}
    held = [told_forward(costs, v, stage) - sum(stashes[u] for u in stage if u > v) for v in stage]
    return max(0, max(held) - unsaved_sent)


def told_alone(costs: StageTable, stage: set[int]) -> int:
    """The most that a layer holds above the checkpoint, which has the outputs of the last layer if they are sent."""
    found = 0
    for v in stage:
        stash = costs.sums.costs[v].stash_bytes
        is_sent = v == max(stage) and v < costs.num_layers - 1
        made = sum(
            num_bytes
            for outputs in (
                costs.workspaces.held_outputs,
                costs.workspaces.unsaved if costs.transfers.keeps_sent else (),
            )
            for (producer, _), num_bytes in outputs
            if producer == v
        )
        whole = costs.sums.costs[v].forward_workspace_bytes + stash - is_sent * made
        found = max(found, whole - made_elsewhere(costs, v, stage))
    return found


def told(costs: StageTable, before: set[int], end: set[int], *, again: bool) -> int:
    """The most that the stage with the layers `end - before` holds above its stash in a backward, without the loss.

    `again` if it recomputes: then each layer runs forward too, the last one is gathered once for both, and outputs that
    only later stages keep are there all the time.
    """
    num_layers, stage, peak = costs.num_layers, end - before, 0
    behind = set() if len(end) == num_layers else {*range(num_layers + 1)} - end
    for v in stage:
        cost = costs.sums.costs[v]
        absent = sum(x.num_bytes for x in cost.leftovers if v + x.num_later in behind)
        is_gathered = again and v == max(stage)
        own = max(0, cost.backward_workspace_bytes - is_gathered * cost.gathering_bytes - absent)
        for shared in costs.profile.shared_weights:
            used = stage & {*shared.layers}
            own += shared.gradient_bytes * bool(used and min(used) <= v < max(used))
        held = max(own, told_forward(costs, v, stage)) if again else own
        held -= sum(costs.sums.costs[u].stash_bytes for u in stage if u > v)
        for (producer, readers), num_bytes in costs.workspaces.saved_later if again else costs.workspaces.held_outputs:
            held += num_bytes * (producer in stage and producer > v and bool(behind & {*readers}))
        peak = max(peak, held)
    return peak


@settings(deadline=None)
@given(st.one_of(graph_profiles(max_layers=6), profiles(max_layers=6)), st.sampled_from([1, 2]))
def test_a_pass_holds_what_is_left_at_every_layer(profile: Profile, num_replicas: int) -> None:
    profile = sharded(replace(profile, loss=()), num_replicas=num_replicas, sharding="weights")
    num_layers = len(profile.layers)
    for downsets in (None, Graph(num_layers, [*profile.precedence]).positions):
        costs = StageTable(profile, 4, downsets)
        before = [{v for v in range(num_layers) if costs.downsets.is_before(v)[i]} for i in range(costs.num_positions)]
        stages = [(i, j) for i in range(len(before)) for j in range(len(before)) if before[i] < before[j]]
        first, end = np.array(stages).T
        passing = costs.pass_through.gradient_bytes(first, end)
        found = costs.workspaces.above_stash("backward", first, end)
        unsaved_sent = costs.unsaved_sent(end, costs.pass_through.activation_bytes(first, end)[1])
        found_forward = costs.workspaces.above_stash("forward", first, end, unsaved_sent=unsaved_sent)
        found_alone = costs.workspaces.alone(first, end)
        found_first = costs.workspaces.of_first_half(first, end)
        found_halves = costs.workspaces.above_between(first, end)
        found_again = costs.workspaces.above_recomputed_stash(first, end, np.zeros_like(first))
        for i, stage in enumerate(stages):
            layers = [before[x] for x in stage]
            inside = layers[1] - layers[0]
            assert found_forward[i] == told_forward_above_stash(costs, inside, int(unsaved_sent[i]))
            assert found_alone[i] == told_alone(costs, inside)
            if not passing[i]:
                assert found[i] == told(costs, *layers, again=False)
                assert max(0, found_again[i]) == told(costs, *layers, again=True)
                assert found_first[i] == told_first_half(costs, inside)
                assert found_halves[i] == told_second_half(costs, inside)


def test_outputs_that_were_sent_stay_while_earlier_layers_run() -> None:
    """The last layer's own backward does not free its output, as the engine still holds it."""
    profile = make_profile([1, 1, 1], stash_bytes=[10, 30, 40], output_bytes=[0, 20, 0], workspace_bytes=[50, 0, 0])
    costs = StageTable(profile, 4)
    found = {x: costs.row_parts(*x).backward_workspace for x in ((0, 1), (0, 2), (0, 3))}
    assert found == {(0, 1): 50, (0, 2): 50 - 30 + 20, (0, 3): 0}


def test_a_skip_that_was_sent_stays_while_layers_before_its_own_run() -> None:
    sizes = {"microbatch_size": 1, "num_bytes": 20}
    values = tuple(
        Value(producer=i, consumers=(j,), costs=(ValueCost(**sizes),))
        for i, j in ((0, 1), (1, 2), (1, 4), (2, 3), (3, 4))
    )
    profile = make_profile([1] * 5, stash_bytes=40, workspace_bytes=[100, 0, 100, 0, 0])
    costs = StageTable(replace(profile, values=values), 4)
    found = {x: costs.row_parts(*x).backward_workspace for x in ((0, 2), (0, 3), (2, 4), (0, 5))}
    assert found == {(0, 2): 100, (0, 3): 100, (2, 4): 100 - 40 + 20, (0, 5): 20}


@pytest.mark.parametrize(("saved_later", "expected"), [(0, 70), (20, 50)])
def test_a_recompute_makes_no_output_that_only_the_next_stage_keeps(saved_later: int, expected: int) -> None:
    profile = make_profile([1, 1, 1], stash_bytes=[10, 40, 0], output_bytes=[0, 20, 0])
    profile = with_costs_by_layer(profile, [{"output_saved_later_bytes": saved_later}] * 3)
    assert StageTable(profile, 4).row_parts(0, 2).recomputed_stash == expected


def test_an_output_that_no_layer_keeps_counts_once_on_the_stages_beside_its_cut() -> None:
    """Before the cut in the stash, behind it in the receive buffer, and in neither forward workspace."""
    profile = make_profile([1, 1], stash_bytes=[10, 30], output_bytes=[50, 0])
    profile = with_costs_by_layer(
        profile,
        [
            {"output_unsaved_bytes": 50, "forward_workspace_bytes": 60},
            {"output_unsaved_bytes": 0, "forward_workspace_bytes": 57},
        ],
    )
    costs = StageTable(profile, 4)
    first, last, whole = (costs.row_parts(*x) for x in ((0, 1), (1, 2), (0, 2)))
    assert (first.stash, first.forward_workspace, first.recompute_workspace) == (10 + 50, 60 - 50, 10 + 60 - 50)
    assert (last.stash, last.forward_workspace, last.recompute_workspace) == (30, 57 - 50, 30 + 57 - 50)
    assert (whole.stash, whole.forward_workspace, whole.recompute_workspace) == (40, 57, 30 + 57)
