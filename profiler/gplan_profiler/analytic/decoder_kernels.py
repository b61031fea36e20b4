"""The kernels of a decoder's layers in Megatron-LM with Transformer Engine, on one device: what each computes and keeps.

A layer is a list of kernels in the order of its forward; its backward runs them the other way round. Each kernel keeps
for its backward what it reads, unless an earlier one keeps it: a product its input, a norm its input, a gated activation
its input, attention its queries, keys, values and output. With residual branches the gradient of a branch's output is
held to the branch's start. So the stash, and the most that a backward holds above it, follow from the list.

Sources, NVIDIA/Megatron-LM and NVIDIA/TransformerEngine: attention.py (queries, keys and values are copied out of one
product's result, rotated, kept without it), fused_bias_swiglu.py (keeps its input), cross_entropy.py of Transformer
Engine (writes the gradient over the logits), fused_cross_entropy.py and cross_entropy.py of Megatron-LM (float32
logits), layers.py (gradients of weights are added to float32 buffers by the product; the output layer returns an empty
gradient of the weight's size beside). Tokens are spread evenly over experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from msgspec import structs

from gplan.core import OperationKind, Work
from gplan.core.layer_cost import Lifetime
from gplan_profiler.analytic.collectives import Exchange, Group, exchange_s
from gplan_profiler.analytic.decoder_config import BlockKind, Decoder, Widths
from gplan_profiler.analytic.hardware import ExchangeKind, Hardware, KernelName
from gplan_profiler.analytic.roofline import Operation, operations_seconds, total_work
from gplan_profiler.analytic.shapes import AttentionShape, Layout, MatmulShape
from gplan_profiler.analytic.trainers import MEGATRON, Trainer

DTYPE = "bfloat16"
ELEMENT = 2  # bytes of a weight or activation
LOGIT = 4  # of an unfused logit
GRADIENT = 4  # of a gradient that is float32

_EXCHANGES = {"forward": "before", "backward": "behind"}  # the fields of `Kernel` with the collectives of a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of a layer's forward, with that of its backward, for one micro-batch."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    keeps: int = 0  # bytes for its backward that no earlier kernel keeps
    makes: int = 0  # bytes of its result
    input_gradient: int = 0  # bytes that its backward makes and hands on
    beside: int = 0  # bytes that its backward needs beside that, and leaves free
    in_place: bool = False  # whether that gradient is written over what the kernel keeps
    before: tuple[Exchange, ...] = ()  # collectives of the forward
    behind: tuple[Exchange, ...] = ()  # those of the backward
    for_weights: int = 0  # bytes that its product for the gradient of weights reads: its input, its result's gradient
    waits: bool = False  # whether the host reads sizes that the device has computed
    keeps_own: bool = False  # whether all that it keeps is its own, and nothing of what it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A layer on one device: its weights, its kernels, and the bytes of what it hands on."""

    name: str
    kind: str
    kernels: tuple[Kernel, ...]
    branches: tuple[int, ...] = ()  # how many kernels each residual branch has; none: the layer is no sum of branches
    parameters: int  # held by the device, that every data-parallel rank has
    experts: int = 0  # the same of routed experts
    weights: tuple[tuple[int, int], ...] = ()  # the matrices of products that Transformer Engine runs
    matrices: tuple[int, ...] = ()  # the parameters of each large tensor
    output: int = 0  # bytes handed on and kept by the next layer; 0: the loss
    is_recomputed: bool = False  # whether it runs again before its backward and keeps its output alone

    @property
    def _kept_bytes(self) -> int:
        return sum(x.keeps for x in self.kernels)

    @property
    def stash_bytes(self) -> int:
        """What the layer keeps for its backward; its output too, which the next layer keeps."""
        return (0 if self.is_recomputed else self._kept_bytes) + self.output

    @property
    def pending_bytes(self) -> int:
        """What is kept between the halves of a split backward above the stash: products have their second half alone."""
        return sum(x.for_weights for x in self.kernels) - self.stash_bytes

    @property
    def forward_workspace_bytes(self) -> int:
        """The most above what is kept while a kernel makes its result."""
        kept, most = 0, 0
        for x in self.kernels:
            kept = 0 if self.is_recomputed else kept + x.keeps
            most = max(most, kept + x.makes + self.is_recomputed * x.keeps)
        return max(0, most - kept)

    @property
    def backward_workspace_bytes(self) -> int:
        """The most of a backward above the stash: gradients, less what later kernels have freed."""
        starts = {sum(self.branches[:i]) for i in range(len(self.branches))}
        kept, handed, residual, most = self._kept_bytes, self.output, 0, 0
        stash = 0 if self.is_recomputed else kept
        for i, x in reversed(list(enumerate(self.kernels))):
            if not residual and self.branches:
                residual, handed = handed, 0  # both paths of the sum read the same gradient
            made = 0 if x.in_place else x.input_gradient
            most = max(most, kept + residual + handed + made + x.beside)
            kept, handed = kept - x.keeps, x.input_gradient
            if i in starts:
                handed, residual = residual, 0  # the sum of both paths
        return max(0, most - stash)

    @property
    def tensors(self) -> tuple[Lifetime, ...]:
        """The tensors of a forward and a backward and when they are there, but for the layer's input and its gradient.

        Each kernel takes one time: those of the forward 0, 1 and so on, then those of a recompute, then those of the
        backward. The result of the last kernel is kept until the backward begins, when its gradient arrives.
        """
        again = len(self.kernels) * self.is_recomputed
        found = self._forward_tensors(0, keeps=not self.is_recomputed)
        if again:
            found += self._forward_tensors(again, keeps=True)
        return tuple(Lifetime(*x) for x in (*found, *self._backward_tensors(again)) if x[0])

    def _forward_tensors(self, start: int, *, keeps: bool) -> list[tuple[int, int, int]]:
        """(bytes, made, freed) of what the kernels make from time `start` on; what they keep until their backward, if `keeps`."""
        count = len(self.kernels)
        end = count * (2 + self.is_recomputed)
        made, found = 0, list[list[int]]()
        for i, x in enumerate(self.kernels):
            back = end - 1 - i if keeps else start + count - 1
            kept_input = made if x.keeps >= made and not x.keeps_own else 0
            if kept_input:
                found[-1][2] = back
            found += [
                [x.keeps - kept_input, start + i, back],
                [x.makes, start + i, min(start + i + 1, start + count - 1)],
            ]
            made = x.makes
        if start == 0 and self.output:
            found[-1][2] = count
        return [(a, b, c) for a, b, c in found]

    def _backward_tensors(self, again: int) -> list[tuple[int, int, int]]:
        """(bytes, made, freed) of gradients, and of what is needed beside them; `again` kernels are recomputed before.

        The gradient of a branch's result is kept until the branch is done, as the path around the branch has the same.
        """
        count = len(self.kernels)
        starts = {sum(self.branches[:i]) for i in range(len(self.branches))}
        first = count + again
        handed, residual = [self.output, count, first], None
        found = [handed]
        for time, (i, x) in enumerate(reversed(list(enumerate(self.kernels))), first):
            if residual is None and self.branches:
                residual = handed
            handed[2] = max(handed[2], time)
            given = [0 if x.in_place or not i else x.input_gradient, time, time + 1]
            found += [given, [x.beside, time, time]]
            if residual is not None:
                residual[2] = time
            handed = given
            if i in starts:
                residual = None
        return [(a, b, c) for a, b, c in found]

    def seconds(self, hardware: Hardware, widths: Widths, trainer: Trainer = MEGATRON) -> tuple[float, float]:
        """Seconds of forward and backward with their collectives.

        The host starts operations while the device computes, so the slower of both counts.
        """
        once_s, back_s = (max(self._clocks_s(way, hardware, widths, trainer)) for way in ("forward", "backward"))
        return once_s, back_s + self.is_recomputed * once_s

    def _clocks_s(self, way: str, hardware: Hardware, widths: Widths, trainer: Trainer) -> tuple[float, float]:
        """Seconds of the device, its waits included, and of the host."""
        operations = [y for x in self.kernels for y in getattr(x, way)]
        exchanges = [y for x in self.kernels for y in getattr(x, _EXCHANGES[way])]
        waited_s = sum(exchange_s(hardware, widths, x) for x in exchanges)
        waited_s += trainer.sizes_s * sum(x.waits for x in self.kernels)
        if trainer.holds_gradients and way == "backward":  # read, and added to those of float32
            operations += _moved("pointwise", (ELEMENT + 2 * GRADIENT) * (self.parameters + self.experts))
        tensor = sum(x.group == "tensor" for x in exchanges)
        started_s = trainer.exchange_host_s(widths, hardware.devices_per_node) * tensor
        host_s = started_s + trainer.host_s * sum(x.work.num_operations for x in operations)
        return operations_seconds(operations, trainer.on(hardware), dtype=DTYPE) + waited_s, host_s

    def late_bytes(self, hardware: Hardware, widths: Widths, trainer: Trainer) -> int:
        """What a forward's scattered sums take while the host is ahead of the device, for each micro-batch in flight.

        The allocator takes a tensor back that another stream reads once that has read it. Until then further layers are
        started, and such tensors are held as their activations are. The host is ahead where the device is the slower of
        both. Else it is from the third micro-batch of a warm-up on: the sends before keep the device waiting for the
        next stage, not the host. Of groups on more than two nodes nothing was seen.
        """
        scattered = sum(y.num_bytes for x in self.kernels for y in x.before if y.kind == "reduce_scatter")
        if not (trainer.frees_late and scattered) or widths.tensor > 2 * hardware.devices_per_node:
            return 0
        device_s, host_s = self._clocks_s("forward", hardware, widths, trainer)
        ahead = 1.0 if device_s > host_s else max(0.0, 1 - 2 / widths.pipeline)
        return round(ahead * scattered)

    def work(self, way: str) -> tuple[Work, ...]:
        """Counted work of the forward or the backward."""
        return total_work([y for x in self.kernels for y in getattr(x, way)])


