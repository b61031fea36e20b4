"""A computed profile of a language model from its configuration alone, on one device of a tensor- and expert-parallel group.

For models that are too large to build, and for widths that the planner does not choose. A configuration is the
config.json of a Hugging Face model (keys of Llama, Mixtral, Qwen3-MoE, DeepSeek-V3) or one of `decoder_names()`. Counted
are the products, the attention (causal: half of the square), norms, activations and embeddings, in bfloat16, with
weights, saved activations and optimizer state as Megatron-LM holds them: activations divided by the tensor-parallel size
(sequence parallelism), experts by the expert-parallel size, and 12 bytes a parameter of optimizer state divided over the
data-parallel ranks (4 bytes of gradient are not). Seconds are by the roofline. Left out: collectives within a layer,
imbalance between experts, and the memory of temporary tensors but for the logits.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gplan.core import (
    Layer,
    LayerCost,
    ModelId,
    OperationKind,
    Profile,
    SharedWeight,
    StepCost,
    Timing,
    Work,
)
from gplan.core.errors import FileError, UsageError
from profiler.analytic.hardware import Hardware
from profiler.analytic.roofline import roofline_seconds

_DTYPE, _WEIGHT, _GRADIENT, _STATE, _LOGIT = "bfloat16", 2, 4, 12, 4  # bytes
_TABLE = Path(__file__).with_name("decoders.toml")


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
        for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")

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
    def _head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """The products of a block's attention, as (in, out)."""
        hidden = self.hidden_size
        if not self.kv_lora_rank:
            heads = self.num_key_value_heads or self.num_attention_heads
            return (hidden, self.query_width), (hidden, 2 * heads * self._head), (self.value_width, hidden)
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
            f"{name} is no configuration of a decoder: {error}; expected keys such as hidden_size"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A layer on one device for one sample: parameters, work of a forward, and what it saves and needs."""

    name: str
    kind: str
    parameters: int  # held by the device, that every data-parallel rank has
    experts: int = 0  # the same of routed experts
    work: tuple[Work, ...]
    saved_bytes: int
    workspace_bytes: int = 0
    output_copies: int = 1  # hidden states that it hands on
    backward_factor: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderProfile:
    """The layers of a decoder on a device, for micro-batches of some sizes."""

    name: str
    decoder: Decoder
    widths: Widths
    hardware: Hardware

    @property
    def tokens(self) -> int:
        """Of one sample."""
        return self.widths.sequence_length

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states of a sample, a tensor-parallel rank's share."""
        return _WEIGHT * self.tokens * self.decoder.hidden_size // self.widths.tensor

    def parts(self) -> tuple[_Part, ...]:
        """Embedding, blocks, multi-token prediction, and the head with norm and loss."""
        model = self.decoder
        blocks = [self._block(f"layers.{i}", is_sparse=model.is_sparse(i)) for i in range(model.num_hidden_layers)]
        predicted = [self._prediction(f"mtp.{i}") for i in range(model.num_nextn_predict_layers)]
        return (self._embedding(), *blocks, *predicted, self._head())

    def _products(self, matrices: tuple[tuple[int, int], ...], tokens: float, divisor: int) -> Work:
        flops = sum(2 * tokens * a * b / divisor for a, b in matrices)
        moved = sum(_WEIGHT * (a * b + tokens * (a + b)) / divisor for a, b in matrices)
        return Work(kind="matmul", num_operations=len(matrices), num_flops=round(flops), num_bytes=round(moved))

    def _pointwise(self, kind: OperationKind, elements: float, num_operations: int) -> Work:
        values = round(elements / self.widths.tensor)
        return Work(kind=kind, num_operations=num_operations, num_flops=values, num_bytes=2 * _WEIGHT * values)

    def _block(self, name: str, *, is_sparse: bool) -> _Part:
        model, split, tokens = self.decoder, self.widths.tensor, self.tokens
        attention = model.attention_matrices
        per_head = model.query_width + model.value_width
        core = Work(
            kind="attention",
            num_operations=1,
            num_flops=tokens * tokens * per_head // split,  # 2 products of 2 FLOPs, half of the square
            num_bytes=_WEIGHT * tokens * 2 * per_head // split,
        )
        held = sum(a * b for a, b in attention) // split + 2 * model.hidden_size
        widths = [model.hidden_size * 4, sum(out for _, out in attention) + model.value_width]
        work = [
            self._products(attention, tokens, split),
            core,
            self._pointwise("normalization", 4 * tokens * model.hidden_size, 4),
        ]
        experts = 0
        if is_sparse:
            taken, width = model.num_experts_per_tok, model.expert_width
            expert, router = self._gated(width), (model.hidden_size, model.routed_experts)
            local = ceil(model.routed_experts / self.widths.expert)
            experts = local * sum(a * b for a, b in expert)
            shared = self._gated(width * model.n_shared_experts) if model.n_shared_experts else ()
            held += sum(a * b for a, b in shared) // split + router[0] * router[1]
            work += [self._products((router,), tokens, split), self._routed(expert, experts, taken, local)]
            work += [self._products(shared, tokens, split)] if shared else []
            work.append(self._pointwise("pointwise", tokens * 3 * width * (taken + model.n_shared_experts), 2))
            work.append(self._pointwise("indexing", 2 * tokens * taken * model.hidden_size, 2))
            widths += [
                taken * (2 * model.hidden_size + 3 * width),
                3 * width * model.n_shared_experts,
                2 * model.routed_experts,
            ]
        else:
            gated = self._gated(model.intermediate_size)
            held += sum(a * b for a, b in gated) // split
            work += [
                self._products(gated, tokens, split),
                self._pointwise("pointwise", tokens * 3 * model.intermediate_size, 2),
            ]
            widths.append(3 * model.intermediate_size)
        return _Part(
            name=name,
            kind="SparseBlock" if is_sparse else "DenseBlock",
            parameters=held,
            experts=experts,
            work=tuple(work),
            saved_bytes=_WEIGHT * tokens * sum(widths) // split,
        )

    def _gated(self, width: int) -> tuple[tuple[int, int], ...]:
        """A gated perceptron: gate and up, down."""
        return (self.decoder.hidden_size, width), (self.decoder.hidden_size, width), (width, self.decoder.hidden_size)

    def _routed(self, expert: tuple[tuple[int, int], ...], experts: int, taken: int, local: int) -> Work:
        """The experts of a device: all their weights are read, and each rank sends as many tokens as it receives."""
        found = self._products(expert, self.tokens * taken, self.widths.tensor)
        return Work(
            kind="matmul",
            num_operations=len(expert) * local,
            num_flops=found.num_flops,
            num_bytes=found.num_bytes + _WEIGHT * experts,
        )

    def _embedding(self) -> _Part:
        model, split = self.decoder, self.widths.tensor
        return _Part(
            name="embedding",
            kind="Embedding",
            parameters=0 if self._ties else model.vocab_size * model.hidden_size // split,
            work=(self._pointwise("indexing", self.tokens * model.hidden_size, 1),),
            saved_bytes=0,
        )

    @property
    def _ties(self) -> bool:
        """Whether other stages hold the embedding too."""
        return self.decoder.tie_word_embeddings or self.decoder.num_nextn_predict_layers > 0

    def _prediction(self, name: str) -> _Part:
        """A block after a projection of the hidden states beside the next token's embedding."""
        model, block = self.decoder, self._block(name, is_sparse=self.decoder.is_sparse(self.decoder.num_hidden_layers))
        projection = ((2 * model.hidden_size, model.hidden_size),)
        return _Part(
            name=name,
            kind="MultiTokenPrediction",
            parameters=block.parameters + 2 * model.hidden_size * model.hidden_size // self.widths.tensor,
            experts=block.experts,
            work=(*block.work, self._products(projection, self.tokens, self.widths.tensor)),
            saved_bytes=block.saved_bytes + 3 * self.hidden_bytes,
            output_copies=1 + model.num_nextn_predict_layers,
        )

    def _head(self) -> _Part:
        """Final norm, output layer and loss; the output layer runs once more for each token that is predicted further."""
        model, split, passes = self.decoder, self.widths.tensor, 1 + self.decoder.num_nextn_predict_layers
        output, logits = ((model.hidden_size, model.vocab_size),), self.tokens * model.vocab_size
        return _Part(
            name="head",
            kind="Head",
            parameters=model.hidden_size
            + (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size // split),
            work=(
                self._products(output, passes * self.tokens, split),
                self._pointwise("reduction", passes * 2 * logits, 4),
                self._pointwise("normalization", self.tokens * model.hidden_size, 1),
            ),
            saved_bytes=passes * _LOGIT * logits // split + 2 * self.hidden_bytes,
            workspace_bytes=_LOGIT * logits // split,
        )

    def profile(self, microbatch_sizes: tuple[int, ...]) -> Profile:
        """The computed profile; the optimizer's state is counted with the weights, as experts divide it otherwise."""
        parts = self.parts()
        data, sparse_data = self.widths.data, max(1, self.widths.data * self.widths.tensor // self.widths.expert)

        def held(dense: int, experts: int = 0) -> int:
            return _WEIGHT * (dense + experts) + _STATE * dense // data + _STATE * experts // sparse_data

        layers = tuple(
            Layer(
                name=part.name,
                kind=part.kind,
                num_parameters=part.parameters + part.experts,
                weight_bytes=held(part.parameters, part.experts),
                gradient_bytes=_GRADIENT * (part.parameters + part.experts),
                costs=tuple(self._cost(part, size, is_last=part is parts[-1]) for size in microbatch_sizes),
                num_trained=1,
            )
            for part in parts
        )
        parameters = sum(x.parameters + x.experts for x in parts)
        moved = 2 * _GRADIENT * parameters + 2 * sum(held(x.parameters, x.experts) for x in parts)
        model, last = self.decoder, len(parts) - 1
        table = model.vocab_size * model.hidden_size // self.widths.tensor
        users = [0, *range(1 + model.num_hidden_layers, last), *([last] if model.tie_word_embeddings else [])]
        shared = SharedWeight(
            name="embedding.weight",
            layers=tuple(users),
            num_parameters=table,
            weight_bytes=held(table),
            gradient_bytes=_GRADIENT * table,
        ) if self._ties else None  # fmt: skip
        nothing = Timing.exactly(0.0, origin="computed")
        step = StepCost(
            optimizer=Timing.exactly(moved / self.hardware.bytes_per_s, origin="computed"),
            zero_grad=nothing,
            optimizer_name="Adam",
            state_bytes=0,
            workspace_bytes=0,
        )
        return Profile(
            model=ModelId(
                name=self.name, settings=self._settings(), digest=sha256(repr(self).encode()).hexdigest()[:16]
            ),
            device=self.hardware.device(),
            layers=layers,
            shared_weights=() if shared is None else (shared,),
            loss=(),
            loss_reduction="mean",
            step=step,
            link=self.hardware.link,
            overhead_s=0.0,
            whole_model=(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=(),
            origin="computed",
            notes=(
                f"computed from the sizes of {self.name} for {self.hardware.name}; nothing was built or measured",
                "collectives within layers are not counted; weights include the optimizer's state",
            ),
        )

    def _settings(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, str(getattr(self.widths, name))) for name in self.widths.__slots__)

    def _cost(self, part: _Part, size: int, *, is_last: bool) -> LayerCost:
        work = tuple(
            Work(
                kind=x.kind, num_operations=x.num_operations, num_flops=size * x.num_flops, num_bytes=size * x.num_bytes
            )
            for x in part.work
        )
        forward_s = roofline_seconds(work, self.hardware, dtype=_DTYPE)
        forward = Timing.exactly(forward_s, origin="computed")
        half = Timing.exactly(0.5 * part.backward_factor * forward_s, origin="computed")
        output = 0 if is_last else size * part.output_copies * self.hidden_bytes
        return LayerCost(
            microbatch_size=size,
            forward=forward,
            backward=Timing.exactly(part.backward_factor * forward_s, origin="computed"),
            input_gradient=half,
            weight_gradient=half,
            stash_bytes=size * part.saved_bytes,
            forward_workspace_bytes=size * part.workspace_bytes,
            backward_workspace_bytes=size * part.workspace_bytes,
            output_bytes=output,
            output_gradient_bytes=output,
            output_unsaved_bytes=0,
            forward_work=work,
        )


def decoder_profile(
    name: str,
    hardware: Hardware,
    *,
    widths: Widths,
    microbatch_sizes: tuple[int, ...] = (1,),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Profile:
    """The computed profile of a configuration; raises UsageError or FileError for one that is not known."""
    found = DecoderProfile(name=name, decoder=load_decoder(name, settings), widths=widths, hardware=hardware)
    return found.profile(microbatch_sizes)
