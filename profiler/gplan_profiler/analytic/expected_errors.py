"""How far predictions of computed profiles were off: of published runs, by trainer and GPU, in expected_errors.toml.

`benchmarks/published_runs.py --report` writes that file from the rows that it predicts. A GPU with few runs counts with
all of its trainer.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from gplan.core.units import percent_text

ALL = "all GPUs"
_FEWEST = 12  # runs of a kind


class ExpectedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the errors of one kind of run, as shares: within which half of them are, and nine of ten."""

    num_runs: int
    step_half: float
    step_most: float
    num_memories: int = 0  # runs with a published memory
    memory_half: float = 0.0
    memory_most: float = 0.0

    def text(self, kind: str) -> str:
        """One sentence."""
        half, most = percent_text(self.step_half), percent_text(self.step_most)
        memory = ""
        if self.num_memories >= _FEWEST:
            memory = f"; memory within {percent_text(self.memory_half)} and {percent_text(self.memory_most)} in {self.num_memories}"
        return (
            f"published runs like this one ({kind}): the step was predicted within {half} in half of {self.num_runs} cases, "
            f"within {most} in nine of ten{memory}"
        )


def expected_error(trainer: str, hardware: str) -> str:
    """The sentence for a trainer's runs on a GPU, by their names."""
    text = resources.files("gplan_profiler.analytic").joinpath("expected_errors.toml").read_text(encoding="utf-8")
    known = msgspec.toml.decode(text, type=dict[str, dict[str, ExpectedError]]).get(trainer, {})
    own = known.get(hardware)
    if own is not None and own.num_runs >= _FEWEST:
        return own.text(f"{trainer}, {hardware}")
    if ALL in known:
        return known[ALL].text(f"{trainer}, {ALL}")
    return f"no published run of {trainer} was compared with predictions"
