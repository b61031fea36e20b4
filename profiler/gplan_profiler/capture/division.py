"""Which of the author's layers are too large for a good cut, and are divided (granularity "auto").

A layer that takes more than `LARGEST_SHARE` of the model's work or parameters is divided into its own children, lists
opened, and these again, as long as the model has at most `MOST_LAYERS` layers; one of less than `_LEAST_WORK` is too
short to be measured in parts. Operations of its own that are too much together, as in a forward without submodules, are
cut as with granularity "op". Layers with equal shares are all divided or none.

The work of an operation is what it takes on a device that moves one byte in the time of `_FLOPS_PER_BYTE` FLOPs. It
decides only what is divided: the layers are measured afterwards. The answer is a tuple of module paths: "blocks.3" has
its children as layers, "blocks.3.*" its operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from gplan.core.profile import operations_entry
from gplan_profiler.analytic.work_counter import WorkCounter
from gplan_profiler.capture.authored_layers import PART, unit_paths
from gplan_profiler.capture.trace import Trace, module_path
from gplan_profiler.capture.value_forms import has_fixed_size
from gplan_profiler.memory.allocations import tensors_in
from gplan_profiler.torch_compat import pytree

LARGEST_SHARE = 1 / 32
MOST_LAYERS = 80
_FLOPS_PER_BYTE = 20.0  # between a CPU's and a GPU's
_LEAST_WORK = 1e7  # FLOPs, about a millisecond of a CPU's core
_EQUAL = 0.99  # of another share, which counts as the same one


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

    with_children = {path for path, x in model.named_modules() if any(True for _ in x.children())}
    found, tried = set[str](), set[str]()
    while True:
        units = {*unit_paths(model, found).values()} - {PART}
        share = {x: share_of(x) for x in units - tried}
        largest = max(share.values(), default=0.0)
        if largest <= LARGEST_SHARE:
            break
        alike = {x for x in share if share[x] >= _EQUAL * largest}
        tried |= alike
        more = found | (alike & with_children)
        if sum(len(by_call.get(x, ())) for x in {*unit_paths(model, more).values()} - {PART}) <= MOST_LAYERS:
            found = more
    paths = unit_paths(model, found)
    outside = {path for path, _ in model.named_modules()} - paths.keys()
    single = outside | ((tried & units) - with_children)  # whose own operations are in no smaller module
    of_operations = {operations_entry(x) for x in single if share_of_own(x) > LARGEST_SHARE}
    if isinstance(model, nn.Sequential):  # whose children are layers as they are, also those that are lists
        found |= {x for x, _ in model.named_children() if x not in units and share_of(x) > LARGEST_SHARE}
    return tuple(sorted(found | of_operations))


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
