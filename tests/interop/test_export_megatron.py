"""Megatron-LM's layout, read back by a parser written from its documentation."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gplan
from gplan.core import Plan, Profile, ValueCost
from gplan.core.errors import UsageError
from gplan.interop.export.exporters import Export, export
from gplan.interop.machine_layout import layout_of
from gplan.interop.receivers import constraints_for
from gplan.simulation.simulator import schedule_of
from tests.interop.planned import cut, profiled, shared, transformer, value


def arguments(plan: Plan, profile: Profile | None = None) -> dict[str, str]:
    """What a shell hands to the program."""
    words = shlex.split(export(plan, to="megatron", profile=profile).text.replace("\\\n", ""))
    found, name = dict[str, str](), ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = word
    return found


def stages_of(layout: str) -> list[str]:
    """The letters of every stage: a letter or a group in parentheses may be repeated by *n; commas mean nothing."""
    text, end = unrolled(layout.replace(",", ""), 0)
    assert end == len(layout.replace(",", "")), f"{layout} has a parenthesis too many"
    return text.split("|")


def unrolled(text: str, at: int) -> tuple[str, int]:
    """The text from `at` to the end of the group it is in, repetitions written out."""
    made = ""
    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            item, at = unrolled(text, at + 1)
            assert text[at : at + 1] == ")", f"{text} leaves a parenthesis open"
        else:
            item = text[at]
        assert set(item) <= set("EtmL|"), f"{item!r} in {text} is no letter of a layout"
        at += 1
        times = re.compile(r"\*(\d+)").match(text, at)
        if times:
            item, at = item * int(times[1]), times.end()
        made += item
    return made, at


def check_layout(found: dict[str, str]) -> list[str]:
    """The stages of an argument list that Megatron-LM accepts."""
    stages = stages_of(found["--pipeline-model-parallel-layout"])
    letters = "".join(stages)
    assert len(stages) % int(found["--pipeline-model-parallel-size"]) == 0
    assert letters == "E" + "t" * int(found["--num-layers"]) + "L"
    return stages


def test_the_parser_reads_the_documented_example() -> None:
    stages = stages_of("Et*3|(tt|)*29,m|L")
    assert stages == ["Ettt", *["tt"] * 29, "m", "L"]
    assert stages_of("Et*2|(tt|)*22t|(tt|)*7mL") == ["Ett", *["tt"] * 22, "t", *["tt"] * 7, "mL"]
    assert stages_of("E|t*12|L") == ["E", "t" * 12, "L"]


@given(st.data(), st.integers(1, 40))
def test_every_layer_is_on_the_stage_that_the_plan_gives_it(data: st.DataObject, num_blocks: int) -> None:
    places = data.draw(st.sets(st.integers(1, num_blocks + 1), max_size=8))
    plan = cut(transformer(num_blocks), sorted(places))
    stages = check_layout(arguments(plan))
    for stage, letters in zip(plan.stages, stages, strict=True):
        assert letters.count("t") == sum(x.startswith("layers.") for x in stage.layer_names)
        assert ("E" in letters) == ("tok_embeddings" in stage.layer_names)
        assert ("L" in letters) == ("output" in stage.layer_names)


def order_of(rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int) -> list[str]:
    """The actions of a rank, as Megatron-LM's interleaved schedule documents them: a table of groups, and a warm-up."""
    groups = range(0, num_microbatches, num_ranks)
    table = [(m, c) for group in groups for c in range(num_chunks) for m in range(group, group + num_ranks)]
    num_warmup = min(len(table), 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks)
    forwards = [f"{c * num_ranks + rank}F{m}" for m, c in table]
    backwards = [f"{(num_chunks - 1 - c) * num_ranks + rank}B{m}" for m, c in table]
    steady = [x for pair in zip(forwards[num_warmup:], backwards, strict=False) for x in pair]
    return [*forwards[:num_warmup], *steady, *backwards[len(table) - num_warmup :]]


