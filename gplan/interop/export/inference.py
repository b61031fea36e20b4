"""To vLLM and SGLang: the number of blocks of every stage, as the environment variable that each reads.

Relies on vllm/distributed/utils.py and sglang/srt/distributed/utils.py (`get_pp_indices`: integers with commas between
them, one for each rank, whose sum is the number of blocks; the embedding is on the first rank, norm and head on the
last).
"""

from __future__ import annotations

from collections.abc import Callable

from gplan.core import Plan, Profile
from gplan.interop.export.requirements import Export
from gplan.interop.receivers import RECEIVERS, check_plan, decoder_of

VARIABLES = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}


def to_inference(name: str) -> Callable[[Plan, Profile | None], Export]:
    """The exporter for "vllm" or "sglang"."""

    def exporter(plan: Plan, profile: Profile | None) -> Export:
        """One line for a shell; raises UsageError unless every stage has whole blocks."""
        check_plan(name, plan, profile)
        decoder = decoder_of(plan.layer_names, RECEIVERS[name].title)
        counts = [decoder.counts(stage.first_layer, stage.end_layer)[0] for stage in plan.stages]
        notes = (
            f"start with --pipeline-parallel-size {plan.num_devices}; the model has {len(decoder.blocks)} blocks",
            "the plan balances training: inference has no backward, and its memory is weights and a KV cache that is as small "
            "on every rank as on the fullest",
        )
        return Export(format=name, text=f"export {VARIABLES[name]}={','.join(map(str, counts))}\n", notes=notes)

    return exporter
