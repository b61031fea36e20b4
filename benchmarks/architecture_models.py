"""Tiny random models of many architectures, for benchmarks/architectures.py.

Setting `name` chooses the model: one of `ARCHITECTURES`. Hugging Face models are built from their config classes and
called by name, with `labels` where they compute their own loss, with the library's defaults for everything else (the
cache of keys and values included). Only sizes are set, and dropout to 0, so that gradients can be compared.

    gplan profile benchmarks/architecture_models.py --set name=gpt2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import handwritten_models as handwritten
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

VOCABULARY, LENGTH, NUM_CLASSES = 96, 16, 5
IMAGE_SIZE = 32

loss_reduction = "mean"

Inputs = Callable[[int, torch.Generator], Any]
Sizes = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a model is built, and what it is called with."""

    group: str
    build: Callable[[], nn.Module]
    inputs: Inputs


ARCHITECTURES: dict[str, Architecture] = {}


def model(name: str = "gpt2") -> nn.Module:
    """The model of that name, with random weights and without dropout."""
    made = ARCHITECTURES[name].build()
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # of class labels
            module.dropout_prob = 0.0
    return made.train()


def batches(batch_size: int, name: str = "gpt2") -> Iterator[tuple[Any, None]]:
    """Endless (inputs, None): the targets are among the inputs, or made by `loss`."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield ARCHITECTURES[name].inputs(batch_size, generator), None


def loss(output: Any, target: None) -> Tensor:
    """The model's own loss, or the mean squared distance of all its float outputs from a wave."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    leaves = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
    distances = [F.mse_loss(x.float(), _wave(x)) for x in leaves if x.is_floating_point() and x.dim()]
    return torch.stack(distances).mean()


def _wave(x: Tensor) -> Tensor:
    """The same target for every sample."""
    return torch.arange(x[0].numel(), device=x.device).cos().view_as(x[0]).expand_as(x)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD, which also takes sparse gradients."""
    return torch.optim.SGD(parameters, lr=1e-3)


def define(name: str, group: str, build: Callable[[], nn.Module], inputs: Inputs) -> None:
    """Add an architecture."""
    ARCHITECTURES[name] = Architecture(group=group, build=build, inputs=inputs)


# Inputs


def integers(*shape: int, most: int = VOCABULARY, least: int = 3) -> Inputs:
    """Whole numbers; the smallest are left out, as they are often those of padding and the like."""
    return lambda n, g: torch.randint(least, most, (n, *shape), generator=g)


def floats(*shape: int) -> Inputs:
    """Normally distributed numbers."""
    return lambda n, g: torch.randn(n, *shape, generator=g)


def ones(*shape: int) -> Inputs:
    """A mask of ones."""
    return lambda n, g: torch.ones(n, *shape, dtype=torch.int64)


def named(**inputs: Inputs) -> Inputs:
    """Inputs by name."""
    return lambda n, g: {name: make(n, g) for name, make in inputs.items()}


def several(*inputs: Inputs) -> Inputs:
    """Inputs by place."""
    return lambda n, g: tuple(make(n, g) for make in inputs)


def tokens_with_labels(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """As for the training of a language model: the labels are the tokens."""
    tokens = integers(LENGTH)(n, generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def padded_tokens(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Every sample ends with the same number of padded places."""
    given = tokens_with_labels(n, generator)
    given["attention_mask"][:, -4:] = 0
    given["labels"][:, -4:] = -100
    return given


