"""Which of the author's layers are too large for a good cut, and are divided (granularity "auto").

A layer that takes more than `LARGEST_SHARE` of the model's work or parameters is divided into its own children, lists
opened, and each of these above `_LARGEST_PART` again; one of less than `_LEAST_WORK` is too short to be measured in
parts. Then neighbours within one divided module are joined, the smallest pair first, while they are at most
`_LARGEST_PART` together or the model has more than `MOST_LAYERS` layers. Cuts are not predicted here: on another device
half of the seconds may have passed a whole stage earlier. Operations of its own that are too much together, as in a
forward without submodules, are cut as with granularity "op".

The work of an operation is what it takes on a device that moves one byte in the time of `_FLOPS_PER_BYTE` FLOPs. It
decides only what is divided: the layers are measured afterwards. The answer is a tuple of module paths: "blocks.3" has
its children as layers, "blocks.3.*" its operations; "+blocks.3.down" is part of the layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from gplan.core.profile import JOINED, operations_entry
from gplan_profiler.analytic.work_counter import WorkCounter
from gplan_profiler.capture.authored_layers import PART, unit_paths
from gplan_profiler.capture.trace import Trace, module_path
from gplan_profiler.capture.value_forms import has_fixed_size
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import pytree

LARGEST_SHARE = 1 / 32
_LARGEST_PART = 1 / 64
MOST_LAYERS = 80
_FLOPS_PER_BYTE = 20.0  # between a CPU's and a GPU's
_LEAST_WORK = 1e7  # FLOPs, about a millisecond of a CPU's core


def divided(traced: Trace, model: nn.Module) -> tuple[str, ...]:
    """The modules of a traced model that must be divided, sorted; before any operation of the trace is replaced."""
    by_call, own = dict[str, dict[str, float]](), dict[str, list[float]]()  # work of a module's calls, and of its own
    known, total = dict[Any, float](), 0.0
    for node in _operations(traced):
        work = _work(node, known)
        total += work
        own.setdefault(module_path(node), []).append(work)
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
            calls = by_call.setdefault(str(path), {})
            calls[key] = calls.get(key, 0.0) + work
    num_parameters = max(1, sum(x.numel() for x in model.parameters()))

    @cache
    def share_of(path: str) -> float:
        """The larger of a module's shares of work, in its largest call, and of parameters; 0.0 with too little work."""
        work = max(by_call.get(path, {"": 0.0}).values())
        parameters = sum(x.numel() for x in model.get_submodule(path).parameters())
        return max(work / total, parameters / num_parameters) if work >= _LEAST_WORK else 0.0

    def share_of_own(path: str) -> float:
        """The share of work of all operations that are a module's own but the largest; 0.0 with too little work."""
        works = own.get(path, [0.0])
        rest = sum(works) - max(works)
        return rest / total if rest >= _LEAST_WORK else 0.0

    def owner_of(path: str) -> str:
        """The innermost divided module around a unit; "" for a layer of the author's."""
        around = accumulate(path.split(".")[:-1], "{}.{}".format)
        return max((x for x in around if x in found), key=len, default="")

    modules = {path: x for path, x in model.named_modules() if path}
    with_parts = {x for x, y in modules.items() if any(z.dim() > 1 for part in y.children() for z in part.parameters())}
    found, limits = set[str](), (LARGEST_SHARE, _LARGEST_PART)
    while large := {
        x for x in with_parts.intersection(unit_paths(model, found).values()) if share_of(x) > limits[owner_of(x) != ""]
    }:
        found |= large
    units = {*unit_paths(model, found).values()} - {PART}
    runs: list[tuple[str, ...]] = [(x,) for x in by_call if x in units]  # of units that are one layer
    while True:
        places = [(owner_of(run[0]), len(by_call[run[0]])) for run in runs]
        shares = [sum(map(share_of, run)) for run in runs]
        pairs = [(shares[i] + shares[i + 1], i) for i, (x, y) in enumerate(pairwise(places)) if x == y and x[0]]
        share, i = min(pairs, default=(1.0, 0))
        if not pairs or (share > _LARGEST_PART and sum(num_calls for _, num_calls in places) <= MOST_LAYERS):
            break
        runs[i : i + 2], owner = [runs[i] + runs[i + 1]], places[i][0]
        if sum(run[0].startswith(f"{owner}.") for run in runs) == 1:  # the module is whole again
            runs[i], found = (owner,), found - {owner}
    units = {run[0] for run in runs}
    outside = {path for path, _ in model.named_modules()} - unit_paths(model, found).keys()
    single = outside | (units - with_parts)  # whose own operations are in no smaller module
    of_operations = {operations_entry(x) for x in single if share_of_own(x) > LARGEST_SHARE}
    if isinstance(model, nn.Sequential):  # whose children are layers as they are, also those that are lists
        found |= {x for x, _ in model.named_children() if x not in units and share_of(x) > LARGEST_SHARE}
    return tuple(sorted(found | of_operations | {f"{JOINED}{x}" for run in runs for x in run[1:]}))


def _operations(traced: Trace) -> Iterator[Node]:
    """All operations, those of inner graphs included."""
    for graph in (
        traced.graph,
        *(x.graph for x in traced.module.modules() if isinstance(x, GraphModule) and x is not traced.module),
    ):
        yield from (node for node in graph.nodes if node.op == "call_function" and "nn_module_stack" in node.meta)


def _work(node: Node, known: dict[Any, float]) -> float:
    """FLOPs, and bytes in FLOPs, of an operation; equal operations are computed once."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: x.meta.get("val"))
    key = node.target, _form(args), _form(kwargs)
    if key not in known:
        known[key] = _computed_work(node.target, args, kwargs)
    return known[key]


def _form(value: Any) -> Any:
    leaves, structure = pytree.tree_flatten(value)
    return structure, tuple((str(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)


def _computed_work(target: Any, args: Any, kwargs: Mapping[str, Any]) -> float:
    """By the operations that it runs on fake tensors; by its operands where these cannot run it, as with sizes by data."""
    counter = WorkCounter(lambda: 0)
    try:
        with torch.no_grad(), counter:
            target(*args, **kwargs)
        works = [x.work for x in counter.between(0, 1)]
        return sum(float(x.num_flops) + _FLOPS_PER_BYTE * float(x.num_bytes) for x in works)
    except Exception:
        operands = (x for x in tensors_in((args, kwargs)) if has_fixed_size(x))
        return _FLOPS_PER_BYTE * sum(x.numel() * x.element_size() for x in operands)
