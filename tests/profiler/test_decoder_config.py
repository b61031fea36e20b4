"""Profiles from configurations: sizes as published, and shares of parallel groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gplan.core.errors import FileError, UsageError
from gplan.corrections.sharding import sharded
from gplan.cost.stage_table import StageTable
from gplan_profiler.analytic.decoder_config import Widths, known_decoders, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile, num_parameters
from gplan_profiler.analytic.hardware import load_hardware
from tests.decoders import decoder_profile

H100 = load_hardware("h100")


PUBLISHED = {  # parameters in billions, by the model cards; DeepSeek-V3's 671 are without multi-token prediction
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "mixtral-8x7b": 46.70,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "kimi-k2": 1026.5,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "qwen3-next-80b-a3b": 79.67,
    "glm-4.5-air": 106.85,  # without the layer that predicts further
    "glm-4.5": 352.80,
    "llama4-scout-17b-16e": 107.77,
    "llama4-maverick-17b-128e": 400.71,
    "gemma-3-27b": 27.01,
    "olmo-3-7b": 7.30,
    "apertus-8b": 8.053,
    "apertus-70b": 70.60,
    "deepseek-v3.2": 671.88,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert num_parameters(load_decoder(name))[0] / 1e9 == pytest.approx(billions, rel=2e-3)


def test_models_are_found_by_their_ids() -> None:
    assert load_decoder("deepseek-ai/DeepSeek-V3.2-Exp") == load_decoder("deepseek-v3.2") != load_decoder("deepseek-v3")
    with pytest.raises(UsageError, match="no model is named deepseek-ai/DeepSeek-V2"):
        load_decoder("deepseek-ai/DeepSeek-V2")


def test_deepseek_has_671_billion_parameters_and_a_layer_that_predicts_further() -> None:
    profile = decoder_profile("deepseek-v3")
    predicted = next(x for x in profile.layers if x.name == "mtp.0")
    main = profile.num_parameters - predicted.num_parameters
    assert main / 1e9 == pytest.approx(671.0, rel=2e-3)
    counted = num_parameters(load_decoder("deepseek-v3"))
    assert (counted[0], counted[2]) == (main, predicted.num_parameters)
    assert predicted.num_parameters / 1e9 == pytest.approx(11.5, rel=2e-2)
    assert set(known_decoders()) == {*PUBLISHED, "deepseek-v3"}


def test_a_forward_has_two_flops_for_each_active_parameter_and_token() -> None:
    profile = decoder_profile("llama3-8b", sequence_length=2048)
    products = sum(x.num_flops for layer in profile.layers for x in layer.costs[0].forward_work if x.kind == "matmul")
    weights = profile.num_parameters - 128256 * 4096  # the embedding is looked up
    assert products == pytest.approx(2 * 2048 * weights, rel=1e-3)


def test_work_memory_and_weights_are_divided() -> None:
    whole, split = (
        decoder_profile("deepseek-v3"),
        decoder_profile("deepseek-v3", tensor=2, expert=64, expert_tensor=1, data=64),
    )
    for before, after in zip(whole.layers[1:5], split.layers[1:5], strict=True):
        assert after.costs[0].stash_bytes == before.costs[0].stash_bytes // 2
        flops = [sum(x.num_flops for x in layer.costs[0].forward_work) for layer in (before, after)]
        assert flops[1] == pytest.approx(flops[0] / 2, rel=1e-6)
    sparse = next(i for i, x in enumerate(whole.layers) if x.kind == "SparseBlock")
    assert split.layers[sparse].num_parameters < whole.layers[sparse].num_parameters / 20


def test_a_config_file_is_read_with_other_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    path.write_text(json.dumps({**config, "q_lora_rank": None, "architectures": ["LlamaForCausalLM"]}))
    assert load_decoder(str(path), {"num_hidden_layers": 3}).num_hidden_layers == 3
    path.write_text(json.dumps({"hidden_size": "wide"}))
    with pytest.raises(FileError, match="is no configuration of a decoder"):
        load_decoder(str(path))
    for key, value, told in (
        ("num_experts", -4, "num_experts is -4"),
        ("num_nextn_predict_layers", 10**8, "expected at most 10,000"),
        ("num_attention_heads", 65, "65 heads share a hidden_size of 64"),
        ("num_local_experts", 4, "num_experts_per_tok is 0 of 4 experts"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is 0; expected at least 1"),
        ("moe_layer_freq", [0], "moe_layer_freq has 1 entries; expected one for each of the 2 layers"),
        (
            "layer_types",
            ["full_attention", "mamba"],
            "layer_types speaks of linear attention or Mamba; expected full_attention, or a model_type with such layers",
        ),
    ):
        path.write_text(json.dumps({**config, key: value}))
        with pytest.raises(FileError, match=told):
            load_decoder(str(path))
    path.write_text(json.dumps({**config, "num_local_experts": 1, "num_experts_per_tok": 2}))
    with pytest.raises(FileError, match="num_experts_per_tok is 2 of 1 experts; expected 1 to 1"):
        load_decoder(str(path))
    for content in (b"{", b'{"_name_or_path": "J\xfcrgen"}'):
        path.write_bytes(content)
        with pytest.raises(FileError, match="cannot be read"):
            load_decoder(str(path))


def test_experts_are_divided_over_ranks_that_are_there() -> None:
    with pytest.raises(
        UsageError, match="experts are divided by 64; expected a divisor of tensor x context x data = 2 x 1 x 4"
    ):
        Widths(tensor=2, expert=64, data=4)
    with pytest.raises(UsageError, match="the sequence-length size is 0"):
        Widths(sequence_length=0)
    with pytest.raises(UsageError, match="32 heads cannot be divided over 7 ranks"):
        decoder_profile("llama3-8b", tensor=7)


MIB = 2**20


def test_memory_of_a_block_by_hand() -> None:
    """Llama-3 70B at 4096 tokens: hidden states 64 MiB, queries 64, keys and values 8 each, half of the gate's input 224."""
    block = decoder_profile("llama3-70b").layers[1].costs[0]
    kept = 64 + (64 + 8 + 8) + 64 + 1 + 64 + 64 + 2 * 224 + 224 + 64  # in the order of the forward, with the output
    assert block.stash_bytes == kept * MIB
    assert block.backward_workspace_bytes == (64 + 224 + 2 * 224 - 224) * MIB  # in the gate's backward
    assert block.output_saved_later_bytes == 64 * MIB


