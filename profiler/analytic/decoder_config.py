"""The sizes of language models: the config.json of Hugging Face (keys of Llama, Mixtral, Qwen3-MoE, DeepSeek-V3), or by name."""

from __future__ import annotations

import tomllib
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """How the layers of a stage are divided, and the size of a sample."""

    tensor: int = 1
    expert: int = 1
    data: int = 1
    sequence_length: int = 4096

    def __post_init__(self) -> None:
        for name in ("tensor", "expert", "data", "sequence_length"):
            if getattr(self, name) < 1:
                raise UsageError(f"the {name.replace('_', '-')} size is {getattr(self, name)}; expected at least 1")
        if (self.tensor * self.data) % self.expert:
            raise UsageError(
                f"experts are divided by {self.expert}; expected a divisor of tensor x data = {self.tensor} x {self.data} ranks"
            )


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
    q_lora_rank: int | None = None
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

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in self.__struct_fields__:
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
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
    def expert_width(self) -> int:
        """The intermediate size of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

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

    def is_sparse(self, block: int) -> bool:
        """Whether a block has experts."""
        return bool(self.routed_experts) and block >= self.first_k_dense_replace


@cache
def _known() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_TABLE.read_text())


def decoder_names() -> tuple[str, ...]:
    """The configurations that are known by name."""
    return tuple(_known())


def load_decoder(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Decoder:
    """A configuration by its name, or from a config.json, with other values for some keys.

    Raises UsageError or FileError for what is no configuration.
    """
    path = Path(name)
    if name in _known():
        found: Any = {key: value for key, value in _known()[name].items() if key != "source"}
    elif path.suffix == ".json":
        try:
            found = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise FileError(f"{path} cannot be read: {error}; expected the config.json of a model") from error
    else:
        raise UsageError(f"no model is named {name}; expected {', '.join(decoder_names())}, or a config.json")
    strange = [key for key in settings if key not in Decoder.__struct_fields__]
    if strange:
        raise UsageError(f"a decoder has no {strange[0]}; expected one of {', '.join(Decoder.__struct_fields__)}")
    try:
        return msgspec.convert({**_without_nothing(found), **settings}, Decoder)
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


def _without_nothing(found: Any) -> Any:
    """Keys that are null have their defaults."""
    return {key: value for key, value in found.items() if value is not None} if isinstance(found, Mapping) else found
