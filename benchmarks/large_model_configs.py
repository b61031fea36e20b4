"""Large language models by their public configurations, without weights: 8 to 671 billion parameters.

Setting `name` chooses the model. Weights are bfloat16, the optimizer is AdamW. Nothing is downloaded.

    gplan profile benchmarks/large_model_configs.py --set name=llama3-70b --microbatch-size 1 --device meta --hardware h100
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

SEQUENCE_LENGTH = 4096
T5_LENGTH = 512  # of the text that is read, and of what continues it

_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def _llama(width: int, feed_forward: int, num_blocks: int, num_heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": width, "intermediate_size": feed_forward, "num_hidden_layers": num_blocks}
    return "Llama", {**_LLAMA, **sizes, "num_attention_heads": num_heads}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-8b": _llama(4096, 14336, 32, 32),
    "llama3-70b": _llama(8192, 28672, 80, 64),
    "llama3-405b": _llama(16384, 53248, 126, 128),
    "mixtral-8x22b": ("Mixtral", {
        "vocab_size": 32000, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
    }),
    "deepseek-v3": ("DeepseekV3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096,
    }),
    "qwen3-235b-a22b": ("Qwen3Moe", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "max_position_embeddings": 40960,
    }),
    "t5-11b": ("T5", {
        "vocab_size": 32128, "d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_layers": 24, "num_heads": 128,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }),
}  # fmt: skip
"""The library's name and the sizes."""


def model(name: str = "llama3-8b") -> nn.Module:
    """The model of that name in bfloat16; its output has `logits`."""
    if name not in CONFIGS:
        raise ValueError(f"no model is called {name!r}; choose one of {', '.join(CONFIGS)}")
    kind, sizes = CONFIGS[name]
    config = getattr(hf, f"{kind}Config")(**sizes, use_cache=False)  # a cache serves generation only
    auto = hf.AutoModelForSeq2SeqLM if name == "t5-11b" else hf.AutoModelForCausalLM
    found: nn.Module = auto.from_config(config, dtype=torch.bfloat16)
    return found


def example_inputs(batch_size: int, name: str = "llama3-8b") -> Any:
    """Tokens, int64 (batch, sequence); those of T5 by name."""
    if name == "t5-11b":
        tokens = torch.zeros(batch_size, T5_LENGTH, dtype=torch.int64)
        return {"input_ids": tokens, "decoder_input_ids": tokens}
    return torch.zeros(batch_size, SEQUENCE_LENGTH, dtype=torch.int64)


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def batches(batch_size: int, name: str = "llama3-8b") -> Iterable[tuple[Any, Tensor]]:
    """Endless (inputs, target tokens)."""
    inputs = example_inputs(batch_size, name)
    while True:
        yield inputs, torch.zeros_like(inputs["input_ids"] if isinstance(inputs, dict) else inputs)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, whose state is in the weights' precision."""
    return torch.optim.AdamW(parameters, lr=1e-4)
