"""Trainers whose runs of language models can be computed: what they fuse, keep, sum and overlap, each with its source.

Megatron-LM is NVIDIA/Megatron-LM with Transformer Engine. Its collectives within layers are not hidden: eight published
runs with a tensor width are predicted within 5 % so, and 13 to 17 % too fast at width 8 if those beside products count as hidden.
With --tp-comm-overlap they run beside products, in chunks (`OVERLAPPING`). "legacy" is the same without Transformer Engine (megatron/core/tensor_parallel/layers.py), as
in forks of before 2024. nanotron is huggingface/nanotron (src/nanotron/models/llama.py: the gate's activation and its
product are two operations, logits are cast to float32, loss in float32 too; src/nanotron/optim/gradient_accumulator.py:
gradients are made in bfloat16 and added to float32 ones; src/nanotron/parallel/pipeline_parallel/engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from gplan.core import OperationKind
from gplan.core.profile import MEGATRON_LM, NANOTRON_NAME
from gplan_profiler.analytic.decoder_config import Decoder, Widths
from gplan_profiler.analytic.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What one trainer does differently from others."""

    name: str
    version: str
    host_s: float  # of the CPU to start one operation
    product_share: float = 1.0  # of what Transformer Engine's products and cuDNN's attention reach
    attention_share: float = 1.0
    rank_host_s: float = 0.0  # of the CPU for each rank of a collective within a layer, in jobs of several nodes
    divides_sequence: bool = True  # norms and sums on 1 / tensor of the tokens
    fuses_gate: bool = True  # activation and product in one operation, which keeps its input alone
    hidden_share: float = 0.0  # of collectives that can run beside a product
    # a layer of experts waits in each direction for the sizes of their tokens, then for its kernels
    sizes_s: float = 0.0
    stores_scores: bool = False  # attention in single products: keeps the softmax, its dropout's mask and result
    recomputes_scores: bool = False  # attention runs again in the backward (selective recompute)
    gradient_bytes: int = 4  # of a value in which gradients are summed
    keeps_masks: bool = False  # of dropout behind each branch, one byte a value, also where nothing is dropped
    holds_gradients: bool = False  # in bfloat16 beside those of float32
    frees_late: bool = False  # tensors of collectives, as torch does unless TORCH_NCCL_AVOID_RECORD_STREAMS is set
    exchanges_tensors: bool = False  # replicas exchange one tensor after the other
    sums_whole: bool = False  # replicas that divide the optimizer's state sum whole gradients all the same
    holds_empty_gradients: bool = False  # one for each shape of a weight
    casts_logits: bool = False  # to float32 before a loss that keeps float32
    counts_blocks: bool = False  # cuts between blocks by the parameters of their products, the head's among them

    def on(self, hardware: Hardware) -> Hardware:
        """A device with the shares and the launches of this trainer."""
        shares: dict[OperationKind, float] = {"matmul": self.product_share, "attention": self.attention_share}
        efficiencies = {
            kind: msgspec.structs.replace(x, flops=min(1.0, x.flops * shares.get(kind, 1.0)))
            for kind, x in hardware.efficiencies.items()
        }
        launch_s = self.host_s if hardware.kind == "cuda" else hardware.launch_s
        return replace(hardware, launch_s=launch_s, efficiencies=efficiencies)

    def exchange_host_s(self, widths: Widths, devices_per_node: int) -> float:
        """Seconds of the CPU to start a collective of a tensor group."""
        if widths.devices <= devices_per_node:
            return 0.0
        num_nodes = -(-widths.tensor // devices_per_node)
        return self.rank_host_s * widths.tensor * (0.7 + 0.3 * num_nodes)


def layers_by_cost(decoder: Decoder, num_stages: int) -> tuple[int, ...]:
    """How many layers behind the embedding each stage has where a trainer `counts_blocks`: norm and head are the last two.

    A stage ends with the first block behind its share of the cost of all products (`build_model` of nanotron's models/base.py,
    `get_block_compute_costs` of models/llama.py: all heads have keys, and nothing routes); stages behind the head are empty.
    """
    count, hidden = decoder.num_hidden_layers, decoder.hidden_size
    block, head = 4 * hidden**2 + 3 * hidden * decoder.intermediate_size, decoder.vocab_size * hidden
    stages = [0]
    for i in range(1, count + 1):
        stages[-1] += 1
        if i * block > (count * block + head) * len(stages) / num_stages:
            stages.append(0)
    stages[-1] += 1  # the norm
    stages += [0] * (len(stages) < num_stages)
    stages[-1] += 1  # head and loss
    return (*stages, *[0] * (num_stages - len(stages)))


MEGATRON = Trainer(name=MEGATRON_LM, version="core 0.14", host_s=4e-6, sizes_s=9e-4, holds_empty_gradients=True)
OVERLAPPING = replace(MEGATRON, hidden_share=0.8)
LEGACY = Trainer(
    name=MEGATRON_LM,
    version="2023",
    host_s=4e-6,
    product_share=0.95,
    attention_share=0.7,
    gradient_bytes=2,
    keeps_masks=True,
)
NANOTRON = Trainer(
    name=NANOTRON_NAME, version="0.4", host_s=1.2e-4, product_share=0.84, attention_share=0.75, rank_host_s=2e-4, exchanges_tensors=True, sums_whole=True, fuses_gate=False,
    holds_gradients=True, casts_logits=True, counts_blocks=True, frees_late=True,
)  # fmt: skip
