"""How far computed predictions of published runs were off, by trainer and GPU.

The numbers are in expected_errors.toml, which `benchmarks/published_runs.py --report` writes from the runs that it predicts.
Where a trainer has fewer than twelve runs on a GPU, its runs on all GPUs are taken.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from gplan.core.units import percent_text

ALL = "all GPUs"
_FEWEST_RUNS = 12  # of which the nine of ten are more than one or two outliers; assumed


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
        if self.num_memories >= _FEWEST_RUNS:
            half_bytes, most_bytes = percent_text(self.memory_half), percent_text(self.memory_most)
            memory = f"; the memory within {half_bytes} in half of {self.num_memories} cases, within {most_bytes} in nine of ten"
        return (
            f"published runs like this one ({kind}): the step was predicted within {half} in half of {self.num_runs} cases, "
            f"within {most} in nine of ten{memory}"
        )


def expected_error(trainer: str, hardware: str) -> str:
    """The sentence for a trainer's runs on a GPU, by their names."""
    text = resources.files("gplan_profiler.analytic").joinpath("expected_errors.toml").read_text(encoding="utf-8")
    known = msgspec.toml.decode(text, type=dict[str, dict[str, ExpectedError]]).get(trainer, {})
    own = known.get(hardware)
    if own is not None and own.num_runs >= _FEWEST_RUNS:
        return own.text(f"{trainer}, {hardware}")
    if ALL in known:
        return known[ALL].text(f"{trainer}, {ALL}")
    return f"no published run of {trainer} was compared with predictions"
