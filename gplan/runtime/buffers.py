"""Checks of buffers that forwards write to: refuses those that stages on several devices share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.fx import GraphModule

from gplan.core import Plan
from gplan.core.errors import UsageError
from gplan.runtime.capture_cache import CapturedModel, named_tensors
from gplan.runtime.stage_state import StateNames
from gplan_profiler.capture.inplace import writers
from gplan_profiler.capture.moving_averages import RunningNorm


class SharedBuffers:
    """Buffers, except norms' moving averages, that layers on several devices use.

    Each device has a copy, so what one stage writes the others would not see: such writes are refused. They are
    found in a graph's operators before training; a stage that is no graph is checked by torch's version counters in
    each step.
    """

    def __init__(self, model: nn.Module, usual: CapturedModel, names: StateNames, plan: Plan) -> None:
        """Raises UsageError if a graph writes to one of them."""
        of_norms = {id(x) for norm in usual.chain.norms(0, len(usual.chain)) for x in norm.buffers}
        self._buffers = {name: x for name, x in model.named_buffers() if id(x) not in of_norms}
        self._stages = {name: stages for name, stages in _on_several(names, plan).items() if name in self._buffers}
        sharing = {stage for stages in self._stages.values() for stage in stages}
        written: dict[int, set[int]] = {}  # the ids of the buffers, under any of their paths in the model
        for stage in sharing:
            layers = usual.layers(stage)
            module = usual.chain.stage(layers.start, layers.stop)
            if not isinstance(module, GraphModule):
                written[stage] = set()
                continue
            buffers = {name: id(x) for name, x in module.named_buffers(remove_duplicate=False)}
            held = [x for x in module.graph.find_nodes(op="get_attr") if x.target in buffers]
            written[stage] = {buffers[str(node.target)] for _, node in writers(module.graph.nodes, held)}
        for name, stages in self._stages.items():
            for stage in stages:
                if id(self._buffers[name]) in written[stage]:
                    raise self._is_written(name, f"the forward of stage {stage}")

    @contextmanager
    def forbid_writes(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Raise UsageError after the block if one of these tensors, by name, was written to."""
        before = {name: tensors[name]._version for name in self._stages if name in tensors}
        yield
        for name, num_writes in before.items():
            if tensors[name]._version != num_writes:
                raise self._is_written(name, "a forward")

    def _is_written(self, name: str, writer: str) -> UsageError:
        stages = " and ".join(map(str, self._stages[name]))
        return UsageError(
            f"the buffer {name} is written by {writer} and used by stages {stages}, which are on devices of their own, each "
            "with a copy: keep the layers that use it together (gplan balance --keep-together), or give each its own buffer"
        )


def check_norms(model: nn.Module, usual: CapturedModel, names: StateNames, plan: Plan) -> None:
    """Raise UsageError for moving averages that stages of several devices write to; their copies would differ."""
    first = {id(x): name for name, x in named_tensors(model).items()}
    shared = _on_several(names, plan)
    for norm in usual.chain.norms(0, len(usual.chain)):
        name = first.get(id(norm.running_mean))
        if name in shared:
            stages = " and ".join(map(str, shared[name]))
            raise UsageError(
                f"{name} is written by stages {stages}, which are in processes of their own: keep the layers that share the "
                "norm together (gplan balance --keep-together), or give each a norm of its own"
            )


def strict_norm(model: nn.Module, norms: Sequence[RunningNorm], microbatch_size: int) -> str | None:
    """Return the first batch norm with one value per channel and sample, which needs two samples; else None."""
    strict = {id(x.running_mean) for x in norms if not x.is_per_sample and x.num_values == microbatch_size}
    found = (name for name, buffer in model.named_buffers() if id(buffer) in strict)
    return next((name.rpartition(".")[0] for name in found), None)


def _on_several(names: StateNames, plan: Plan) -> dict[str, Sequence[int]]:
    """Return names used by stages on several devices, with those stages."""
    return {x: stages for x, stages in names.shared().items() if len({plan.devices[i] for i in stages}) > 1}