def test_fused_cross_entropy_keeps_the_logits_alone() -> None:
    made = DecoderProfile(
        name="llama3-70b", decoder=load_decoder("llama3-70b"), widths=Widths(), hardware=H100, fuses_cross_entropy=True
    ).profile((1,))
    fused, plain = made.layers[-1].costs[0], decoder_profile("llama3-70b").layers[-1].costs[0]
    logits = 4096 * 128256
    assert fused.stash_bytes == 2 * logits + 64 * MIB
    assert plain.stash_bytes == 4 * logits + 64 * MIB
    table = 2 * 8192 * 128256  # the output layer's empty gradient
    assert fused.backward_workspace_bytes == table + 64 * MIB
    assert fused.backward.median_s < plain.backward.median_s


def test_megatron_frees_outputs_and_receives_when_it_needs() -> None:
    made = decoder_profile("llama3-70b")
    first, later = (StageTable(made, 32).row_parts(*x) for x in ((0, 3), (3, 5)))
    blocks = 1073 * MIB
    assert first.stash == 2 * blocks  # the embedding's output, and no output of the stage
    assert later.stash + later.received_activation == 2 * blocks  # what was received in place of what was sent
    assert first.received_gradient == later.received_gradient == later.received_activation == 64 * MIB
    assert first.sent == later.sent == first.received_activation == 0
    assert StageTable(made, 32).transfers.receives_ahead == 0
    assert replace(made, versions=()).is_for_megatron is False