TOKENS = integers(LENGTH)
CLASSES = integers(most=NUM_CLASSES, least=0)
IMAGES = floats(3, IMAGE_SIZE, IMAGE_SIZE)
LABELLED_IMAGES = named(pixel_values=IMAGES, labels=CLASSES)
SEQUENCE_PAIRS = named(input_ids=TOKENS, attention_mask=ones(LENGTH), labels=integers(LENGTH // 2))
VECTORS = floats(8)


# Hugging Face


def configured(kind: str, **settings: Any) -> Any:
    """A config with dropout of all kinds off."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    _turn_dropout_off(config)
    return config


def _turn_dropout_off(config: Any) -> None:
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            _turn_dropout_off(value)
        elif not ("drop" in key or "jitter" in key or key.startswith("mask_")):
            continue
        elif isinstance(value, float):
            setattr(config, key, 0.0)
        elif isinstance(value, (list, tuple)):  # one rate for each stage
            setattr(config, key, [0.0] * len(value))


def hugging_face(name: str, group: str, head: str, config: Callable[[], Any], inputs: Inputs) -> None:
    """Add a model of transformers: of the class `head`, or what an Auto class of that name makes."""

    def build() -> nn.Module:
        import transformers

        found = getattr(transformers, head)
        made: nn.Module = found.from_config(config()) if head.startswith("Auto") else found(config())
        return made

    define(name, group, build, inputs)


def alike(group: str, head: str, inputs: Inputs, *some: tuple[str, Sizes]) -> None:
    """Add models with one kind of head: pairs of names and the sizes that they share; "{}" in `head` is a name."""
    for kinds, sizes in some:
        for kind in kinds.split():
            made = partial(configured, kind, **sizes)
            hugging_face(kind.lower(), group, head.format(kind), made, inputs)


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
EARLY = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 2 * LENGTH}
EXPERTS = {
    **GROUPED, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
STATES = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 4}
RELATIVE = {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
TWO_SIDED = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
PATCHES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": IMAGE_SIZE,
    "patch_size": 8, "num_labels": NUM_CLASSES,
}  # fmt: skip
STAGED = {"image_size": IMAGE_SIZE, "num_labels": NUM_CLASSES}
WINDOWS = {**STAGED, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": NUM_CLASSES}
WAVE_SIZES = {
    **SMALL, "conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [8, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}  # fmt: skip

alike(
    "decoder", "AutoModelForCausalLM", tokens_with_labels,
    ("GPT2 GPTBigCode", EARLY),
    ("GPTJ CodeGen", {**EARLY, "rotary_dim": 4}),
    ("GPTNeoX Falcon Phi Persimmon BioGpt", SMALL),
    ("OPT", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    ("Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 32}),
    ("Llama Qwen2 StableLm Olmo Olmo2 Cohere Granite Starcoder2 Nemotron Arcee DiffLlama NanoChat Apertus BitNet", GROUPED),
    ("Qwen3 Gemma Helium SeedOss", {**GROUPED, "head_dim": 8}),
    ("Mistral Olmo3 Cohere2 Exaone4", {**GROUPED, "sliding_window": 8}),
    ("Ministral Gemma2 Gemma3Text", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    ("Phi3 SmolLM3", {**GROUPED, "pad_token_id": 0}),
    ("Glm Glm4", {**GROUPED, "head_dim": 8, "pad_token_id": 0}),
    ("XLNet", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64}),
    ("GPTNeo", {**SMALL, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8}),
)  # fmt: skip
alike(
    "mixture of experts", "AutoModelForCausalLM", tokens_with_labels,
    ("Mixtral Olmoe GraniteMoe Phimoe", EXPERTS),
    ("DeepseekV2 DeepseekV3", LATENT),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    ("GptOss", {**EXPERTS, "head_dim": 8, "sliding_window": 8}),
    ("Dots1", {**EXPERTS, "head_dim": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    ("FlexOlmo", {**EXPERTS, "pad_token_id": 0}),
    ("Qwen3Next", {**EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2}),
    ("MiniMax", {**EXPERTS, "head_dim": 8, "block_size": 8}),
    ("Jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
               "mamba_d_state": 4, "use_mamba_kernels": False, "pad_token_id": 0}),
)  # fmt: skip
alike(
    "state space or recurrent", "AutoModelForCausalLM", tokens_with_labels,
    ("Mamba FalconMamba", {**STATES, "time_step_rank": 4}),
    ("Mamba2", {**STATES, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    ("RecurrentGemma", {**GROUPED, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8, "head_dim": 8}),
    ("Lfm2", {**GROUPED, "full_attn_idxs": [1, 3]}),
    ("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "context_length": 2 * LENGTH}),
)  # fmt: skip
alike(
    "encoder", "AutoModelForMaskedLM", tokens_with_labels,
    ("Bert Roberta MPNet FNet MegatronBert", SMALL),
    ("Albert Electra RoFormer", {**SMALL, "embedding_size": 16}),
    ("Deberta", RELATIVE),
    ("DebertaV2", {**RELATIVE, "position_buckets": 8}),
    ("ModernBert", {**SMALL, "local_attention": 8, "pad_token_id": 0}),
    ("Longformer", {**SMALL, "attention_window": 4, "pad_token_id": 0}),
    ("BigBird", {**SMALL, "attention_type": "original_full"}),
    ("Funnel", {"vocab_size": VOCABULARY, "d_model": 32, "block_sizes": [2, 2], "n_head": 4, "d_head": 8, "d_inner": 64}),
    ("Nystromformer", {**SMALL, "num_landmarks": 4, "segment_means_seq_len": LENGTH}),
    ("Reformer", {"vocab_size": VOCABULARY, "hidden_size": 32, "feed_forward_size": 64, "num_attention_heads": 4,
                  "attention_head_size": 8, "attn_layers": ["local"] * 3, "local_attn_chunk_length": 8, "is_decoder": False,
                  "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]}),
)  # fmt: skip
alike(
    "encoder-decoder", "AutoModelForSeq2SeqLM", SEQUENCE_PAIRS,
    ("T5 UMT5", T5_SIZES),
    ("Bart Pegasus Marian MBart Blenderbot M2M100", TWO_SIDED),
    ("SwitchTransformers", {**T5_SIZES, "num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1,
                            "num_sparse_decoder_layers": 1}),
)  # fmt: skip
hugging_face(
    "whisper", "encoder-decoder", "WhisperForConditionalGeneration",
    lambda: configured("Whisper", **TWO_SIDED, num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=LENGTH,
                       suppress_tokens=None, begin_suppress_tokens=None, bos_token_id=1),
    named(input_features=floats(8, 2 * LENGTH), labels=integers(LENGTH // 2)),
)  # fmt: skip
alike(
    "vision", "{}ForImageClassification", LABELLED_IMAGES,
    ("ViT DeiT", PATCHES),
    ("Dinov2", {**PATCHES, "mlp_ratio": 2}),
    ("Swin Swinv2", WINDOWS),
    ("ConvNext ConvNextV2", {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ("ResNet", {**CONVOLUTIONS, "layer_type": "basic"}),
    ("RegNet", {**CONVOLUTIONS, "groups_width": 4}),
    ("MobileNetV2", {**STAGED, "depth_multiplier": 0.25}),
    ("MobileViT", {**STAGED, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]}),
)  # fmt: skip
alike("audio", "{}ForCTC", named(input_values=floats(800), labels=integers(4)), ("Wav2Vec2 Hubert WavLM", WAVE_SIZES))


# Text and images together

TEXT_SIDE = {**SMALL, "projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
IMAGE_SIDE = {**PATCHES, "projection_dim": 16}
TEXT_AND_IMAGE = named(
    input_ids=TOKENS, attention_mask=ones(LENGTH), pixel_values=IMAGES, return_loss=lambda n, g: True
)


hugging_face(
    "clip", "text and image", "CLIPModel",
    lambda: configured("CLIP", text_config=TEXT_SIDE, vision_config=IMAGE_SIDE, projection_dim=16), TEXT_AND_IMAGE,
)  # fmt: skip


def images_in_text(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sixteen places for the patches of an image, then text."""
    places, words = torch.full((n, 16), VOCABULARY - 1), torch.randint(3, VOCABULARY - 1, (n, 8), generator=generator)
    tokens = torch.cat([places, words], 1)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
        "pixel_values": IMAGES(n, generator),
    }


hugging_face(
    "llava", "text and image", "LlavaForConditionalGeneration",
    lambda: configured("Llava", text_config=configured("Llama", **GROUPED), vision_config=configured("CLIPVision", **PATCHES),
                       image_token_index=VOCABULARY - 1, vision_feature_select_strategy="default"), images_in_text,
)  # fmt: skip

# Other inputs and outputs

hugging_face(
    "patchtst", "time series", "PatchTSTForPrediction",
    lambda: configured("PatchTST", num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, prediction_length=8,
                       num_hidden_layers=4, d_model=32, num_attention_heads=4, ffn_dim=64, loss="mse"),
    named(past_values=floats(32, 2), future_values=floats(8, 2)),
)  # fmt: skip
hugging_face(
    "informer", "time series", "InformerForPrediction",
    lambda: configured("Informer", prediction_length=8, context_length=16, lags_sequence=[1, 2], d_model=16, encoder_layers=2,
                       decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
                       decoder_ffn_dim=32, num_time_features=1, input_size=1),
    named(past_values=floats(18), past_time_features=floats(18, 1), past_observed_mask=lambda n, g: torch.ones(n, 18),
          future_values=floats(8), future_time_features=floats(8, 1)),
)  # fmt: skip
hugging_face(
    "perceiver", "other inputs", "PerceiverForMaskedLM",
    lambda: configured("Perceiver", vocab_size=VOCABULARY, d_model=32, d_latents=32, num_latents=8, num_blocks=1,
                       num_self_attends_per_block=4, num_self_attention_heads=4, num_cross_attention_heads=4,
                       max_position_embeddings=LENGTH),
    named(inputs=TOKENS, labels=TOKENS),
)  # fmt: skip

# Ways in which Hugging Face models are trained


def varied(
    name: str, kind: str, sizes: Sizes, change: Callable[[Any], Any], inputs: Inputs = tokens_with_labels
) -> None:
    """Add a causal language model that is changed after it was built."""

    def build() -> nn.Module:
        import transformers

        made = transformers.AutoModelForCausalLM.from_config(configured(kind, **sizes))
        changed: nn.Module = change(made) or made
        return changed

    define(name, "as Hugging Face models are trained", build, inputs)


def _adapted(model: nn.Module, **settings: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **settings))


