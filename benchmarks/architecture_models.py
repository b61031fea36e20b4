"""Tiny random models of many architectures, for benchmarks/architectures.py.

Setting `name` chooses the model: one of `ARCHITECTURES`. Hugging Face models are built from their config classes and
called by name, with `labels` where they compute their own loss, with the library's defaults for everything else (the
cache of keys and values included). Only sizes are set, and dropout to 0, so that gradients can be compared.

    gplan profile benchmarks/architecture_models.py --set name=gpt2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, NUM_CLASSES = 96, 16, 5
IMAGE_SIZE = 32

loss_reduction = "mean"

Inputs = Callable[[int, torch.Generator], Any]


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


def always(value: object) -> Inputs:
    """A constant."""
    return lambda n, g: value


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


TOKENS = integers(LENGTH)
CLASSES = integers(most=NUM_CLASSES, least=0)
IMAGES = floats(3, IMAGE_SIZE, IMAGE_SIZE)
SEQUENCE_PAIRS = named(input_ids=TOKENS, attention_mask=ones(LENGTH), labels=integers(LENGTH // 2))


# Hugging Face


def configured(name: str, **settings: Any) -> Any:
    """A config with dropout of all kinds off."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
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


def causal(group: str, **configs: dict[str, Any]) -> None:
    """Add causal language models, trained with labels."""
    for kind, settings in configs.items():
        hugging_face(
            kind.lower(),
            group,
            "AutoModelForCausalLM",
            lambda kind=kind, settings=settings: configured(kind, **settings),
            tokens_with_labels,
        )


