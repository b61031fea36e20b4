"""Sharded replicas: the replicas of a stage divide its parameters among them, by torch's FSDP2 (`fully_shard`).

    optimizer   the stage is one group of parameters, gathered when a step begins and freed after its last backward
    weights     each layer is a group, gathered for its forward and for its backward and freed after each; so is a
                parameter that several layers of the stage use, for each of them

The optimizer gets this replica's part of each parameter, a DTensor that is divided along dimension 0, so its state is
divided too. Forwards use the gathered parameter: always the same tensor, with memory only while it is gathered.
Gradients of micro-batches are summed whole and reduce-scattered once a step, as torch's pipelining does with FSDP2.

These stay whole on every replica, and their gradients are averaged: parameters without dimensions or entries, of another
dtype than most, or of several stages of one process, and with "optimizer" those that are frozen. Buffers stay whole too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from gplan.core import Plan
from gplan.core.checks import Sharding
from gplan.core.errors import UsageError
from gplan.core.units import some_names
from gplan.runtime.capture_cache import CapturedModel
from gplan.runtime.process_group import RankLayout
from gplan.runtime.stage_module import ParameterGroup, StageModule
from gplan.runtime.stage_state import StateNames
from gplan_profiler.model.materialise import with_attributes
from gplan_profiler.torch_compat import finish_sharded_backward, gather_asynchronously, reset_sharded


class ShardedStage:
    """A stage whose parameters are divided over the replicas. `parts` and `gathered` are by parameter name."""

    def __init__(
        self,
        stage: StageModule,
        parameters: Mapping[str, nn.Parameter],
        layers: Sequence[Sequence[str]],
        *,
        sharding: Sharding,
        replicas: dist.ProcessGroup,
        like: Mapping[str, Tensor],
    ) -> None:
        """Divide `parameters`; those of each group in `layers` are gathered together, others with the stage.

        Master weights are gathered in the dtype of `like`; gradients are accumulated in that of the gradients of `like`.
        """
        hooked = [name for name, x in parameters.items() if x._backward_hooks or x._post_accumulate_grad_hooks]
        if hooked:
            raise UsageError(
                f"{some_names(hooked)} {'has' if len(hooked) == 1 else 'have'} gradient hooks, which do not run where replicas "
                "divide the parameters; take the hooks off, or balance again with --shard none"
            )
        device = next(iter(parameters.values())).device
        mesh = DeviceMesh.from_group(replicas, device.type)
        groups = [ParameterGroup([parameters[name] for name in names]) for names in layers]
        rest = [name for name in parameters if all(name not in names for names in layers)]
        divided = {id(x) for x in parameters.values()}
        whole = [x for x in stage.parameters() if id(x) not in divided]
        stage.held = nn.ParameterList([*(parameters[name] for name in rest), *whole])
        stage.groups = nn.ModuleList(groups)
        self._keeps_gathered = sharding == "optimizer"
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if masters := [like[name] for name, x in parameters.items() if x.dtype != like[name].dtype]:
            policy = replace(policy, param_dtype=masters[0].dtype, reduce_dtype=masters[0].grad_dtype)
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        fully_shard(
            stage,
            mesh=mesh,
            reshard_after_forward=not self._keeps_gathered,
            mp_policy=policy,
            ignored_params={*whole},
        )
        assert isinstance(stage, FSDPModule)
        self._module: FSDPModule = stage
        if device.type == "cpu":
            gather_asynchronously(self._module)
            for module in (*groups, self._module):
                assert isinstance(module, FSDPModule)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
        # In a backward each group gathers the one before, where that overlaps with computing, or only itself. torch's
        # default may gather one of another micro-batch.
        modules = [*groups, self._module]
        for module, before in zip(modules, modules if device.type == "cpu" else [*groups[:1], *groups], strict=False):
            assert isinstance(module, FSDPModule) and isinstance(before, FSDPModule)
            module.set_modules_to_backward_prefetch([before])
        holders: list[tuple[StageModule | ParameterGroup, Sequence[str]]] = [(stage, rest)]
        holders += zip(groups, layers, strict=True)
        self.parts = {
            name: with_attributes(x, parameters[name])
            for holder, names in holders
            for name, x in zip(names, holder.held, strict=False)
        }
        self.gathered: dict[str, nn.Parameter] = {}  # as forwards use them; freed afterwards
        for holder, names in holders:
            assert isinstance(holder, FSDPModule)
            holder.unshard()
            self.gathered |= zip(names, holder.held, strict=False)
            holder.reshard()
        self.groups = {id(self.gathered[x]): group for group, names in zip(groups, layers, strict=True) for x in names}
        self._trained = [x for x in self.gathered.values() if x.requires_grad]
        for name, x in self.gathered.items():
            if x.requires_grad:
                x.grad_dtype = like[name].grad_dtype
        self._replicas, self._is_under_way = replicas, False

    def reset(self) -> None:
        """Free what is gathered, and drop what a failed step left."""
        if self._is_under_way:
            reset_sharded(self._module)
            self._is_under_way = False
        self._module.reshard()
        for parameter in self._trained:
            parameter.grad = None

    def begin(self) -> None:
        """Begin a pass; with "optimizer" the parameters are gathered unless they are already. Collective."""
        self._is_under_way = True
        self._module.set_is_last_backward(False)
        self._module.set_requires_gradient_sync(False)
        self._module.set_reshard_after_backward(not self._keeps_gathered)
        if self._keeps_gathered:
            self._module.unshard()

    def end_evaluation(self) -> None:
        """A pass without backwards ended."""
        self._is_under_way = False

    def reduce_gradients(self) -> None:
        """Reduce-scatter the gradients over the replicas, and free the parameters, after a step's last pass. Collective.

        Parameters without a gradient here that have one on another replica get zeros.
        """
        if self._trained:
            device, own = self._trained[0].device, [x.grad is not None for x in self._trained]
            has_gradient = torch.tensor(own, dtype=torch.int32, device=device)
            dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._replicas)
            for x, is_used in zip(self._trained, has_gradient.tolist(), strict=True):
                if is_used and x.grad is None:
                    x.grad = torch.zeros(x.shape, dtype=x.grad_dtype, device=device)  # its own memory may be freed
        finish_sharded_backward(self._module)
        self._is_under_way = False


class _OnCpu:
    """Collectives of gloo in place. Its own copy all tensors once more, and free the copy in another thread.

    They are what FSDP2 asks of a custom collective: `allocate` and a call.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_OnCpu):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        peers = [
            (rank, part)
            for rank, part in zip(dist.get_process_group_ranks(group), output_tensor.chunk(group.size()), strict=True)
            if rank != dist.get_rank()
        ]
        works = [dist.irecv(part, src=rank, group=group) for rank, part in peers]
        works += [dist.isend(input_tensor, dst=rank, group=group) for rank, _ in peers]
        transfers = _Transfers([x for x in works if x is not None])
        if async_op:
            return transfers
        transfers.wait()
        return None


