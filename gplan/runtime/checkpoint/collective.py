"""Work that every rank does and that has failed everywhere if it failed on one.

What a rank made, or the error it met, is pickled and passed to all, so that no rank waits for one that gave up. A rank
that died is noticed by the connection that breaks; one that hangs, by the process group's timeout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from gplan.core.errors import GplanError, RunError, is_interrupt
from profiler.host.failure import strip_gloo_advice
from profiler.model.error_location import describe

T = TypeVar("T")


class LostPeerError(RunError):
    """A process of the run has ended or is silent: nothing can be agreed upon any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of a group, or this process alone where `group` is None."""

    group: dist.ProcessGroup | None
    stages: Sequence[int] = ()  # of this rank, for messages; none where it has none or all

    @property
    def rank(self) -> int:
        """This process among those of the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def place(self) -> str:
        """What messages call this process, such as `rank 1 (stage 1)` or `rank 1 (stages 1, 3)`."""
        name = "this process" if self.group is None else f"rank {self.rank}"
        held = ", ".join(map(str, self.stages))
        return f"{name} ({'stage' if len(self.stages) == 1 else 'stages'} {held})" if held else name

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """What `work` made on every rank, by rank; an error on any rank is raised on all, that of the lowest first.

        The values travel pickled, so they are copies. A GplanError keeps its class; all else becomes a RunError.
        """
        value, error = self._attempt(work)
        everyone = self._gather((value, None if error is None else (type(error), str(error))))
        failed = next((failure for _, failure in everyone if failure is not None), None)
        if failed is not None:
            kind, text = failed
            raise kind(text) from error
        return [cast(T, pickle.loads(made)) for made, _ in everyone if made is not None]

    def _attempt(self, work: Callable[[], T]) -> tuple[bytes | None, GplanError | None]:
        try:
            return pickle.dumps(work()), None
        except GplanError as error:
            return None, error if self.group is None else type(error)(f"{self.place}: {error}")
        except Exception as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from None
            return None, RunError(f"{self.place}: {describe(error)}")

    def _gather(self, outcome: T) -> list[T]:
        if self.group is None:
            return [outcome]
        outcomes: list[T] = [outcome] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except RuntimeError as error:
            raise lost_peer(error, place=self.place) from error
        return outcomes


def lost_peer(error: RuntimeError, *, place: str) -> LostPeerError:
    """What a broken collective means."""
    reason = strip_gloo_advice(describe(error))
    return LostPeerError(f"{place} lost another rank of the run, which ended or fell silent ({reason})")
