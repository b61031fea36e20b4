"""The table of trainers that read a plan: what each can run. It imports little, so that the command line reads it quickly.

Its rules are checked by `receivers`; their sources are in each receiver's module of `interop/export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gplan.core import RecomputeMode

Cuts = Literal["calls", "items", "children", "names", "decoder", "blocks", "own"]
"""Where a receiver cuts: before calls of modules; between the items of a sequence of modules; between children of the model
and entries of a child that is a list; between modules of a language model by their names; between its embeddings, blocks,
multi-token prediction and head; between its blocks only; nowhere but where it does itself, whatever the plan says."""


SPECIAL_LAYERS = {
    "Mamba": "Mamba-2 layers",
    "DeltaNet": "gated delta nets",
    "Lightning": "lightning attention",
    "SandwichNorm": "norms both before and after attention and perceptron",
    "PostNorm": "norms after attention and perceptron only",
    "Parallel": "attention and perceptron side by side",
    "LayerNorm": "LayerNorm",
    "WeightlessNorm": "norms without weights",
    "EmbeddingNorm": "a norm behind the embedding",
    "HeadNorm": "norms of queries and keys",
    "WideHeadNorm": "norms over all heads of queries and keys together",
    "Plain": "perceptrons without a gate",
    "GatedGelu": "perceptrons gated by GELU",
    "Relu": "ReLU perceptrons",
    "Xielu": "xIELU perceptrons",
    "Biases": "biases of attention's output or of perceptrons",
    "HeadBias": "a bias of the output layer",
    "LearnedPositions": "learned positions",
    "Alibi": "biases of attention by distance (ALiBi)",
    "Latent": "latent attention",
    "Indexed": "attention to the tokens that an indexer selects",
    "Chunked": "attention in chunks",
    "Sinks": "attention sinks",
    "Gate": "gates of attention's output",
    "HeadGate": "gates of attention's heads",
    "HeadSize": "heads whose size is not hidden_size / num_attention_heads",
    "SharedValue": "one product for keys and values",
    "Layers": "layers of different sizes",
}
"""What not every trainer's models have: the names are those of `Decoder.special`.

Read in NVIDIA/Megatron-LM (training/arguments.py, core/transformer/transformer_layer.py, transformer_config.py),
pytorch/torchtitan (models/llama3, qwen3, qwen3_5, deepseek_v3, gpt_oss), huggingface/nanotron (config/models_config.py,
models/llama.py, qwen.py and starcoder2.py) in August 2026. Automodel, vLLM and SGLang take Hugging Face's models.
"""

OTHER_NAMES = {
    "nemo": "automodel (NeMo Automodel) or megatron (NeMo on Megatron-core)",
    **dict.fromkeys(("nemo-automodel", "nemo_automodel"), "automodel"),
    **dict.fromkeys(("mcore", "megatron-core", "megatron-lm", "megatron_lm", "megatron-bridge"), "megatron"),
    **dict.fromkeys(("titan", "torch-titan"), "torchtitan"),
}
"""Other common names of trainers, and what gplan calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """What a trainer can run. Names of schedules and recompute modes are gplan's, beside the receiver's own."""

    title: str
    checked_with: str  # the version that `benchmarks/receivers` checked exports with
    how: str  # in which way
    cuts: Cuts
    schedules: Mapping[str, str] | None  # the first is the default; None: any order of actions
    recompute: Mapping[RecomputeMode, str]  # empty: any mode
    max_chunks: int | None = None  # stages of a device; None: any number
    replicas: bool = True  # whether it runs data-parallel pipelines
    tied: Literal["summed", "one stage", "refused"] = "summed"  # a parameter of several layers
    copies_keys: bool = False  # whether more tensor ranks than heads of keys and values copy these; others refuse
    serves: bool = False  # a model that is trained already
    refuses: frozenset[str] = frozenset()  # of SPECIAL_LAYERS, what its models cannot have,
    combinations: tuple[frozenset[str], ...] = ()  # but for these, if a model has all of one
    lacks: frozenset[str] = frozenset()  # what its own models do not have, and a user's own model can

    @property
    def default_schedule(self) -> str:
        """The schedule of a plan for it where none is named."""
        return "1f1b" if self.schedules is None else next(iter(self.schedules))