def _moved(kind: OperationKind, *amounts: float, kernel: KernelName | None = None) -> tuple[Operation, ...]:
    """Operations bound by memory, one for each amount of bytes."""
    work = (Work(kind=kind, num_operations=1, num_flops=round(x / ELEMENT), num_bytes=round(x)) for x in amounts)
    return tuple(Operation(work=x, kernel=kernel) for x in work)


def _product(
    m: int, k: int, n: int, *, groups: int = 1, layout: Layout = "TN", out_bytes: int = ELEMENT, dtype: str = DTYPE
) -> Operation:
    shape = MatmulShape(
        m=m, k=k, n=n, groups=groups, layout=layout, accumulate=out_bytes == GRADIENT, dtype=dtype,
        out_dtype="float32" if out_bytes == GRADIENT else DTYPE,
    )  # fmt: skip
    moved = ELEMENT * (m * k + k * n) + (2 if shape.accumulate else 1) * out_bytes * m * n
    work = Work(kind="matmul", num_operations=1, num_flops=shape.num_flops, num_bytes=groups * moved)
    return Operation(work=work, shape=shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch of a block without its norms."""

    kernels: tuple[Kernel, ...]
    matrices: tuple[tuple[int, int], ...]
    values: int  # parameters outside of matrices, which are not divided
    experts: int = 0  # parameters of the device's experts
    routed: tuple[tuple[int, int], ...] = ()  # the matrices of one


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The layers of a decoder for one micro-batch, a tensor-parallel rank's share.

    Attention, norms and gated activations are fused kernels, as in Megatron-LM unless told otherwise.
    """

    decoder: Decoder
    widths: Widths
    microbatch_size: int
    fuses_cross_entropy: bool
    trainer: Trainer = MEGATRON
    products: str = DTYPE  # in which the products of weights multiply

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on a rank that divides the sequence with others."""
        return self.microbatch_size * self.widths.sequence_length // self.widths.context

    def _bytes(self, width: float) -> int:
        """Of so many values for each token, divided over the tensor-parallel ranks."""
        return int(ELEMENT * self.tokens * width) // self.widths.tensor

    def _rows(self, width: float) -> int:
        """Bytes of so many values for each token where ranks divide the tokens, not the values."""
        return int(ELEMENT * self.tokens * width) // (self.widths.tensor if self.trainer.divides_sequence else 1)

    @property
    def _key_value_bytes(self) -> tuple[int, int]:
        """Of the keys and of their values on a rank, which has one head at least."""
        model, heads = self.decoder, max(self.decoder.kv_heads, self.widths.tensor)
        return self._bytes(heads * model.key_width // model.kv_heads), self._bytes(heads * model.value_head)

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states."""
        return self._rows(self.decoder.hidden_size)

    def _exchanges(
        self, kind: ExchangeKind, num_bytes: float, *, group: Group = "tensor", hidden: bool = False
    ) -> tuple[Exchange, ...]:
        """A collective of these bytes on the whole group; none of a group of one."""
        sizes = {"tensor": self.widths.tensor, "context": self.widths.context, "expert": self.widths.expert}
        if (sizes | {"expert_tensor": self.widths.of_expert})[group] == 1 or not num_bytes:
            return ()
        share = self.trainer.hidden_share if hidden else 0.0
        return (Exchange(kind=kind, group=group, num_bytes=int(num_bytes), hidden=share),)

    def _into(self, kernel: Kernel, width: int) -> Kernel:
        """A product whose input, `width` values a token, all tensor ranks read whole: gathered, or already the same.

        The input is gathered again for the gradient of the weight.
        """
        whole = ELEMENT * self.tokens * width
        if not self.trainer.divides_sequence:
            return replace(kernel, behind=self._exchanges("all_reduce", whole, hidden=True))
        again = self._exchanges("all_gather", whole, hidden=True)
        scattered = self._exchanges("reduce_scatter", whole, hidden=True)
        return replace(kernel, before=self._exchanges("all_gather", whole), behind=(*again, *scattered))

    def _out_of(self, kernel: Kernel, width: int) -> Kernel:
        """A product whose result, `width` values a token, is the sum over all tensor ranks: scattered, or held by each."""
        whole = ELEMENT * self.tokens * width
        if not self.trainer.divides_sequence:
            return replace(kernel, before=self._exchanges("all_reduce", whole))
        return replace(
            kernel,
            before=self._exchanges("reduce_scatter", whole),
            behind=self._exchanges("all_gather", whole),
        )

    def block(self, name: str, kind: BlockKind) -> Part:
        """Attention and a perceptron or experts, each with its norms, added to the hidden states."""
        if kind.sizes:
            own = structs.replace(self.decoder, per_layer=(), **dict(kind.sizes))
            return replace(self, decoder=own).block(name, replace(kind, sizes=()))
        model, split = self.decoder, self.widths.tensor
        found = [*([self._mixer(kind)] if kind.mixer else []), *([self._feed(kind)] if kind.feed else [])]
        branches = [(*self._with_norms(x.kernels, is_first=not i), self._sum()) for i, x in enumerate(found)]
        matrices = [y for x in found for y in x.matrices]
        num_norms = len(found) * (model.num_block_norms // 2) or 1
        return Part(
            name=name,
            kind=self._kind_name(kind),
            kernels=tuple(y for x in branches for y in x),
            branches=tuple(map(len, branches)),
            parameters=num_norms * model.norm_values + sum(x.values for x in found) + sum(map(prod, matrices)) // split,
            experts=sum(x.experts for x in found),
            weights=tuple({*((a, b // split) for a, b in matrices), *(y for x in found for y in x.routed)}),
            matrices=tuple(prod(x) // split for x in matrices),
            output=self.hidden_bytes,
        )

    def _kind_name(self, kind: BlockKind) -> str:
        """The parts of a block as the name of a class: norms that are not before its branches, a mixer, a perceptron or experts.

        Attention is not named beside a perceptron or experts: `DenseBlock`, `SparseBlock`.
        """
        model = self.decoder
        norms = "PostNorm" if model.norms_after else "SandwichNorm" if model.num_block_norms > 2 else ""
        if not kind.mixer:
            return norms + {"dense": "PerceptronBlock", "sparse": "ExpertsBlock"}[kind.feed]
        mixer = model.linear_name if kind.mixer == "linear_attention" else "" if kind.feed else "Attention"
        return f"{norms}{mixer}{kind.feed.title()}Block"

    def _with_norms(self, kernels: tuple[Kernel, ...], *, is_first: bool) -> tuple[Kernel, ...]:
        """A branch with the norms of its input and its result; the block's input is kept by the layer before."""
        model = self.decoder
        reads_input = is_first or model.is_parallel
        norm = self._norm(model.hidden_size, keeps=0 if reads_input else self.hidden_bytes)
        behind = [self._norm(model.hidden_size, keeps=self.hidden_bytes)] * (
            model.num_block_norms > 2 or model.norms_after
        )
        if not model.norms_after and (is_first or model.num_block_norms > 1):
            return (norm, *kernels, *behind)
        if reads_input:  # its first kernel reads what is kept already
            kernels = (replace(kernels[0], keeps=kernels[0].keeps - self.hidden_bytes), *kernels[1:])
        return (*kernels, *behind)

    def _mixer(self, kind: BlockKind) -> _Branch:
        """Attention of a kind, or linear attention."""
        model = self.decoder
        if kind.mixer == "linear_attention":
            return _Branch(self._linear_attention(), model.linear_matrices, model.linear_values)
        before = self._latent_products() if model.kv_lora_rank else self._direct_products(is_rotary=kind.is_rotary)
        matrices, values = model.attention_matrices, model.attention_values
        if kind.mixer == "indexed_attention":
            before, matrices = (*before, *self._index(kind.attended)), (*matrices, *model.index_matrices)
            values += 2 * model.index_head_dim
        value = self._bytes(model.value_width)
        gates = self._bytes(model.num_attention_heads) if model.has_head_gates else value
        gate = Kernel(
            forward=_moved("pointwise", 2 * value + gates), backward=_moved("pointwise", 3 * value + 2 * gates),
            keeps=value + gates, makes=value, input_gradient=value + gates,
        )  # fmt: skip
        projected = self._linear(model.value_width, model.hidden_size, keeps=0, by_input=True)
        core = (self._core(kind.attended), *[gate] * model.attn_output_gate)
        return _Branch((*before, *core, self._out_of(projected, model.hidden_size)), matrices, values)

    def _feed(self, kind: BlockKind) -> _Branch:
        """A perceptron, or experts with a router."""
        model, hidden = self.decoder, self.decoder.hidden_size
        if kind.feed == "dense":
            values = (model.num_gates * model.dense_width + hidden) * model.mlp_bias + model.activation_values
            return _Branch(self._perceptron(model.dense_width), tuple(self._gated(model.dense_width)), values)
        own = model.expert_width // self.widths.of_expert
        routed = ((hidden, model.num_gates * own), (own, hidden))
        local = -(-model.routed_experts // self.widths.expert)
        biases = (model.num_gates * own + hidden) * model.has_expert_biases
        return _Branch(
            kernels=self._experts(local),
            matrices=tuple(self._gated(model.shared_width)) if model.shared_width else (),
            values=(hidden + model.has_router_bias) * model.routed_experts + hidden * model.has_shared_gate,
            experts=local * (sum(map(prod, routed)) + biases),
            routed=routed,
        )

    def embedding(self) -> Part:
        """Looks rows up; its gradient is a dense table, which is added to the float32 gradients."""
        model, split = self.decoder, self.widths.tensor
        table, is_tied = model.vocab_size * model.hidden_size // split, model.ties_embedding
        moved = _moved("indexing", 2 * self.hidden_bytes, *[2 * self.hidden_bytes] * (self.microbatch_size > 1))
        cleared, summed = ELEMENT * table, (ELEMENT + 2 * self.trainer.gradient_bytes) * table
        added = _moved("pointwise", cleared, summed)
        kernel = self._out_of(
            Kernel(
                forward=moved,
                backward=(*_moved("indexing", 2 * self.hidden_bytes), *added),
                makes=self.hidden_bytes,
                beside=ELEMENT * table,
            ),
            model.hidden_size,
        )
        own = (model.learned_positions + model.unused_positions) * model.hidden_size + (0 if is_tied else table)
        norms = [self._norm(model.hidden_size, keeps=self.hidden_bytes)] * model.has_embedding_norm
        return Part(
            name="model.embed_tokens", kind="Embedding", kernels=(kernel, *norms), parameters=own + len(norms) * model.norm_values,
            matrices=() if is_tied else (table,), output=self.hidden_bytes,
        )  # fmt: skip

    def prediction(self, name: str) -> Part:
        """A block after a projection of the hidden states beside the next token's embedding, both normalized."""
        model = self.decoder
        block = self.block(name, model.block_kind(model.num_hidden_layers, self.widths.sequence_length))
        hidden = model.hidden_size
        joined = (*[self._norm(hidden)] * 2, self._linear(2 * hidden, hidden, keeps=self._bytes(2 * hidden)))
        return replace(
            block,
            kind="MultiTokenPrediction",
            kernels=(*joined, *block.kernels),
            branches=(len(joined) + block.branches[0], block.branches[1]),
            parameters=block.parameters + 2 * hidden * hidden // self.widths.tensor + 3 * model.norm_values,
        )

    def head(self) -> tuple[Part, ...]:
        """Final norm, output layer and loss; the last two run once more for each token that is predicted further.

        Where a trainer can cut behind the norm, that is a layer of its own.
        """
        model, split = self.decoder, self.widths.tensor
        output = (model.hidden_size, model.vocab_size // split)
        passes, table = 1 + model.num_nextn_predict_layers, prod(output)
        logits = self.tokens * output[1]
        layer = self._into(
            self._linear(*output, keeps=self.hidden_bytes, beside=ELEMENT * table, is_split=True), model.hidden_size
        )
        sums = self._exchanges("all_reduce", LOGIT * self.tokens) * 3  # largest logit, sum, logit of the target
        if self.fuses_cross_entropy:  # counted as the published share of it is: read and written both ways
            moved = _moved("reduction", 2 * ELEMENT * logits, kernel="cross-entropy")
            loss = Kernel(
                forward=moved, backward=moved, keeps=ELEMENT * logits, input_gradient=ELEMENT * logits, in_place=True,
                before=sums,
            )  # fmt: skip
        else:  # float32: converted, its maximum found and subtracted, exponentiated, summed, divided; back: scaled, converted
            passes_over, converted = 8, (ELEMENT + LOGIT) * logits
            loss = Kernel(
                forward=_moved("reduction", converted + passes_over * LOGIT * logits, kernel="unfused-cross-entropy"),
                backward=_moved("reduction", 2 * LOGIT * logits + converted, kernel="unfused-cross-entropy"),
                keeps=LOGIT * logits,
                makes=(LOGIT if self.trainer.casts_logits else ELEMENT) * logits,
                keeps_own=True,
                input_gradient=ELEMENT * logits,
                before=sums,
            )
        norm = Part(
            name="model.norm", kind="Norm", kernels=(self._norm(model.hidden_size),), parameters=model.norm_values,
            output=self.hidden_bytes,
        )  # fmt: skip
        lm_head = Part(
            name="lm_head",
            kind="Head",
            kernels=(layer, loss) * passes,
            parameters=model.lm_head_bias * output[1] + (0 if model.tie_word_embeddings else table),
            matrices=() if model.tie_word_embeddings else (table,),
        )
        if self.trainer.counts_blocks:  # the norm's result is kept as its output
            return norm, replace(lm_head, kernels=(replace(layer, keeps=0), *lm_head.kernels[1:]))
        kernels, parameters = norm.kernels + lm_head.kernels, norm.parameters + lm_head.parameters
        return (replace(lm_head, name="model.norm..lm_head", kernels=kernels, parameters=parameters),)

    def _gated(self, width: int) -> list[tuple[int, int]]:
        """A perceptron: gate and up in one product, or up alone, and down."""
        return [(self.decoder.hidden_size, self.decoder.num_gates * width), (width, self.decoder.hidden_size)]

    def _norm(self, width: int, *, keeps: int = 0) -> Kernel:
        """Keeps its input, which is counted as the layer's before where `keeps` is 0."""
        size = self._rows(width) if width == self.decoder.hidden_size else self._bytes(width)
        return Kernel(
            forward=_moved("normalization", 2 * size),
            backward=_moved("normalization", 3 * size),
            keeps=keeps,
            makes=size,
            input_gradient=size,
        )

    def _sum(self) -> Kernel:
        """Adds a branch to the hidden states; the result is kept by what follows."""
        moved = _moved("pointwise", 3 * self.hidden_bytes)
        mask = self.hidden_bytes // ELEMENT * self.trainer.keeps_masks
        return Kernel(forward=moved, backward=moved, keeps=mask, makes=self.hidden_bytes)

    def _linear(
        self,
        width_in: int,
        width_out: int,
        *,
        keeps: int,
        beside: int = 0,
        by_input: bool = False,
        is_split: bool = False,
    ) -> Kernel:
        """A product of every token; its width is divided over the tensor-parallel ranks, unless it `is_split` already."""
        split = 1 if is_split else self.widths.tensor
        k, n = (width_in // split, width_out) if by_input else (width_in, width_out // split)
        tokens = self.tokens
        dtype = DTYPE if is_split else self.products  # the output layer stays in bfloat16
        made = ELEMENT if self.trainer.holds_gradients else self.trainer.gradient_bytes
        return Kernel(
            forward=(_product(tokens, k, n, dtype=dtype),),
            backward=(
                _product(tokens, n, k, layout="NN", dtype=dtype),
                _product(n, tokens, k, layout="NT", out_bytes=made, dtype=dtype),
            ),
            keeps=keeps,
            makes=ELEMENT * tokens * n,
            input_gradient=ELEMENT * tokens * k,
            beside=beside,
            for_weights=ELEMENT * tokens * (k + n),
        )

    def _direct_products(self, *, is_rotary: bool) -> tuple[Kernel, ...]:
        """One product; queries are copied out of its result, queries and keys normalized and rotated, values copied.

        Tensor ranks beyond the heads of keys gather the result of all, and take a head that others have too (attention.py).
        """
        model = self.decoder
        query, (keys, values) = self._bytes(model.query_width), self._key_value_bytes
        gathered = ELEMENT * self.tokens * model.attention_matrices[0][1]
        gather = Kernel(
            forward=_moved("pointwise", 2 * gathered), backward=_moved("pointwise", 4 * gathered),
            before=self._exchanges("all_gather", gathered), behind=self._exchanges("reduce_scatter", gathered),
            makes=gathered, input_gradient=gathered // self.widths.tensor, beside=gathered,
        )  # fmt: skip
        product = self._into(
            self._linear(*model.attention_matrices[0], keeps=self.hidden_bytes),
            model.hidden_size,
        )
        rotated = [2 * query, 2 * keys] * is_rotary
        rotation = Kernel(
            forward=_moved("pointwise", 2 * query, *rotated, 2 * values),
            backward=_moved("pointwise", *rotated, 2 * (query + keys + values)),
            makes=query + keys + values,
            input_gradient=query + keys + values,
        )
        width = model.query_width + model.key_width
        norms = [self._norm(width, keeps=self._bytes(width))] * model.has_head_norms
        return product, *[gather] * (self.widths.tensor > self.decoder.kv_heads), *norms, rotation

    def _latent_products(self) -> tuple[Kernel, ...]:
        """Multi-head latent attention: down, norm and up for queries, and for keys and values together."""
        model, hidden = self.decoder, self.hidden_bytes
        expanded = model.num_attention_heads * (model.qk_nope_head_dim + model.value_head)
        latent, rank = model.kv_lora_rank + model.qk_rope_head_dim, model.kv_lora_rank
        if model.q_lora_rank:
            queries = [
                self._linear(model.hidden_size, model.q_lora_rank, keeps=hidden),
                self._norm(model.q_lora_rank, keeps=self._bytes(model.q_lora_rank)),
                self._into(
                    self._linear(model.q_lora_rank, model.query_width, keeps=self._bytes(model.q_lora_rank)),
                    model.q_lora_rank,
                ),
            ]
        else:
            queries = [self._into(self._linear(model.hidden_size, model.query_width, keeps=hidden), model.hidden_size)]
        keys = [
            self._linear(model.hidden_size, latent, keeps=0),
            self._norm(rank, keeps=self._bytes(latent)),
            self._into(self._linear(rank, expanded, keeps=self._bytes(rank)), latent),
        ]
        query, value = self._bytes(model.query_width), self._bytes(model.value_width)
        moved = _moved("pointwise", 2 * query, 2 * query, 2 * query, 2 * value)  # rotated, and joined to whole heads
        joined = Kernel(forward=moved, backward=moved, makes=2 * query + value, input_gradient=2 * query + value)
        return (*queries, *keys, joined)

    def _index(self, attended: float) -> tuple[Kernel, ...]:
        """The indexer: scores of all earlier tokens, of which the largest are attended to; trained on those alone."""
        model = self.decoder
        width, keys = model.index_n_heads * model.index_head_dim, model.index_head_dim + model.index_n_heads
        pairs = self.tokens * self.widths.sequence_length // 2  # causal
        flops = 2 * pairs * width // self.widths.tensor
        read = self._bytes(width) + ELEMENT * self.tokens * keys
        works = [
            Work(kind="attention", num_operations=1, num_flops=round(share * flops), num_bytes=size)
            for share, size in ((1.0, read), (2 * attended, 2 * read))
        ]
        selected = _moved("reduction", 4 * pairs, 4 * pairs)  # float32 scores, written and read
        scores = Kernel(
            forward=(Operation(work=works[0]), *selected), backward=(Operation(work=works[1]),), keeps=read, makes=4 * pairs,
            input_gradient=read,
        )  # fmt: skip
        return *(self._linear(*x, keeps=0) for x in model.index_matrices), scores

    def _linear_attention(self) -> tuple[Kernel, ...]:
        """Gated DeltaNet, lightning attention or Mamba-2, whose recurrence is computed by chunks of tokens.

        Within a chunk as causal attention; between chunks each head reads and updates its state of key by value. The
        delta rule also solves a triangular system for each chunk. The backward computes states again.
        """
        model = self.decoder
        joined, values = (self._bytes(x) for x in model.linear_widths)
        key, value = model.linear_sizes
        heads, chunk = model.linear_heads, model.linear_chunk
        scores = chunk * key * (model.linear_num_key_heads or heads)
        flops = scores + heads * (chunk * value + 4 * key * value)
        if model.linear_is_delta:
            flops += heads * (2 * chunk * key + chunk * value + chunk**2 // 3 + 2 * key * value)
        states = self._bytes(2 * heads * key * value / chunk)  # written and read
        works = [
            Work(kind="attention", num_operations=1, num_flops=round(x * flops * self.tokens) // self.widths.tensor,
                 num_bytes=size)
            for x, size in ((1.0, joined + values + states), (2.5, 2 * (joined + values + states)))
        ]  # fmt: skip
        convolution = Kernel(
            forward=_moved("pointwise", 2 * joined), backward=_moved("pointwise", 4 * joined), keeps=joined, makes=joined,
            input_gradient=joined,
        )  # fmt: skip
        ring = self.widths.context  # ranks that divide the sequence hand their states on
        handed = self._exchanges(
            "all_gather",
            (ring > 1) * 4 * ring * self.microbatch_size * heads * key * value // self.widths.tensor,
            group="context",
        )
        core = Kernel(
            forward=(Operation(work=works[0]),), backward=(Operation(work=works[1]),), before=handed, behind=handed,
            keeps=joined + values, makes=values, input_gradient=joined,
        )  # fmt: skip
        norm = Kernel(  # of the result, times the gate
            forward=_moved("normalization", 3 * values), backward=_moved("normalization", 5 * values), keeps=2 * values,
            makes=values, input_gradient=2 * values,
        )  # fmt: skip
        inner, outer = model.linear_matrices
        return (
            self._into(self._linear(*inner, keeps=self.hidden_bytes), model.hidden_size),
            *[convolution] * (model.linear_conv_kernel_dim > 0),
            core,
            norm,
            self._out_of(self._linear(*outer, keeps=0, by_input=True), model.hidden_size),
        )

    def _core(self, attended: float) -> Kernel:
        """Causal attention to a share of the earlier tokens; with sums over keys in float32."""
        model, split = self.decoder, self.widths.tensor
        heads = model.num_attention_heads // split
        kv_heads = max(1, self.decoder.kv_heads // split)
        query, value = self._bytes(model.query_width), self._bytes(model.value_width)
        keys, values = (query, value) if model.kv_lora_rank else self._key_value_bytes
        sums = 4 * self.tokens * heads
        ring = self.widths.context  # chunks of keys and values, which go round the ranks that divide the sequence
        sequence = self.widths.sequence_length // ring
        shapes = [
            AttentionShape(
                batch=self.microbatch_size, sequence=sequence, heads=heads, kv_heads=kv_heads,
                qk_dim=model.query_width // model.num_attention_heads,
                v_dim=model.value_width // model.num_attention_heads, direction=direction,
            )
            for direction in ("forward", "backward")
        ]  # fmt: skip
        kept = query + keys + values + value
        works = [
            Work(
                kind="attention",
                num_operations=ring,
                num_bytes=size,
                num_flops=round(ring * attended * (shape.num_flops // 2)),  # causal: half
            )
            for shape, size in zip(shapes, (kept, 2 * kept), strict=True)
        ]
        fused = [(Operation(work=work, shape=shape),) for work, shape in zip(works, shapes, strict=True)]
        sums_of = [[3 * x] * ring * (ring > 1) for x in (value, query + keys + values)]
        forward, backward = self._single_products(shapes[0], ring) if self.trainer.stores_scores else fused
        stored = 0
        if self.trainer.recomputes_scores:
            backward = (*forward, *backward)
        elif self.trainer.stores_scores:
            stored = (2 * ELEMENT + 1) * heads * self.tokens * self.widths.sequence_length
        # Each step's result is added to a sum in memory (Transformer Engine's context_parallel.py, fwd_out_correction).
        forward, backward = (
            (*forward, *_moved("pointwise", *sums_of[0])),
            (*backward, *_moved("pointwise", *sums_of[1])),
        )
        chunks = ring * (keys + values)
        kept_again = 2 * ELEMENT if stored else 2 * ELEMENT + 1  # gradients of both squares, or what was not stored
        return Kernel(
            forward=forward,
            backward=backward,
            before=self._exchanges("all_gather", chunks, group="context", hidden=True),
            behind=self._exchanges("all_gather", 2 * chunks, group="context", hidden=True),
            keeps=kept + (stored if self.trainer.stores_scores else sums),
            makes=value,
            input_gradient=query + keys + values,
            beside=self.trainer.stores_scores * kept_again * heads * self.tokens * sequence,
        )

    def _single_products(self, forward: AttentionShape, ring: int) -> list[tuple[Operation, ...]]:
        """Attention of the whole square: two products and a softmax with dropout, forward; four and both, backward."""
        heads, side = forward.batch * forward.heads * ring, forward.sequence
        scores = ELEMENT * heads * side**2
        one = _product(side, forward.qk_dim, side, groups=heads)
        two = _product(side, side, forward.v_dim, groups=heads)
        moved = _moved("normalization", 2 * scores), _moved("normalization", 3 * scores)
        dropped = _moved("pointwise", 2.5 * scores)
        return [(one, *moved[0], *dropped, two), (two, one, *dropped, *moved[1], one, two)]

    def _perceptron(self, width: int) -> tuple[Kernel, ...]:
        hidden = self.decoder.hidden_size
        return (
            self._into(self._linear(hidden, self.decoder.num_gates * width, keeps=self.hidden_bytes), hidden),
            self._activation(self._bytes(width)),
            self._out_of(self._linear(width, hidden, keeps=self._bytes(width), by_input=True), hidden),
        )

    def _activation(self, size: int) -> Kernel:
        """The gate's activation times the other half, or a plain one; keeps its input."""
        gates = self.decoder.num_gates
        forward: tuple[int, ...] = (1 + gates,)
        backward: tuple[int, ...] = (1 + 2 * gates,)
        kept = gates
        if gates > 1 and not self.trainer.fuses_gate:  # the activation, then the product of both halves
            forward, backward, kept = (2, 3), (3, 3, 4), gates + 1
        return Kernel(
            forward=_moved("pointwise", *(x * size for x in forward)),
            backward=_moved("pointwise", *(x * size for x in backward)),
            keeps=kept * size,
            makes=size,
            input_gradient=gates * size,
        )

    def _experts(self, local: int) -> tuple[Kernel, ...]:
        """Router, shared experts, and the routed ones between the two exchanges of tokens.

        The hidden states after the norm are kept for the router; experts keep their tokens, which are copied for them. Each
        expert gets as many from every rank, rounded up.
        """
        model, hidden, num_ranks = self.decoder, self.hidden_bytes, self.widths.expert * self.widths.of_expert
        taken, width = model.num_experts_per_tok, model.expert_width // self.widths.of_expert
        own = self.tokens // self.widths.tensor  # tokens of this rank: the sequence is divided here
        rows = -(-own * taken // model.routed_experts)  # of each expert, from one rank
        moved = ELEMENT * rows * model.routed_experts  # bytes for each value of a token
        sent = moved * model.hidden_size
        gathered = sent * self.widths.of_expert  # by the ranks that divide an expert
        scores = 4 * own * model.routed_experts
        router = Kernel(
            forward=(_product(own, model.hidden_size, model.routed_experts), *_moved("reduction", *[scores] * 4)),
            backward=(
                _product(own, model.routed_experts, model.hidden_size, layout="NN"),
                _product(model.routed_experts, own, model.hidden_size, layout="NT", out_bytes=GRADIENT),
                *_moved("reduction", *[scores] * 2),
            ),
            keeps=hidden + 3 * scores,
            makes=scores,
            input_gradient=hidden,
        )
        shared: tuple[Kernel, ...] = ()
        if model.shared_width:
            dense = self._perceptron(model.shared_width)
            shared = (replace(dense[0], keeps=0), *dense[1:])  # the router keeps its input
        ways: tuple[KernelName, KernelName] = ("permute-forward", "permute-backward")
        out, back = (
            (
                _moved("indexing", hidden + sent, 2 * sent, kernel=way),
                _moved("indexing", 2 * sent, sent + hidden, kernel=way),
            )
            for way in ways
        )
        moves = self._exchanges("all_to_all", sent, group="expert")
        wide = (
            self._exchanges("all_gather", gathered, group="expert_tensor"),
            self._exchanges("reduce_scatter", gathered, group="expert_tensor"),
        )
        tokens_in = Kernel(
            forward=out[0], backward=back[1], makes=gathered, input_gradient=hidden, beside=gathered, waits=True,
            before=(*moves, *wide[0]), behind=(*wide[1], *moves),
        )  # fmt: skip
        tokens_out = Kernel(
            forward=out[1], backward=back[0], makes=hidden, input_gradient=gathered,
            before=(*wide[1], *moves), behind=(*moves, *wide[0]),
        )  # fmt: skip
        gated, inside = self._activation(moved * self.widths.of_expert * width), (local, rows * num_ranks)
        return (
            router,
            *shared,
            tokens_in,
            _grouped(*inside, model.hidden_size, model.num_gates * width, keeps=gathered),
            gated,
            _grouped(*inside, width, model.hidden_size, keeps=moved * self.widths.of_expert * width),
            tokens_out,
        )


def _grouped(groups: int, rows: int, k: int, n: int, *, keeps: int) -> Kernel:
    """A product of each local expert with its tokens."""
    return Kernel(
        forward=(_product(rows, k, n, groups=groups),),
        backward=(
            _product(rows, n, k, groups=groups, layout="NN"),
            _product(n, rows, k, groups=groups, layout="NT", out_bytes=GRADIENT),
        ),
        keeps=keeps,
        makes=ELEMENT * groups * rows * n,
        input_gradient=ELEMENT * groups * rows * k,
        for_weights=ELEMENT * groups * rows * (k + n),
    )