@pytest.mark.parametrize(("num_ranks", "num_chunks", "num_microbatches"), [(2, 2, 8), (3, 2, 3), (2, 3, 4), (4, 3, 16)])
def test_chunks_are_run_in_the_order_of_the_plan(num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    names, schedule = transformer(num_ranks * num_chunks), f"interleaved-1f1b:{num_chunks}"
    plan = cut(names, range(1, num_ranks * num_chunks), schedule=schedule, num_microbatches=num_microbatches)
    found = arguments(plan)
    assert (found["--pipeline-model-parallel-size"], len(check_layout(found))) == (
        str(num_ranks),
        num_ranks * num_chunks,
    )
    for rank, order in enumerate(schedule_of(plan).orders):
        assert {x.stage % num_ranks for x in order} == {rank}
        expected = order_of(rank, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches)
        assert [str(x) for x in order] == expected


def test_no_other_argument_may_stand_beside_a_layout() -> None:
    found = arguments(cut(transformer(5), [2, 3, 5], schedule="interleaved-1f1b:2"))
    assert not [name for name in found if "virtual" in name]


def test_stages_that_are_equal_are_written_once() -> None:
    plan = cut(transformer(61), [4, *range(6, 62, 2)])
    assert arguments(plan)["--pipeline-model-parallel-layout"] == "Et*3|(tt|)*28ttL"


def test_a_shell_reads_the_lines_as_one_list_of_arguments() -> None:
    plan = cut(transformer(61), [4, *range(6, 62, 2)])
    done = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + export(plan, to="megatron").text], capture_output=True, text=True, check=True
    )
    expected = [word for pair in arguments(plan).items() for word in pair]
    assert done.stdout.splitlines() == expected


def test_the_batch_sizes_are_those_of_all_replicas() -> None:
    found = arguments(cut(transformer(4), [3], num_replicas=3))
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("2", "48")


def test_gpt2_with_its_tied_embedding_can_be_expressed() -> None:
    names = ["wte", "wpe", "drop", *(f"h.{i}" for i in range(4)), "ln_f", "lm_head"]
    plan = cut([f"transformer.{x}" if x != "lm_head" else x for x in names], [5])
    profile = profiled(plan.layer_names, shared_weights=(shared(0, 8),))
    found = arguments(plan, profile)
    assert check_layout(found) == ["Ett", "ttL"]
    assert "--untie-embeddings-and-output-weights" not in found
    assert "--untie-embeddings-and-output-weights" in arguments(plan, profiled(plan.layer_names))
    notes = export(plan, to="megatron", profile=profile).notes
    assert any("E stands for transformer.wte, transformer.wpe, transformer.drop" in x for x in notes)


@pytest.mark.parametrize(("cuts", "chunk"), [([3], 2), ([4], 1), ([5], 4), ([2, 3], 1)])
def test_recompute_chunks_divide_every_stage(cuts: list[int], chunk: int) -> None:
    plan = cut(transformer(4), cuts, recompute="always")
    found = arguments(plan)
    assert (found["--recompute-granularity"], found["--recompute-method"]) == ("full", "uniform")
    assert int(found["--recompute-num-layers"]) == chunk
    assert all(stage.count("t") % chunk == 0 for stage in check_layout(found))


def test_what_the_embeddings_send_to_every_block_is_made_anew_on_each_stage() -> None:
    plan = cut(["embed", "rotary", "layers.0", "layers.1", "norm"], [3])
    profile = profiled(plan.layer_names, values=(value(1, 2, 3), value(2, 3), value(3, 4)))
    notes = export(plan, to="megatron", profile=profile).notes
    assert "every stage of Megatron-LM computes itself what the plan sends on from rotary" in notes


