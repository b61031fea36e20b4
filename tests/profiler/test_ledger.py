"""The recorder of storages against the allocator's own record, and against torch's memory tracker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools import MemTracker
from torch.nn import functional as F

from profiler.capture.capture import capture
from profiler.capture.chain import Tensors, flat_tensors
from profiler.memory.allocations import StorageRecorder, storage_key
from profiler.memory.layer_memory import LayerBytes, allocate_gradients, layer_bytes, measure_bytes, pass_through
from profiler.model.load import load_model_file

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MODELS: dict[str, dict[str, Any]] = {
    "transformer_lm.py": {"num_blocks": 2, "width": 64},
    "gpt2_hf.py": {"num_blocks": 2, "width": 64},
    "resnet.py": {},
    "unet.py": {},
}
OF_CONVOLUTIONS = {"resnet.py", "unet.py"}


def recorded(layers: list[nn.Module], inputs: Tensors, loss: Callable[[Tensors], Tensor]) -> tuple[LayerBytes, ...]:
    with StorageRecorder() as recorder:
        passage = pass_through(layers, inputs, loss, now=recorder.now, address_of=storage_key)
    return layer_bytes(recorder.trace(), passage)


def test_births_and_deaths_are_those_of_the_storages() -> None:
    before = torch.zeros(100)
    with StorageRecorder() as recorder:
        kept = before + 1
        middle = recorder.now()
        gone = torch.zeros(50)
        view = kept.view(10, 10)[2:]
        del gone
        kept.add_(before)
        later = recorder.now()
    trace = recorder.trace()
    assert trace.alive(0, later, later) == {storage_key(view): 400}
    assert trace.peak_bytes() == 600
    assert trace.peak_bytes(0, middle) == 400


def test_deaths_after_the_block_are_nobodys_business() -> None:
    with StorageRecorder() as recorder:
        kept = torch.zeros(4)
    del kept
    assert [event.num_bytes for event in recorder.trace().events] == [16]


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> tuple[str, tuple[LayerBytes, ...], tuple[LayerBytes, ...]]:
    """The allocator's record and the recorder, of a real model on a CPU."""
    if request.param == "gpt2_hf.py":
        pytest.importorskip("transformers")
    file = load_model_file(str(EXAMPLES / request.param), settings=MODELS[request.param])
    inputs, target = next(file.batches(2))
    chain = capture(file.model, inputs)
    allocate_gradients(file.model)
    layers = [chain.stage(layer, layer + 1) for layer in range(len(chain))]

    def loss(tensors: Tensors) -> Tensor:
        return file.loss(chain.model_output(tensors), target)

    tensors = flat_tensors(inputs, what="the inputs")
    return request.param, measure_bytes(layers, tensors, loss), recorded(layers, tensors, loss)


def test_what_is_kept_and_what_crosses_is_the_allocators(both: tuple[str, Any, Any]) -> None:
    _, allocator, recorder = both
    for measured, found in zip(allocator, recorder, strict=True):
        assert found.stash_bytes == pytest.approx(measured.stash_bytes, rel=0.01, abs=64)
        assert found.output == measured.output


def test_workspaces_are_the_allocators_but_for_scratch_in_kernels(both: tuple[str, Any, Any]) -> None:
    name, allocator, recorder = both
    for measured, found in zip(allocator[:-1], recorder[:-1], strict=True):  # a loss may take another path under a mode
        for of_found, of_measured in (
            (found.forward_workspace_bytes, measured.forward_workspace_bytes),
            (found.backward_workspace_bytes, measured.backward_workspace_bytes),
        ):
            assert of_found <= 1.01 * of_measured
            if name not in OF_CONVOLUTIONS:
                assert of_found == pytest.approx(of_measured, rel=0.01, abs=8192)  # sums of norms, by thread


@pytest.mark.parametrize("activation", [nn.GELU, nn.Sigmoid])
def test_the_peak_is_that_of_torchs_memory_tracker(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(64, 256), activation(), nn.LayerNorm(256), nn.Linear(256, 10))
    x, target = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    allocate_gradients(model)

    def step() -> None:
        F.cross_entropy(model(x), target).backward()

    tracker = MemTracker()
    tracker.track_external(model, x, target)
    held = sum(t.nbytes for p in model.parameters() for t in (p, p.grad)) + x.nbytes + target.nbytes
    with tracker:
        step()
    with StorageRecorder() as recorder:
        step()
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert recorder.trace().peak_bytes() == total - held
