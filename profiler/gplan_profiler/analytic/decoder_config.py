"""The sizes of language models: the config.json of Hugging Face, or by name.

A key that is neither used nor known to leave layers as they are is refused if it speaks of experts, layers or attention,
and else named in `Decoder.unused`, and so in the profile's notes.
Checked against the parameters of Hugging Face's own models of `FAMILIES`; another family is computed as a Llama, and a
note says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gplan.core.errors import FileError, UsageError

_TABLE = Path(__file__).with_name("decoders.toml")
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
_MOST_LAYERS = 10_000  # of a model; more would take all memory
_KINDS = {
    "layer_types": {"full_attention", "sliding_attention", "chunked_attention"},
    "mlp_layer_types": {"dense", "sparse"},
}

_QWEN: dict[str, Any] = {"use_sliding_window": False}
_GEMMA: dict[str, Any] = {"num_block_norms": 4, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {**_QWEN, "qkv_bias": True},
    "qwen2_moe": {**_QWEN, "qkv_bias": True, "has_shared_gate": True},
    "qwen3": {**_QWEN, "has_head_norms": True},
    "qwen3_moe": {**_QWEN, "has_head_norms": True},
    "llama4": {"n_shared_experts": 1, "attention_chunk_size": 8192, "full_attention_interval": 4},
    "deepseek_v3": {},
    "gpt_oss": {"attention_bias": True, "has_sinks": True, "has_expert_biases": True, "full_attention_interval": 2},
    "gemma2": {**_GEMMA, "sliding_window": 4096, "full_attention_interval": 2},
    "gemma3": {**_GEMMA, "sliding_window": 4096, "has_head_norms": True, "full_attention_interval": 6},
}
"""By `model_type`, without `_text`: what no key says, and keys whose default there is another one."""

_SAME_KEY = {
    "sliding_window_pattern": "full_attention_interval",
    "no_rope_layer_interval": "full_attention_interval",
    "experts_per_token": "num_experts_per_tok",
    "num_mtp_layers": "num_nextn_predict_layers",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_num_shared_experts": "n_shared_experts",
    "num_shared_experts": "n_shared_experts",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "interleave_moe_layer_step",
    "num_dense_layers": "first_k_dense_replace",
}
_NO_EFFECT = re.compile(  # on the weights of layers and their work
    r".*(_token_ids?|_token_index|_dropout|_eps|_coef|_range|rope.*|_scal(e|ing|ar|ing_factor)|_map)|_.*|"
    r"(torch_)?dtype|architectures|transformers_version|use_cache|hidden_act|hidden_activation|max_position_embeddings|"
    r"pretraining_tp|norm_topk_prob|output_.*|return_dict|router_jitter_noise|n_group|topk_group|topk_method|scoring_func|"
    r"seq_aux|aux_loss_alpha|ep_size|qk_head_dim|for_llm_compression|attn_temperature_tuning|floor_scale|"
    r"swiglu_(alpha|limit)|initial_context_length|cache_implementation|chunk_size_feed_forward|"
    r"is_encoder_decoder|id2label|label2id|problem_type|name_or_path|model_type|"
    r".*(multiplier|jitter_noise|loss_weight|aux_loss.*|dropout.*|capacity.*)|attn_implementation|attn_scale|"
    r"moe_use_aux_free|moe_norm_min"
)
_SMALL_EFFECT = re.compile(r".*(softcap|softcapping)|use_qk_norm|(vision|audio)_.*")  # named in a note
_CHANGES_LAYERS = re.compile(  # a word of a key that probably changes what layers compute
    r"(?:.*_)?(n?experts?|moe|n?layers?|blocks?|attn|attention|linear|conv\d?d?|mamba|ssm|mixer|hybrid|mlp|ffn|n?heads?|lora|"
    r"latent|sparse|sliding|window|n_embd|rank)(?:_.*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """How the layers of a stage are divided, and the size of a sample."""

    tensor: int = 1
    context: int = 1  # ranks that divide the tokens of a sequence
    expert: int = 1
    expert_tensor: int = (
        0  # ranks that divide each expert; 0: as many as `tensor`, or 1 where those do not go into the ranks
    )
    data: int = 1
    pipeline: int = 1  # devices of a pipeline; they only count for where groups lie
    sequence_length: int = 4096

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "expert", "data", "pipeline", "sequence_length"):
            if getattr(self, name) < 1:
                raise UsageError(f"the {name.replace('_', '-')} size is {getattr(self, name)}; expected at least 1")
        if self.expert_tensor < 0:
            raise UsageError(f"the expert-tensor size is {self.expert_tensor}; expected at least 1")
        if self.ranks % (self.expert * (self.expert_tensor or 1)):
            by = f"{self.expert} x {self.expert_tensor}" if self.expert_tensor > 1 else f"{self.expert}"
            product = f"tensor x context x data = {self.tensor} x {self.context} x {self.data}"
            raise UsageError(f"experts are divided by {by}; expected a divisor of {product} ranks")

    @property
    def ranks(self) -> int:
        """Of a pipeline stage, over all replicas."""
        return self.tensor * self.context * self.data

    @property
    def devices(self) -> int:
        """Of the whole job."""
        return self.ranks * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights outside of experts, sum their gradients and divide the optimizer's state."""
        return self.context * self.data

    @property
    def of_expert(self) -> int:
        """Ranks that divide each expert; Megatron-LM's default is the tensor width."""
        return self.expert_tensor or (1 if self.ranks % (self.expert * self.tensor) else self.tensor)

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.ranks // (self.expert * self.of_expert)


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a language model, by the names of Hugging Face configurations; 0 where a model has no such part."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0  # multi-head latent attention
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_experts: int = 0
    n_routed_experts: int = 0
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    num_nextn_predict_layers: int = 0  # multi-token prediction
    shared_expert_intermediate_size: int = 0
    intermediate_size_mlp: int = 0  # of blocks without experts, where `intermediate_size` is that of experts
    decoder_sparse_step: int = 1
    interleave_moe_layer_step: int = 1
    moe_layer_freq: int | tuple[int, ...] = 1
    mlp_only_layers: tuple[int, ...] = ()
    moe_layers: tuple[int, ...] | None = None
    mlp_layer_types: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ()
    no_rope_layers: tuple[int, ...] = ()  # 0: without rotary positions, and with attention to all tokens
    sliding_window: int = 0
    attention_chunk_size: int = 0
    use_sliding_window: bool = True
    max_window_layers: int = 0
    full_attention_interval: int = 0  # 0: windows in all blocks
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    num_block_norms: int = 2
    has_head_norms: bool = False  # of queries and keys
    has_sinks: bool = False
    has_expert_biases: bool = False
    has_shared_gate: bool = False
    is_gated: bool = True  # the perceptron: a gate times up; else up alone
    has_norm_biases: bool = False
    learned_positions: int = 0
    unused: tuple[str, ...] = ()  # sentences on keys that were not used, and so may change what is computed

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), int) and value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        for name in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"):
            if not getattr(self, name):
                raise ValueError(f"{name} is 0; expected at least 1")
        for name in ("layer_types", "no_rope_layers", "mlp_layer_types", "moe_layer_freq"):
            given = getattr(self, name)
            if isinstance(given, tuple) and 0 < len(given) < self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(given)} entries; expected one for each of the {self.num_hidden_layers} layers"
                )
        for name, kinds in _KINDS.items():
            if strange := {*getattr(self, name)} - kinds:
                raise ValueError(
                    f"{name} has {min(strange)}; expected {' or '.join(sorted(kinds))}: no other layer is computed"
                )
        if self.routed_experts and not 0 < self.num_experts_per_tok <= self.routed_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} of {self.routed_experts} experts; expected 1 to "
                f"{self.routed_experts}"
            )
        for name in ("num_hidden_layers", "num_nextn_predict_layers"):
            if getattr(self, name) > _MOST_LAYERS:
                raise ValueError(f"{name} is {getattr(self, name):,}; expected at most {_MOST_LAYERS:,}")
        if not self._head:
            raise ValueError(
                f"{self.num_attention_heads} heads share a hidden_size of {self.hidden_size}; expected no more heads than that"
            )

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that has them, of which each token takes a few."""
        return self.num_experts or self.n_routed_experts or self.num_local_experts

    @property
    def num_gates(self) -> int:
        """Values of a perceptron's first product for each of its intermediate size."""
        return 1 + self.is_gated

    @property
    def expert_width(self) -> int:
        """The intermediate size of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def dense_width(self) -> int:
        """The intermediate size of a block without experts."""
        return self.intermediate_size_mlp or self.intermediate_size

    @property
    def shared_width(self) -> int:
        """The intermediate size of all shared experts together."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.expert_width

    @property
    def value_width(self) -> int:
        """Of the attention's output, over all heads."""
        return self.num_attention_heads * (self.v_head_dim or self._head)

    @property
    def query_width(self) -> int:
        """Of the queries, over all heads."""
        latent = self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.num_attention_heads * (latent if self.kv_lora_rank else self._head)

    @property
    def key_width(self) -> int:
        """Of the keys, over all heads that have their own; without latent attention also of the values."""
        return (self.num_key_value_heads or self.num_attention_heads) * self._head

    @property
    def ties_embedding(self) -> bool:
        """Whether other layers hold the embedding too."""
        return self.tie_word_embeddings or self.num_nextn_predict_layers > 0

    @property
    def _head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """The products of a block's attention, as (in, out)."""
        hidden = self.hidden_size
        if not self.kv_lora_rank:
            return (hidden, self.query_width + 2 * self.key_width), (self.value_width, hidden)
        expanded = self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)
        queries = (
            [(hidden, self.q_lora_rank), (self.q_lora_rank, self.query_width)]
            if self.q_lora_rank
            else [(hidden, self.query_width)]
        )
        latent = (hidden, self.kv_lora_rank + self.qk_rope_head_dim)
        return (*queries, latent, (self.kv_lora_rank, expanded), (self.value_width, hidden))

    @property
    def block_values(self) -> int:
        """Parameters of a block outside of matrices, without those of its perceptron: norms, biases and sinks."""
        latent = self.kv_lora_rank and self.kv_lora_rank + self.q_lora_rank
        biases = 0
        if self.attention_bias and self.kv_lora_rank:
            biases = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim + self.hidden_size
        elif self.attention_bias or self.qkv_bias:
            biases = self.query_width + 2 * self.key_width + self.attention_bias * self.hidden_size
        own = self.has_head_norms * 2 * self._head + self.has_sinks * self.num_attention_heads
        return self.num_block_norms * (1 + self.has_norm_biases) * self.hidden_size + latent + biases + own

    def is_sparse(self, block: int) -> bool:
        """Whether a block has experts."""
        if not self.routed_experts:
            return False
        if self.moe_layers is not None:
            return block in self.moe_layers
        if self.mlp_layer_types[block:]:
            return self.mlp_layer_types[block] == "sparse"
        if isinstance(self.moe_layer_freq, tuple):
            return bool(self.moe_layer_freq[block]) if self.moe_layer_freq[block:] else True
        is_dense = block < self.first_k_dense_replace or block in self.mlp_only_layers or block % self.moe_layer_freq
        return not (is_dense or (block + 1) % (self.decoder_sparse_step * self.interleave_moe_layer_step))

    def attended(self, block: int, sequence: int) -> float:
        """Which share of all earlier tokens a token of a block attends to, on average over a sequence."""
        window = self.attention_chunk_size or (self.sliding_window if self.use_sliding_window else 0)
        if not 0 < window < sequence:
            return 1.0
        if self.layer_types:
            is_local = self.layer_types[block] != "full_attention"
        elif self.no_rope_layers:
            is_local = bool(self.no_rope_layers[block])
        else:
            interval = self.full_attention_interval
            is_local = block >= self.max_window_layers and (not interval or (block + 1) % interval > 0)
        if not is_local:
            return 1.0
        if self.attention_chunk_size:
            chunks, rest = divmod(sequence, window)
            return (chunks * window**2 + rest**2) / sequence**2
        return 1 - (1 - window / sequence) ** 2


