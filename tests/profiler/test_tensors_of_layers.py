"""The tensors of layers: replayed layer by layer they reserve what the allocations of the whole model reserve."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from gplan.core import ActionKind, LayerCost, Timing
from gplan.cost.caching_allocator import Block, CachingAllocator
from gplan.cost.reserved_bytes import StageTensors, replay
from gplan_profiler.analytic.layer_work import LayerAnalysis, analyse
from gplan_profiler.capture.capture import capture
from gplan_profiler.capture.chain import Tensors, flat_tensors
from gplan_profiler.memory.allocations import StorageRecorder
from gplan_profiler.memory.layer_memory import allocate_gradients
from tests.model_files import load_model_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def cost(analysis: LayerAnalysis) -> LayerCost:
    none = Timing.exactly(0.0)
    return LayerCost(microbatch_size=1, forward=none, backward=none, **analysis.memory.fields(on_gpu=True))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(("example", "size"), [("unet.py", 8), ("resnet.py", 64), ("transformer_lm.py", 16)])
def test_replay_of_layers_reserves_what_the_model_does(example: str, size: int, in_flight: int) -> None:
    file = load_model_file(str(EXAMPLES / example))
    inputs, target = next(file.batches(size))
    chain = capture(file.model, inputs)
    allocate_gradients(file.model)
    layers: list[nn.Module] = [chain.stage(layer, layer + 1) for layer in range(len(chain))]
    tensors = flat_tensors(inputs, what="the inputs")

    def loss(outputs: Tensors) -> Tensor:
        return file.loss(chain.model_output(outputs), target)

    steady = [x for m in range(3) for x in ((ActionKind.BACKWARD, m), (ActionKind.FORWARD, m + in_flight))]
    order = [
        *((ActionKind.FORWARD, m) for m in range(in_flight)),
        *steady,
        *((ActionKind.BACKWARD, m) for m in range(3, 3 + in_flight)),
    ]
    alone = CachingAllocator()
    stage = StageTensors(layers=tuple(map(cost, analyse(layers, tensors, loss))), buffers=())
    replay(alone, {0: stage}, [(0, *x) for x in order], num_steps=1)
    values = dict[int, Tensor]()
    with StorageRecorder() as recorder:
        for kind, m in order:
            if kind is ActionKind.FORWARD:
                found = tensors
                for layer in layers:
                    found = layer(*found)
                values[m] = loss(found)
                del found
            else:
                values.pop(m).backward()  # type: ignore[no-untyped-call]
    whole, blocks = CachingAllocator(), dict[int, Block]()
    for event in recorder.trace().events:
        if event.num_bytes > 0:
            blocks[event.address] = whole.allocate(event.num_bytes)
        elif event.address in blocks:
            whole.free(blocks.pop(event.address))
    assert whole.reserved_bytes > 20 * 2**20
    assert alone.most_allocated_bytes == pytest.approx(whole.most_allocated_bytes, rel=0.01)
    assert alone.reserved_bytes == pytest.approx(whole.reserved_bytes, rel=0.04)