class _Transfers(dist.Work):
    """Transfers that are awaited together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True


class _ReduceScatter(_OnCpu):
    """Sums; what others send takes the place of the own part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        parts, ranks, own = input_tensor.chunk(group.size()), dist.get_process_group_ranks(group), group.rank()
        output_tensor.copy_(parts[own])
        for distance in range(1, group.size()):
            to, other = (own + distance) % group.size(), (own - distance) % group.size()
            sent = dist.isend(parts[to], dst=ranks[to], group=group)
            received = dist.irecv(parts[own], src=ranks[other], group=group)
            _Transfers([x for x in (sent, received) if x is not None]).wait()
            output_tensor += parts[own]


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """The parameters of a process's sharded stages; empty where the replicas divide nothing."""

    parts: Mapping[str, nn.Parameter]  # of the optimizer
    gathered: Mapping[str, nn.Parameter]  # of forwards
    groups: Mapping[int, ParameterGroup]  # by the id of a gathered parameter, those that a layer gathers

    @contextmanager
    def allocated(self) -> Iterator[None]:
        """In the block gathered parameters have memory, of any content, so that a capture may compute with them."""
        freed = [x for x in self.gathered.values() if not x.untyped_storage().nbytes()]
        for parameter in freed:
            parameter.untyped_storage().resize_(parameter.nbytes)
        try:
            yield
        finally:
            for parameter in freed:
                parameter.untyped_storage().resize_(0)


