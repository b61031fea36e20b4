"""Who takes part: whose cut, whose executor, which schedule and whether it recomputes; and how one of them is trained.

Every contender trains the same model on the same mini-batch from the same weights. What it does is what its file in
`written/` says; gplan's engine also carries out the cuts that others make, so that a cut can be told from an executor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from beside.models import NUM_MICROBATCHES, SUBJECTS, loss

Executor = Literal["gplan", "by hand", "torchgpipe"]
Cuts = tuple[int, ...]
Batches = Iterable[tuple[Tensor, Tensor]]
OWN = "torchgpipe, its own measurement"
HAND_WRITTEN = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
INSTALL = "pip install --no-deps torchgpipe==0.0.7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One row of the table; `num_threads` are those of torch within an operation, in each process."""

    executor: Executor
    cut: str  # whose
    schedule: str = "gpipe"
    recompute: Literal["never", "always"] = "never"
    num_processes: int = 2
    num_threads: int = 1

    @property
    def is_gplan(self) -> bool:
        """Whether the cut is gplan's and so is the executor."""
        return self.executor == self.cut == "gplan"


CONTENDERS = (
    Contender(executor="gplan", cut="gplan"),
    Contender(executor="by hand", cut="equal layer counts"),
    Contender(executor="gplan", cut=OWN),
    Contender(executor="gplan", cut="gplan", schedule="1f1b"),
    Contender(executor="by hand", cut="equal layer counts", schedule="1f1b"),
    Contender(executor="gplan", cut="DeepSpeed, by parameters", schedule="1f1b"),
    Contender(executor="gplan", cut="gplan", recompute="always"),
    Contender(executor="torchgpipe", cut=OWN, num_processes=1),
    Contender(executor="torchgpipe", cut=OWN, num_processes=1, num_threads=2),
    Contender(executor="torchgpipe", cut=OWN, num_processes=1, recompute="always"),
)


def has_torchgpipe() -> bool:
    """Whether torchgpipe is installed, which gplan does not need."""
    return importlib.util.find_spec("torchgpipe") is not None


def trained(
    contender: Contender, subject: str, batches: Batches, *, plan_file: str, cuts: Cuts
) -> Iterator[Tensor | None]:
    """The losses of training steps in this process, one for each of `batches`,
    None where the process is not told it."""
    model, (inputs, _) = SUBJECTS[subject].model(), SUBJECTS[subject].sample()
    if contender.executor == "gplan":
        from beside.written import with_gplan

        return with_gplan.train(model, batches, loss, path=plan_file)  # type: ignore[no-any-return, no-untyped-call]
    if contender.executor == "by hand":
        from beside.written import by_hand

        made = HAND_WRITTEN[contender.schedule]
        return by_hand.train(  # type: ignore[no-any-return, no-untyped-call]
            model, batches, inputs, loss, schedule_class=made, num_microbatches=NUM_MICROBATCHES
        )
    from beside.written import with_torchgpipe

    balance = counts_of(cuts, len(model))
    return with_torchgpipe.train(  # type: ignore[no-any-return, no-untyped-call]
        model, batches, loss, balance=balance, num_microbatches=NUM_MICROBATCHES, checkpoint=contender.recompute
    )


def counts_of(cuts: Cuts, num_layers: int) -> list[int]:
    """How many layers each stage has.

    >>> counts_of((3, 5), 12)
    [3, 2, 7]
    """
    return [j - i for i, j in zip((0, *cuts), (*cuts, num_layers), strict=True)]


def cuts_of(counts: Iterable[int]) -> Cuts:
    """At which layer each stage but the first begins.

    >>> cuts_of([3, 2, 7])
    (3, 5)
    """
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return tuple(ends[1:-1])
