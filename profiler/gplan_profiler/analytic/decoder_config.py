"""The sizes of language models: the config.json of Hugging Face, or by name.

Keys are read, or refused, by `decoder_keys`; parameters are checked against Hugging Face's own models of each family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from gplan.core.errors import FileError, UsageError
from gplan_profiler.analytic.decoder_keys import MOST_LAYERS, decoder_values
from gplan_profiler.analytic.expected_errors import DENSE, HYBRID, MIXTURE

_TABLE = Path(__file__).with_name("decoders.toml")
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
_KINDS = {
    "layer_types": {
        "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "linear_attention", "mlp", "moe",
    },
    "mlp_layer_types": {"dense", "sparse"},
}  # fmt: skip


ORDER = "tp-cp-ep-dp-pp"
"""How trainers place groups: ranks of a tensor group are neighbours, stages are farthest apart (Megatron-LM's default)."""


def places_alike(order: str, num_ranks: int, num_expert_ranks: int, pipeline: int) -> bool:
    """Whether a pipeline has the same ranks for experts as for the rest, given how many ranks divide a copy of each."""
    return pipeline == 1 or order.endswith("pp") or num_ranks == num_expert_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """How the layers of a stage are divided, and the size of a sample."""

    tensor: int = 1
    context: int = 1  # ranks that divide the tokens of a sequence
    expert: int = 1
    expert_tensor: int = 0  # ranks that divide each expert; 0: as many as `tensor`, or 1 where those do not fit
    data: int = 1
    pipeline: int = 1  # devices of a pipeline; they only count for where groups lie
    sequence_length: int = 4096
    order: str = ORDER  # of the groups, the one whose ranks are neighbours first

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
        if sorted(self.order.split("-")) != sorted(ORDER.split("-")):
            raise UsageError(
                f"the order of groups is {self.order}; expected tp, cp, ep, dp and pp in some order, such as {ORDER}"
            )
        experts = self.expert * self.of_expert if self.expert > 1 else self.tensor * self.context
        if not places_alike(self.order, self.tensor * self.context, experts, self.pipeline):
            raise UsageError(
                f"with the order {self.order}, stages lie alike for experts only if tensor x context = expert x expert-tensor, and "
                f"{self.tensor} x {self.context} is not {self.expert} x {self.of_expert}; take an order that ends with pp, or other sizes"
            )

    def placed(self, *groups: str, of_experts: bool = False) -> tuple[tuple[int, int], ...]:
        """The (size, stride) of a group over these dimensions in the numbering of ranks; those that follow each other as one.

        Experts have a grid of their own, without context, whose dp is that of ranks with the same experts.

        >>> Widths(tensor=2, data=4, context=2).placed("cp", "dp"), Widths(tensor=2, data=4, pipeline=3).placed("pp")
        (((8, 2),), ((3, 8),))
        >>> Widths(tensor=2, data=4, pipeline=3, order="tp-cp-ep-pp-dp").placed("dp")
        ((4, 6),)
        """
        sizes = {"tp": self.tensor, "cp": self.context, "dp": self.data, "pp": self.pipeline}
        if of_experts:
            sizes = {"tp": self.of_expert, "ep": self.expert, "dp": self.expert_replicas, "pp": self.pipeline}
        found, stride = list[tuple[int, int]](), 1
        for name in self.order.split("-"):
            size = sizes.get(name, 1)
            if name in groups:
                if found and found[-1][0] * found[-1][1] == stride:
                    found[-1] = (found[-1][0] * size, found[-1][1])
                else:
                    found.append((size, stride))
            stride *= size
        return tuple(found)

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


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What a block computes."""

    mixer: str = "full_attention"  # a kind of attention; "": none
    feed: str = "dense"  # or "sparse", with experts; "": none
    attended: float = 1.0  # share of all earlier tokens that a token attends to
    is_rotary: bool = True  # whether positions rotate queries and keys
    sizes: tuple[tuple[str, int], ...] = ()  # of a `Decoder`, that are others in this block


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a language model, by the names of Hugging Face configurations; 0 where a model has no such part."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0  # 0 only where all blocks have experts of their own size
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
    no_rope_layers: tuple[int, ...] = ()  # 0: without rotary positions; chunks are only attended to with them
    no_rope_interval: int = 0  # one of so many layers is without rotary positions
    sliding_window: int = 0
    attention_chunk_size: int = 0
    use_sliding_window: bool = True
    max_window_layers: int = 0
    full_attention_interval: int = 0  # 0: `other_attention` in all blocks
    other_attention: str = ""  # of layers that are not full attention; "": by the window or the chunk that is given
    moe_layer_end_index: int = MOST_LAYERS
    attention_bias: bool = False  # of all products of the attention
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    num_block_norms: int = 2
    norms_after: bool = False  # norms of the branches' results in place of their inputs
    is_parallel: bool = False  # attention and perceptron read the same hidden states
    has_one_part: bool = False  # a block is attention, a perceptron or experts
    attn_output_gate: bool = False
    has_head_gates: bool = False  # that gate has one value for each head
    has_head_norms: bool = False  # of queries and keys
    head_norm_values: int = 1  # parameters for each value that such a norm reads: a weight, or a bias too
    heads_norm_apart: bool = False  # each head has its own weights
    values_are_keys: bool = False  # one product for both
    has_sinks: bool = False
    has_expert_biases: bool = False
    has_router_bias: bool = False
    has_shared_gate: bool = False
    is_gated: bool = True  # the perceptron: a gate times up; else up alone
    has_norm_biases: bool = False
    has_norm_weights: bool = True
    has_embedding_norm: bool = False
    hidden_act: str = ""  # a perceptron's activation; "": not known
    activation_values: int = 0  # its parameters
    alibi: bool = False  # biases of attention by distance
    index_n_heads: int = 0  # of the indexer, that selects the tokens to attend to
    index_head_dim: int = 0
    index_topk: int = 0
    linear_num_key_heads: int = 0  # of linear attention and Mamba-2, whose groups are key heads; 0: as attention
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0  # Mamba-2: of the state
    linear_value_head_dim: int | Literal["auto"] = 0
    linear_conv_kernel_dim: int = 0
    linear_conv_bias: bool = False
    linear_chunk: int = 64  # tokens that are computed at once
    linear_num_decays: int = 0  # values that each head projects from the hidden states
    linear_values_per_head: int = 0  # parameters of a head alone
    linear_norms_apart: bool = False  # each head has its own weights
    linear_is_delta: bool = False  # the delta rule: values are corrected by what the state holds
    learned_positions: int = 0
    unused_positions: int = 0  # more rows of their table
    per_layer: tuple[dict[str, int | bool], ...] = ()  # sizes that are others in a layer
    unused: tuple[str, ...] = ()  # sentences on keys that were not used, and so may change what is computed

    def __post_init__(self) -> None:
        has_own = self.moe_intermediate_size and all(
            map(self.is_sparse, range(min(self.num_hidden_layers, MOST_LAYERS)))
        )
        for name in _SIZES:
            if getattr(self, name) < 1 and not (name == "intermediate_size" and has_own):
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
            if getattr(self, name) > MOST_LAYERS:
                raise ValueError(f"{name} is {getattr(self, name):,}; expected at most {MOST_LAYERS:,}")
        if not self._head:
            raise ValueError(
                f"{self.num_attention_heads} heads share a hidden_size of {self.hidden_size}; expected no more heads than that"
            )

        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if shared and heads % shared and not self.kv_lora_rank:
            raise ValueError(f"{shared} key-value heads are shared by {heads} heads; expected a divisor of {heads}")
        if self.head_dim is None and not self.kv_lora_rank and self.hidden_size % heads:
            raise ValueError(f"hidden_size is {self.hidden_size}; expected a multiple of {heads} heads, or a head_dim")
        if self.mlp_bias and self.routed_experts:
            raise ValueError("mlp_bias is true and there are experts; expected a model that has one of both")
        kinds_found = {self._kind(i) for i in range(self.num_hidden_layers)}
        if "indexed_attention" in kinds_found and not (self.index_topk and self.index_head_dim and self.q_lora_rank):
            raise ValueError(
                "layers have indexed_attention; expected index_topk, index_head_dim, index_n_heads, q_lora_rank"
            )
        if "moe" in kinds_found and not self.routed_experts:
            raise ValueError("layer_types has moe, and there are no experts; expected n_routed_experts")
        if not self.has_one_part and kinds_found & {"mlp", "moe"}:
            raise ValueError(
                "layer_types has mlp or moe; expected attention, but in Nemotron-H (model_type nemotron_h)"
            )
        linear = [x for x in self.__struct_fields__ if re.match(r"linear_(num|key|value|conv)", x) and getattr(self, x)]
        if ("linear_attention" in kinds_found or linear) and not (self.linear_num_decays or self.linear_norms_apart):
            raise ValueError(
                f"{linear[0] if linear else 'layer_types'} speaks of linear attention or Mamba; expected full_attention, or a "
                "model_type with such layers: granitemoehybrid, minimax, nemotron_h, qwen3_next, qwen3_5"
            )
        sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        missing = [x for x in sizes if not getattr(self, x)]
        if "linear_attention" in kinds_found and self.linear_num_decays and missing:
            raise ValueError(f"{', '.join(missing)} of linear attention or Mamba is missing; expected at least 1")
        if len({(x.routed_experts, x.num_experts_per_tok) for x in self.variants}) > 1:  # each is checked too
            raise ValueError("per_layer has numbers of experts that differ; expected the same in all layers")
        if self.index_topk and "indexed_attention" not in kinds_found:
            raise ValueError(
                f"index_topk is {self.index_topk}; expected a model_type with indexed attention, such as deepseek_v32"
            )

    @property
    def variants(self) -> tuple[Decoder, ...]:
        """Decoders with the sizes of each layer, where layers differ."""
        found = dict.fromkeys(tuple(x.items()) for x in self.per_layer)
        return tuple(msgspec.structs.replace(self, per_layer=(), **dict(x)) for x in found) or (self,)

    @property
    def special(self) -> tuple[str, ...]:
        """What its layers have that not every trainer's models do, by the names of `SPECIAL_LAYERS` of gplan.interop."""
        kinds, act = {self._kind(i) for i in range(self.num_hidden_layers)}, self.hidden_act.split("_")[0]
        is_direct = not self.kv_lora_rank
        found = {
            self.linear_name: "linear_attention" in kinds,
            "SandwichNorm": self.num_block_norms > 2,
            "PostNorm": any(x.norms_after for x in self.variants),
            "Parallel": self.is_parallel,
            "LayerNorm": self.has_norm_biases,
            "WeightlessNorm": not self.has_norm_weights,
            "EmbeddingNorm": self.has_embedding_norm,
            "HeadNorm": self.has_head_norms and not self.heads_norm_apart,
            "WideHeadNorm": self.has_head_norms and self.heads_norm_apart,
            "Plain": not self.is_gated,
            "GatedGelu": self.is_gated and act == "gelu",
            "Relu": not self.is_gated and act == "relu",
            "Xielu": act == "xielu",
            "Biases": self.attention_bias or self.attention_out_bias or self.mlp_bias or self.has_expert_biases,
            "HeadBias": self.lm_head_bias,
            "LearnedPositions": self.learned_positions > 0,
            "Alibi": self.alibi,
            "Latent": not is_direct,
            "Indexed": "indexed_attention" in kinds,
            "Chunked": "chunked_attention" in kinds,
            "Sinks": any(x.has_sinks for x in self.variants),
            "Gate": self.attn_output_gate and not self.has_head_gates,
            "HeadGate": self.has_head_gates,
            "HeadSize": is_direct and self._head * self.num_attention_heads != self.hidden_size,
            "SharedValue": any(x.values_are_keys for x in self.variants),
            "Layers": len(self.variants) > 1,
        }
        return tuple(x for x, is_there in found.items() if is_there)

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that has them, of which each token takes a few."""
        return self.num_experts or self.n_routed_experts or self.num_local_experts

    @property
    def kind(self) -> str:
        """The kind of model whose published runs resemble its own."""
        if "linear_attention" in map(self._kind, range(self.num_hidden_layers)):
            return HYBRID
        return MIXTURE if self.routed_experts else DENSE

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
        shared = 0 if self.routed_experts else self.shared_expert_intermediate_size
        return self.intermediate_size_mlp or shared or self.intermediate_size

    @property
    def shared_width(self) -> int:
        """The intermediate size of all shared experts together."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.expert_width

    @property
    def value_width(self) -> int:
        """Of the attention's output, over all heads."""
        return self.num_attention_heads * self.value_head

    @property
    def query_width(self) -> int:
        """Of the queries, over all heads."""
        latent = self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.num_attention_heads * (latent if self.kv_lora_rank else self._head)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in all: as many as of queries where the configuration has no number of them."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def key_width(self) -> int:
        """Of the keys without latent attention, over all heads that have their own."""
        return self.kv_heads * self._head

    @property
    def value_head(self) -> int:
        """Of the values of a head."""
        return self.v_head_dim or self._head

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
            gates = self.attn_output_gate * (self.num_attention_heads if self.has_head_gates else self.value_width)
            values = 0 if self.values_are_keys else self.kv_heads * self.value_head
            return (hidden, self.query_width + gates + self.key_width + values), (self.value_width, hidden)
        expanded = self.num_attention_heads * (self.qk_nope_head_dim + self.value_head)
        latent_queries = (
            [(hidden, self.q_lora_rank), (self.q_lora_rank, self.query_width)]
            if self.q_lora_rank
            else [(hidden, self.query_width)]
        )
        latent = (hidden, self.kv_lora_rank + self.qk_rope_head_dim)
        return (*latent_queries, latent, (self.kv_lora_rank, expanded), (self.value_width, hidden))

    @property
    def attention_values(self) -> int:
        """Parameters of a block's attention outside of matrices: norms, biases and sinks."""
        latent = self.kv_lora_rank and self.kv_lora_rank + self.q_lora_rank
        biases = (self.attention_bias or self.attention_out_bias) * self.hidden_size
        if self.attention_bias and self.kv_lora_rank:
            biases += self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
        elif self.attention_bias or self.qkv_bias:
            biases += self.attention_matrices[0][1]
        norms = self.query_width + self.key_width if self.heads_norm_apart else 2 * self._head
        own = self.has_head_norms * self.head_norm_values * norms + self.has_sinks * self.num_attention_heads
        return latent + biases + own

    @property
    def norm_values(self) -> int:
        """Parameters of a norm of the hidden states."""
        return (self.has_norm_weights + self.has_norm_biases) * self.hidden_size

    @property
    def index_matrices(self) -> tuple[tuple[int, int], ...]:
        """The products of an indexer: queries from the latent ones, and one key with a weight for each head."""
        size = self.index_head_dim
        return (self.q_lora_rank, self.index_n_heads * size), (self.hidden_size, size + self.index_n_heads)

    @property
    def linear_name(self) -> str:
        """What its linear attention is: a Mamba-2 layer, a gated delta net or lightning attention."""
        return "DeltaNet" if self.linear_is_delta else "Mamba" if self.linear_num_decays else "Lightning"

    @property
    def linear_heads(self) -> int:
        """Heads of linear attention, each with its state."""
        return self.linear_num_value_heads or self.num_attention_heads

    @property
    def linear_sizes(self) -> tuple[int, int]:
        """Of a state of linear attention: key by value."""
        width = self.linear_value_head_dim
        value = 2 * self.hidden_size // self.linear_heads if width == "auto" else width or self._head
        return self.linear_key_head_dim or self._head, value

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Of queries, keys and values together, and of the values, over all heads."""
        key, value = self.linear_sizes
        key_heads = self.linear_num_key_heads or self.linear_heads
        return 2 * key_heads * key + self.linear_heads * value, self.linear_heads * value

    @property
    def linear_matrices(self) -> tuple[tuple[int, int], ...]:
        """The products of linear attention: queries, keys, values, a gate and decays; and the output."""
        joined, values = self.linear_widths
        decays = self.linear_num_decays * self.linear_heads
        return (self.hidden_size, joined + values + decays), (values, self.hidden_size)

    @property
    def linear_values(self) -> int:
        """Parameters of linear attention outside of matrices: convolution, decays and norm."""
        joined, values = self.linear_widths
        convolution = joined * (
            self.linear_conv_kernel_dim + (self.linear_conv_bias and self.linear_conv_kernel_dim > 0)
        )
        norm = values if self.linear_norms_apart else self.linear_sizes[1]
        return convolution + self.linear_values_per_head * self.linear_heads + norm

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
        is_dense = is_dense or block > self.moe_layer_end_index
        return not (is_dense or (block + 1) % (self.decoder_sparse_step * self.interleave_moe_layer_step))

    def _is_rotary(self, block: int) -> bool:
        if self.no_rope_layers[block:]:
            return bool(self.no_rope_layers[block])
        return not self.no_rope_interval or (block + 1) % self.no_rope_interval > 0

    def _kind(self, block: int) -> str:
        """The kind of a block's layer; those after the last, which predict further, have full attention."""
        other = self.other_attention or ("chunked_attention" if self.attention_chunk_size else "sliding_attention")
        interval = self.full_attention_interval
        if self.layer_types:
            return self.layer_types[block] if self.layer_types[block:] else "full_attention"
        if interval or other != "chunked_attention":
            is_full = block < self.max_window_layers or (interval and not (block + 1) % interval)
        else:
            is_full = not self._is_rotary(block)
        return "full_attention" if is_full else other

    def block_kind(self, block: int, sequence: int) -> BlockKind:
        """What a block computes for sequences of so many tokens."""
        kind = self._kind(block)
        feed = "sparse" if self.is_sparse(block) else "dense"
        if self.has_one_part and block < self.num_hidden_layers:
            feed = {"mlp": "dense", "moe": "sparse"}.get(kind, "")
        mixer = "" if kind in ("mlp", "moe") else kind
        sizes = tuple(self.per_layer[block].items()) if self.per_layer[block:] else ()
        window = dict(sizes).get("sliding_window", self.sliding_window)
        return BlockKind(mixer, feed, self._attended(kind, sequence, window), self._is_rotary(block), sizes)

    def _attended(self, kind: str, sequence: int, sliding_window: int) -> float:
        window = {
            "sliding_attention": sliding_window if self.use_sliding_window else 0,
            "chunked_attention": self.attention_chunk_size,
            "indexed_attention": self.index_topk,
        }.get(kind, 0)
        if not 0 < window < sequence:
            return 1.0
        if kind == "chunked_attention":
            chunks, rest = divmod(sequence, window)
            return (chunks * window**2 + rest**2) / sequence**2
        return 1 - (1 - window / sequence) ** 2


_KEYS = tuple(x for x in Decoder.__struct_fields__ if x != "unused")


@cache
def known_decoders() -> dict[str, dict[str, Any]]:
    """The configurations that are known by name."""
    return msgspec.toml.decode(_TABLE.read_text(encoding="utf-8"), type=dict[str, dict[str, Any]])


def _known_name(name: str) -> str:
    """The name in the table that a name means, such as a Hugging Face id; "" for none.

    >>> _known_name("meta-llama/Llama-3.1-70B-Instruct"), _known_name("llama-3-8b"), _known_name("gpt-9")
    ('llama3-70b', 'llama3-8b', '')
    """

    def plain(text: str) -> str:
        text = re.sub(
            r"[^a-z0-9]", "", re.sub(r"-(instruct|base|chat|hf|it|pt|exp|v0[\d.]*)\b", "", text.lower().split("/")[-1])
        )
        return re.sub(r"^llama3[123](?=\d+b)", "llama3", text.removeprefix("meta"))

    return next((x for x in known_decoders() if plain(x) == plain(name)), "")


def load_decoder(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Decoder:
    """A configuration by its name, or from a config.json, with other values for some keys.

    Raises UsageError or FileError for what is no configuration.
    """
    path, known = Path(name), _known_name(name)
    if known:
        name = known
        found: Any = {"model_type": "llama", **known_decoders()[name]}
        del found["source"]
    elif path.suffix == ".json":
        try:
            found = json.loads(path.read_bytes())  # accepts Infinity, which transformers writes
        except (OSError, ValueError, RecursionError) as error:
            raise FileError(f"{path} cannot be read: {error}; expected the config.json of a model") from error
    else:
        raise UsageError(f"no model is named {name}; expected {', '.join(known_decoders())}, or a config.json")
    keys = {*_KEYS, "model_type"}
    if strange := [key for key, value in settings.items() if key not in keys and value is not None]:
        near = get_close_matches(strange[0], _KEYS, n=3, cutoff=0.4)
        raise UsageError(
            f"a decoder has no {strange[0]}; did you mean {', '.join(near)}?"
            if near
            else f"a decoder has no {strange[0]}; expected one of {', '.join(_KEYS)}"
        )
    if not isinstance(found, dict):
        raise FileError(
            f"{name} is no configuration of a decoder; expected an object with the keys of Llama: {', '.join(_SIZES)}"
        )
    try:
        return msgspec.convert(decoder_values(found, settings, _KEYS), Decoder)
    except (msgspec.ValidationError, TypeError) as error:
        raise FileError(
            f"{name} is no configuration of a decoder: {error}; expected the keys of Llama: {', '.join(_SIZES)}"
        ) from error
    except ValueError as error:
        raise FileError(f"{name} {error}") from error


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
            raise UsageError(
                f"--set {text}: expected a key and a number, true or false, or a text as in 'model_type=\"llama\"'"
            ) from error
    return found