def shard_stages(
    plan: Plan,
    captured: CapturedModel,
    names: StateNames,
    stages: Sequence[StageModule],
    tensors: Mapping[str, Tensor],
    divided: Collection[str],
    *,
    like: Mapping[str, Tensor],
    ranks: RankLayout | None,
) -> ShardedTensors:
    """Divide parameters of this process's stages over the replicas; sets `StageModule.shards`.

    `tensors` are those of the stages, of which these names are `divided`, and `like` all of the model.
    """
    first = {id(tensor): name for name, tensor in like.items()}
    for stage in stages:
        own = [name for name in names.used_by_stage[stage.index] if name in divided]
        parameters = {name: x for name in own if isinstance(x := tensors[name], nn.Parameter)}
        if not parameters:
            continue
        assert ranks is not None and ranks.replicas is not None
        layers: list[list[str]] = []
        if plan.sharding == "weights":
            used = [
                {first[id(x)] for x in captured.chain.state(layer).values() if id(x) in first}
                for layer in captured.layers(stage.index)
            ]
            uses = Counter(name for found in used for name in found)
            layers = [[x] for x in own if uses[x] > 1]  # gathered by each of its layers
            layers += [[x for x in own if x in found and uses[x] == 1] for found in used]
        stage.shards = ShardedStage(
            stage,
            parameters,
            [x for x in layers if x],
            sharding=plan.sharding,
            replicas=ranks.replicas,
            like=like,
        )
    found = [x.shards for x in stages if x.shards is not None]
    return ShardedTensors(
        parts={name: x for shards in found for name, x in shards.parts.items()},
        gathered={name: x for shards in found for name, x in shards.gathered.items()},
        groups={key: x for shards in found for key, x in shards.groups.items()},
    )


def divided_names(plan: Plan, names: StateNames, model: nn.Module, ranks: RankLayout | None) -> Collection[str]:
    """Return the names of the parameters that replicas divide, the same on every rank; none without replicas."""
    if ranks is None or ranks.replicas is None or plan.sharding == "none":
        return ()
    parameters = dict(model.named_parameters())
    trained = [x for x in parameters.values() if x.requires_grad]
    num_bytes = Counter[torch.dtype]()
    for x in trained:
        num_bytes[x.dtype] += x.numel() * x.itemsize
    dtypes = {x for x, _ in num_bytes.most_common(1)}
    repeated = {name for name, stages in names.shared().items() if len({plan.devices[x] for x in stages}) < len(stages)}
    return {
        name
        for name, x in parameters.items()
        if x.dim()
        and x.numel()
        and x.is_contiguous()
        and name not in repeated
        and (x.dtype in dtypes if x.requires_grad else plan.sharding == "weights")
    }


_UNDIVIDED = {
    "LBFGS": "keeps one state for all parameters",
    "Muon": "works on whole matrices",
    "Adafactor": "works on whole matrices",
    "Rprop": "works on whole tensors",
}
"""Optimizers, by class, that cannot update a part of a parameter by itself, and why."""


def check_optimizer(optimizer: Optimizer, plan: Plan) -> None:
    """Raise UsageError for an optimizer whose state cannot be divided over the replicas."""
    if plan.sharding == "none" or plan.num_replicas == 1:
        return
    reasons = [_UNDIVIDED[x.__name__] for x in type(optimizer).__mro__ if x.__name__ in _UNDIVIDED]
    if reasons:
        raise UsageError(
            f"{type(optimizer).__name__} {reasons[0]}, which replicas cannot divide; use one that treats each number by "
            "itself, such as AdamW or SGD, or balance again with --shard none"
        )
