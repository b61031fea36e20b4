"""Models of the size that people train, as the libraries configure them, with random weights and made data.

Setting `name` chooses the model: gpt2 (124 M parameters, tied), bert (110 M, tied), llama (134 M, untied), t5 (223 M,
tied three ways), vit (86 M), moe (a Mixtral of 193 M), whisper (241 M, tied). Setting `optimizer_name` is adamw or sgd,
with momentum. ResNet-50 is examples/resnet.py with depth=50 and image_size=224. Tokens are drawn over the whole
vocabulary, so that gradients of embeddings have as many different rows as in training.

    gplan profile benchmarks/real_size_models.py --set name=gpt2 --microbatch-size 1
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

SEQUENCE_LENGTH = 128
NUM_FRAMES = 300  # of audio, of which the encoder makes half as many positions
NUM_CLASSES = 1000


_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {"use_cache": False}),
    "bert": ("Bert", "ForMaskedLM", {}),
    "llama": ("Llama", "ForCausalLM", {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "use_cache": False,
    }),
    "t5": ("T5", "ForConditionalGeneration", {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "use_cache": False, "decoder_start_token_id": 0,
    }),
    "vit": ("ViT", "ForImageClassification", {"num_labels": NUM_CLASSES}),
    "moe": ("Mixtral", "ForCausalLM", {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_local_experts": 8, "use_cache": False,
    }),
    "whisper": ("Whisper", "ForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "max_source_positions": NUM_FRAMES // 2, "use_cache": False,
    }),
}  # fmt: skip
"""The library's names and sizes; without a cache of keys and values, which serves generation only."""


def _config(name: str) -> Any:
    if name not in _MODELS:
        raise ValueError(f"no model is called {name!r}; choose {', '.join(_MODELS)}")
    kind, _, sizes = _MODELS[name]
    return getattr(hf, f"{kind}Config")(**sizes)


def model(name: str = "gpt2") -> nn.Module:
    """The model of that name; its output has `logits`."""
    config, (kind, head, _) = _config(name), _MODELS[name]
    found: nn.Module = getattr(hf, kind + head)(config)
    return found


def batches(batch_size: int, name: str = "gpt2", seed: int = 0) -> Iterator[tuple[Any, Tensor]]:
    """Endless (inputs, target classes); tokens are int64 (batch, sequence), images and audio float32."""
    config, generator = _config(name), torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(config.vocab_size, (batch_size, SEQUENCE_LENGTH), generator=generator)

    while True:
        match name:
            case "vit":
                images = torch.randn(batch_size, 3, config.image_size, config.image_size, generator=generator)
                yield images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
            case "t5":
                yield {"input_ids": tokens(), "decoder_input_ids": tokens()}, tokens()
            case "whisper":
                audio = torch.randn(batch_size, config.num_mel_bins, NUM_FRAMES, generator=generator)
                yield {"input_features": audio, "decoder_input_ids": tokens()}, tokens()
            case _:
                yield tokens(), tokens()


def example_inputs(batch_size: int, name: str = "gpt2", seed: int = 0) -> Any:
    """The inputs of the first batch."""
    inputs, _ = next(batches(batch_size, name=name, seed=seed))
    return inputs


def loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of the output's `logits`."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], optimizer_name: str = "adamw") -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum."""
    if optimizer_name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-4)