def _frozen_below(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)


varied("llama, gradient checkpointing", "Llama", GROUPED, lambda x: x.gradient_checkpointing_enable())
varied("llama, padding", "Llama", GROUPED, lambda x: None, padded_tokens)
varied("llama, bfloat16", "Llama", GROUPED, lambda x: x.to(torch.bfloat16))
varied("llama, frozen below", "Llama", GROUPED, _frozen_below)
varied("llama, LoRA", "Llama", GROUPED, lambda x: _adapted(x, target_modules=["q_proj", "v_proj"]))
varied("mixtral, router loss", "Mixtral", {**EXPERTS, "output_router_logits": True}, lambda x: None)
varied("llama, hidden states returned", "Llama", {**GROUPED, "output_hidden_states": True}, lambda x: None)


# Beyond libraries

for name, build, inputs in (
    ("modded-nanogpt", handwritten.CastHead, TOKENS),
    ("diffusion U-Net", handwritten.DiffusionUnet, several(floats(3, 16, 16), integers(most=1000))),
    ("WaveNet", handwritten.WaveNet, floats(16, 32)),
    ("Fourier neural operator", handwritten.FourierOperator, floats(16, 32)),
    ("DLRM", handwritten.Dlrm, several(VECTORS, integers(4, 3, most=50))),
    ("LSTM over time", handwritten.Recurrent, TOKENS),
    ("complex activations", handwritten.ComplexActivations, VECTORS),
    ("sparse embeddings", handwritten.Sparse, TOKENS),
    ("one encoder, two inputs", handwritten.Siamese, several(VECTORS, VECTORS)),
):  # fmt: skip
    define(name, "beyond libraries", build, inputs)