def test_experts_wait_for_their_tokens() -> None:
    alone, spread = (decoder_profile("mixtral-8x7b", expert=x, data=4).layers[1].costs[0] for x in (1, 4))
    sent = 2 * 2 * 4096 * 4096  # two experts a token
    exchange_s = 2 * (3 * H100.link.latency_s + 0.75 * sent / H100.link.bytes_per_s)
    assert spread.forward.median_s == pytest.approx(alone.forward.median_s + exchange_s, rel=0.05)


def test_megatron_shards_the_state_in_place() -> None:
    made = DecoderProfile(
        name="llama3-8b", decoder=load_decoder("llama3-8b"), widths=Widths(data=4), hardware=H100, divides_state=False
    ).profile((1,))
    block, divided = made.layers[1], sharded(made, num_replicas=4, sharding="optimizer").layers[1]
    assert divided.weight_bytes == block.weight_bytes == 2 * block.num_parameters
    assert (divided.reduced_bytes, divided.gathered_bytes) == (0, block.weight_bytes)
    assert divided.updated_bytes == block.gradient_bytes // 4


def test_experts_on_one_rank_alone_hold_their_state() -> None:
    alone, spread = (decoder_profile("mixtral-8x7b", expert=4, data=data).layers[1] for data in (4, 8))
    experts = 2 * 3 * 4096 * 14336
    dense = alone.num_parameters - experts
    assert alone.gradient_bytes == 4 * dense
    assert alone.weight_bytes == 2 * dense + (2 + 4 + 12) * experts
    assert spread.gradient_bytes == 4 * spread.num_parameters
    assert spread.weight_bytes == 2 * spread.num_parameters + 12 * experts // 2 - 12 * experts // 8


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 128}


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, "111111"),
        ({"first_k_dense_replace": 2}, "001111"),
        ({"decoder_sparse_step": 2}, "010101"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "010001"),
        ({"interleave_moe_layer_step": 3}, "001001"),
        ({"moe_layers": [0, 5]}, "100001"),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, "001010"),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, "011011"),
        ({"mlp_layer_types": ["dense", *["sparse"] * 5]}, "011111"),
    ],
)
def test_which_blocks_have_experts(keys: dict[str, object], sparse: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **EXPERTS, **keys}))
    decoder = load_decoder(str(tmp_path / "config.json"))
    assert [decoder.is_sparse(i) for i in range(6)] == [x == "1" for x in sparse]


