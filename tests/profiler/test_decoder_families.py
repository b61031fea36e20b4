"""Configurations of Hugging Face's families: parameters of their own models, to the unit, and which blocks differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gplan_profiler.analytic.decoder_config import load_decoder
from gplan_profiler.analytic.decoder_profile import num_parameters
from tests.decoders import decoder_profile

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24,
    "vocab_size": 500, "num_hidden_layers": 4,
}  # fmt: skip
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
OLD = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None}  # of classes that have other keys
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
WHOLE = {"head_dim": 12}  # where the class has no other one than hidden size by heads
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 24, "mamba_d_conv": 3, "mamba_expand": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
LOCAL = {"local", "sliding_attention", "chunked_attention", "indexed_attention"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3": ("llama", {}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
    "Qwen2-MoE": (
        "qwen2_moe",
        {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 112, "head_dim": 12,
         "decoder_sparse_step": 2, "qkv_bias": True},
    ),
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}),
    "Llama-4": ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 208}),
    "Llama-4 by a list": ("llama4_text", {"num_local_experts": 4, "moe_layers": [0, 1, 3], "intermediate_size_mlp": 208}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 2,
         "moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "GPT-OSS": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma-2": ("gemma2", {}),
    "Gemma-3": ("gemma3_text", {"num_hidden_layers": 7}),
    "Mistral": ("mistral", {}),
    "Granite-3": ("granite", {}),
    "Granite-3 with experts": ("granitemoe", {**WHOLE, "num_local_experts": 4}),
    "Granite-4": (
        "granitemoehybrid",
        {**WHOLE, **MAMBA, "num_local_experts": 4, "shared_intermediate_size": 72,
         "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "Granite-4 without experts": (
        "granitemoehybrid", {**WHOLE, **MAMBA, "num_local_experts": 0, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "Nemotron-H": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 24,
         "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 48,
         "moe_shared_expert_intermediate_size": 80, "num_nextn_predict_layers": 0},
    ),
    "Bamba": ("bamba", {**WHOLE, **MAMBA, "attn_layer_indices": [2]}),
    "Qwen3-next": ("qwen3_next", {**LINEAR, "num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 2,
                                  "shared_expert_intermediate_size": 56}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "MiniMax-01": ("minimax", {"num_local_experts": 4}),
    "MiniMax-M2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3.2": (
        "deepseek_v32",
        {**LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "first_k_dense_replace": 1, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 4},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    ),
    "dots.llm1": (
        "dots1",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48,
         "first_k_dense_replace": 1},
    ),
    "Nemotron-4": ("nemotron", {}),
    "StableLM": ("stablelm", {**WHOLE, "use_qkv_bias": True}),
    "EXAONE with experts": ("exaone_moe", {**WHOLE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "GLM-4": ("glm4", {"pad_token_id": 0}),
    "GLM-4.5": (
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_qk_norm": True,
         "attention_bias": True, "num_nextn_predict_layers": 0, "num_mtp_layers": 0},
    ),
    "OLMo": ("olmo", WHOLE),
    "OLMo-2": ("olmo2", WHOLE),
    "OLMo-3": ("olmo3", WHOLE),
    "OLMoE": ("olmoe", {**WHOLE, "num_experts": 4, "num_experts_per_tok": 2}),
    "Phi-2": ("phi", WHOLE),
    "Phi-3": ("phi3", {**WHOLE, "pad_token_id": 0}),
    "Phi-3.5-MoE": ("phimoe", {**WHOLE, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "Falcon-7B": ("falcon", {"head_dim": None, "ffn_hidden_size": 160}),
    "Falcon-40B": ("falcon", {"head_dim": None, "ffn_hidden_size": 160, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "Falcon-RW": ("falcon", {"head_dim": None, "ffn_hidden_size": 160, "multi_query": False, "parallel_attn": False, "bias": True}),
    "Pythia": ("gpt_neox", {**WHOLE, "num_key_value_heads": 8}),
    "GPT-2": ("gpt2", {**WHOLE, "num_key_value_heads": 8, "n_inner": 160, "n_positions": 77}),
    "StarCoder2": ("starcoder2", WHOLE),
    "Command R+": ("cohere", {**WHOLE, "use_qk_norm": True}),
    "Command R7B": ("cohere2", WHOLE),
    "SmolLM3": ("smollm3", {**WHOLE, "pad_token_id": 0}),
    "ERNIE 4.5": ("ernie4_5", {"use_bias": True}),
    "ERNIE 4.5 with experts": (
        "ernie4_5_moe", {**WHOLE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_end_index": 2},
    ),
    "Hunyuan": ("hunyuan_v1_dense", {"rope_parameters": ROPE}),
    "Hunyuan-A13B": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2] * 4, "rope_parameters": ROPE}),
    "Seed-OSS": ("seed_oss", {"attention_out_bias": True}),
    "EXAONE-4": ("exaone4", WHOLE),
    "Helium": ("helium", {**WHOLE, "attention_bias": True}),
    "OPT": ("opt", {**OLD, "ffn_dim": 160, "word_embed_proj_dim": 96, "max_position_embeddings": 77}),
    "BioGPT": ("biogpt", {**OLD, "intermediate_size": 160, "max_position_embeddings": 77}),
    "XGLM": ("xglm", {**OLD, "ffn_dim": 160}),
    "CTRL": ("ctrl", {**OLD, "dff": 160}),
    "GPT-J": ("gptj", {**OLD, "rotary_dim": 8, "n_inner": 160}),
    "CodeGen": ("codegen", {**OLD, "rotary_dim": 8}),
    "SantaCoder": ("gpt_bigcode", {**OLD, "n_positions": 77}),
    "StarCoder with keys of each head": ("gpt_bigcode", {**OLD, "n_positions": 77, "multi_query": False}),
    "GPT-Neo": ("gpt_neo", {**OLD, "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 77}),
    "Persimmon": ("persimmon", {**OLD, "intermediate_size": 160}),
    "Phi with norms of heads": ("phi", {**WHOLE, "qk_layernorm": True}),
    "StableLM-2": ("stablelm", {**WHOLE, "qk_layernorm": True}),
    "Apertus": ("apertus", WHOLE),
    "Apertus without xIELU": ("apertus", {**WHOLE, "hidden_act": "relu2", "attention_bias": True}),
    "CWM": ("cwm", {}),
    "Ministral": ("ministral", {**TURNS, "rope_parameters": ROPE, "rms_norm_eps": 1e-6}),
    "InternLM3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "IQuest-Coder": ("iquestcoder", {}),
    "Aria": ("aria_text", {"moe_num_experts": 4}),
    "Jais-2": ("jais2", {}),
    "nanochat": ("nanochat", WHOLE),
    "VaultGemma": ("vaultgemma", {}),
    "Gemma-4": (
        "gemma4_text",
        {**TURNS, "hidden_size_per_layer_input": 0, "global_head_dim": 40, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
    ),
    "Gemma-4 unified": ("gemma4_unified_text", TURNS),
    "MiniCPM3": ("minicpm3", {**LATENT, "num_key_value_heads": 8, "v_head_dim": None}),
    "Youtu": ("youtu", {**LATENT, "num_key_value_heads": 8, "attention_bias": True}),
    "MiMo-V2-Flash": (
        "mimo_v2_flash",
        {**TURNS, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "swa_num_key_value_heads": 4, "attention_bias": True},
    ),
    "Hunyuan 3": ("hy_v3", EXPERTS),
    "Trinity": ("afmoe", {**EXPERTS, "num_shared_experts": 1}),
    "Laguna": (
        "laguna", {**EXPERTS, **TURNS, "shared_expert_intermediate_size": 56, "num_attention_heads_per_layer": [8, 4, 4, 8]},
    ),
    "Laguna with whole gates": ("laguna", {**EXPERTS, **TURNS, "shared_expert_intermediate_size": 56, "gating": "per-element"}),
    "Solar Open": ("solar_open", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "attention_bias": True}),
    "Mellum": ("mellum", {**EXPERTS, **TURNS, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "Kolibri": ("kolibri1", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "Flint": ("flint", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "HyperCLOVA X": ("hyperclovax", {}),
    "HyperCLOVA X without norms of results": ("hyperclovax", {"use_post_norm": False}),
    "Granite-4 with windows": ("granitemoe_swa", {**WHOLE, **TURNS, "num_local_experts": 4, "shared_intermediate_size": 72}),
    "Compass": ("cohere_compass_text", {**WHOLE, **TURNS, "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}),
    "Command A with experts": (
        "cohere2_moe",
        {**TURNS, "num_experts": 4, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
         "prefix_dense_intermediate_size": 208},
    ),
    "OLMo hybrid": ("olmo_hybrid", {**WHOLE, **LINEAR, "pad_token_id": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    sizes = {x: y for x, y in {**SIZES, **settings}.items() if y is not None}
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    length = min(getattr(config, "max_position_embeddings", 4096), 4096)
    profile = decoder_profile(str(path), sequence_length=length)
    body = getattr(model, "model", model.base_model)
    body = getattr(body, "decoder", body)
    blocks = [sum(x.numel() for x in block.parameters()) for block in (body.h if hasattr(body, "h") else body.layers)]
    assert [x.num_parameters for x in profile.layers[1:-1]] == blocks
    shared = sum(x.num_parameters for x in profile.shared_weights)
    assert sum(x.num_parameters for x in profile.layers) + shared == sum(x.numel() for x in model.parameters())
    caps = {"Gemma-2": 2, "VaultGemma": 2, "nanochat": 1}  # of logits
    assert len([x for x in profile.notes if "is left out" in x]) == caps.get(name, 0)
    decoder = load_decoder(str(path))
    assert not (decoder.learned_positions and decoder.block_kind(0, 1).is_rotary)
    attended = [decoder.block_kind(i, 10**6).attended < 1 for i in range(config.num_hidden_layers)]
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    windows = kinds or ["full_attention"] * config.num_hidden_layers
    if not kinds and getattr(config, "sliding_window", None):
        windows = ["sliding_attention"] * config.num_hidden_layers
    assert attended == [x in LOCAL for x in windows]
    products = sum(x.num_flops for layer in profile.layers for x in layer.costs[0].forward_work if x.kind == "matmul")
    total, active, _ = num_parameters(decoder)
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert products == pytest.approx(2 * length * (active - looked_up), rel=0.04), "weights that no product reads"
    assert total >= active
