"""How far computed predictions of published runs were off, by trainer, kind of model and GPU.

The numbers are in expected_errors.toml, which `benchmarks/published_runs.py --report` writes from the runs that it predicts.
Where a trainer has fewer than twelve runs of a kind on a GPU, those on all GPUs are taken.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from gplan.core.units import percent_text

ALL = "all GPUs"
DENSE, MIXTURE, HYBRID = "dense", "mixture of experts", "hybrid"
"""Kinds of models: a hybrid has blocks of Mamba or linear attention."""


class ExpectedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The absolute errors of one kind of run, as shares: `half` is their median, `most` is what nine of ten are within."""

    num_runs: int
    step_half: float
    step_most: float
    num_memories: int = 0  # runs with a published memory
    memory_half: float = 0.0
    memory_most: float = 0.0

    def text(self, kind: str) -> str:
        """The errors in a sentence."""
        half, most = percent_text(self.step_half), percent_text(self.step_most)
        memory = ""
        if self.num_memories:
            half_bytes, most_bytes = percent_text(self.memory_half), percent_text(self.memory_most)
            memory = f"; the memory within {half_bytes} in half of {self.num_memories} cases, within {most_bytes} in nine of ten"
        return (
            f"published runs like this one ({kind}): the step was predicted within {half} in half of {self.num_runs} cases, "
            f"within {most} in nine of ten{memory}"
        )


@cache
def _known_errors() -> dict[str, dict[str, dict[str, ExpectedError]]]:
    """By trainer, kind and GPU."""
    text = resources.files("gplan_profiler.analytic").joinpath("expected_errors.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=dict[str, dict[str, dict[str, ExpectedError]]])


def expected_error(trainer: str, hardware: str, *, kind: str = DENSE, receiver: str = "") -> str:
    """The sentence for a trainer's runs of a kind of model on a GPU, by their names.

    `receiver` is the trainer that the numbers are for, where it is another one than that whose runs are computed.
    """
    if receiver not in ("", trainer):
        return (
            f"no published runs of {receiver} check this plan: its times and memory assume the kernels of {trainer} with "
            "Transformer Engine"
        )
    known = _known_errors().get(trainer, {}).get(kind, {})
    gpu = hardware if hardware in known else ALL
    if gpu in known:
        return known[gpu].text(f"{trainer}, {kind}, {gpu}")
    return f"no published run of a {kind} model by {trainer} was compared with predictions"
