"""Keep each call of a custom autograd function as one operation of a trace, with its own backward.

torch.export traces into the forward of a torch.autograd.Function and drops its backward. Here a call becomes the
operator `gplan::function` during the trace, and a CustomFunction afterwards. Under no_grad, and in torch.vmap
where no argument wants a gradient, it is traced like other code. Exception: torch's reentrant checkpoint is traced
through, because the plan decides what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from gplan.core.errors import ModelError
from profiler.capture.authored_layers import replaced
from profiler.capture.value_forms import Form
from profiler.memory.allocations import storage_key, tensors_in

torch.library.define("gplan::function", "(Tensor(a!)[] tensors, int index) -> Tensor[]")
_FUNCTION = torch.ops.gplan.function.default


@dataclass(frozen=True)
class CustomFunction:
    """A call that stays one operation, of a custom autograd function or of another callable, from tensors to tensors."""

    function: type[torch.autograd.Function] | Callable[..., Any]
    arguments: Form
    writes: tuple[int, ...]  # indices of the tensors that it writes into
    shares: tuple[int, ...]  # indices of the tensors that share memory with a result
    copies: tuple[int, ...] = ()  # indices of the tensors that are copied before the call

    @property
    def __name__(self) -> str:
        """The name in generated code."""
        return str(self.function.__name__)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The returned tensors, each once."""
        given = [x.clone() if place in self.copies else x for place, x in enumerate(tensors)]
        args, kwargs = self.arguments.value(given)
        output = getattr(self.function, "apply", self.function)(*args, **kwargs)
        return Form.of_leaves(*pytree.tree_flatten(output))[1]

    def on_copies(self) -> CustomFunction:
        """The same call on copies of the arguments that it writes into."""
        shares = tuple(place for place in self.shares if place not in self.writes)
        return replace(self, writes=(), shares=shares, copies=self.writes)


def custom_functions(found: list[CustomFunction]) -> AbstractContextManager[None]:
    """Inside, calls of custom functions are traced as operators and appended to `found`."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        def plain() -> Any:
            return own.__get__(None, function)(*args, **kwargs)

        mode = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if mode is None or not torch.is_grad_enabled():
            return plain()
        tensors = list(tensors_in((args, kwargs)))
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):  # inside a transform such as torch.vmap
            takes_context = function.setup_context is torch.autograd.Function.setup_context
            can_be_traced = not takes_context and not any(x.requires_grad for x in tensors)
            return function.forward(*args, **kwargs) if can_be_traced else plain()
        if function is CheckpointFunction:
            return _without_checkpoint(*args)
        return _traced(function, plain, (args, kwargs), mode.tracer, found)

    return replaced(torch.autograd.Function, apply=classmethod(apply))


def put_custom_functions(module: GraphModule, found: list[CustomFunction]) -> None:
    """Replace the operators in a traced graph by the custom functions in `found`."""
    for node in calls_in(module, _FUNCTION):
        tensors, index = node.args
        node.target, node.args = found[index], tuple(tensors)  # type: ignore[index, arg-type]


def calls_in(module: GraphModule, operator: OpOverload) -> Iterator[Node]:
    """The calls of an operator in the graph of a module and in its inner graphs, which are recompiled afterwards."""
    for body in [x for x in module.modules() if isinstance(x, GraphModule)]:
        calls = body.graph.find_nodes(op="call_function", target=operator)
        yield from calls
        if calls and body is not module:  # only the graph of the module itself is used
            body.recompile()


def _without_checkpoint(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """The function of a reentrant checkpoint, called directly."""
    with torch.set_grad_enabled(any(isinstance(x, Tensor) and x.requires_grad for x in args)):
        return function(*args)


def _traced(
    function: type[torch.autograd.Function],
    plain: Callable[[], Any],
    given: tuple[Any, Any],
    tracer: Any,
    found: list[CustomFunction],
) -> Any:
    """Call a function and add the call as one operation to the graph."""
    arguments, tensors = Form.of_leaves(*pytree.tree_flatten(given))
    before = [x._version for x in tensors]
    with untraced(), _Reads(tensors) as reads:
        output = plain()
    if reads.has_others:
        raise ModelError(
            f"the custom autograd function {function.__name__} reads a tensor of the model that is not among its arguments; "
            "expected every parameter, buffer and activation that it uses to be an argument of apply(...), so that the "
            "stage that runs it has them"
        )
    writes = tuple(place for place, x in enumerate(tensors) if x._version != before[place])
    made = Form.of_leaves(*pytree.tree_flatten(output))[1]
    memory = {storage_key(x) for x in made}
    shares = tuple(place for place, x in enumerate(tensors) if storage_key(x) in memory)
    add_to_graph(CustomFunction(function, arguments, writes, shares), tensors, made, tracer, found)
    return output


def add_to_graph(
    call: CustomFunction, tensors: Sequence[Tensor], made: Sequence[Tensor], tracer: Any, found: list[CustomFunction]
) -> None:
    """Add a call on some tensors of a trace, which made others, as one operation to the graph and to `found`."""
    proxies = [tracer.unwrap_proxy(x) for x in tensors]
    node = tracer.create_proxy("call_function", _FUNCTION, (proxies, len(found)), {})
    found.append(call)
    track_tensor_tree(list(made), node, constant=None, tracer=tracer)


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, operations on the fake tensors of a trace are not added to its graph."""
    key = torch._C.DispatchKey.PreDispatch
    included = torch._C._dispatch_tls_local_include_set().remove(key)
    excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C.DisableTorchFunction():
        yield


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operations that read tensors of the trace other than the given ones and their own results."""

    def __init__(self, given: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_others = False
        self._known = {storage_key(x): x for x in given}  # kept, so that no other storage gets the same key

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        self.has_others |= any(storage_key(x) not in self._known for x in read)
        output = function(*args, **(kwargs or {}))
        self._known.update({storage_key(x): x for x in tensors_in(output)})
        return output