_MEGATRON = Receiver(
    title="Megatron-LM",
    checked_with="megatron-core 0.16.1",
    how="parsed and validated by PipelineParallelLayerLayout, and trained by its schedules",
    cuts="decoder",
    schedules={"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"},
    recompute={"never": "", "always": "full"},
    copies_keys=True,
    refuses=frozenset({"Lightning"}),
    lacks=frozenset({
        "SandwichNorm", "PostNorm", "Parallel", "WeightlessNorm", "EmbeddingNorm", "WideHeadNorm", "GatedGelu", "Relu", "Xielu",
        "HeadBias", "Alibi", "Chunked", "HeadGate", "SharedValue", "Layers",
    }),
)  # fmt: skip


def _inference(title: str, checked_with: str, how: str) -> Receiver:
    """One stage on each device; what the schedule and recompute of training are does not matter."""
    return Receiver(
        title=title,
        checked_with=checked_with,
        how=how,
        cuts="blocks",
        schedules=None,
        recompute={},
        max_chunks=1,
        serves=True,
    )


RECEIVERS: dict[str, Receiver] = {
    "torchtitan": Receiver(
        title="torchtitan",
        checked_with="torchtitan 0.3.0",
        how="split by _split_module and by the splitter of its transformers backend, and trained by its schedules",
        cuts="children",
        schedules=None,
        recompute={"never": "None", "always": "FullAC.Config()"},
        replicas=False,
        tied="one stage",
        lacks=frozenset(SPECIAL_LAYERS) - {"DeltaNet", "HeadNorm", "Biases", "Latent", "Sinks", "Gate", "HeadSize"},
    ),
    "megatron": _MEGATRON,
    "verl": replace(
        _MEGATRON,
        title="verl",
        checked_with=f"{_MEGATRON.checked_with} (verl 0.9.1 was read)",
        how="parsed by PipelineParallelLayerLayout, to which verl hands the string",
        refuses=frozenset({"Mamba", "Lightning"}),
    ),
    "automodel": Receiver(
        title="NeMo Automodel",
        checked_with="nemo-automodel 0.7.0",
        how="split by split_model_into_stages",
        cuts="names",
        schedules=None,
        recompute={"never": ""},
        tied="one stage",
    ),
    "nanotron": Receiver(
        title="nanotron",
        checked_with="nanotron 0.4",
        how="read by ParallelismArgs, TokensArgs and OptimizerArgs of its configuration",
        cuts="own",
        schedules={"1f1b": "1f1b", "gpipe": "afab"},
        recompute={"never": "false", "always": "true"},
        max_chunks=1,
        refuses=frozenset(SPECIAL_LAYERS) - {"GatedGelu"},
        combinations=(frozenset({"LayerNorm", "Plain", "Biases"}),),  # StarCoder2
    ),
    "deepspeed": Receiver(
        title="DeepSpeed",
        checked_with="deepspeed 0.19.8",
        how="divided by the bounds of PipelineModule, and trained by its engine",
        cuts="items",
        schedules={"1f1b": "1F1B"},
        recompute={"never": "none", "always": "whole"},
        max_chunks=1,
    ),
    "torchgpipe": Receiver(
        title="torchgpipe",
        checked_with="torchgpipe 0.0.5",
        how="split and trained",
        cuts="items",
        schedules={"gpipe": "GPipe"},
        recompute={"never": "never", "always": "always", "except-last": "except_last"},
        max_chunks=1,
        replicas=False,
        tied="refused",
    ),
    "pytorch": Receiver(
        title="torch.distributed.pipelining",
        checked_with="torch 2.13.0",
        how="split by pipeline() and trained on two processes",
        cuts="calls",
        schedules=None,
        recompute={"never": "none"},
        replicas=False,
        tied="one stage",
    ),
    "vllm": _inference(
        "vLLM",
        "sglang 0.5.23",
        "parsed by SGLang's get_pp_indices, which comes from vLLM; vLLM itself was not installed",
    ),
    "sglang": _inference("SGLang", "sglang 0.5.23", "parsed by get_pp_indices"),
}
"""The trainers that plans are made for, exported to and read from, by name."""