_KEYS = tuple(x for x in Decoder.__struct_fields__ if x != "unused")


@cache
def _known() -> dict[str, dict[str, Any]]:
    return msgspec.toml.decode(_TABLE.read_text(encoding="utf-8"), type=dict[str, dict[str, Any]])


def decoder_names() -> tuple[str, ...]:
    """The configurations that are known by name."""
    return tuple(_known())


def _known_name(name: str) -> str:
    """The name in the table that a name means, such as a Hugging Face id; "" for none.

    >>> _known_name("meta-llama/Llama-3.1-70B-Instruct"), _known_name("llama-3-8b"), _known_name("gpt-9")
    ('llama3-70b', 'llama3-8b', '')
    """

    def plain(text: str) -> str:
        text = re.sub(
            r"[^a-z0-9]", "", re.sub(r"-(instruct|base|chat|hf|v\d[\d.]*)\b", "", text.lower().split("/")[-1])
        )
        return re.sub(r"^llama3[123](?=\d+b)", "llama3", text.removeprefix("meta"))

    return next((x for x in _known() if plain(x) == plain(name)), "")


def load_decoder(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Decoder:
    """A configuration by its name, or from a config.json, with other values for some keys.

    Raises UsageError or FileError for what is no configuration.
    """
    path, known = Path(name), _known_name(name)
    if known:
        name = known
        found: Any = {key: value for key, value in _known()[name].items() if key != "source"}
    elif path.suffix == ".json":
        try:
            found = msgspec.json.decode(path.read_bytes())
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            raise FileError(f"{path} cannot be read: {error}; expected the config.json of a model") from error
    else:
        raise UsageError(f"no model is named {name}; expected {', '.join(decoder_names())}, or a config.json")
    if strange := [key for key in settings if key not in _KEYS]:
        raise UsageError(f"a decoder has no {strange[0]}; expected one of {', '.join(_KEYS)}")
    try:
        described = _described(found)
        if isinstance(described, dict) and (strange := described.pop("refused", [])):
            raise FileError(
                f"{name} has {', '.join(strange)}: layers with {'these keys' if strange[1:] else 'this key'} are not computed; remove "
                "what leaves the layers as they are without it, or profile the model itself with gplan profile --device meta"
            )
        return msgspec.convert({**described, **settings}, Decoder)
    except (msgspec.ValidationError, TypeError) as error:
        raise FileError(
            f"{name} is no configuration of a decoder: {error}; expected the keys of Llama: {', '.join(_SIZES)}"
        ) from error


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values by their keys.

    >>> parse_settings(["num_hidden_layers=40", "tie_word_embeddings=false"])
    {'num_hidden_layers': 40, 'tie_word_embeddings': False}
    """
    found = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            found[key] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise UsageError(f"--set {text}: expected a key and a number, true or false") from error
    return found


def _described(found: Any) -> Any:
    """The keys of a Decoder: those of the language model in a larger one, with what its family adds. Null is a default."""
    if not isinstance(found, Mapping):
        return found
    inner = found.get("text_config")
    flat = {**found, **inner, "text_config": None} if isinstance(inner, Mapping) else found
    flat = {_SAME_KEY.get(key, key): value for key, value in flat.items()}
    family = str(flat.get("model_type") or "llama").removesuffix("_text")
    unknown = [x for x, value in flat.items() if value and x not in _KEYS and not _NO_EFFECT.fullmatch(x)]
    refused = [x for x in unknown if _CHANGES_LAYERS.fullmatch(x) and not _SMALL_EFFECT.fullmatch(x)]
    not_used = [x for x in unknown if x not in refused]
    notes = [f"{x} of the configuration is not used; layers are computed as without it" for x in not_used]
    if family not in FAMILIES:
        notes.append(f"the layers of {family} are computed as those of Llama with the same keys")
    given = {**FAMILIES.get(family, {}), **{key: x for key, x in flat.items() if key in _KEYS}}
    return {key: value for key, value in given.items() if value is not None} | {"unused": notes, "refused": refused}
