"""torch's own clipping over all ranks: `torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)`.

torch would clip each rank by the norm of its own gradients. Its norm is therefore replaced, for the whole process once a
pipeline spans several ranks: where the gradients of a pipeline are among those given, it is that of all ranks. So are
`get_total_norm` and what builds on either. `clip_grad_value_` looks at each number alone and stays as it is. A name that
was imported before the pipeline was made, `from torch.nn.utils import get_total_norm`, stays torch's; `clip_grad_norm_`
may be imported at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gplan.runtime.sharded_tensors import is_divided, local_gradients
from gplan_profiler.torch_compat import replace_clipping

if TYPE_CHECKING:
    from gplan.runtime.stage_state import StageState

_PIPELINES: WeakSet[StageState] = WeakSet()


def clip_over_all_ranks(pipeline: StageState) -> None:
    """From now on torch's norm of this pipeline's gradients is that of all ranks."""
    _PIPELINES.add(pipeline)
    replace_clipping(_total_norm, _clip)


def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    pipeline = next((x for x in _PIPELINES if x.has_gradients(tensors)), None)
    if pipeline is not None:
        tensors, norm_type = [pipeline.gradient_norm(tensors, norm_type)], float("inf")  # that of one number is itself
    return get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def _clip(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients of which some may be divided over replicas by a norm that is whole, which torch refuses."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    is_mixed = is_divided(parameters) and not is_divided([total_norm])
    clip_grads_with_norm_(list(local_gradients(parameters)) if is_mixed else parameters, max_norm, total_norm, foreach)
