"""Traces as torch.profiler writes them, made from a schedule and durations that are known: forwards take 1 s,
backwards 2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gplan.core import ActionKind, Span, StageCost
from gplan.schedules.registry import make_schedule
from gplan.simulation.simulator import simulate_schedule

NUM_RANKS, NUM_MICROBATCHES, PERIOD_S = 2, 4, 100.0
_MAIN, _AUTOGRAD, _STREAM = 1, 2, 7
_LATER_S = 0.5  # that a kernel runs after it was launched


@dataclass
class RankWriter:
    """The events of one rank."""

    rank: int
    has_kernels: bool = False
    late_s: float = 0.0
    num_stages: int = NUM_RANKS
    events: list[dict[str, Any]] = field(default_factory=list)

    def step(self, number: int, start_s: float) -> None:
        self._event("user_annotation", f"ProfilerStep#{number}", start_s - 1, start_s + PERIOD_S - 1)

    def action(self, span: Span, step_start_s: float) -> None:
        """The range of the runtime, which begins with waiting, and the operation or kernel in it."""
        start_s, end_s = step_start_s + span.start_s, step_start_s + span.end_s
        if span.action.kind is ActionKind.OPTIMIZER:
            self._work("user_annotation", "Optimizer.step#SGD.step", start_s, end_s)
            return
        self._event("user_annotation", f"PP:{span.action}", start_s - 0.05 * self._waits(span), end_s)
        if span.duration_s == 0.0:
            return
        is_forward = span.action.kind is ActionKind.FORWARD
        name = "aten::linear" if is_forward else "autograd::engine::evaluate_function: AddmmBackward0"
        self._work(
            "cpu_op",
            name,
            start_s,
            end_s,
            thread=_MAIN if is_forward or not self.has_kernels else _AUTOGRAD,
        )

    def _waits(self, span: Span) -> bool:
        """Whether the input of an action is another rank's, and its range begins with waiting."""
        if span.action.kind is ActionKind.FORWARD:
            return span.action.stage > 0
        return span.action.kind is not ActionKind.WEIGHT_GRADIENT and span.action.stage < self.num_stages - 1

    def overlapped(self, number: int) -> None:
        """A step of one stage and two micro-batches, with a forward and a backward in one range."""
        base_s = PERIOD_S * number
        rows = [("PP:0F0", 0.0, 1.0), ("PP:(0F1;0B0)OVERLAP_F_B", 2.0, 5.0), ("PP:0B1", 5.0, 7.0)]
        for name, start_s, end_s in rows:
            self._event("user_annotation", name, base_s + start_s, base_s + end_s)
        back = "autograd::engine::evaluate_function: X"
        for name, start_s, end_s in (
            ("aten::linear", 0.0, 1.0),
            ("aten::linear", 2.0, 3.0),
            (back, 3.0, 5.0),
            (back, 5.0, 7.0),
        ):
            self._event("cpu_op", name, base_s + start_s, base_s + end_s)

    def write(self, folder: Path, *, host: str = "a", has_base: bool = True, first_events: int = 0) -> Path:
        base = {"baseTimeNanoseconds": 1_700_000_000 * 10**9} if has_base else {}
        trace = {"schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": self.rank}, "host_name": host, **base,
                 "traceEvents": self.events[first_events:], "traceName": "made"}  # fmt: skip
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(trace, indent=1))
        return path

    def _work(self, cat: str, name: str, start_s: float, end_s: float, *, thread: int = _MAIN) -> None:
        """An operation, or the range of an update; on a GPU a short one, which launches a kernel and a transfer."""
        if not self.has_kernels:
            self._event(cat, name, start_s, end_s, thread)
            return
        self._event(cat, name, start_s, start_s + 0.02, thread)
        number = len(self.events)
        kernels = (("sgemm", start_s + _LATER_S, end_s), ("ncclDevKernel_SendRecv(...)", start_s - 1.0, end_s + 9.0))
        for correlation, (kernel, begun_s, last_s) in enumerate(kernels, start=number):
            args = {"correlation": correlation}
            self._event("cuda_runtime", "cudaLaunchKernel", start_s + 0.01, start_s + 0.02, thread, args)
            self._event("kernel", kernel, begun_s, last_s + _LATER_S, _STREAM, {"stream": 7, **args})

    def _event(
        self, cat: str, name: str, start_s: float, end_s: float, thread: int = _MAIN, args: dict[str, Any] | None = None
    ) -> None:
        ts = round(1e6 * (start_s + self.late_s + 10.0), 3)
        dur = round(1e6 * (end_s - start_s), 3)
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": args or {}}
        )


def made_traces(
    folder: Path,
    schedule: str,
    *,
    forward_s: Sequence[Sequence[float]] = ((1.0,) * 3, (1.0,) * 3),
    has_steps: bool = True,
    has_kernels: bool = False,
    hosts: tuple[str, str] = ("a", "a"),
    late_s: tuple[float, float] = (0.0, 0.0),
    has_base: bool = True,
    first_events: int = 0,
) -> list[Path]:
    """A file of each of two ranks; `forward_s[stage][step]`,
    where a stage is left out it takes as long as the first."""
    made = make_schedule(schedule, num_devices=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    writers = [RankWriter(rank, has_kernels, late_s[rank], made.num_stages) for rank in range(NUM_RANKS)]
    for number in range(len(forward_s[0])):
        start_s = PERIOD_S * number
        seconds = [forward_s[min(stage, 1)][number] for stage in range(made.num_stages)]
        timeline = simulate_schedule(made, [_cost(x) for x in seconds], recompute="never")
        for writer in writers if has_steps else ():
            writer.step(number + 1, start_s)
        for span in timeline.spans:
            writers[span.device].action(span, start_s)
    return [
        writer.write(folder, host=host, has_base=has_base, first_events=first_events)
        for writer, host in zip(writers, hosts, strict=True)
    ]


def _cost(forward_s: float) -> StageCost:
    return StageCost(
        forward_s=forward_s, backward_s=2.0, recompute_s=0.0, optimizer_s=0.5, activation_bytes=0, gradient_bytes=0,
        activation_s=0.0, gradient_s=0.0, input_gradient_s=1.0, weight_gradient_s=1.0,
    )  # fmt: skip