def test_attention_to_a_window_is_counted_by_pairs_of_tokens(tmp_path: Path) -> None:
    path, sequence, window = tmp_path / "config.json", 32000, 9000
    pairs = {
        "sliding_attention": sum(min(i + 0.5, window) for i in range(sequence)),
        "chunked_attention": sum(i % window + 0.5 for i in range(sequence)),
    }
    for kind, key in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        path.write_text(json.dumps({**SMALL, key: window, "layer_types": [kind, *["full_attention"] * 5]}))
        profile = decoder_profile(str(path), sequence_length=sequence)
        windowed, full = (
            next(x.num_flops for x in profile.layers[i].costs[0].forward_work if x.kind == "attention") for i in (1, 2)
        )
        assert windowed / full == pytest.approx(2 * pairs[kind] / sequence**2, rel=1e-3)
        assert profile.layers[1].costs[0].forward.median_s < profile.layers[2].costs[0].forward.median_s


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"moe_every": 2, "n_expert_groups": 4},
            "has moe_every, n_expert_groups, .* are not computed; if .* give --set moe_every=null --set n_expert_groups=null; else",
        ),
        (
            {"hc_mult": 4},
            "has hc_mult, .* is not computed; if the layers are those of llama without, give --set hc_mult=null",
        ),
        (
            {"num_key_values_heads": 2, "gate": 1},
            r"did you mean num_key_value_heads by num_key_values_heads\? Then give --set num_key_value_heads=2 "
            "--set num_key_values_heads=null; if the layers are those of llama without, give --set gate=null; else",
        ),
        ({"gate": "swish", "fold": [2]}, "has gate, fold"),
        ({"hybrid_override_pattern": "M-M*"}, "has hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "attention"] * 3}, "layer_types speaks of linear attention"),
        ({"layer_types": [["wavelet"], {}] * 3}, "Expected `str`, got `array`"),
        ({"layer_types": 6}, "Expected `array`, got `int`"),
        ({"full_attention_interval": "LGL"}, "has the sliding_window_pattern LGL"),
        ({"layer_types": ["wavelet"] * 6}, "layer_types has wavelet; expected chunked_attention or full_attention"),
        ({"linear_key_head_dim": 8}, "linear_key_head_dim speaks of linear attention"),
        ({"index_topk": 64}, "index_topk is 64; expected a model_type with indexed attention"),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 4}, "has no num_key_value_heads, head_dim, experts"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 6, "mamba_d_conv": 4, **GRANITE},
            "linear_num_key_heads.* missing",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": 2},
            "has no experts; expected them in a model of the model_type mixtral",
        ),
        ({"model_type": "granitemoehybrid", "mamba_proj_bias": True}, "has mamba_proj_bias"),
        ({"model_type": "minimax_m2", "use_qk_norm": False}, "has use_qk_norm"),
        ({"model_type": "jamba"}, "model_type jamba: its layers of Mamba-1 .* gplan profile --device meta"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "4 key-value heads are shared by 6 heads"),
        ({"hidden_size": 4095}, "hidden_size is 4095; expected a multiple of .* heads, or a head_dim"),
        ({"model_type": "gpt_9"}, "has the model_type gpt_9, whose layers are not known; .* near it: gpt"),
    ],
)
def test_keys_that_change_layers_are_refused(keys: dict[str, object], told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **keys}))
    with pytest.raises(FileError, match=told):
        load_decoder(str(path))


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_a_larger_one(key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "sees", key: {**SMALL, "model_type": "llama"}, "vision_config": {"depth": 2}})
    )
    found = load_decoder(str(path))
    assert [x for x in found.unused if "vision_config" in x]
    path.write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert msgspec.structs.replace(found, unused=()) == load_decoder(str(path))


def test_a_key_without_effect_is_set_to_null(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "model_type": "gpt_9", "hc_mult": 1}))
    changed = load_decoder(str(path), {"hc_mult": None, "model_type": "llama"})
    path.write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert changed == load_decoder(str(path))


def test_experts_by_the_keys_of_ernie(tmp_path: Path) -> None:
    """ERNIE 4.5: 21.8 billion parameters, of which a token takes 3, and the embedding."""
    keys = {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
        "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 103424, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_interval": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(keys))
    total, active, _ = num_parameters(load_decoder(str(tmp_path / "config.json")))
    assert (total / 1e9, active / 1e9) == (pytest.approx(21.8, abs=0.1), pytest.approx(3.0 + 0.265, abs=0.1))


