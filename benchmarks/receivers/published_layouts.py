"""Layouts that vendors publish, beside gplan's for the same model, widths and schedule, priced on the same computed profile.

Facts carry over from the recipes: sizes, parallel widths, micro-batches and the layout. Context parallelism is priced as a
shorter sequence. Collectives within layers and imbalance of experts are left out, so the seconds are not those of a run;
the difference between two layouts of one model is what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gplan.core import Plan, Profile
from gplan.interop.planning import import_plan
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import load_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A layout with the model and the run that it was published for."""

    model: str
    layout: str
    num_devices: int
    num_microbatches: int
    widths: Widths
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    hardware: str = "h100"

    @property
    def profile(self) -> Profile:
        """The computed profile of the model."""
        return DecoderProfile(
            name=self.model,
            decoder=load_decoder(self.model, self.settings),
            widths=self.widths,
            hardware=load_hardware(self.hardware),
        ).profile((1,))

    def priced(self, *, time_limit_s: float = 10.0) -> Plan:
        """The layout as a plan, with the best for Megatron-LM as its first rival; memory is not limited."""
        return import_plan(
            self.layout,
            self.profile,
            receiver="megatron",
            num_devices=self.num_devices,
            num_microbatches=self.num_microbatches,
            memory_bytes=10**15,
            time_limit_s=time_limit_s,
        )


BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"

PUBLISHED = (
    Published(
        model="deepseek-v3",
        layout="Et*3|(tt|)*29,m|L",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(tensor=2, expert=64, data=64),
        source="NVIDIA/Megatron-LM, docs/user-guide/features/pipeline_parallel_layout.md (widths of the recipe below)",
    ),
    Published(
        model="deepseek-v3",
        layout="Et|(tt|)*30mL",
        num_devices=8,
        num_microbatches=128,
        widths=Widths(tensor=2, expert=64, data=64),
        source=f"{BRIDGE}, scripts/performance/configs/deepseek/deepseek_workload_base_configs.py, H100",
    ),
    Published(
        model="deepseek-v3",
        layout="Et*4|(t*4|)*14tmL",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(tensor=2, expert=64, data=64),
        source=f"{BRIDGE}, src/megatron/bridge/recipes/deepseek/deepseek_v3.py, PP 16 without VPP",
    ),
    Published(
        model="deepseek-v3",
        layout="Et|(tt|)*14,t|(tt|)*15,tL",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(expert=8, data=16),
        settings={"num_nextn_predict_layers": 0},
        source="AMD-AGI/Primus, examples/moe_package/run_deepseek_v3_pretrain_mi355x.sh: the default",
    ),
    Published(
        model="deepseek-v3",
        layout="Et|t|(tt|)*29,tL",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(expert=8, data=16),
        settings={"num_nextn_predict_layers": 0},
        source="the same, tuned by hand for memory: with less recompute 1.03 to 1.10 times as fast on their machines",
    ),
    Published(
        model="deepseek-v3",
        layout="Et*2|(tt|)*22t|(tt|)*7mL",
        num_devices=8,
        num_microbatches=128,
        widths=Widths(expert=32, data=32),
        source="yanring/Megatron-MoE-ModelZoo, best_practice/DeepSeekV3/run.sh, 256 H100 (256 micro-batches there)",
    ),
    Published(
        model="kimi-k2",
        layout="Et|(tt|)*30L",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(tensor=8, expert=64, data=8),
        source=f"{BRIDGE}, scripts/performance/configs/kimi/kimi_workload_base_configs.py, H100 (1024 micro-batches there)",
    ),
    Published(
        model="llama3-70b",
        layout="Et*4|(t*4|)*18t*4L",
        num_devices=4,
        num_microbatches=64,
        widths=Widths(tensor=4, data=2, sequence_length=4096),
        source=f"{BRIDGE}, scripts/performance/configs/llama/llama3_workload_base_configs.py, H100 BF16: equal layers, 8192 tokens by 2",
    ),
    Published(
        model="qwen3-235b-a22b",
        layout="Et*5|(t*6|)*14t*5L",
        num_devices=16,
        num_microbatches=128,
        widths=Widths(tensor=4, expert=8, data=8, sequence_length=2048),
        source=f"{BRIDGE}, recipes for Qwen3 235B: account_for_embedding_in_pipeline_split and _loss_, 4096 tokens by 2",
    ),
)