causal(
    "decoder",
    GPT2=EARLY,
    GPTNeo={
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
    },
    GPTJ={**EARLY, "rotary_dim": 4},
    GPTNeoX=SMALL,
    GPTBigCode=EARLY,
    CodeGen={**EARLY, "rotary_dim": 4},
    OPT={**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    Bloom={"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    Falcon=SMALL,
    Mpt={"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 32},
    Llama=GROUPED,
    Mistral={**GROUPED, "sliding_window": 8},
    Ministral={**GROUPED, "sliding_window": 8, "head_dim": 8},
    Qwen2=GROUPED,
    Qwen3={**GROUPED, "head_dim": 8},
    Gemma={**GROUPED, "head_dim": 8},
    Gemma2={**GROUPED, "head_dim": 8, "sliding_window": 8},
    Gemma3Text={**GROUPED, "head_dim": 8, "sliding_window": 8},
    Phi=SMALL,
    Phi3={**GROUPED, "pad_token_id": 0},
    StableLm=GROUPED,
    Olmo=GROUPED,
    Olmo2=GROUPED,
    Olmo3={**GROUPED, "sliding_window": 8},
    Cohere=GROUPED,
    Cohere2={**GROUPED, "sliding_window": 8},
    Granite=GROUPED,
    Starcoder2=GROUPED,
    Nemotron=GROUPED,
    SmolLM3={**GROUPED, "pad_token_id": 0},
    Glm={**GROUPED, "head_dim": 8, "pad_token_id": 0},
    Glm4={**GROUPED, "head_dim": 8, "pad_token_id": 0},
    Exaone4={**GROUPED, "sliding_window": 8},
    Persimmon=SMALL,
    BioGpt=SMALL,
    XGLM={"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 64, "num_layers": 4, "attention_heads": 4},
    Arcee=GROUPED,
    Helium={**GROUPED, "head_dim": 8},
    DiffLlama=GROUPED,
    NanoChat=GROUPED,
    Apertus=GROUPED,
    SeedOss={**GROUPED, "head_dim": 8},
    BitNet=GROUPED,
    CTRL={"vocab_size": VOCABULARY, "n_embd": 32, "dff": 64, "n_layer": 4, "n_head": 4, "n_positions": 2 * LENGTH},
)
causal(
    "mixture of experts",
    Mixtral=EXPERTS,
    DeepseekV2=LATENT,
    DeepseekV3=LATENT,
    GptOss={**EXPERTS, "head_dim": 8, "sliding_window": 8},
    Qwen2Moe={**EXPERTS, "shared_expert_intermediate_size": 16},
    Qwen3Moe={**EXPERTS, "head_dim": 8},
    Olmoe=EXPERTS,
    GraniteMoe=EXPERTS,
    Phimoe=EXPERTS,
    Llama4Text={**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    Glm4Moe={**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
    Ernie4_5_Moe={**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    Jamba={
        **EXPERTS, "mamba_d_state": 4, "mamba_d_conv": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4,
    },
    Qwen3Next={
        **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    JetMoe={**EXPERTS, "kv_channels": 8, "num_key_value_heads": 2, "num_attention_heads": 4},
    MiniMax={**EXPERTS, "head_dim": 8, "block_size": 8},
    Lfm2Moe={**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    Dots1={**EXPERTS, "head_dim": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    FlexOlmo={**EXPERTS, "pad_token_id": 0},
)  # fmt: skip
causal(
    "state space or recurrent",
    Mamba={"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 4},
    Mamba2={
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "chunk_size": 8,
    },
    FalconMamba={"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 4},
    Rwkv={
        "vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 4,
        "intermediate_size": 64, "context_length": 32,
    },
    RecurrentGemma={**GROUPED, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    Bamba={
        **GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    Lfm2={**GROUPED, "full_attn_idxs": [1, 3]},
    FalconH1={
        **GROUPED, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    Zamba2={
        **SMALL, "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "mamba_d_state": 8, "n_mamba_heads": 8,
        "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1,
    },
    GraniteMoeHybrid={
        **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8, "shared_intermediate_size": 32,
    },
)  # fmt: skip


def encoder(head: str, inputs: Inputs, **configs: dict[str, Any]) -> None:
    """Add encoders with a head for some task."""
    for kind, settings in configs.items():
        task = head.removeprefix("AutoModelFor")
        hugging_face(
            kind.lower() + ("" if task == "MaskedLM" else f", {task}"),
            "encoder",
            head,
            lambda kind=kind, settings=settings: configured(kind, **settings),
            inputs,
        )


encoder(
    "AutoModelForMaskedLM",
    tokens_with_labels,
    Bert=SMALL,
    Roberta=SMALL,
    Albert={**SMALL, "embedding_size": 16},
    Deberta={**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    DebertaV2={**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    Electra={**SMALL, "embedding_size": 16},
    DistilBert={
        "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 32,
    },
    ModernBert={**SMALL, "local_attention": 8, "pad_token_id": 0},
    MPNet=SMALL,
    FNet=SMALL,
    SqueezeBert={**SMALL, "embedding_size": 32},
    MobileBert={**SMALL, "embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    ConvBert={**SMALL, "embedding_size": 16, "conv_kernel_size": 3},
    RoFormer={**SMALL, "embedding_size": 16},
    Esm={**SMALL, "position_embedding_type": "rotary", "pad_token_id": 0, "mask_token_id": 1},
    MegatronBert=SMALL,
    Nystromformer={**SMALL, "num_landmarks": 8, "segment_means_seq_len": 16},
    Longformer={**SMALL, "attention_window": 4, "pad_token_id": 0},
    BigBird={**SMALL, "attention_type": "original_full"},
    Funnel={
        "vocab_size": VOCABULARY, "d_model": 32, "d_inner": 64, "n_head": 4, "d_head": 8, "block_sizes": [2, 2],
        "num_decoder_layers": 1,
    },
)  # fmt: skip
encoder(
    "AutoModelForSequenceClassification",
    named(input_ids=TOKENS, attention_mask=ones(LENGTH), labels=CLASSES),
    XLMRoberta={**SMALL, "num_labels": NUM_CLASSES},
    LayoutLM={**SMALL, "num_labels": NUM_CLASSES},
    NomicBert={**SMALL, "num_labels": NUM_CLASSES},
    XLNet={
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_layer": 4,
        "n_head": 4,
        "d_inner": 64,
        "num_labels": NUM_CLASSES,
    },
)
encoder(
    "AutoModelForQuestionAnswering",
    named(
        input_ids=TOKENS,
        attention_mask=ones(LENGTH),
        start_positions=integers(most=LENGTH),
        end_positions=integers(most=LENGTH),
    ),
    Camembert=SMALL,
)


def sequence_to_sequence(**configs: tuple[str, dict[str, Any], Inputs]) -> None:
    """Add encoder-decoders."""
    for kind, (head, settings, inputs) in configs.items():
        hugging_face(
            kind.lower(),
            "encoder-decoder",
            head,
            lambda kind=kind, settings=settings: configured(kind, **settings),
            inputs,
        )


TWO_SIDED = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
AUDIO_FEATURES = floats(8, 2 * LENGTH)
sequence_to_sequence(
    T5=("AutoModelForSeq2SeqLM", T5_SIZES, SEQUENCE_PAIRS),
    UMT5=("AutoModelForSeq2SeqLM", T5_SIZES, SEQUENCE_PAIRS),
    SwitchTransformers=(
        "AutoModelForSeq2SeqLM",
        {**T5_SIZES, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0},
        SEQUENCE_PAIRS,
    ),
    Bart=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    Pegasus=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    Marian=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    MBart=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    Blenderbot=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    M2M100=("AutoModelForSeq2SeqLM", TWO_SIDED, SEQUENCE_PAIRS),
    LED=(
        "AutoModelForSeq2SeqLM",
        {**TWO_SIDED, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        SEQUENCE_PAIRS,
    ),
    ProphetNet=(
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
            "max_position_embeddings": 32, "disable_ngram_loss": True, "num_buckets": 8, "relative_max_distance": 16,
        },
        SEQUENCE_PAIRS,
    ),
    PegasusX=("AutoModelForSeq2SeqLM", {**TWO_SIDED, "num_global_tokens": 4, "block_size": 8}, SEQUENCE_PAIRS),
    Moonshine=(
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 1,
        },
        named(input_values=floats(4000), labels=integers(LENGTH // 2)),
    ),
    LongT5=("AutoModelForSeq2SeqLM", {**T5_SIZES, "local_radius": 3, "encoder_attention_type": "local"}, SEQUENCE_PAIRS),
    Whisper=(
        "WhisperForConditionalGeneration",
        {
            **TWO_SIDED, "num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": LENGTH,
            "suppress_tokens": None, "begin_suppress_tokens": None, "bos_token_id": 1,
        },
        named(input_features=AUDIO_FEATURES, labels=integers(LENGTH // 2)),
    ),
    Speech2Text=(
        "Speech2TextForConditionalGeneration",
        {**TWO_SIDED, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64},
        named(input_features=floats(2 * LENGTH, 8), labels=integers(LENGTH // 2)),
    ),
)  # fmt: skip


def vision(**configs: tuple[str, dict[str, Any]]) -> None:
    """Add image models; classifiers are trained with labels."""
    for kind, (head, settings) in configs.items():
        has_labels = "Classification" in head
        inputs = named(pixel_values=IMAGES, labels=CLASSES) if has_labels else named(pixel_values=IMAGES)
        hugging_face(
            kind.lower(),
            "vision",
            head,
            lambda kind=kind, settings=settings: configured(kind, **settings),
            inputs,
        )


PATCHES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": IMAGE_SIZE,
    "patch_size": 8, "num_labels": NUM_CLASSES,
}  # fmt: skip
STAGED = {"image_size": IMAGE_SIZE, "num_labels": NUM_CLASSES}
CLASSIFIER = "AutoModelForImageClassification"
vision(
    ViT=(CLASSIFIER, PATCHES),
    DeiT=("DeiTForImageClassification", PATCHES),
    Beit=("BeitForImageClassification", {**PATCHES, "use_relative_position_bias": True}),
    Swin=(CLASSIFIER, {**STAGED, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    Swinv2=(CLASSIFIER, {**STAGED, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    ConvNext=(CLASSIFIER, {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ConvNextV2=(CLASSIFIER, {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ResNet=(CLASSIFIER, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": NUM_CLASSES}),
    RegNet=(CLASSIFIER, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "groups_width": 4, "num_labels": NUM_CLASSES}),
    Dinov2=(CLASSIFIER, {**PATCHES, "mlp_ratio": 2}),
    Segformer=(
        "SegformerForImageClassification",
        {"num_labels": NUM_CLASSES, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    ),
    PoolFormer=(CLASSIFIER, {"num_labels": NUM_CLASSES, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    MobileNetV2=(CLASSIFIER, {**STAGED, "depth_multiplier": 0.25}),
    MobileViT=(CLASSIFIER, {**STAGED, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 8], "num_attention_heads": 2}),
    Levit=("LevitForImageClassification", {**STAGED, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}),
    Pvt=(CLASSIFIER, {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}),
    Cvt=(CLASSIFIER, {"num_labels": NUM_CLASSES, "embed_dim": [8, 16, 24], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}),
    EfficientNet=(CLASSIFIER, {**STAGED, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}),
    Hiera=(CLASSIFIER, {**STAGED, "image_size": [IMAGE_SIZE, IMAGE_SIZE], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2], "num_query_pool": 1, "masked_unit_size": [4, 4]}),
    DPT=("DPTForDepthEstimation", {**PATCHES, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}),
    Yolos=("YolosForObjectDetection", {**PATCHES, "image_size": [IMAGE_SIZE, IMAGE_SIZE], "num_detection_tokens": 5}),
    DINOv3ViT=("AutoModel", {**PATCHES, "pos_embed_rescale": None}),
    VitDet=("VitDetModel", PATCHES),
    FocalNet=(CLASSIFIER, {**STAGED, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4}),
    SwiftFormer=(CLASSIFIER, {**STAGED, "embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    Perceiver=(
        "PerceiverForImageClassificationLearned",
        {**STAGED, "num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 2, "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    ),
    CLIPVision=("CLIPVisionModelWithProjection", {**PATCHES, "projection_dim": 16}),
    IJepa=("IJepaModel", PATCHES),
)  # fmt: skip


def segmentation_config() -> Any:
    """A SegFormer that labels every pixel."""
    return configured(
        "Segformer",
        num_labels=NUM_CLASSES,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    )


def detr_config() -> Any:
    """A DETR on a ResNet."""
    backbone = configured(
        "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return configured(
        "Detr", use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=5, num_labels=NUM_CLASSES,
    )  # fmt: skip


hugging_face(
    "segformer, every pixel", "vision", "SegformerForSemanticSegmentation", segmentation_config,
    named(pixel_values=IMAGES, labels=integers(IMAGE_SIZE, IMAGE_SIZE, most=NUM_CLASSES, least=0)),
)  # fmt: skip
hugging_face("detr", "vision", "DetrForObjectDetection", detr_config, named(pixel_values=IMAGES))

hugging_face(
    "videomae", "vision", "VideoMAEForVideoClassification",
    lambda: configured("VideoMAE", **PATCHES, num_frames=4, tubelet_size=2),
    named(pixel_values=floats(4, 3, IMAGE_SIZE, IMAGE_SIZE), labels=CLASSES),
)  # fmt: skip
hugging_face(
    "timesformer", "vision", "TimesformerForVideoClassification", lambda: configured("Timesformer", **PATCHES, num_frames=4),
    named(pixel_values=floats(4, 3, IMAGE_SIZE, IMAGE_SIZE), labels=CLASSES),
)  # fmt: skip
hugging_face(
    "sam, vision encoder", "vision", "SamVisionModel",
    lambda: configured("SamVision", **PATCHES, output_channels=16, mlp_dim=64, window_size=2, global_attn_indexes=[1, 3]),
    named(pixel_values=IMAGES),
)  # fmt: skip
hugging_face(
    "mask2former", "vision", "Mask2FormerModel",
    lambda: configured(
        "Mask2Former", feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, encoder_layers=2,
        decoder_layers=2, num_attention_heads=4, dim_feedforward=64, num_queries=5,
        backbone_config=configured("Swin", **STAGED, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2],
                                   window_size=4, out_features=["stage1", "stage2", "stage3", "stage4"]),
    ),
    named(pixel_values=floats(3, 64, 64)),
)  # fmt: skip

WAVES = floats(800)
WAVE_SIZES = {
    **SMALL, "conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [8, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}  # fmt: skip
for kind, head in {
    "Wav2Vec2": "Wav2Vec2ForCTC", "Hubert": "HubertForCTC", "WavLM": "WavLMForCTC", "SEW": "SEWForCTC",
    "Data2VecAudio": "Data2VecAudioForCTC", "UniSpeech": "UniSpeechForCTC",
}.items():  # fmt: skip
    hugging_face(
        kind.lower(), "audio", head, lambda kind=kind: configured(kind, **WAVE_SIZES),
        named(input_values=WAVES, labels=integers(4)),
    )  # fmt: skip
hugging_face(
    "ast", "audio", "ASTForAudioClassification",
    lambda: configured("AST", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_length=32,
                       num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8, num_labels=NUM_CLASSES),
    named(input_values=floats(32, 16), labels=CLASSES),
)  # fmt: skip
hugging_face(
    "patchtst", "time series", "PatchTSTForPrediction",
    lambda: configured("PatchTST", num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=32,
                       num_attention_heads=4, ffn_dim=64, num_hidden_layers=3, prediction_length=8, loss="mse"),
    named(past_values=floats(32, 3), future_values=floats(8, 3)),
)  # fmt: skip
hugging_face(
    "patchtsmixer", "time series", "PatchTSMixerForPrediction",
    lambda: configured("PatchTSMixer", num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=16,
                       num_layers=3, prediction_length=8, loss="mse"),
    named(past_values=floats(32, 3), future_values=floats(8, 3)),
)  # fmt: skip


hugging_face(
    "time series transformer", "time series", "TimeSeriesTransformerForPrediction",
    lambda: configured("TimeSeriesTransformer", prediction_length=8, context_length=16, lags_sequence=[1, 2], num_time_features=1,
                       d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32),
    named(past_values=floats(18), past_time_features=floats(18, 1), past_observed_mask=ones(18), future_values=floats(8),
          future_time_features=floats(8, 1)),
)  # fmt: skip
hugging_face(
    "decision transformer", "time series", "DecisionTransformerModel",
    lambda: configured("DecisionTransformer", state_dim=6, act_dim=2, hidden_size=32, n_layer=3, n_head=4, max_ep_len=32),
    named(states=floats(LENGTH, 6), actions=floats(LENGTH, 2), rewards=floats(LENGTH, 1), returns_to_go=floats(LENGTH, 1),
          timesteps=integers(LENGTH, most=32), attention_mask=ones(LENGTH)),
)  # fmt: skip


# Text and images together

TEXT_SIDE = {**SMALL, "projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
IMAGE_SIDE = {**PATCHES, "projection_dim": 16}
IMAGE_TOKEN, NUM_IMAGE_TOKENS = VOCABULARY - 1, (IMAGE_SIZE // 8) ** 2
TEXT_AND_IMAGE = named(input_ids=TOKENS, attention_mask=ones(LENGTH), pixel_values=IMAGES, return_loss=always(True))


def text_with_image(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens that begin with the places of an image."""
    text = integers(LENGTH, most=VOCABULARY - 1)(n, generator)
    places = torch.full((n, NUM_IMAGE_TOKENS), IMAGE_TOKEN)
    tokens = torch.cat([places, text], dim=1)
    labels = torch.cat([torch.full_like(places, -100), text], dim=1)
    images = IMAGES(n, generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": images, "labels": labels}


hugging_face(
    "clip", "text and image", "CLIPModel",
    lambda: configured("CLIP", text_config=TEXT_SIDE, vision_config=IMAGE_SIDE, projection_dim=16), TEXT_AND_IMAGE,
)  # fmt: skip
hugging_face(
    "siglip", "text and image", "SiglipModel",
    lambda: configured("Siglip", text_config=TEXT_SIDE, vision_config=IMAGE_SIDE), TEXT_AND_IMAGE,
)  # fmt: skip
hugging_face(
    "blip", "text and image", "BlipForConditionalGeneration",
    lambda: configured("Blip", text_config={**TEXT_SIDE, "encoder_hidden_size": 32}, vision_config=IMAGE_SIDE, projection_dim=16),
    named(input_ids=TOKENS, attention_mask=ones(LENGTH), pixel_values=IMAGES, labels=TOKENS),
)  # fmt: skip
hugging_face(
    "vilt", "text and image", "ViltModel", lambda: configured("Vilt", **SMALL, image_size=IMAGE_SIZE, patch_size=8),
    named(input_ids=TOKENS, attention_mask=ones(LENGTH), pixel_values=IMAGES),
)  # fmt: skip
hugging_face(
    "git", "text and image", "GitForCausalLM",
    lambda: configured("Git", **SMALL, vision_config=PATCHES),
    named(input_ids=TOKENS, attention_mask=ones(LENGTH), pixel_values=IMAGES, labels=TOKENS),
)  # fmt: skip
hugging_face(
    "llava", "text and image", "LlavaForConditionalGeneration",
    lambda: configured(
        "Llava",
        text_config=configured("Llama", **{**GROUPED, "max_position_embeddings": 64}),
        vision_config=configured("CLIPVision", **IMAGE_SIDE),
        image_token_index=IMAGE_TOKEN, image_seq_length=NUM_IMAGE_TOKENS,
    ),
    text_with_image,
)  # fmt: skip
hugging_face(
    "gemma3, with images", "text and image", "Gemma3ForConditionalGeneration",
    lambda: configured(
        "Gemma3",
        text_config={**GROUPED, "head_dim": 8, "sliding_window": 8, "max_position_embeddings": 64},
        vision_config={**PATCHES, "vision_use_head": False}, mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN,
    ),
    lambda n, g: _four_places_of_an_image(text_with_image(n, g)),
)  # fmt: skip
hugging_face(
    "smolvlm", "text and image", "SmolVLMForConditionalGeneration",
    lambda: configured(
        "SmolVLM", text_config=configured("Llama", **{**GROUPED, "max_position_embeddings": 64, "pad_token_id": 0}),
        vision_config={**PATCHES}, scale_factor=2, image_token_id=IMAGE_TOKEN, pad_token_id=0,
    ),
    lambda n, g: {**(x := _four_places_of_an_image(text_with_image(n, g))), "pixel_values": x["pixel_values"][:, None]},
)  # fmt: skip


def _four_places_of_an_image(given: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: x[:, NUM_IMAGE_TOKENS - 4 :] for name, x in given.items() if name != "pixel_values"}
    return {**kept, "pixel_values": given["pixel_values"], "token_type_ids": (kept["labels"] < 0).long()}


hugging_face(
    "paligemma", "text and image", "PaliGemmaForConditionalGeneration",
    lambda: configured(
        "PaliGemma",
        text_config=configured("Gemma", **{**GROUPED, "head_dim": 8, "max_position_embeddings": 64}),
        vision_config=configured("SiglipVision", **{**PATCHES, "projection_dim": 32}),
        image_token_index=IMAGE_TOKEN, projection_dim=32,
    ),
    lambda n, g: {**(given := text_with_image(n, g)), "token_type_ids": (given["labels"] >= 0).long()},
)  # fmt: skip
hugging_face(
    "vision-encoder-decoder", "text and image", "VisionEncoderDecoderModel",
    lambda: _vision_encoder_decoder_config(), named(pixel_values=IMAGES, labels=integers(LENGTH // 2)),
)  # fmt: skip


def _vision_encoder_decoder_config() -> Any:
    import transformers

    reader = configured("ViT", **PATCHES)
    writer = configured("GPT2", **EARLY, is_decoder=True, add_cross_attention=True)
    found = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(reader, writer)
    found.decoder_start_token_id, found.pad_token_id = 1, 0
    return found


# Ways in which Hugging Face models are trained


def varied(
    name: str, kind: str, settings: dict[str, Any], change: Callable[[Any], Any], inputs: Inputs = tokens_with_labels
) -> None:
    """Add a causal language model that is changed after it was built."""

    def build() -> nn.Module:
        import transformers

        made = transformers.AutoModelForCausalLM.from_config(configured(kind, **settings))
        changed: nn.Module = change(made) or made
        return changed

    define(name, "as Hugging Face models are trained", build, inputs)


def _adapted(model: nn.Module, **settings: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **settings))


def _virtual_tokens(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _with_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _frozen_below(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)


class UnderAutocast(nn.Module):
    """A model whose forward runs in bfloat16 where autocast says so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(**inputs)


PADDED_PLACES = torch.arange(LENGTH) >= LENGTH - 4


def padded_tokens(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Every sample ends with the same number of padded places."""
    given = tokens_with_labels(n, generator)
    given["attention_mask"][:, PADDED_PLACES] = 0
    given["labels"][:, PADDED_PLACES] = -100
    return given


varied("llama, gradient checkpointing", "Llama", GROUPED, lambda x: x.gradient_checkpointing_enable())
varied(
    "llama, reentrant checkpointing", "Llama", GROUPED,
    lambda x: x.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True}),
)  # fmt: skip
varied(
    "bert as a decoder, gradient checkpointing",
    "Bert",
    {**SMALL, "is_decoder": True},
    lambda x: x.gradient_checkpointing_enable(),
)
varied("llama, eager attention", "Llama", GROUPED, _with_eager_attention)
varied("llama, padding", "Llama", GROUPED, lambda x: None, padded_tokens)
varied("llama, bfloat16", "Llama", GROUPED, lambda x: x.to(torch.bfloat16))
varied("llama, float64", "Llama", GROUPED, lambda x: x.double())
varied("llama, autocast", "Llama", GROUPED, UnderAutocast)
varied("llama, frozen below", "Llama", GROUPED, _frozen_below)
varied("llama, LoRA", "Llama", GROUPED, lambda x: _adapted(x, target_modules=["q_proj", "v_proj"]))
varied(
    "gpt2, LoRA and trained norms",
    "GPT2",
    EARLY,
    lambda x: _adapted(x, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True),
)
varied("mixtral, LoRA on attention", "Mixtral", EXPERTS, lambda x: _adapted(x, target_modules=["q_proj", "k_proj"]))
varied("llama, DoRA", "Llama", GROUPED, lambda x: _adapted(x, target_modules=["q_proj"], use_dora=True))
varied("llama, prompt tuning", "Llama", GROUPED, _virtual_tokens)
varied("llama, LoRA and gradient checkpointing", "Llama", GROUPED, lambda x: _checkpointed_adapter(x))
varied("mixtral, router loss", "Mixtral", {**EXPERTS, "output_router_logits": True}, lambda x: None)
varied("llama, hidden states returned", "Llama", {**GROUPED, "output_hidden_states": True}, lambda x: None)


def _checkpointed_adapter(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return _adapted(model, target_modules=["q_proj", "v_proj"])


# diffusers

LATENTS, STEPS = floats(4, 8, 8), integers(most=1000)
STATES = floats(LENGTH, 32)


def diffusion(name: str, kind: str, settings: dict[str, Any], inputs: Inputs) -> None:
    """Add a denoiser of diffusers."""

    def build() -> nn.Module:
        import diffusers

        made: nn.Module = getattr(diffusers, kind)(**settings)
        return made

    define(name, "diffusion", build, inputs)


diffusion(
    "UNet2DConditionModel", "UNet2DConditionModel",
    {
        "sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 4,
        "norm_num_groups": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
    named(sample=LATENTS, timestep=STEPS, encoder_hidden_states=STATES),
)  # fmt: skip
diffusion(
    "UNet2DModel", "UNet2DModel",
    {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "layers_per_block": 1,
        "norm_num_groups": 4, "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    named(sample=LATENTS, timestep=STEPS),
)  # fmt: skip
diffusion(
    "DiT", "DiTTransformer2DModel",
    {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4, "sample_size": 8, "norm_num_groups": 4, "dropout": 0.0},
    named(hidden_states=LATENTS, timestep=STEPS, class_labels=CLASSES),
)  # fmt: skip
diffusion(
    "SD3", "SD3Transformer2DModel",
    {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16, "out_channels": 4,
    },
    named(hidden_states=LATENTS, encoder_hidden_states=STATES, pooled_projections=floats(16), timestep=STEPS),
)  # fmt: skip
diffusion(
    "PixArt", "PixArtTransformer2DModel",
    {
        "sample_size": 8, "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4,
        "cross_attention_dim": 32, "caption_channels": 32, "out_channels": 4, "norm_num_groups": 4, "use_additional_conditions": False,
    },
    named(hidden_states=LATENTS, encoder_hidden_states=STATES, timestep=STEPS, added_cond_kwargs=always({})),
)  # fmt: skip
diffusion(
    "AutoencoderKL", "AutoencoderKL",
    {
        "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4, "latent_channels": 4, "sample_size": 16,
    },
    named(sample=floats(3, 16, 16)),
)  # fmt: skip


diffusion(
    "Flux", "FluxTransformer2DModel",
    {
        "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4),
    },
    named(hidden_states=floats(LENGTH, 4), encoder_hidden_states=STATES, pooled_projections=floats(16), timestep=floats(),
          img_ids=floats(LENGTH, 3), txt_ids=floats(LENGTH, 3)),
)  # fmt: skip
diffusion(
    "Wan", "WanTransformer3DModel",
    {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 32, "freq_dim": 16, "ffn_dim": 48, "num_layers": 3, "rope_max_seq_len": 32,
    },
    named(hidden_states=floats(4, 2, 8, 8), timestep=STEPS, encoder_hidden_states=STATES),
)  # fmt: skip
diffusion(
    "CogVideoX", "CogVideoXTransformer3DModel",
    {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32,
        "num_layers": 3, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": LENGTH,
    },
    named(hidden_states=floats(2, 4, 8, 8), timestep=STEPS, encoder_hidden_states=STATES),
)  # fmt: skip


# Beyond libraries


class Recurrent(nn.Module):
    """Two LSTMs over time, called with packed states, and a head on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y
        return self.head(x)  # type: ignore[no-any-return]


class StepByStep(nn.Module):
    """A GRU cell in a loop over time, and attention over all its states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, 16), nn.GRUCell(16, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, state = self.embedding(tokens), torch.zeros(len(tokens), 16)
        states = []
        for step in range(tokens.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        found = torch.stack(states, dim=1)
        attended, _ = self.attention(found, found, found, need_weights=False)
        return self.head(found + attended)  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Three inputs of different kinds, branches that meet, and nested outputs, one of them a tensor that is also read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.picture = nn.Embedding(VOCABULARY, 16), nn.Conv2d(3, 16, 4, stride=4)
        self.numbers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.mixers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.heads = nn.ModuleDict({"count": nn.Linear(16, 1), "kind": nn.Linear(16, NUM_CLASSES)})

    def forward(self, words: Tensor, picture: Tensor, *, numbers: Tensor | None = None) -> dict[str, Any]:
        x = self.words(words).mean(1)
        y = self.picture(picture).flatten(2).mean(2)
        z = torch.zeros_like(x) if numbers is None else self.numbers(numbers)
        for mixer in self.mixers:
            x, y, z = torch.tanh(mixer(x + y)), y + z, z * 0.5 + x
        return {"heads": {name: head(x + z) for name, head in self.heads.items()}, "state": (x, [y]), "note": "done"}


class Complex(nn.Module):
    """Filters in the frequency domain with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ParameterList(torch.randn(9, 8, dtype=torch.cfloat) / 3 for _ in range(4))
        self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight, mixer in zip(self.filters, self.mixers, strict=True):
            x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * weight, n=x.shape[1], dim=1)
            x = torch.tanh(mixer(x))
        return torch.view_as_complex(x.unflatten(-1, (4, 2)))


class ComplexActivations(nn.Module):
    """Complex numbers pass from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.cfloat) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return z.abs()


class Sparse(nn.Module):
    """Embeddings with sparse gradients, a bag of them, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, mode="sum", sparse=True)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).mean(1) + self.bag(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Quantised(nn.Module):
    """Weights of 8 bits with a scale for every row, frozen; a trained adapter beside each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = F.linear(x, self.weight.to(x.dtype) * self.scale) + self.up(self.down(x))  # type: ignore[operator]
        return made


class Rounded(torch.autograd.Function):
    """Rounds to 15 levels; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 7
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class FakeQuantised(nn.Linear):
    """Trained with rounded weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight), self.bias)


class Siamese(nn.Module):
    """One encoder called for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.encoder(a) - self.encoder(b)).abs())  # type: ignore[no-any-return]


class Looping(nn.Module):
    """One block applied several times, as a fixed-point iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.first(x)
        for _ in range(6):
            x = torch.tanh(self.block(x) + start)
        return self.last(x)  # type: ignore[no-any-return]


class Messages(nn.Module):
    """Messages along the edges of one graph for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.rounds = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))
        self.last = nn.Linear(16, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.first(nodes)
        source, target = (index.unsqueeze(-1).expand(-1, -1, x.shape[-1]) for index in edges.unbind(1))
        for linear in self.rounds:
            sums = torch.zeros_like(x).scatter_add(1, target, x.gather(1, source))
            x = x + torch.relu(linear(torch.cat([x, sums], dim=-1)))
        return self.last(x)  # type: ignore[no-any-return]


class PerSample(nn.Module):
    """torch.func.vmap over the samples inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.func.vmap(lambda row: torch.tanh(self.second(row)) * row.norm())(x)
        return self.last(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """torch.utils.checkpoint around every second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if place % 2 else layer(x))
        return x


class EarlyStop(nn.Module):
    """Blocks in a list; how many run depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.abs().mean() > 1e6:
                break
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """A block that decides by the values of its input which of two layers to use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.one(x) if x.sum() > 0 else self.other(x)
        return torch.tanh(made)


class Blocks(nn.Module):
    """A stem, blocks in a ModuleList, and a head."""

    def __init__(self, make: Callable[[], nn.Module], num_blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class WithTransformer(nn.Module):
    """torch.nn.Transformer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.inner(self.words(source), self.words(target), tgt_mask=mask))  # type: ignore[no-any-return]


class ParametrisedBlock(nn.Module):
    """Weights that are computed: one normalised, one orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.other = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(torch.tanh(self.one(x))))


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh())


def _attention_block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


VECTORS = floats(8)
for name, build, inputs in (
    ("LSTM over time", Recurrent, TOKENS),
    ("GRU cell in a loop", StepByStep, TOKENS),
    ("three inputs, nested outputs", Graph, lambda n, g: {"words": TOKENS(n, g), "picture": IMAGES(n, g), "numbers": floats(6)(n, g)}),
    ("complex weights", Complex, floats(16, 8)),
    ("complex activations", ComplexActivations, VECTORS),
    ("sparse embeddings", Sparse, TOKENS),
    ("torch.compile-d", lambda: torch.compile(Blocks(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())), backend="eager"), VECTORS),
    ("torch.compile-d blocks", lambda: Blocks(lambda: torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), backend="eager")), VECTORS),
    ("quantised linear layers", lambda: Blocks(lambda: nn.Sequential(Quantised(), nn.Tanh())), VECTORS),
    ("quantisation-aware", lambda: Blocks(lambda: nn.Sequential(FakeQuantised(16, 16), nn.Tanh())), VECTORS),
    ("one encoder, two inputs", Siamese, several(VECTORS, VECTORS)),
    ("fixed-point iteration", Looping, VECTORS),
    ("graph network", Messages, several(floats(10, 6), integers(2, 20, most=10, least=0))),
    ("vmap in the forward", PerSample, VECTORS),
    ("checkpoint of torch", Checkpointed, floats(16)),
    ("torch.nn.Transformer", WithTransformer, several(TOKENS, TOKENS)),
    ("parametrised weights", lambda: Blocks(ParametrisedBlock), VECTORS),
    ("spectral norm", lambda: Blocks(_spectral), VECTORS),
    ("batch norm", lambda: Blocks(lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))), VECTORS),
    ("blocks that branch on values", lambda: Blocks(Branching), VECTORS),
    ("stop that depends on values", EarlyStop, floats(16)),
    ("nn.TransformerEncoder", lambda: nn.TransformerEncoder(_attention_block(), 4), floats(LENGTH, 16)),
):  # fmt: skip
    define(name, "beyond libraries", build, inputs)
