"""Seconds of collectives by hand, within a node and across, and what widths add to layers."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from gplan.core import Link
from gplan.core.errors import UsageError
from gplan.cost.stage_table import StageTable
from gplan_profiler.analytic.collectives import collective_s, pipeline_link
from gplan_profiler.analytic.decoder_config import BlockKind, Widths, load_decoder
from gplan_profiler.analytic.decoder_kernels import LayerKernels
from gplan_profiler.analytic.decoder_profile import DecoderProfile, check_divisions
from gplan_profiler.analytic.hardware import CollectiveRate, load_hardware
from gplan_profiler.analytic.trainers import LEGACY, MEGATRON, NANOTRON, OVERLAPPING

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MADE = replace(
    load_hardware("h100"),
    link=Link(latency_s=0.0, bytes_per_s=100e9),
    network=Link(latency_s=1e-3, bytes_per_s=10e9),
    network_share=0.5,
    collectives={kind: CollectiveRate(share=0.5, start_s=1e-3, rank_s=1e-4) for kind in KINDS},
)


@pytest.mark.parametrize(
    ("kind", "size", "stride", "seconds"),
    [
        ("all_gather", 1, 1, 0.0),
        ("all_gather", 4, 1, 1e-3 + 3e-4 + 0.75 * 8e9 / 50e9),
        ("all_reduce", 4, 1, 1e-3 + 3e-4 + 1.5 * 8e9 / 50e9),
        # two nodes of eight: the ring enters a node through eight cards at once
        ("all_gather", 16, 1, 1e-3 + 1e-3 + 7e-4 + 15 / 16 * 8e9 / 40e9),
        # one member in each of four nodes
        ("reduce_scatter", 4, 8, 1e-3 + 3e-3 + 0.75 * 8e9 / 5e9),
        # half of the tokens leave the node, each rank's through its own card
        ("all_to_all", 16, 1, 1e-3 + 1e-3 + 7e-4 + 0.5 * 8e9 / 5e9),
    ],
)
def test_a_collective_by_hand(kind: str, size: int, stride: int, seconds: float) -> None:
    assert collective_s(MADE, kind, 8e9, group=((size, stride),)) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_stages_are_neighbours_in_a_node_or_across() -> None:
    near, far = Widths(tensor=2, pipeline=4), Widths(tensor=8, pipeline=4)
    assert pipeline_link(MADE, near) == MADE.link
    assert pipeline_link(MADE, far) == MADE.network
    assert pipeline_link(MADE, Widths(tensor=2, pipeline=4)) == MADE.link
    assert pipeline_link(MADE, Widths(tensor=2, pipeline=8)) == MADE.network, "four stages a node, on two nodes"
    replicas = pipeline_link(MADE, Widths(tensor=4, data=2, pipeline=2))
    whole = collective_s(MADE, "reduce_scatter", 1e9, group=((2, 4),))
    assert float(replicas.collectives_s("reduce_scatter", 2e9, 2)) == pytest.approx(2 * whole)
    hidden = pipeline_link(MADE, Widths(data=4), hidden=0.75)
    seen = pipeline_link(MADE, Widths(data=4))
    assert float(hidden.collectives_s("all_gather", 1e9, 4)) == pytest.approx(
        float(seen.collectives_s("all_gather", 1e9, 4)) / 4
    )


def test_groups_are_placed_in_an_order() -> None:
    sizes = {"tensor": 2, "context": 2, "data": 4, "pipeline": 3, "expert": 4, "expert_tensor": 1}
    plain, stages_first = Widths(**sizes), Widths(**sizes, order="tp-cp-ep-pp-dp")
    assert [plain.placed(x) for x in ("tp", "cp", "dp", "pp")] == [((2, 1),), ((2, 2),), ((4, 4),), ((3, 16),)]
    assert [stages_first.placed(x) for x in ("cp", "pp", "dp")] == [((2, 2),), ((3, 4),), ((4, 12),)]
    assert (plain.placed("cp", "dp"), stages_first.placed("cp", "dp")) == (((8, 2),), ((2, 2), (4, 12)))
    assert plain.placed("ep", of_experts=True) == ((4, 1),)
    # stages are then neighbours in a node, and no two replicas of a stage are in one
    near, far = (pipeline_link(MADE, replace(x, context=1, expert=1, data=8)) for x in (stages_first, plain))
    assert (near.bytes_per_s, far.bytes_per_s) == (MADE.link.bytes_per_s, MADE.network.bytes_per_s)
    assert float(near.collectives_s("all_gather", 8e9, 8)) > float(far.collectives_s("all_gather", 8e9, 8))
    with pytest.raises(UsageError, match="the order of groups is tp-pp; expected tp, cp, ep, dp and pp in some order"):
        Widths(order="tp-pp")
    with pytest.raises(UsageError, match="only if tensor x context = expert x expert-tensor"):
        Widths(tensor=2, data=4, pipeline=2, expert=8, expert_tensor=1, order="tp-cp-ep-pp-dp")


def block_exchanges(trainer: object, **widths: int) -> list[tuple[str, str, int]]:
    kernels = LayerKernels(load_decoder("llama3-8b"), Widths(**widths), 1, False, trainer)  # type: ignore[arg-type]
    block = kernels.block("", BlockKind())
    return [(x.kind, x.group, x.num_bytes) for kernel in block.kernels for x in kernel.before]


def test_sums_of_whole_gradients_beside_a_divided_state() -> None:
    widths = Widths(data=4)
    plain, whole = (pipeline_link(MADE, widths, sums_whole=x) for x in (False, True))
    seconds = {
        x: [float(link.collectives_s(x, 1e9, 4)) for link in (plain, whole)] for x in ("reduce_scatter", "all_gather")
    }
    assert seconds["all_gather"][0] == seconds["all_gather"][1]
    assert seconds["reduce_scatter"][1] == pytest.approx(float(plain.collectives_s("all_reduce", 1e9, 4)))


def test_scattered_sums_are_held_while_the_host_is_ahead() -> None:
    def late_bytes(tensor: int, pipeline: int, size: int) -> int:
        widths = Widths(tensor=tensor, pipeline=pipeline)
        kernels = LayerKernels(load_decoder("llama3-8b"), widths, size, False, NANOTRON)
        return kernels.block("", BlockKind()).late_bytes(load_hardware("h100"), widths, NANOTRON)

    sums = 2 * 2 * 4096 * 4096  # behind attention and perceptron
    assert late_bytes(8, 2, 1) == 0  # its host is the slower clock
    assert late_bytes(8, 4, 1) == sums / 2  # two of four micro-batches of the warm-up
    assert late_bytes(8, 2, 32) == late_bytes(8, 8, 32) == 32 * sums
    assert late_bytes(32, 8, 1) == 0


def test_ranks_divide_key_and_value_heads() -> None:
    decoder = load_decoder("llama3-70b", {"num_attention_heads": 96, "head_dim": 128})
    given = {"context": 1, "expert": 1, "sequence_length": 4608}
    with pytest.raises(
        UsageError, match=r"^8 key and value heads cannot be divided over 6 ranks; .* 4 or 8 \(--tensor\)"
    ):
        check_divisions(decoder, tensor=6, **given)
    with pytest.raises(UsageError, match=r"^8 key and value heads cannot be divided over 12 ranks"):
        check_divisions(decoder, tensor=12, **given)
    check_divisions(decoder, tensor=16, **given)  # each is copied


def test_a_block_gathers_and_scatters_its_hidden_states() -> None:
    hidden = 2 * 4096 * 4096
    pair = [("all_gather", "tensor", hidden), ("reduce_scatter", "tensor", hidden)]
    assert block_exchanges(MEGATRON, tensor=2) == pair * 2
    assert block_exchanges(replace(LEGACY, divides_sequence=False), tensor=2) == [("all_reduce", "tensor", hidden)] * 2
    assert block_exchanges(MEGATRON) == []
    keys = 2 * 4096 * 2 * 1024  # of 8 heads of 128, and as many values
    assert block_exchanges(MEGATRON, context=4) == [("all_gather", "context", keys)]


def test_hidden_collectives_cost_less() -> None:
    def block_s(trainer: object) -> float:
        made = DecoderProfile(
            name="x", decoder=load_decoder("llama3-8b"), widths=Widths(tensor=8), hardware=load_hardware("h100"),
            trainer=trainer,  # type: ignore[arg-type]
        )  # fmt: skip
        return made.profile((1,)).layers[1].costs[0].backward.median_s

    assert block_s(OVERLAPPING) < block_s(MEGATRON)


def test_second_halves_of_backwards_keep_what_products_read() -> None:
    made = DecoderProfile(
        name="x", decoder=load_decoder("llama3-8b"), widths=Widths(sequence_length=1024), hardware=load_hardware("h100")
    )
    block = made.profile((1,)).layers[1].costs[0]
    widths = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]  # read and made by its products
    assert block.between_bytes == 2 * 1024 * sum(x + y for x, y in widths)
    assert block.pending_bytes < 0


def test_a_stage_holds_one_empty_gradient_of_each_shape() -> None:
    decoder = load_decoder("llama3-70b", {"num_hidden_layers": 4})
    made = DecoderProfile(name="llama", decoder=decoder, widths=Widths(), hardware=load_hardware("h100")).profile((1,))
    shapes = ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))
    for first, end in ((0, 2), (0, 3), (0, 6)):
        held = StageTable(made, 4).row_parts(first, end)
        assert held.weight == sum(x.weight_bytes for x in made.layers[first:end]) + 2 * sum(map(prod, shapes))