REFUSALS = [
    (cut(["stem", "layer1.0", "layer2.0", "fc"], [2]), "blocks in 2 lists (layer1, layer2)"),
    (cut(["stem", "cell", "fc"], [2]), "no blocks such as layers.0"),
    (cut(["0", "1", "2"], [2]), "no blocks such as layers.0"),
    (cut(["embed", "layers.0", "mix", "layers.1", "head"], [2]), "other layers stand between the blocks layers.0 and"),
    (cut(["layers.0", "layers.1", "head"], [1]), "no layer stands before the blocks"),
    (cut(["embed", "layers.0", "layers.1"], [1]), "no layer stands after the blocks"),
    (cut(["embed", "drop", "layers.0", "head"], [1]), "cuts before drop, within the embeddings; Megatron-LM cannot cut them"),
    (cut(["embed", "layers.0", "norm", "head"], [3]), "cuts before head, within the head; Megatron-LM cannot cut it"),
    (cut(transformer(2), [2], schedule="gpipe"), "schedule gpipe; Megatron-LM can express 1f1b or interleaved-1f1b"),
    (cut(transformer(5), [2, 3, 5], schedule="zb-v"), "schedule zb-v; Megatron-LM can express 1f1b or interleaved-1f1b"),
    (cut(transformer(5), [3], schedule="zb-h1"), "schedule zb-h1; Megatron-LM can express 1f1b or interleaved-1f1b"),
    (
        cut(transformer(5), [2, 3, 5], schedule="interleaved-1f1b:2", num_microbatches=5),
        "the plan interleaves 5 micro-batches on 2 devices; Megatron-LM does so in groups of 2",
    ),
    (cut(transformer(5), [3], schedule="interleaved-1f1b:2"), "the plan has 2 stages on one device; Megatron-LM interleaves on 2"),
    (cut(transformer(2), [2], recompute="except-last"), "recompute except-last; Megatron-LM can express never or always"),
    (cut(transformer(2), [2], recompute="selected"), "recompute selected"),
    (cut(transformer(2), [2], granularity="op"), "cuts between operations, such as tok_embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_the_layout_has_no_words_for_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        export(plan, to="megatron")
    assert told in str(caught.value)


WITH_PREDICTION = ["embed", *(f"layers.{i}" for i in range(6)), "mtp.0", "norm", "head"]


@pytest.mark.parametrize(
    ("cuts", "layout"),
    [
        ([2, 5, 7], "Et|t*3|tt|mL"),
        ([3, 5, 8], "Ett|tt|ttm|L"),
        ([1, 7, 8], "E|t*6|m|L"),
    ],
)
def test_multi_token_prediction_has_a_letter_of_its_own(cuts: list[int], layout: str) -> None:
    found = arguments(cut(WITH_PREDICTION, cuts))
    assert (found["--pipeline-model-parallel-layout"], found["--mtp-num-layers"]) == (layout, "1")


def test_multi_token_prediction_is_on_the_last_stage_of_a_rank_other_than_the_first() -> None:
    interleaved = cut(WITH_PREDICTION, [2, 7, 8], schedule="interleaved-1f1b:2")
    with pytest.raises(UsageError, match=r"multi-token prediction is on stage 2, which is on rank 0"):
        export(interleaved, to="megatron")
    early = cut(WITH_PREDICTION, [7, 8, 9], schedule="interleaved-1f1b:2")
    with pytest.raises(UsageError, match="cuts before head, within the head"):
        export(early, to="megatron")


def test_the_profile_shows_blocks_that_differ_share_or_skip() -> None:
    plan = cut(transformer(3), [2])
    plain = profiled(plan.layer_names)
    wide = replace(plain.layers[2], num_parameters=7)
    differ = replace(plain, layers=(*plain.layers[:2], wide, *plain.layers[3:]))
    notes = export(plan, to="megatron", profile=differ).notes
    assert any("blocks of several kinds (Layer of 0 parameters, Layer of 7 parameters)" in x for x in notes)
    chain = tuple(value(i, i + 1) for i in range(5))
    skips = replace(plain, values=(*chain, value(1, 3)))
    for profile, told in (
        (
            skips,
            r"the output of layers.0 is read beyond layers.1, by layers.2; .* a copy of it too \(y.clone\(\)\), or train with gplan run",
        ),
        (replace(plain, shared_weights=(shared(1, 3),)), "tied.weight is shared by blocks"),
    ):
        with pytest.raises(UsageError, match=told):
            export(plan, to="megatron", profile=profile)
    assert check_layout(arguments(plan, replace(plain, values=chain))) == ["Et", "ttL"]


@pytest.mark.parametrize("readers", [(2, 3), (2, 3, 4)])
def test_conditioning_made_before_the_blocks_is_not_said_to_be_computed_on_every_stage(
    readers: tuple[int, ...],
) -> None:
    plan = cut(["embed", "condition", "layers.0", "layers.1", "head"], [3])
    conditioning = value(1, *readers)
    with_gradient = replace(conditioning, costs=(ValueCost(microbatch_size=2, num_bytes=4, gradient_bytes=4),))
    profile = profiled(plan.layer_names, values=(value(0, 2), value(2, 3), value(3, 4), with_gradient))
    with pytest.raises(UsageError, match=r"the output of condition is read beyond layers.0, by layers.1; .*gplan run"):
        export(plan, to="megatron", profile=profile)
    assert readers[2:] or export(plan, to="megatron", profile=replace(profile, values=(conditioning,)))


@pytest.mark.parametrize("receiver", ["megatron", "verl", "vllm"])
def test_final_sequential_is_no_second_list_of_blocks(receiver: str) -> None:
    names = ["embed", "layers.0", "layers.1", "head.0", "head.1", "head.2"]
    kinds = ["Embedding", "Block", "Block", "LayerNorm", "GELU", "Linear"]
    plan, plain = cut(names, [2]), profiled(names)
    profile = replace(plain, layers=tuple(replace(x, kind=kind) for x, kind in zip(plain.layers, kinds, strict=True)))
    assert gplan.balance(profile, num_devices=2, constraints=constraints_for(receiver, profile)).cuts in ((2,), (3,))
    assert export(plan, to=receiver, profile=profile).text
    with pytest.raises(UsageError, match=r"blocks in 2 lists \(layers, head\)"):  # of equal modules
        export(plan, to=receiver, profile=plain)


def of_configuration(path: Path, *, receiver: str = "megatron", **config: Any) -> tuple[Plan, Export]:
    """The layout of a small model on 2 devices with 2 stages each, and its export."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    (path / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 4096, **config}))
    found = layout_of(
        str(path / "config.json"), receiver=receiver, hardware="h100", num_devices=2, num_chunks=2, tensor=2
    )
    return found.plan, export(found.plan, to=receiver, profile=found.profile)


MAMBA = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-ME-M-M*", "mamba_num_heads": 32, "mamba_head_dim": 64,
    "n_groups": 4, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
GRANITE = {
    "model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 32,
    "mamba_n_groups": 2, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_d_conv": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "num_hidden_layers": 4,
}  # fmt: skip
DELTA = {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "head_dim": 64,
}  # fmt: skip
MIXED = {
    "model_type": "deepseek_v3", "num_hidden_layers": 8, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(("config", "letters"), [(MAMBA, "M-M*-ME-M-M*"), (GRANITE, "MEME*EME")])
def test_hybrid_models_have_a_pattern_with_the_stages_of_the_plan(
    tmp_path: Path, config: dict[str, Any], letters: str
) -> None:
    plan, made = of_configuration(tmp_path, **config)
    words = shlex.split(made.text.replace("\\\n", ""))
    stages = words[words.index("--hybrid-layer-pattern") + 1].split("|")
    assert "".join(stages) == letters
    per_block = len(letters) // sum("layers." in x for x in plan.layer_names)
    assert [len(x) for x in stages] == [
        per_block * sum("layers." in name for name in x.layer_names) for x in plan.stages
    ]
    assert not {"--num-layers", "--pipeline-model-parallel-layout"} & {*words} and "--bf16" in words
    assert any("needs a Megatron-LM newer than core 0.16" in x for x in made.notes)
    assert not any("was checked with" in x for x in made.notes)


def test_which_blocks_have_experts_or_gated_delta_nets(tmp_path: Path) -> None:
    _, made = of_configuration(tmp_path, **MIXED)
    assert "--moe-layer-freq '([0]*2+[1]*6)'" in made.text and "--expert-model-parallel-size 1" in made.text
    assert not any("several kinds" in x for x in made.notes)
    assert any("the flags of the model stand beside these, such as --hidden-size" in x for x in made.notes)
    _, made = of_configuration(tmp_path, **DELTA)
    assert "--linear-attention-freq '([1]*3+[0]*1)*2'" in made.text and "gated_delta_net" in made.text
    assert "--pipeline-model-parallel-layout" in made.text


@pytest.mark.parametrize(
    ("config", "receiver", "told"),
    [
        (MAMBA, "verl", "the model has Mamba-2 layers, which the models of verl do not have"),
        (MAMBA, "nanotron", "Mamba-2 layers and perceptrons without a gate, which the models of nanotron"),
        ({**MAMBA, "num_nextn_predict_layers": 1}, "megatron", "--set num_nextn_predict_layers=0"),
        ({**MAMBA, "n_groups": 1}, "megatron", "--tensor is 2, which does not divide .* 1; take --tensor 1"),
    ],
)
def test_what_a_trainer_has_no_layers_for_is_refused(
    tmp_path: Path, config: dict[str, Any], receiver: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        of_configuration(tmp_path, receiver=receiver, **config)


def test_norms_that_megatron_does_not_have_are_named(tmp_path: Path) -> None:
    _, made = of_configuration(tmp_path, model_type="gemma3", num_hidden_layers=8)
    assert any("own models have no norms both before and after attention" in x for x in made.notes)


def test_every_width_of_the_plan_is_written(tmp_path: Path) -> None:
    _, made = of_configuration(tmp_path, num_hidden_layers=8)
    assert "--tensor-model-parallel-size 2" in made.text and "--context-parallel-size 1" in made.text
    _, made = of_configuration(tmp_path, receiver="verl", num_hidden_layers=8)
    assert "megatron.tensor_model_parallel_size=2" in made.text and "megatron.context_parallel_size=1" in made.text
