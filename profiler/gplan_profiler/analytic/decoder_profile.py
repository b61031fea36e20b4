"""A computed profile of a language model from its configuration alone, on one device of a tensor- and expert-parallel group.

For models that are too large to build, and for widths that the planner does not choose. The kernels of each layer, what
they keep and what they take are those of Megatron-LM (gplan_profiler/analytic/decoder_kernels.py), in bfloat16: weights of 2
bytes, gradients of 4, and 12 bytes of optimizer state, which the data-parallel ranks divide. Activations are divided by
the tensor-parallel size (sequence parallelism), experts by the expert-parallel size. Seconds are by the roofline and the
device's shares by shape. A step clears, scales and checks the gradients, then Adam reads and writes the state. Layers have
the names of Hugging Face models, by which exports name modules. Collectives within layers and between replicas are those of
the widths, by `collectives`; other trainers differ as `trainers` says. Left out: imbalance between experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod

from gplan.core import Layer, LayerCost, ModelId, Precision, Profile, SharedWeight, StepCost, Timing
from gplan.core.errors import UsageError
from gplan.core.layer_cost import Leftover
from gplan.core.profile import ParameterSize
from gplan.core.units import now_text
from gplan_profiler.analytic.collectives import pipeline_link
from gplan_profiler.analytic.decoder_config import ORDER, Decoder, Widths
from gplan_profiler.analytic.decoder_kernels import DTYPE, ELEMENT, LayerKernels, Part
from gplan_profiler.analytic.expected_errors import expected_error
from gplan_profiler.analytic.hardware import Hardware
from gplan_profiler.analytic.trainers import MEGATRON, Trainer

UNDIVIDED = "replicas"
"""The setting that says over how many replicas a plan is to divide the optimizer's state, where the profile does not."""
SPECIAL = "special"
"""The setting that names what not every trainer's models have (`Decoder.special`)."""
_STATE = 12  # bytes of the optimizer's state: master weights and two moments
_MASTER = 4  # of a master weight, and of its gradient while it is updated
_GRADIENT_PASSES = 4  # over the gradients once a step: cleared, scaled (read and written), checked for NaN
_UPDATE_BYTES = 4 + 2 * _STATE + ELEMENT + 4  # of a parameter: gradient, state read and written, weight, norm


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderProfile:
    """The layers of a decoder on a device, for micro-batches of some sizes."""

    name: str
    decoder: Decoder
    widths: Widths
    hardware: Hardware
    fuses_cross_entropy: bool = False
    divides_state: bool = True  # over the data-parallel ranks; else that is left to the sharding of a plan
    recomputed: frozenset[int] = frozenset()  # blocks that run again in the backward, one by one
    trainer: Trainer = MEGATRON
    products: str = DTYPE  # in which the layers' products multiply, such as "float8"
    reduction_hidden: float = 0.0  # share of the replicas' collectives that run beside computing
    receiver: str = field(default="", repr=False)  # that runs it, where another trainer is priced; "": `trainer`

    def parts(self, microbatch_size: int = 1) -> tuple[Part, ...]:
        """Embedding, blocks, multi-token prediction, and the head with norm and loss."""
        model = self.decoder
        kernels = LayerKernels(
            model, self.widths, microbatch_size, self.fuses_cross_entropy, self.trainer, self.products
        )
        sequence = self.widths.sequence_length
        kinds = [model.block_kind(i, sequence) for i in range(model.num_hidden_layers)]
        made = {x: kernels.block("", x) for x in set(kinds)}
        blocks = [
            replace(made[x], name=f"model.layers.{i}", is_recomputed=i in self.recomputed) for i, x in enumerate(kinds)
        ]
        further = [kernels.prediction(f"mtp.{i}") for i in range(model.num_nextn_predict_layers)]
        return (kernels.embedding(), *blocks, *further, *kernels.head())

    @property
    def _ranks(self) -> tuple[int, int]:
        """Over how many ranks gradients are summed and the optimizer's state is divided, and those of experts."""
        return self.widths.replicas, self.widths.expert_replicas

    def _summed(self, part: Part) -> int:
        """Parameters whose gradients other ranks sum too; experts that no other rank has are not among them."""
        ranks, expert_ranks = self._ranks
        return part.parameters + (part.experts if expert_ranks > 1 or ranks == 1 else 0)

    def _weight_bytes(self, part: Part) -> int:
        """Of the weights, and what experts hold beyond a share of 1 / ranks of the state of all summed parameters."""
        ranks, expert_ranks = self._ranks
        if self._summed(part) < part.parameters + part.experts:
            more = (self.trainer.gradient_bytes + _STATE) * part.experts
        else:
            more = max(0, _STATE * part.experts // expert_ranks - _STATE * part.experts // ranks)
        # Gradients, with replicas in buckets too, which DDP sums.
        held = ELEMENT * (1 + self.trainer.holds_gradients * (1 + (ranks > 1)))
        return held * (part.parameters + part.experts) + more

    def profile(self, microbatch_sizes: tuple[int, ...]) -> Profile:
        """The computed profile; with the weights are counted the state of experts that fewer ranks divide, and the
        gradients of those that are on one rank alone."""
        made = {size: self.parts(size) for size in microbatch_sizes}
        parts = made[microbatch_sizes[0]]
        kinds = [(id(x.kernels), x.kind, x.is_recomputed) for x in parts]  # blocks of a kind share their kernels
        layers_of = dict[tuple[int, str, bool], Layer]()  # parts that are alike are computed once
        for *alike, kind in zip(*made.values(), kinds, strict=True):
            if kind not in layers_of:
                layers_of[kind] = self._layer(dict(zip(microbatch_sizes, alike, strict=True)))
        layers = tuple(replace(layers_of[kind], name=part.name) for kind, part in zip(kinds, parts, strict=True))
        shared = self._tied(len(parts) - 1)
        if self.trainer.holds_empty_gradients:
            shared = (*shared, *_empty_gradients(parts))
        return Profile(
            model=ModelId(
                name=self.name,
                settings=tuple(
                    (x, str(self.widths.of_expert if x == "expert_tensor" else getattr(self.widths, x)))
                    for x in self.widths.__slots__
                    if x != "order" or self.widths.order != ORDER
                )
                + (() if self.divides_state else ((UNDIVIDED, str(self.widths.replicas)),))
                + (((SPECIAL, ",".join(special)),) if (special := self.decoder.special) else ()),
                digest=sha256(repr(self).encode()).hexdigest()[:16],
            ),
            device=self.hardware.device(), layers=layers, shared_weights=shared, loss=(), loss_reduction="mean",
            step=self._step(parts, sum(x.num_parameters for x in shared)),
            link=pipeline_link(
                self.hardware, self.widths, hidden=self.reduction_hidden, sums_whole=self.trainer.sums_whole,
                # where each tensor has a collective of its own: a block has six, two of them small
                **({"tensor_bytes": self.trainer.gradient_bytes * parts[1].parameters / 6} if self.trainer.exchanges_tensors else {}),
            ),
            overhead_s=0.0, whole_model=(), created=now_text(), versions=((self.trainer.name, self.trainer.version),), origin="computed",
            notes=(
                f"computed from the sizes of {self.name} for {self.hardware.name}, samples of {self.widths.sequence_length:,} tokens; nothing was built or measured",
                *self.decoder.unused,
            ),
            plan_notes=(expected_error(self.trainer.name, self.hardware.name, kind=self.decoder.kind, receiver=self.receiver),),
            precision=Precision.named("mixed"),
        )  # fmt: skip

    def _layer(self, parts: dict[int, Part]) -> Layer:
        """A layer, given as parts by the size of micro-batches."""
        part, *_ = parts.values()
        return Layer(
            name=part.name, kind=part.kind, num_parameters=part.parameters + part.experts,
            weight_bytes=self._weight_bytes(part), gradient_bytes=self.trainer.gradient_bytes * self._summed(part),
            parameters=tuple(
                ParameterSize(num_rows=x, num_bytes=ELEMENT * x)
                for x in (*part.matrices, self._summed(part) - sum(part.matrices))
            ),
            costs=tuple(self._cost(x, size) for size, x in parts.items()),
        )  # fmt: skip

    def _tied(self, last: int) -> tuple[SharedWeight, ...]:
        """The embedding, where other layers use it too."""
        model = self.decoder
        if not model.ties_embedding:
            return ()
        table = model.vocab_size * model.hidden_size // self.widths.tensor
        further = range(1 + model.num_hidden_layers, 1 + model.num_hidden_layers + model.num_nextn_predict_layers)
        users = (0, *further, *([last] if model.tie_word_embeddings else []))
        return (
            SharedWeight(
                name="model.embed_tokens.weight", layers=users, num_parameters=table, weight_bytes=ELEMENT * table,
                gradient_bytes=self.trainer.gradient_bytes * table,
            ),
        )  # fmt: skip

    def _step(self, parts: tuple[Part, ...], tied: int) -> StepCost:
        """Passes over all gradients, and the update of what a rank holds of the state.

        The sharding of a plan divides all of that: where it does, seconds and bytes are stated so many times.
        """
        ranks, expert_ranks = self._ranks
        dense, experts = tied + sum(x.parameters for x in parts), sum(x.experts for x in parts)
        rate = self.hardware.bytes_per_s * self.hardware.efficiency("pointwise").bandwidth
        stated = 1 if self.divides_state else ranks
        update_bytes = _UPDATE_BYTES * (dense / ranks + experts / expert_ranks)
        passed_bytes = _GRADIENT_PASSES * self.trainer.gradient_bytes * (dense + experts)
        summed = tied + sum(map(self._summed, parts))
        return StepCost(
            optimizer=Timing.exactly(stated * update_bytes / rate, origin="computed"),
            zero_grad=Timing.exactly(stated * passed_bytes / rate, origin="computed"),
            optimizer_name="Adam", state_bytes=stated * _STATE * summed // ranks,
            workspace_bytes=_MASTER * summed * (self.trainer.gradient_bytes < _MASTER),
        )  # fmt: skip

    def _cost(self, part: Part, size: int) -> LayerCost:
        forward_s, backward_s = part.seconds(self.hardware, self.widths, self.trainer)
        half = Timing.exactly(0.5 * backward_s, origin="computed")
        own = part.backward_workspace_bytes
        return LayerCost(
            microbatch_size=size, input_gradient=half, weight_gradient=half,
            forward=Timing.exactly(forward_s, origin="computed"), backward=Timing.exactly(backward_s, origin="computed"),
            stash_bytes=part.stash_bytes + part.late_bytes(self.hardware, self.widths, self.trainer),
            pending_bytes=part.pending_bytes, forward_workspace_bytes=part.forward_workspace_bytes, backward_workspace_bytes=own,
            output_bytes=part.output, output_gradient_bytes=part.output, output_unsaved_bytes=0, output_saved_later_bytes=part.output,
            leftovers=(Leftover(num_later=1, num_bytes=part.output),) if 0 < part.output <= own else (),
            forward_work=part.work("forward"), backward_work=part.work("backward"), tensors=part.tensors,
            num_forward_times=len(part.kernels),
        )  # fmt: skip


def _empty_gradients(parts: tuple[Part, ...]) -> list[SharedWeight]:
    """Empty gradients as weights that several layers share: a stage holds one of each shape of a product's weight.

    Where products add to the gradients themselves, autograd gets such a bfloat16 tensor of Transformer Engine in their
    place (`get_dummy_wgrad`).
    """
    users_of = dict[tuple[int, int], tuple[int, ...]]()
    for layer, part in enumerate(parts):
        for shape in dict.fromkeys(part.weights):
            users_of[shape] = (*users_of.get(shape, ()), layer)
    return [
        SharedWeight(
            name=f"empty gradient of {shape[0]} x {shape[1]}",
            layers=users if len(users) > 1 else (users[0], len(parts) - 1),
            num_parameters=0,
            weight_bytes=ELEMENT * prod(shape),
            gradient_bytes=0,
        )
        for shape, users in users_of.items()
    ]


def num_parameters(decoder: Decoder) -> tuple[int, int, int]:
    """Parameters of a model, those of them that a token uses, and beside them those of multi-token prediction."""
    kernels = LayerKernels(decoder, Widths(), 1, fuses_cross_entropy=False)
    blocks = [kernels.block("", decoder.block_kind(i, 1)) for i in range(decoder.num_hidden_layers)]
    table = decoder.vocab_size * decoder.hidden_size * decoder.ties_embedding
    whole = [kernels.embedding(), *blocks, *kernels.head()]
    experts = sum(x.experts for x in blocks)
    taken = experts * decoder.num_experts_per_tok // max(1, decoder.routed_experts)
    total = table + sum(x.parameters for x in whole) + experts
    further = decoder.num_nextn_predict_layers and kernels.prediction("")
    predicting = decoder.num_nextn_predict_layers * (further.parameters + further.experts) if further else 0
    return total, total - experts + taken, predicting


def check_divisions(decoder: Decoder, *, tensor: int, context: int, expert: int, sequence_length: int) -> None:
    """Raise UsageError for what so many ranks cannot divide, with the nearest numbers that can."""
    if 0 < decoder.learned_positions < sequence_length:
        raise UsageError(
            f"the model has {decoder.learned_positions} learned positions, fewer than the {sequence_length} tokens of a sequence; "
            f"take --sequence-length {decoder.learned_positions}"
        )
    kv_heads = [x.kv_heads if tensor % x.kv_heads else tensor for x in decoder.variants]  # fewer may be copied
    for what, count, width, flag in (
        *(("heads", x.num_attention_heads, tensor, "--tensor") for x in decoder.variants),
        *(("key and value heads", x, tensor, "--tensor") for x in kv_heads),
        ("linear attention heads", decoder.linear_num_value_heads, tensor, "--tensor"),
        ("experts", decoder.routed_experts, expert, "--expert"),
        *token_divisions(sequence_length, tensor=tensor, context=context),
    ):
        if count % width:
            below = max(x for x in range(1, min(width, count) + 1) if count % x == 0)
            above = next((x for x in range(width, count + 1) if count % x == 0), below)
            near = f"{below}" if above == below else f"{below} or {above}"
            raise UsageError(
                f"{count} {what} cannot be divided over {width} ranks; the nearest divisors are {near} ({flag})"
            )


def token_divisions(sequence_length: int, *, tensor: int, context: int) -> tuple[tuple[str, int, int, str], ...]:
    """What is divided of a sequence: a rank has a chunk of the first half and one of the second, so that causal work is even."""
    if context == 1:
        return (("tokens of a sequence", sequence_length, tensor, "--tensor"),)
    return (
        ("tokens of a sequence", sequence_length, 2 * context, "twice --context"),
        (f"tokens on each of {context} context ranks", sequence_length // context, tensor, "--tensor"),
    )
