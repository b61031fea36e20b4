"""The search over widths: every setting that counts allow, bounds that hold, and the same best plan as without bounds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_fields

from gplan.core.errors import NoPlanError, UsageError
from gplan.interop.export.exporters import export
from gplan.interop.layouts import read_layout
from gplan.interop.machine_layout import layout_of
from gplan.interop.receiver_table import SPECIAL_LAYERS
from gplan.interop.width_choices import Choice
from gplan.interop.width_search import WidthSearch
from gplan.partition.block_program import BlockProgram, Counted, equal_blocks
from gplan.partition.even_cuts import priced_cut
from gplan.reporting.text.widths import device_flops, widths_text
from gplan.strategy_search.bounds import SettingBounds
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.hardware import load_hardware
from tests.interop.test_receivers import gplan_exits

SMALL = {"num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8}


def search(**fields: Any) -> WidthSearch:
    given: dict[str, Any] = {
        "name": "small", "decoder": load_decoder("llama3-8b", SMALL), "hardware": load_hardware("a100"), "num_devices": 4,
        "batch_size": 16, "sequence_length": 1024, "receiver": "megatron", "time_limit_s": 60.0,
    }  # fmt: skip
    return WidthSearch(**{**given, **fields})


def test_settings_use_every_device_and_every_sample() -> None:
    choices = list(search().choices())
    assert len(choices) == len(set(choices)) > 20
    for choice in choices:
        widths = choice.widths
        assert widths.devices == 4
        assert choice.num_microbatches * choice.microbatch_size * widths.data == 16
        assert choice.num_chunks == 1 or choice.num_microbatches % widths.pipeline == 0
    experts = search(decoder=load_decoder("mixtral-8x7b", SMALL), fixed={"tensor": 1, "pipeline": 1})
    assert {x.widths.expert for x in experts.choices()} == {1, 2, 4}


def test_more_tensor_ranks_than_heads_of_keys_where_the_trainer_copies_them() -> None:
    """Megatron-LM gathers queries, keys and values, and each rank keeps a whole head; torchtitan refuses such widths."""
    decoder = load_decoder("qwen3-30b-a3b", {"num_hidden_layers": 4})  # 4 heads of keys
    widths = {}
    for receiver in ("megatron", "torchtitan"):
        made = search(decoder=decoder, num_devices=8, receiver=receiver)
        widths[receiver] = {x.widths.tensor for x in made.choices()}
    assert widths == {"megatron": {1, 2, 4, 8}, "torchtitan": {1, 2, 4}}
    made = search(decoder=decoder, num_devices=8)
    keys_of = {}
    for tensor in (4, 8):
        block = made.profile_of(Widths(tensor=tensor), 1).layers[1].costs[0]
        keys_of[tensor] = block.stash_bytes
    assert keys_of[8] > keys_of[4] / 2  # a rank has half of all but the keys and values


def every_step_s(made: WidthSearch, choice: Choice) -> list[float]:
    """The steps of all partitions of a setting that fit the memory."""
    problem = made.problem(choice)
    names = [x.name for x in problem.costs.profile.layers]
    kept = [range(names.index(a) + 1, names.index(b) + 1) for a, b in problem.constraints.keep_together]
    places = [x for x in range(1, len(names)) if not any(x in inside for inside in kept)]
    cuts = combinations(places, problem.num_stages - 1)
    priced = [priced_cut(problem, np.array([*x, len(names)])) for x in cuts]
    return [x.step_s for x in priced if x.peak_bytes <= made.usable_bytes]


LONG = {"num_hidden_layers": 7, "vocab_size": 8_000}  # with `INTERLEAVED` most seconds and bytes are of blocks
INTERLEAVED = {"data": 1, "tensor": 1, "context": 1, "microbatch_size": 1}
TIED, FEW = {"tie_word_embeddings": True}, {"num_experts": 4, "num_experts_per_tok": 1}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("model", "settings", "share", "are_held_back", "fields"),
    [
        ("llama3-8b", {"num_hidden_layers": 6}, None, False, {"fixed": {"microbatch_size": 2}}),
        ("llama3-8b", {"num_hidden_layers": 7}, 1.5, True, {"num_devices": 3, "batch_size": 24}),
        (
            "llama3-8b",
            LONG,
            3.0,
            False,
            {"num_devices": 2, "batch_size": 12, "fixed": INTERLEAVED, "sequence_length": 8192},
        ),
        (
            "llama3-8b",
            LONG,
            5.0,
            False,
            {"num_devices": 3, "batch_size": 12, "fixed": INTERLEAVED, "sequence_length": 8192},
        ),
        ("llama3-8b", TIED, 3.0, False, {"per_node": 4, "num_devices": 8, "fixed": {"tensor": 2}}),
        ("llama3-8b", {"vocab_size": 400_000}, 2.2, True, {"per_node": 2, "num_devices": 6, "batch_size": 12}),
        ("mixtral-8x7b", {"num_local_experts": 4}, 1.5, True, {"per_node": 2, "batch_size": 8}),
        ("mixtral-8x7b", {"num_local_experts": 4}, None, False, {"per_node": 1, "batch_size": 3}),
        ("gpt-oss-20b", {"num_local_experts": 8}, 1.5, True, {"fixed": {"expert": 2}}),  # kinds in turns
        ("glm-4.5-air", SPARSE, 3.0, False, {"per_node": 2, "fixed": {"tensor": 1, "expert": 2}}),
        ("deepseek-v3", SPARSE, 1.8, True, {"batch_size": 8, "fixed": {"tensor": 1}}),
        ("qwen3-next-80b-a3b", FEW, 1.5, True, {"num_devices": 3, "batch_size": 12}),
    ],
)
def test_no_bound_is_above_the_best_of_all_partitions_of_all_settings(
    model: str, settings: dict[str, Any], share: float | None, are_held_back: bool, fields: dict[str, Any]
) -> None:
    """Within `share` times the memory that weights, gradients and optimizer need at least.

    `are_held_back`: whether some larger micro-batches get no bound of their own, as the weights and their state do not fit.
    """
    small = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 32_000}
    fields = {"per_node": 8, **fields}
    device = replace(load_hardware("a100"), devices_per_node=fields.pop("per_node"))
    made = search(decoder=load_decoder(model, {**small, **settings}), hardware=device, **fields)
    state_bytes = {x: made.bounds_of(x).device_state_bytes for x in made.choices()}
    if share is not None:
        made = replace(made, memory_bytes=int(share * min(state_bytes.values())))
    assert are_held_back == any(x.microbatch_size > 1 and y > made.usable_bytes for x, y in state_bytes.items())
    fastest_s = {x: min(every_step_s(made, x), default=float("inf")) for x in state_bytes}
    best_s = min(fastest_s.values())
    assert best_s < float("inf") and (share is None) == (max(fastest_s.values()) < float("inf"))
    for choice, step_s in fastest_s.items():
        within_s = SettingBounds(made.problem(choice)).within_s(made.usable_bytes)
        assert max(made.bounds_of(choice).step_s, within_s) <= step_s * (1 + 1e-9), choice
    found = made.run()
    assert all(bound_s <= fastest_s[x] * (1 + 1e-9) for x, bound_s in found.unplanned)
    assert all(x.step_s >= fastest_s[x.choice] * (1 - 1e-9) for x in found.planned)
    assert found.lower_bound_s <= best_s * (1 + 1e-9)
    assert min(x.step_s for x in found.planned) <= best_s * 1.005 and found.gap <= 0.02
    assert found.plan.prediction.step_s == pytest.approx(found.best.step_s)


FEW_EXPERTS = {
    "num_hidden_layers": 7, "hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "n_routed_experts": 16,
    "moe_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "settings", "blocks", "memory_bytes"),
    [
        (model, settings, blocks, None if gb is None else int(gb * 1e9))
        for model, settings, blocks, memories in (
            ("llama3-8b", SMALL, range(1, 7), (None, 3.5)),
            ("deepseek-v3", {**FEW_EXPERTS, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}, range(4, 8), (None, 4.6)),
            ("deepseek-v3", {**FEW_EXPERTS, "first_k_dense_replace": 3, "num_nextn_predict_layers": 0}, range(4, 8), (None, 4.6, 3.5)),
            ("deepseek-v3", {**FEW_EXPERTS, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}, range(2, 8), (4.6, 3.5)),
            ("gpt-oss-20b", {"num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 1}, range(1, 6), (None, 4.6)),
        )
        for gb in memories
    ],
)  # fmt: skip
def test_blocks_counted_by_a_program_are_the_best(
    model: str, settings: dict[str, int], blocks: range, memory_bytes: int | None
) -> None:
    """Also where a stage has none of the equal blocks, or layers before them are on several stages.

    Multi-token prediction shares the embedding, and devices with a shared weight wait for each other: in no path.
    """
    off = 0.015 if settings.get("num_nextn_predict_layers") else 1e-4
    fixed: dict[str, int | str | None] = {"microbatch_size": 1, "tensor": 1, "pipeline": 4, "data": 1}
    made = search(decoder=load_decoder(model, settings), fixed=fixed, memory_bytes=memory_bytes)
    for choice in made.choices():
        problem, steps = made.problem(choice), every_step_s(made, choice)
        assert equal_blocks(problem) == blocks
        nothing = Counted(cut=None, step_s=float("inf"), lower_bound_s=0.0)
        found = BlockProgram(problem, blocks).solve(nothing, enough=1e-6, deadline_s=time.perf_counter() + 60)
        assert found.step_s == pytest.approx(min(steps, default=float("inf")), rel=off)
        if steps:
            assert min(steps) * (1 - off) <= found.lower_bound_s <= min(steps) * (1 + 1e-9)


def test_a_program_goes_on_with_a_smaller_gap() -> None:
    """Steps that the first gap leaves out are looked for with the second."""
    fixed: dict[str, int | str | None] = {"microbatch_size": 1, "tensor": 1, "pipeline": 4, "data": 1, "num_chunks": 1}
    made = search(fixed=fixed, batch_size=64, sequence_length=8192)
    choice = next(made.choices())
    problem, best_s = made.problem(choice), min(every_step_s(made, choice))
    program, deadline_s = BlockProgram(problem, range(1, 7)), time.perf_counter() + 60
    known = Counted(cut=None, step_s=1.05 * best_s, lower_bound_s=0.0)
    assert 1.05 * best_s * 0.05 > 2e-4  # more than what the solver cannot tell apart
    first = program.solve(known, enough=0.2, deadline_s=deadline_s)
    assert first.cut is None and 0.8 * 1.05 * best_s * (1 - 1e-6) <= first.lower_bound_s <= best_s
    second = program.solve(first, enough=0.005, deadline_s=deadline_s)
    assert second.step_s == pytest.approx(best_s, rel=0.01) and second.lower_bound_s <= best_s * (1 + 1e-6)


def test_moves_better_an_even_partition() -> None:
    made = search(fixed={"tensor": 1, "data": 1}, memory_bytes=4_600_000_000)
    is_better = False
    for choice in made.choices():
        problem, steps = made.problem(choice), every_step_s(made, choice)
        even = made.even_cut(problem)
        found = made.bettered_cut(problem, even, time.perf_counter() + 60)
        assert (found is not None or even is None) and (found is None or steps)
        if found is not None:
            assert found.peak_bytes <= made.usable_bytes and found.step_s >= min(steps) * (1 - 1e-9)
            assert even is None or found.step_s <= even.step_s * (1 + 1e-9)
            is_better |= even is None or found.step_s < even.step_s
    assert is_better


def test_a_memory_that_nothing_fits_names_a_machine_that_does() -> None:
    tight = replace(load_hardware("rtx4090"), memory_bytes=6_000_000_000)
    one = search(hardware=tight, decoder=load_decoder("llama3-8b", {"num_hidden_layers": 8}))
    with pytest.raises(
        NoPlanError, match=r"no split of 4 devices .*; the smallest machine .* has \d+ devices"
    ) as error:
        one.run()
    enough = int(str(error.value).split()[-2])
    assert replace(one, num_devices=enough, batch_size=enough).run().plan.peak_bytes <= one.usable_bytes


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    small = replace(load_hardware("a100"), memory_bytes=8 << 30)
    one = search(hardware=small, num_devices=1, batch_size=4)
    with pytest.raises(NoPlanError, match=r"of its 8.00 GiB; the least found is .* too much \(tensor 1, .*recompute\)"):
        one.run()


def test_reasons_for_what_a_trainer_cannot_run_are_one_line() -> None:
    decoder = load_decoder("llama3-8b", {**SMALL, "tie_word_embeddings": True})
    found = search(decoder=decoder, receiver="torchtitan", num_devices=8).run()
    reasons = [x for x in widths_text(found) if "not possible: " in x]
    assert len(reasons) == 1 and reasons[0].endswith(" reasons more") and "untie it" in reasons[0]
    assert len(found.ruled_out) <= 6
    assert all(x.choice.widths.pipeline == 1 for x in found.planned)
    assert all(x.widths.pipeline == 1 for x, _ in found.unplanned), "settings that are not possible have no bound"


@pytest.mark.parametrize(("memory", "fitting"), [(8, 2), (4, 4)])
def test_a_machine_that_fits_may_be_part_of_a_node(memory: int, fitting: int) -> None:
    small = replace(load_hardware("a100"), memory_bytes=memory << 30)
    one = search(hardware=small, num_devices=1, batch_size=4)
    with pytest.raises(NoPlanError, match=f"was found to fit has {fitting} devices$"):
        one.run()


def test_gradients_begin_when_one_micro_batch_is_done() -> None:
    """With one micro-batch no device has gradients beside all that it keeps, and so it fits less memory."""
    memory_bytes = 9_100_000_000
    tight = replace(load_hardware("a100"), memory_bytes=memory_bytes)
    for batch_size in (1, 2):
        found = search(hardware=tight, num_devices=1, batch_size=batch_size).run()
        assert found.best.choice.num_microbatches == 1 and found.plan.device_total_bytes <= memory_bytes


def test_of_plans_nearly_as_fast_the_one_with_fewest_stages_a_device() -> None:
    fixed: dict[str, int | str | None] = {"tensor": 1, "pipeline": 2, "microbatch_size": 1}
    found = search(
        decoder=load_decoder("llama3-8b", {**SMALL, "num_hidden_layers": 24}), batch_size=128, fixed=fixed
    ).run()
    fastest = min(found.planned, key=lambda x: x.step_s)
    assert (found.best.choice.num_chunks, fastest.choice.num_chunks) == (1, 2)
    assert fastest.step_s < found.best.step_s <= 1.01 * fastest.step_s
    assert found.gap >= 1 - fastest.step_s / found.best.step_s - 1e-9  # counted from the plan that is shown
    text = list(widths_text(found))
    assert "of those nearly as fast as the fastest, the first has the fewest stages a device" in text


def test_the_sentence_of_the_gap() -> None:
    found = search().run()
    for bound, is_cut_short, sentence in (
        (found.best.step_s, False, f"proven best of these {found.num_choices} settings, as they are predicted"),
        (0.9 * found.best.step_s, False, "as predicted, no other is more than 10.0 % faster"),
        (0.9 * found.best.step_s, True, "10.0 % faster; a longer --time-limit may narrow this"),
    ):
        lines = widths_text(replace(found, lower_bound_s=bound, is_cut_short=is_cut_short))
        assert any(x.endswith(sentence) for x in lines)
    assert not found.is_cut_short and search(time_limit_s=1e-3, num_devices=8).run().is_cut_short


def test_flops_are_those_of_megatrons_log() -> None:
    """Its formula for Llama: products of each token, and half of what attention would take without a causal mask."""
    found = search().run()
    h, f, kv, length = 1024, 3584, 1024, 1024
    of_block = 6 * (h * (h + 2 * kv) + h * h + 3 * h * f) + 6 * h * length
    each = 16 * length * (6 * of_block + 6 * h * 128256) / 4
    assert device_flops(found) == pytest.approx(each, rel=1e-3)


def test_a_batch_that_few_widths_divide_has_a_hint() -> None:
    told = list[str]()
    common: dict[str, Any] = {"receiver": "megatron", "hardware": "h100", "num_gpus": 48, "on_start": told.append}
    settings = [f"{x}={y}" for x, y in SMALL.items()]
    layout_of("llama3-8b", **common, settings=settings, batch_size=1021, time_limit=1)
    assert [x for x in told if x.endswith("more divide 1020 (6) and 1024 (5)")]
    told.clear()
    layout_of("llama3-8b", **common, settings=settings, batch_size=1024, time_limit=1)
    assert not [x for x in told if "batch" in x]


def test_parameters_of_multi_token_prediction_are_told_beside_the_others() -> None:
    told = list[str]()
    with pytest.raises(UsageError, match="give --gpus N"):
        layout_of("deepseek-v3", receiver="megatron", hardware="h100", on_start=told.append)
    assert told[0].endswith(
        "671.03 billion parameters, 37.55 billion of them for each token, and 11.61 billion of multi-token prediction"
    )


def test_texts_of_the_planner_name_options_of_layout() -> None:
    common: dict[str, Any] = {"receiver": "megatron", "hardware": "rtx4090", "settings": ["num_hidden_layers=16"]}
    with pytest.raises(NoPlanError, match=r"what fits: --pp \d+ --microbatches 8 ") as error:
        layout_of("llama3-8b", **common, num_devices=2)
    assert "--k" not in str(error.value)
    found = layout_of("llama3-8b", **{**common, "hardware": "h200"}, num_devices=16)
    assert [x for x in found.plan.notes if x.endswith("take fewer devices in a pipeline (--pp)")]
    assert not [x for x in found.plan.notes if "--granularity" in x]


def test_what_allocators_reserve_counts_too() -> None:
    free = search().run()
    assert free.plan.memory_limit_bytes == load_hardware("a100").memory_bytes
    needed = free.plan.device_total_bytes
    tight = search(hardware=replace(load_hardware("a100"), memory_bytes=needed - 1)).run()
    assert tight.plan.device_total_bytes < needed and tight.best.choice != free.best.choice


def test_one_that_needs_more_than_the_memory_with_what_is_reserved_has_a_note() -> None:
    fixed: dict[str, int | str | None] = {
        "tensor": 1, "pipeline": 2, "num_chunks": 1, "microbatch_size": 8, "recompute": "never",
    }  # fmt: skip
    whole = search(fixed=fixed).run()
    tight = replace(load_hardware("a100"), memory_bytes=whole.plan.device_total_bytes - 1)
    found = search(fixed=fixed, hardware=tight).run()
    assert found.plan.device_total_bytes == whole.plan.device_total_bytes and not found.ruled_out
    (note,) = set(found.plan.notes) - set(whole.plan.notes)
    assert note.startswith("with what its allocator reserves ")


def test_the_chosen_one_is_the_first_of_the_list_whatever_its_simulated_step() -> None:
    found = search().run()
    slow = replace(found.best, cut=replace(found.best.cut, step_s=1.5 * found.planned[-1].step_s))
    listed = [x for x in widths_text(replace(found, planned=(slow, *found.planned[1:]))) if x.startswith("   ")]
    assert listed[0].startswith(f"   1. {slow.choice}: ") and not any("slower" in x for x in listed)


def test_the_network_of_one_shared_card_keeps_its_latency() -> None:
    said = list[str]()
    layout_of(
        "qwen3-0.6b", receiver="megatron", hardware="h100", network="400Gb/s,5us", num_devices=2, on_start=said.append
    )
    assert any(x.endswith("if they share one card, write 400Gb/s*1,5us") for x in said)
    said.clear()
    layout_of(
        "qwen3-0.6b",
        receiver="megatron",
        hardware="h100",
        network="400Gb/s*8",
        gpus_per_node=2,
        num_devices=2,
        on_start=said.append,
    )
    assert any(x.endswith("network of 200 GB/s for each device (400Gb/s*8)") for x in said)


def test_list_has_the_best_of_each_set_of_widths() -> None:
    decoder = load_decoder("llama3-8b", {**SMALL, "num_hidden_layers": 24})
    found = search(decoder=decoder, batch_size=128, fixed={"microbatch_size": 1}).run()
    lines = [x for x in widths_text(found) if ", micro-batches of" in x]
    shown = [x.partition(", micro-batches")[0].split(". ")[-1].strip() for x in lines]
    assert len(lines) > 3 and len(shown) == len(set(shown))
    assert len({x.choice.widths for x in found.planned}) < len(found.planned)


def test_a_given_dial_that_the_memory_forbids_is_named() -> None:
    made = search(fixed={"data": 4}, memory_bytes=2_500_000_000, batch_size=4)
    with pytest.raises(NoPlanError, match="some split fits if --data is left out"):
        made.run()
    assert replace(made, fixed={}).run().plan.peak_bytes <= 2_500_000_000


@pytest.mark.parametrize(
    ("fixed", "fields", "message"),
    [
        (
            {"microbatch_size": 4},
            {"batch_size": 7},
            "a batch of 7 samples is divided by no widths .* the nearest that is: 8",
        ),
        (
            {"tensor": 2},
            {"num_devices": 3},
            "no widths use all of 3 devices with --tensor 2; take --gpus 2 or --tensor 1$",
        ),
        (
            {"pipeline": 3, "tensor": 2, "data": 4},
            {"num_devices": 48},
            "--data 4, whose product is 24; take --gpus 24 or --data 8 or --pp 6 or --tensor 4$",
        ),
        (
            {"pipeline": 3, "tensor": 2, "data": 4},
            {"num_devices": 32},
            "--data 4, whose product is 24; take --gpus 24 or --pp 4$",
        ),
        (
            {},
            {"num_devices": 12},
            "nodes have 8 devices; expected whole nodes: --gpus 8 or 16, or --gpus-per-node 6$",
        ),
        ({"tensor": 3}, {}, r"8 heads cannot be divided over 3 ranks; the nearest divisors are 2 or 4 \(--tensor\)"),
        (
            {"tensor": 16},
            {"num_devices": 16},
            "a tensor group of 16 does not fit a node of 8 devices, .*; take --tensor 8",
        ),
        ({"expert": 2}, {}, "--expert is 2, and the model has no experts; leave it out"),
        ({"pipeline": 8}, {"num_devices": 8}, "has fewer than one of 6 blocks on each; take --pp 4"),
        (
            {"pipeline": 2, "num_chunks": 5},
            {},
            r"10 stages \(2 devices, 5 each\) need as many blocks, .* 6; take --vpp 3",
        ),
        ({"context": 2}, {"sequence_length": 1022}, r"1022 tokens .* over 4 ranks; .* \(twice --context\)"),
        ({"microbatch_size": 1}, {"batch_size": 10**8}, "has .* actions; expected at most"),
        ({"data": 0}, {}, "--data is 0; expected at least 1"),
        (
            {"num_chunks": 3, "pipeline": 2, "data": 1},
            {"batch_size": 3},
            "3 stages a device need .*; leave --vpp open",
        ),
        ({}, {"batch_size": 0}, "--batch-size is 0; expected at least 1"),
        ({}, {"num_devices": 0}, "--gpus is 0; expected at least 1"),
    ],
)
def test_counts_that_do_not_fit_name_the_nearest_that_do(
    fixed: dict[str, int | str | None], fields: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        search(fixed=fixed, **fields).run()


def test_names_and_dials() -> None:
    told = list[str]()
    common: dict[str, Any] = {
        "receiver": "megatron",
        "hardware": "h100",
        "settings": ["num_hidden_layers=8"],
        "on_start": told.append,
    }
    found = layout_of("meta-llama/Llama-3.1-8B", **common, num_devices=2, tensor=2)
    assert (found.best.choice.widths.devices, found.num_choices) == (4, 1)
    assert told == [
        "meta-llama/Llama-3.1-8B: 2.80 billion parameters",
        "machine: h100 with 79.1 GiB, 8 in a node; links of 450 GB/s in a node, network of 50 GB/s for each device",
    ]
    of_batch = layout_of("meta-llama/Llama-3.1-8B", **common, num_devices=2, tensor=2, data=2, batch_size=20)
    assert of_batch.best.choice.num_microbatches == 10
    for dials, message in (
        ({"num_gpus": 4, "microbatches": 8}, "--microbatches follows from --batch-size"),
        ({"num_gpus": 4, "expert_tensor": 2}, "with --gpus each expert is on one rank"),
        ({"num_devices": 2, "data": 2, "batch_size": 21}, "no multiple of 1 samples x 2 replicas; .*: 20"),
        ({"num_devices": 2, "microbatches": 8, "batch_size": 8}, "leave one of them out"),
        (
            {"num_devices": 2, "sequence_length": 1 << 12, "settings": ["learned_positions=1024"]},
            "take --sequence-length 1024",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            layout_of("meta-llama/Llama-3.1-8B", **{**common, **dials})
    with pytest.raises(UsageError, match="give --gpus N to have all widths chosen"):
        layout_of("llama3-8b", **common)


def test_layout_on_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [x for key, value in SMALL.items() for x in ("--set", f"{key}={value}")]
    arguments = ["--gpus", "4", "--gbs", "16", "--mbs", "2", "--tp", "2", "--hardware", "l40s", *small]
    assert gplan_exits("layout", "llama-3-8b", *arguments) == 0
    captured = capsys.readouterr()
    assert "--tensor-model-parallel-size 2" in captured.out and "--sequence-parallel" in captured.out
    assert "--seq-length 4096" in captured.out
    assert "predicted: a step of" in captured.err and "the best found of" in captured.err
    assert gplan_exits("layout", "llama3-8b", "--gpus", "4", "--network", "400GB/s*8") == 2
    assert "did you mean 400Gb/s*8 (bits)?" in capsys.readouterr().err
    for arguments, told in (
        (["--nodes", "6"], "--gpus-per-node"), (["--config", "a.json"], "the config.json is the first argument"),
        (["--recompute", "full"], "write always"), (["--recompute", "selective"], "write never"),
    ):  # fmt: skip
        assert gplan_exits("layout", "llama3-8b", "--gpus", "4", *arguments) == 2
        assert told in capsys.readouterr().err


def test_an_order_of_groups() -> None:
    given: dict[str, Any] = {
        "receiver": "megatron",
        "hardware": "a100",
        "settings": ["num_hidden_layers=8"],
        "tensor": 4,
    }
    with_order = layout_of("mixtral-8x7b", num_gpus=16, batch_size=32, num_devices=2, order="tp-cp-ep-pp-dp", **given)
    assert {x.choice.widths.expert for x in with_order.planned} <= {1, 4}
    assert with_order.plan.sharding == "optimizer"  # as it was priced; the trainer divides so by itself
    made = export(with_order.plan, to="megatron", profile=with_order.profile)
    assert "--use-tp-pp-dp-mapping" in made.text
    other = layout_of("llama3-8b", num_devices=2, data=2, order="dp-tp-cp-ep-pp", **given)
    made = export(other.plan, to="megatron", profile=other.profile)
    assert "--use-tp-pp-dp-mapping" not in made.text and [x for x in made.notes if "order dp-tp-cp-ep-pp" in x]
    with pytest.raises(UsageError, match="torchtitan places groups as tp-cp-ep-dp-pp; leave --order out"):
        layout_of("llama3-8b", **{**given, "receiver": "torchtitan"}, num_gpus=8, order="tp-cp-ep-pp-dp")


def test_multi_token_prediction_does_not_tie_the_head() -> None:
    common: dict[str, Any] = {"num_devices": 2, "receiver": "megatron", "hardware": "h200"}
    settings = ["num_hidden_layers=16", "num_nextn_predict_layers=1", "hidden_size=1024", "intermediate_size=4096"]
    for tied, flag in ((False, True), (True, False)):
        found = layout_of("llama3-8b", **common, settings=[*settings, f"tie_word_embeddings={str(tied).lower()}"])
        text = export(found.plan, to="megatron", profile=found.profile).text
        assert ("--untie-embeddings-and-output-weights" in text) is flag
        assert "--mtp-num-layers 1" in text
        assert "mL'" in text, "on the second of two ranks, not on the first"


def test_the_older_name_of_torchtitans_head_is_read() -> None:
    profile = search(fixed={}).profile_of(Widths(), 1)
    layers = [f"layers.{i}" for i in range(6)]
    text = str([["tok_embeddings", *layers[:4]], [*layers[4:], "norm", "output"]])
    assert read_layout(text, profile, receiver="torchtitan").cuts == (5,)


FALCON = {
    "model_type": "falcon",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "alibi": True,
}
STARCODER = {
    "model_type": "starcoder2", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1024,
    "intermediate_size": 4096, "num_key_value_heads": 2, "hidden_act": "gelu",
}  # fmt: skip


def test_what_a_trainers_models_do_not_have_is_refused_or_noted(tmp_path: Path) -> None:
    """nanotron's are Llama, Qwen2 and StarCoder2; in Megatron-LM one's own model may have what its arguments do not."""
    common: dict[str, Any] = {"hardware": "h200", "num_devices": 1}
    files = {name: tmp_path / f"{name}.json" for name in ("falcon", "starcoder")}
    files["falcon"].write_text(json.dumps(FALCON))
    files["starcoder"].write_text(json.dumps(STARCODER))
    with pytest.raises(
        UsageError, match="the model has attention and perceptron side by side, LayerNorm, .*the models of nanotron"
    ):
        layout_of(str(files["falcon"]), receiver="nanotron", **common)
    assert layout_of(str(files["starcoder"]), receiver="nanotron", **common).plan
    with pytest.raises(UsageError, match="the model has norms of queries and keys, which"):
        layout_of("qwen3-0.6b", receiver="nanotron", settings=["head_dim=64"], **common)
    notes = {}
    for receiver, name in (("megatron", "falcon"), ("megatron", "starcoder"), ("automodel", "falcon")):
        found = layout_of(str(files[name]), receiver=receiver, settings=["tie_word_embeddings=false"], **common)
        notes[receiver, name] = export(found.plan, to=receiver, profile=found.profile).notes
    assert [
        x
        for x in notes["megatron", "falcon"]
        if x.startswith(
            "Megatron-LM's own models have no attention and perceptron side by side and biases of attention by distance (ALiBi):"
        )
    ]
    told = " ".join(notes["megatron", "starcoder"])
    assert "experimental" not in told and "E stands for" not in told, "one pipeline rank has no layout"
    assert not [
        x for key in (("megatron", "starcoder"), ("automodel", "falcon")) for x in notes[key] if "own models" in x
    ]


def test_every_special_part_of_a_model_has_its_words() -> None:
    decoder = load_decoder("llama3-8b", SMALL)
    every = replace_fields(
        decoder, num_block_norms=4, norms_after=True, is_parallel=True, has_norm_biases=True, has_norm_weights=False,
        has_embedding_norm=True, has_head_norms=True, heads_norm_apart=True, is_gated=False, hidden_act="xielu", mlp_bias=True,
        lm_head_bias=True, learned_positions=8192, alibi=True, has_sinks=True, attn_output_gate=True, head_dim=64,
        values_are_keys=True, attention_chunk_size=8192,
    )  # fmt: skip
    assert not decoder.special and len(every.special) > 15
    assert {*every.special} <= {*SPECIAL_LAYERS}
