"""Work that runs on every rank and fails on all ranks if it fails on one.

Each rank's result or error is pickled and gathered, so no rank waits for one that gave up. A rank that died breaks
the connection; one that hangs runs into the process group's timeout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from gplan.core.errors import GplanError, RunError, is_interrupt
from gplan_profiler.host.failure import strip_gloo_advice
from gplan_profiler.model.error_location import describe

T = TypeVar("T")


class LostPeerError(RunError):
    """Another process of the run ended or does not answer; no collective can succeed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of a group, or this process alone if `group` is None."""

    group: dist.ProcessGroup | None
    stages: Sequence[int] = ()  # of this rank, for messages; empty if it has none or all

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def place(self) -> str:
        """Name of this process in messages, such as `rank 1 (stage 1)` or `rank 1 (stages 1, 3)`."""
        name = "this process" if self.group is None else f"rank {self.rank}"
        held = ", ".join(map(str, self.stages))
        return f"{name} ({'stage' if len(self.stages) == 1 else 'stages'} {held})" if held else name

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results by rank; the error of the lowest rank is raised on all.

        Results are pickled copies. A GplanError keeps its class; any other becomes a RunError.
        """
        value, error = None, None
        try:
            value = pickle.dumps(work())
        except GplanError as own:
            error = own if self.group is None else type(own)(f"{self.place}: {own}")
        except Exception as own:
            if is_interrupt(own):
                raise KeyboardInterrupt from None
            error = RunError(f"{self.place}: {describe(own)}")
        outcome = value, None if error is None else (type(error), str(error))
        everyone = [outcome]
        if self.group is not None:
            everyone = everyone * dist.get_world_size(self.group)
            try:
                dist.all_gather_object(everyone, outcome, group=self.group)
            except RuntimeError as lost:
                raise lost_peer(lost, place=self.place) from lost
        failed = next((failure for _, failure in everyone if failure is not None), None)
        if failed is not None:
            kind, text = failed
            raise kind(text) from error
        return [cast(T, pickle.loads(made)) for made, _ in everyone if made is not None]


def lost_peer(error: RuntimeError, *, place: str) -> LostPeerError:
    """Return the error for a broken collective."""
    reason = strip_gloo_advice(describe(error))
    return LostPeerError(f"{place} lost another rank of the run, which ended or fell silent ({reason})")
