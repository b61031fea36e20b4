"""A checkpoint restores the whole state bit for bit under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Adam
from torch.optim import lr_scheduler as schedules

from gplan.core.errors import FileError
from gplan.runtime.checkpoint.folder import byte_ranges, read_index
from gplan.runtime.checkpoint.saving import save_checkpoint
from gplan.runtime.checkpoint.state import RankState
from tests.runtime.fake_training import (
    DIGEST,
    SHAPES,
    SHARES,
    Decay,
    a_group_per_parameter,
    adam,
    adamw_with_groups,
    cosine,
    halving,
    in_fresh_processes,
    momentum,
    no_schedule,
    one_cycle,
    same_bits,
    sgd,
    share,
    training,
)


def train_and_save(directory: Path, optimizer: Any, scheduler: Any, num_steps: int = 3) -> str:
    own = share(optimizer, scheduler)
    own.run(range(num_steps))
    return str(own.save(directory, num_steps, dist.group.WORLD, epoch=2, share=0.25, data="shard-7"))


def load_and_train(path: Path, optimizer: Any, scheduler: Any, shares: Any = None) -> dict[str, Tensor]:
    own = share(optimizer, scheduler, shares=shares)
    assert own.load(path, dist.group.WORLD) == {"epoch": 2, "share": 0.25, "data": "shard-7"}
    own.run(range(3, 6))
    return own.everything()


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(adamw_with_groups, one_cycle), (sgd, no_schedule)],
)
def test_resume_two_ranks_any_plan(tmp_path: Path, optimizer: Any, scheduler: Any) -> None:
    undisturbed = training(optimizer, scheduler)
    undisturbed.run(range(6))
    path = Path(in_fresh_processes(2, train_and_save, tmp_path, tmp_path / "saved", optimizer, scheduler)[0])

    alone = training(optimizer, scheduler)
    alone.load(path)
    alone.run(range(3, 6))
    assert same_bits(alone.everything(), undisturbed.everything())

    other_cut = [[*SHAPES][:4], [*SHAPES][4:]]
    for num_ranks, shares in ((2, None), (2, other_cut), (3, None)):
        parts = in_fresh_processes(num_ranks, load_and_train, tmp_path, path, optimizer, scheduler, shares)
        merged = {name: tensor for part in parts for name, tensor in part.items()}
        assert same_bits(merged, undisturbed.everything())


def test_resume_one_process_on_three_ranks(tmp_path: Path) -> None:
    undisturbed = training(adamw_with_groups, one_cycle)
    undisturbed.run(range(3))
    path = undisturbed.save(tmp_path / "saved", 3, epoch=2, share=0.25, data="shard-7")
    undisturbed.run(range(3, 6))
    parts = in_fresh_processes(3, load_and_train, tmp_path, path, adamw_with_groups, one_cycle)
    assert same_bits({k: v for part in parts for k, v in part.items()}, undisturbed.everything())


def test_hyperparameters_follow_parameters(tmp_path: Path) -> None:
    undisturbed = training(a_group_per_parameter)
    undisturbed.run(range(6))
    path = Path(
        in_fresh_processes(2, train_and_save, tmp_path, tmp_path / "saved", a_group_per_parameter, no_schedule)[0]
    )
    alone = training(lambda x: Adam([{"params": [p]} for p in x.values()], lr=99.0))
    alone.load(path)
    alone.run(range(3, 6))
    assert same_bits(alone.everything(), undisturbed.everything())


def test_schedulers_differ_between_ranks(tmp_path: Path) -> None:
    undisturbed = training(a_group_per_parameter, cosine)
    undisturbed.run(range(6))
    path = Path(in_fresh_processes(2, train_and_save, tmp_path, tmp_path / "saved", a_group_per_parameter, cosine)[0])
    parts = in_fresh_processes(2, load_and_train, tmp_path, path, a_group_per_parameter, cosine)
    assert same_bits({k: v for part in parts for k, v in part.items()}, undisturbed.everything())
    with pytest.raises(FileError, match="schedulers that differ from rank to rank"):
        training(a_group_per_parameter, cosine).load(path)


def draw_and_save(directory: Path) -> str:
    torch.manual_seed(40 + dist.get_rank())
    return str(share(sgd).save(directory, 1, dist.group.WORLD))


def load_and_draw(path: Path) -> float:
    share(sgd).load(path, dist.group.WORLD)
    return torch.rand(()).item()


def test_random_state_per_rank(tmp_path: Path) -> None:
    path = Path(in_fresh_processes(2, draw_and_save, tmp_path, tmp_path / "saved")[0])
    first, second = (torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in (40, 41))
    assert in_fresh_processes(2, load_and_draw, tmp_path, path) == [first, second]
    assert in_fresh_processes(3, load_and_draw, tmp_path, path) == [first, first, first]


def save_as_replicas(directory: Path) -> str:
    own = training(momentum)
    own.run(range(2))
    own.state.model["num_batches"].fill_(10 + dist.get_rank())
    return str(own.save(directory, 2, dist.group.WORLD))


def test_replicas_write_once(tmp_path: Path) -> None:
    path = Path(in_fresh_processes(2, save_as_replicas, tmp_path, tmp_path / "saved")[0])
    loaded = training(momentum)
    loaded.load(path)
    assert loaded.state.model["num_batches"] == 10
    assert {span.file for span in byte_ranges(read_index(path))} == {"__0_0.distcp"}


def load_and_list(path: Path) -> list[str]:
    read: list[str] = []
    load = state_dict_loader.load

    def listening(values: dict[str, Any], **options: Any) -> None:
        read.extend(values)
        load(values, **options)

    state_dict_loader.load = listening
    share(adam).load(path, dist.group.WORLD)
    return [key for key in read if key.startswith(("model", "optimizers"))]


def test_a_rank_reads_only_what_it_holds(tmp_path: Path) -> None:
    whole = training(adam)
    whole.run(range(1))
    path = whole.save(tmp_path / "saved", 1)
    for names, read in zip(SHARES[2], in_fresh_processes(2, load_and_list, tmp_path, path), strict=True):
        extra = {"tied", "num_batches", "frozen"} if "embed" in names else set()
        assert {key.removeprefix("model.") for key in read if key.startswith("model.")} == {*names} | extra
        optimizer_keys = [key.removeprefix("optimizers.0.state.") for key in read if key.startswith("optimizers")]
        assert {key.rpartition(".")[0] for key in optimizer_keys} == {*names}


def test_torch_loads_converted_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = RankState(model=model.state_dict(), parameters=dict(model.named_parameters()), optimizers=[optimizer])
    path = save_checkpoint(tmp_path, state, step=1, progress={"step": 1}, digest=DIGEST, group=None)
    dcp_to_torch_save(path, tmp_path / "plain.pt")

    content = torch.load(tmp_path / "plain.pt", weights_only=False)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plain.load_state_dict(content["model"])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert torch.equal(
        content["optimizers"][0]["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )
    assert content["progress"] == {"step": 1}
    assert content["gplan"]["step"] == 1
    assert content["ranks"][0]["groups"][0][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    "scheduler",
    [
        cosine,
        one_cycle,
        halving,
        lambda x: [schedules.LambdaLR(x, Decay())],
        lambda x: [schedules.MultiStepLR(x, milestones=[2, 4, 4])],
        lambda x: [schedules.CyclicLR(x, 0.01, 0.1, step_size_up=2)],
        lambda x: [schedules.StepLR(x, 2), schedules.ExponentialLR(x, 0.9)],
        lambda x: [
            schedules.SequentialLR(
                x, [schedules.LinearLR(x, total_iters=2), schedules.CosineAnnealingLR(x, 5)], milestones=[4]
            )
        ],
    ],
)
def test_schedulers_resume(tmp_path: Path, scheduler: Any) -> None:
    undisturbed, resumed = training(momentum, scheduler), training(momentum, scheduler)
    undisturbed.run(range(3))
    resumed.load(undisturbed.save(tmp_path, 3))
    for step in range(3, 7):
        for run in (undisturbed, resumed):
            run.run(range(step, step + 1))
        assert resumed.state.optimizers[0].param_groups[0] | {"params": 0} == (
            undisturbed.state.optimizers[0].param_groups[0] | {"params": 0}
        )
    assert same_bits(resumed.everything(), undisturbed.everything())