CONFIGS = {  # keys of a published config.json, and its parameters in billions
    "MiniCPM3-4B": (
        {"model_type": "minicpm3", "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62, "vocab_size": 73448,
         "num_attention_heads": 40, "num_key_value_heads": 40, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
         "qk_rope_head_dim": 32, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        4.07,
    ),
    "EXAONE-3.5-2.4B": (
        {"model_type": "exaone", "hidden_size": 2560, "intermediate_size": 7168, "num_layers": 30, "vocab_size": 102400, "head_dim": 80,
         "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        2.405,
    ),
    "MiMo-V2-Flash": (
        {"model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "vocab_size": 152576,
         "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
         "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
         "moe_intermediate_size": 2048, "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0], "sliding_window": 128,
         "moe_layer_freq": [0, *[1] * 47], "add_swa_attention_sink_bias": True, "n_shared_experts": None},
        308.8,
    ),
    "Gemma-4 31B": (
        {"model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
            "vocab_size": 262144, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10}},
        30.7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_a_config_as_published(name: str, tmp_path: Path) -> None:
    keys, billions = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    found = load_decoder(str(tmp_path / "config.json"))
    assert num_parameters(found)[0] / 1e9 == pytest.approx(billions, rel=1e-3)


def test_layers_with_sizes_of_their_own(tmp_path: Path) -> None:
    """The `per_layer_config` that transformers writes; a width divides the heads of every layer."""
    path = tmp_path / "config.json"
    sizes = {**SMALL, "model_type": "llama", "num_attention_heads": 8}

    def block(**keys: object) -> list[int]:
        path.write_text(json.dumps({**sizes, **keys}))
        return [x.num_parameters for x in decoder_profile(str(path)).layers[1:-1]]

    other = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96}
    mixed = block(per_layer_config={"01": other})
    assert mixed == [block()[0], block(**other)[0], *block()[2:]] != block()
    block(per_layer_config={"01": other})
    with pytest.raises(UsageError, match="4 heads cannot be divided over 8 ranks"):
        decoder_profile(str(path), tensor=8)
    block(sliding_window=8, per_layer_config={"02": {"sliding_window": 4}})
    windows = [load_decoder(str(path)).block_kind(i, 64).attended for i in range(3)]
    assert windows[0] == windows[1] > windows[2]
    with pytest.raises(FileError, match="numbers of experts that differ"):
        block(num_local_experts=4, num_experts_per_tok=2, per_layer_config={"2": {"num_local_experts": 2}})
    for key in ("colour", "hidden_size", "vocab_size", "num_hidden_layers"):  # of no layer, or of the whole model
        with pytest.raises(FileError, match=f"has {key} of layer 1 in per_layer_config"):
            block(per_layer_config={"01": {key: 3}})
    with pytest.raises(FileError, match="has layer 99 in per_layer_config"):
        block(per_layer_config={"99": other})
    assert block(per_layer_config={"01": {"rope_theta": 1e6}}) == block()
    with pytest.raises(FileError, match="3 key-value heads are shared by 8 heads"):
        block(per_layer_config={"01": {"num_key_value_heads": 3}})


@pytest.mark.parametrize("tensor", [2, 8])
def test_experts_are_divided_by_the_tensor_width(tensor: int) -> None:
    whole, split = decoder_profile("mixtral-8x7b").layers[1], decoder_profile("mixtral-8x7b", tensor=tensor).layers[1]
    assert split.weight_bytes == pytest.approx(whole.weight_bytes / tensor, rel=1e-3)
    replicated = decoder_profile("mixtral-8x7b", tensor=tensor, expert_tensor=1).layers[1]
    assert replicated.weight_bytes > 0.9 * whole.weight_bytes
    flops = [sum(x.num_flops for x in layer.costs[0].forward_work) for layer in (whole, split, replicated)]
    assert flops[1:] == [pytest.approx(flops[0] / tensor, rel=1e-3)] * 2


def test_keys_that_are_not_used_are_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "final_logit_softcapping": 7,
        "attention_dropout": 0.1,
        "index_head_dim": None,
    }
    path.write_text(
        json.dumps({"model_type": "vision_thing", "mode": 3, "text_config": {**text, "model_type": "gemma2"}})
    )
    assert load_decoder(str(path)).unused == (
        "mode of the configuration is left out: only the language model is planned",
        "final_logit_softcapping of the configuration is left out: it adds little to the work of a layer",
    )
    path.write_text(json.dumps(SMALL))
    assert load_decoder(str(path)).unused == (
        "the configuration has no model_type: its layers are taken for those of Llama",
    )
    assert not any(load_decoder(name).unused for name in known_decoders())
