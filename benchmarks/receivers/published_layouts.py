"""Layouts that vendors publish, beside gplan's for the same model, widths and schedule, priced on the same computed profile.

Facts carry over from the recipes: sizes, parallel widths, micro-batches and the layout. Context parallelism is priced as a
shorter sequence. Collectives within layers and imbalance of experts are left out, so the seconds are not those of a run;
the difference between two layouts of one model is what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gplan.core import Profile
from gplan_profiler.analytic.decoder_config import Widths, load_decoder
from gplan_profiler.analytic.decoder_profile import DecoderProfile
from gplan_profiler.analytic.hardware import load_hardware


@dataclass(frozen=True, slots=True)
class Published:
    """A layout with the model and the run that it was published for."""

    model: str
    layout: str
    num_devices: int
    num_microbatches: int
    widths: Widths
    source: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def profile(self) -> Profile:
        """The computed profile of the model."""
        return computed_profile(self.model, self.widths, self.settings)


def computed_profile(model: str, widths: Widths, settings: dict[str, Any]) -> Profile:
    """Of a model on H100."""
    decoder, hardware = load_decoder(model, settings), load_hardware("h100")
    return DecoderProfile(name=model, decoder=decoder, widths=widths, hardware=hardware).profile((1,))


BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
DEEPSEEK = Widths(tensor=2, expert=64, data=64)
ONE_TOKEN = {"num_nextn_predict_layers": 0}

PUBLISHED = (
    Published(
        "deepseek-v3", "Et*3|(tt|)*29,m|L", 16, 128, DEEPSEEK,
        "NVIDIA/Megatron-LM, docs/user-guide/features/pipeline_parallel_layout.md (widths of the recipe below)",
    ),
    Published(
        "deepseek-v3", "Et|(tt|)*30mL", 8, 128, DEEPSEEK,
        f"{BRIDGE}, scripts/performance/configs/deepseek/deepseek_workload_base_configs.py, H100",
    ),
    Published(
        "deepseek-v3", "Et*4|(t*4|)*14tmL", 16, 128, DEEPSEEK,
        f"{BRIDGE}, src/megatron/bridge/recipes/deepseek/deepseek_v3.py, PP 16 without VPP",
    ),
    Published(
        "deepseek-v3", "Et|(tt|)*14,t|(tt|)*15,tL", 16, 128, Widths(expert=8, data=16),
        "AMD-AGI/Primus, examples/moe_package/run_deepseek_v3_pretrain_mi355x.sh: the default", ONE_TOKEN,
    ),
    Published(
        "deepseek-v3", "Et|t|(tt|)*29,tL", 16, 128, Widths(expert=8, data=16),
        "the same, tuned by hand for memory: with less recompute 1.03 to 1.10 times as fast on their machines", ONE_TOKEN,
    ),
    Published(
        "deepseek-v3", "Et*2|(tt|)*22t|(tt|)*7mL", 8, 128, Widths(expert=32, data=32),
        "yanring/Megatron-MoE-ModelZoo, best_practice/DeepSeekV3/run.sh, 256 H100 (256 micro-batches there)",
    ),
    Published(
        "kimi-k2", "Et|(tt|)*30L", 16, 128, Widths(tensor=8, expert=64, data=8),
        f"{BRIDGE}, scripts/performance/configs/kimi/kimi_workload_base_configs.py, H100 (1024 micro-batches there)",
    ),
    Published(
        "llama3-70b", "Et*4|(t*4|)*18t*4L", 4, 64, Widths(tensor=4, data=2, sequence_length=4096),
        f"{BRIDGE}, scripts/performance/configs/llama/llama3_workload_base_configs.py, H100 BF16: equal layers, 8192 tokens by 2",
    ),
    Published(
        "qwen3-235b-a22b", "Et*5|(t*6|)*14t*5L", 16, 128, Widths(tensor=4, expert=8, data=8, sequence_length=2048),
        f"{BRIDGE}, recipes for Qwen3 235B: account_for_embedding_in_pipeline_split and _loss_, 4096 tokens by 2",
    ),
)  # fmt: skip
