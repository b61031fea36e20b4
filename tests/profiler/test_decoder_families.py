"""Configurations of Hugging Face's families: parameters of their own models, to the unit, and which blocks differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import decoder_profile
from gplan_profiler.analytic.hardware import load_hardware

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24,
    "vocab_size": 500, "num_hidden_layers": 4,
}  # fmt: skip
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
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
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    profile = decoder_profile(str(path), load_hardware("h100"), widths=Widths())
    blocks = [sum(x.numel() for x in block.parameters()) for block in model.model.layers]
    assert [x.num_parameters for x in profile.layers[1:-1]] == blocks
    shared = sum(x.num_parameters for x in profile.shared_weights)
    assert sum(x.num_parameters for x in profile.layers) + shared == sum(x.numel() for x in model.parameters())
    assert len([x for x in profile.notes if "is not used" in x]) == 2 * (name == "Gemma-2")  # its caps of logits
    attended = [load_decoder(str(path)).attended(i, 10**6) < 1 for i in range(config.num_hidden_layers)]
    windows = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert attended == [x != "full_attention" for x in windows]
