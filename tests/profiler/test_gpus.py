"""Which device is measured, and the sentence where a GPU is not used; what torch says of GPUs is simulated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gplan.core import Device, Link
from gplan.core.errors import ModelError, UsageError
from gplan.runtime.pipeline import own_device
from gplan.runtime.validation import notes_on_machine
from gplan_profiler.host.host_info import cuda_problem, default_device, gpu_memory, unused_gpu_notes
from gplan_profiler.measure import ProfileOptions
from gplan_profiler.model.memory_budget import check_layer_fits
from tests.runtime.plans import small_example, unmeasured_plan

Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose torch sees a number of GPUs, is built for a CUDA version or none, and warns."""

    def see(*, gpus: int, cuda: str | None = "13.0", warning: str = "") -> None:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return gpus > 0

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return see


OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"gpus": 0, "cuda": None}, "is a build for CPUs; install one for CUDA"),
        ({"gpus": 4, "cuda": None}, "is a build for CPUs; install one for CUDA"),
        (
            {"gpus": 0, "warning": OLD},
            "the NVIDIA driver is older than torch .* built for CUDA 13.0; update the driver",
        ),
        ({"gpus": 0}, "sees no GPU here; see whether `nvidia-smi` lists one"),
    ],
)
def test_missing_cuda_is_one_sentence(host: Host, facts: dict[str, object], reason: str) -> None:
    host(**facts)
    assert default_device() == "cpu"
    with pytest.raises(UsageError, match=f"--device cuda: .*{reason}"):
        ProfileOptions(device="cuda")
    plan = unmeasured_plan(small_example("transformer_lm"), num_devices=2)
    with pytest.raises(UsageError, match=reason):
        own_device(plan, "cuda")


def test_hidden_gpus_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES= leaves torch" in str(cuda_problem())


def test_gpus_are_the_default_and_those_unused_are_noted(host: Host) -> None:
    plan = unmeasured_plan(small_example("transformer_lm"), num_devices=2)
    host(gpus=4)
    assert default_device() == "cuda"
    note = "this host has 4 GPUs that this does not use; `gplan profile --device cuda` does"
    assert note in ProfileOptions(device="cpu").notes
    assert note in notes_on_machine(plan)
    assert note not in ProfileOptions(device="cuda:1", contention=0).notes


def test_link_of_one_gpu_is_assumed_unless_given(host: Host) -> None:
    host(gpus=1)
    assert default_device() == "cuda"
    assert "its link to others is assumed" in ProfileOptions(device="cuda").notes[0]
    assert not ProfileOptions(device="cuda", link=Link(latency_s=1e-6, bytes_per_s=1e9)).notes
    assert "1 GPU that this does not use; `gplan profile --device cuda`" in ProfileOptions(device="cpu").notes[0]


def test_index_beyond_the_gpus(host: Host) -> None:
    host(gpus=1)
    with pytest.raises(UsageError, match="--device cuda:1: this host has 1 CUDA device, numbered from 0"):
        ProfileOptions(device="cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")
def test_host_without_gpus_has_no_note() -> None:
    assert default_device() == "cpu"
    assert unused_gpu_notes() == () or "that torch cannot use" in unused_gpu_notes()[0]


GIB = 2**30


def test_memory_of_a_gpu_is_what_its_allocator_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 29 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 MIG 1g.10gb")
    num_bytes, (context, slices) = gpu_memory("cuda")
    assert num_bytes == 79 * GIB
    assert context.startswith("1.00 GiB of the GPU's 80.0 GiB are taken outside torch's allocator")
    assert "is a MIG slice" in slices and "NCCL does not connect slices of one GPU" in slices


def test_gpus_of_another_kind_are_noted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = unmeasured_plan(small_example("transformer_lm"), num_devices=2)
    plan = replace(plan, device=Device(name="NVIDIA H100", kind="cuda"))
    host(gpus=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("NVIDIA H100", "NVIDIA A100")[index])
    (note,) = notes_on_machine(plan)
    assert note.startswith("this host has GPUs of another kind than the profile: NVIDIA A100, not NVIDIA H100")


def test_a_layer_larger_than_the_device_is_one_sentence() -> None:
    check_layer_fits("head", 1, "cpu")
    with pytest.raises(ModelError, match="layer head needs .* for its weights and gradients, and cpu has .* left"):
        check_layer_fits("head", 2**60, "cpu")
