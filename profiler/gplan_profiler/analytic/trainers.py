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

from gplan.core.profile import MEGATRON_LM


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What one trainer does differently from others."""

    name: str
    version: str
    host_s: float  # of the CPU to start one operation
    exchange_host_s: float = 0.0  # of the CPU for each rank of a collective within a layer, in jobs of several nodes
    divides_sequence: bool = True  # norms and sums on 1 / tensor of the tokens
    fuses_gate: bool = True  # activation and product in one operation, which keeps its input alone
    hidden_share: float = 0.0  # of collectives that can run beside a product
    sizes_s: float = (
        0.0  # a layer of experts waits in each direction for the sizes of their tokens, then for its kernels
    )
    holds_gradients: bool = False  # in bfloat16 beside those of float32
    holds_empty_gradients: bool = False  # one for each shape of a weight
    casts_logits: bool = False  # to float32 before a loss that keeps float32
    counts_blocks: bool = False  # cuts between blocks by the parameters of their products, the head's among them


MEGATRON = Trainer(name=MEGATRON_LM, version="core 0.14", host_s=4e-6, sizes_s=9e-4, holds_empty_gradients=True)
OVERLAPPING = replace(MEGATRON, hidden_share=0.8)
LEGACY = Trainer(name=MEGATRON_LM, version="2023", host_s=4e-6)
NANOTRON = Trainer(
    name="nanotron", version="0.4", host_s=1.4e-4, exchange_host_s=3e-4, fuses_gate=False,
    holds_gradients=True, casts_logits=True, counts_blocks=True,
)  # fmt: skip
