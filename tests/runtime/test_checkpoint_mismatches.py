"""Checkpoints that do not fit or are damaged are refused on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.optim import Adam

from gplan.core.errors import FileError
from gplan.runtime.checkpoint.folder import byte_ranges, read_index
from gplan.runtime.checkpoint.loading import load_checkpoint
from gplan.runtime.checkpoint.state import RankState
from tests.runtime.fake_training import (
    DIGEST,
    Training,
    adam,
    cosine,
    in_fresh_processes,
    one_cycle,
    same_bits,
    sgd,
    share,
    training,
)


def saved(tmp_path: Path, own: Training | None = None) -> Path:
    own = own or training(adam)
    own.run(range(1))
    return own.save(tmp_path, 1)


def load_with(path: Path, *, digest: str = DIGEST, **changes: Tensor) -> None:
    own = training(adam)
    state = RankState(
        model={**own.state.model, **changes}, parameters=own.state.parameters, optimizers=own.state.optimizers
    )
    load_checkpoint(path, state, digest=digest, group=None)


def test_another_model_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is of a model with digest a-model, this one has another"):
        load_with(saved(tmp_path), digest="another")


def test_another_precision_named(tmp_path: Path) -> None:
    path, own = saved(tmp_path), training(adam)
    for parameter in own.state.parameters.values():
        parameter.data = parameter.data.bfloat16()
    expected = "holds parameters in float32, this plan trains in bfloat16: the precision differs; go on with a plan"
    with pytest.raises(FileError, match=expected):
        load_checkpoint(path, own.state, digest="another", group=None)


def test_missing_names_refused(tmp_path: Path) -> None:
    extra = {f"extra.{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(FileError, match=r"lacks 5 tensors of the model \(extra\.0, extra\.1, extra\.2 and 2 more\)"):
        load_with(saved(tmp_path), **extra)


def test_extra_names_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    own = training(adam, names=["embed", "0.weight", "0.bias", "1.scale"])
    with pytest.raises(FileError, match=r"holds 2 tensors that the model has not \(1\.kernel and 1\.none\)"):
        own.load(path)


def test_wrong_shape_or_dtype_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(FileError, match=r"has float32\[3\] for frozen; the model has float32\[4\]"):
        load_with(path, frozen=torch.zeros(4))
    with pytest.raises(FileError, match=r"has float32\[3\] for frozen; the model has bfloat16\[3\]"):
        load_with(path, frozen=torch.zeros(3, dtype=torch.bfloat16))


def test_different_optimizer_or_scheduler_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(FileError, match=r"optimizers \['Adam'\], the run has \['SGD'\]"):
        training(sgd).load(path)
    with pytest.raises(FileError, match=r"schedulers \[\], the run has \['CosineAnnealingLR'\]"):
        training(adam, cosine).load(path)


def test_untrained_parameter_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, training(lambda x: Adam([x["embed"], x["0.weight"]])))
    with pytest.raises(FileError, match=r"lacks 4 tensors of optimizer 0 \(0\.bias, 1\.kernel, 1\.none and 1 more\)"):
        training(adam).load(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_foreign_checkpoint_refused(tmp_path: Path) -> None:
    state_dict_saver.save({"model": {"x": torch.zeros(2)}}, checkpoint_id=tmp_path / "step-000001", no_dist=True)
    with pytest.raises(
        FileError, match="has no file checksums that can be read .*, as each checkpoint that gplan saves has"
    ):
        training(sgd).load(tmp_path / "step-000001")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.index(torch.full((3,), 2.5).numpy().tobytes())  # the frozen parameter
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(FileError, match=r"the bytes of __0_0\.distcp changed"):
        training(adam).load(path)


def damage(path: Path, key: str) -> None:
    """Flip a bit in the value of a key."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    span = next(span for span in byte_ranges(read_index(path)) if span.key == key)
    content[span.offset + span.num_bytes // 2] ^= 1
    file.write_bytes(content)


def load_what_is_damaged(path: Path) -> str:
    with pytest.raises(FileError) as error:
        share(adam).load(path, dist.group.WORLD)
    return str(error.value)


def test_damage_on_one_rank_stops_all(tmp_path: Path) -> None:
    path = saved(tmp_path / "saved")
    damage(path, "model.1.kernel")
    told = in_fresh_processes(2, load_what_is_damaged, tmp_path, path)
    assert told[0] == told[1]
    assert told[0].startswith(f"rank 1 (stage 1): {path} is damaged: the bytes of __0_0.distcp changed")


def test_a_copy_elsewhere_is_as_good(tmp_path: Path) -> None:
    own = training(adam)
    path = saved(tmp_path / "saved", own)
    moved = Path(shutil.move(path, tmp_path / "elsewhere"))
    loaded = training(adam)
    loaded.load(moved)
    assert same_bits(loaded.everything(), own.everything())


def load_an_older_one(path: Path) -> tuple[str, float]:
    own = share(adam)
    loaded = load_checkpoint(path, own.state, digest=DIGEST, group=dist.group.WORLD)
    return loaded.note, next(iter(own.state.model.values())).flatten()[0].item()


def test_ranks_fall_back_together(tmp_path: Path) -> None:
    own = training(adam)
    first, second = own.save(tmp_path / "saved", 1), own.save(tmp_path / "saved", 2)
    damage(second, "model.1.kernel")
    told, values = zip(*in_fresh_processes(2, load_an_older_one, tmp_path, tmp_path / "saved"), strict=True)
    expected = f"rank 1 (stage 1): {second} is damaged: the bytes of __0_0.distcp changed"
    assert told == (f"{expected}; going on from {first}",) * 2
    assert values == (own.state.model["embed"][0, 0].item(), own.state.model["0.bias"][0].item())


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda x: Adam(x.values(), lr=0.5), "lr 0.01, not 0.5"),
        (lambda x: Adam(x.values(), lr=0.01, amsgrad=True), "amsgrad False, not True"),
        (
            lambda x: Adam(x.values(), lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
            "betas (0.9, 0.999), not (0.8, 0.99); weight_decay 0, not 0.1",
        ),
        (lambda x: Adam(x.values(), lr=0.01, foreach=False), ""),
    ],
)
def test_other_hyperparameters_are_told(make: Any, note: str, tmp_path: Path) -> None:
    path = saved(tmp_path, training(lambda x: Adam(x.values(), lr=0.01)))
    loaded = load_checkpoint(path, training(make).state, digest=DIGEST, group=None)
    assert loaded.note == (f"the optimizer goes on with values of {path}: {note} as made now" if note else "")


@pytest.mark.parametrize("scheduler", [cosine, one_cycle])
def test_scheduled_values_are_not_told(scheduler: Any, tmp_path: Path) -> None:
    """A learning rate, and momentum that goes against it."""
    path = saved(tmp_path, training(adam, scheduler))
    assert load_checkpoint(path, training(adam, scheduler).state, digest=DIGEST, group=None).note == ""
