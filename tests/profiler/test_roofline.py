"""Counted work, by hand and by laws on real, meta and fake tensors, and the roofline by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gplan.core import Link, OperationKind, Work
from gplan_profiler.analytic.hardware import KINDS, Efficiency, Hardware
from gplan_profiler.analytic.roofline import Operation, product_dtype, roofline_seconds, total_work
from gplan_profiler.analytic.work_counter import WorkCounter

CPU = Hardware(
    name="made",
    kind="cpu",
    memory_bytes=None,
    bytes_per_s=1e10,
    flops_per_s=(("float32", 1e11), ("bfloat16", 2e11)),
    launch_s=1e-5,
    link=Link(latency_s=0.0, bytes_per_s=1e9),
    network=Link(latency_s=0.0, bytes_per_s=1e9),
    efficiencies={kind: Efficiency(flops=0.5, bandwidth=0.25) for kind in KINDS},
    sources=(("memory", "made"),),
)
GPU = replace(CPU, kind="cuda", memory_bytes=2**30)


def operations(run: Callable[[], object]) -> tuple[Operation, ...]:
    ticks = count()
    with WorkCounter(lambda: next(ticks)) as counter:
        run()
    return counter.between(0, next(ticks))


def counted(run: Callable[[], object]) -> dict[str, Work]:
    return {work.kind: work for work in total_work(operations(run))}


def backward_of(value: Tensor) -> dict[str, Work]:
    return counted(value.sum().backward)


def test_linear_flops() -> None:
    layer, x = nn.Linear(6, 7), torch.randn(5, 6, requires_grad=True)
    forward = counted(lambda: layer(x))["matmul"]
    assert forward == Work(
        kind="matmul", num_operations=1, num_flops=2 * 5 * 6 * 7, num_bytes=4 * (5 * 6 + 6 * 7 + 7 + 5 * 7)
    )
    assert backward_of(layer(x))["matmul"].num_flops == 2 * forward.num_flops


def test_a_gradient_that_nobody_asks_for_is_not_counted() -> None:
    layer = nn.Linear(6, 7)
    assert backward_of(layer(torch.randn(5, 6)))["matmul"].num_flops == 2 * 5 * 6 * 7


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_convolution_flops(layer: type, groups: int) -> None:
    conv, x = layer(8, 8, 3, groups=groups), torch.randn(2, 8, 6, 6, requires_grad=True)
    forward = counted(lambda: conv(x))["convolution"].num_flops
    positions = 4 * 4 if layer is nn.Conv2d else 6 * 6
    assert forward == 2 * 2 * positions * 8 * (8 // groups) * 3 * 3
    assert backward_of(conv(x))["convolution"].num_flops == 2 * forward


def test_attention_is_two_products_forward_and_five_backward() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert counted(lambda: F.scaled_dot_product_attention(query, key, value))["attention"].num_flops == 2 * product
    mixed = F.scaled_dot_product_attention(query, key, value)
    assert backward_of(mixed)["attention"].num_flops == 5 * product


def test_recurrent_flops() -> None:
    lstm, x = nn.LSTM(3, 5), torch.randn(7, 2, 3, requires_grad=True)
    forward = counted(lambda: lstm(x))["matmul"].num_flops
    assert forward == 2 * 7 * 2 * (4 * 5 * 3 + 4 * 5 * 5)
    assert backward_of(lstm(x)[0])["matmul"].num_flops == 2 * forward


def test_views_and_empty_tensors_are_no_work() -> None:
    x = torch.randn(4, 6)
    assert operations(lambda: (x.t(), x.view(24), x[1:], x.expand(2, 4, 6), torch.empty(9), x.contiguous())) == ()
    assert operations(lambda: x.sum().item())[0].work.kind == "reduction"


def test_an_expanded_operand_counts_its_storage() -> None:
    row, x = torch.randn(1, 8), torch.randn(4, 8)
    assert counted(lambda: x + row.expand(4, 8))["pointwise"].num_bytes == 4 * (32 + 8 + 32)


def test_bytes_of_in_place_operations() -> None:
    x, y = torch.randn(10), torch.randn(10)
    assert counted(lambda: x.add_(y))["pointwise"].num_bytes == 4 * 30
    assert counted(lambda: x.copy_(y))["pointwise"].num_bytes == 4 * 20
    assert counted(x.zero_)["pointwise"].num_bytes == 4 * 10
    assert counted(lambda: torch._foreach_add_([x, x], [y, y]))["pointwise"].num_bytes == 2 * 4 * 30


def test_a_look_up_reads_the_rows_and_not_the_table() -> None:
    table, tokens = nn.Embedding(1000, 4), torch.zeros(3, dtype=torch.int64)
    assert counted(lambda: table(tokens))["indexing"].num_bytes == 4 * 12 + 4 * 12 + 8 * 3


def test_norms_softmax_pools_and_sums_have_their_kinds() -> None:
    x = torch.randn(2, 4, 8, 8)
    kinds = {
        "normalization": [nn.LayerNorm(8), nn.BatchNorm2d(4), nn.Softmax(-1)],
        "reduction": [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), lambda y: y.sum(), lambda y: y.norm()],
        "pointwise": [nn.GELU(), torch.clone, lambda y: torch.cat([y, y])],
    }
    for kind, functions in kinds.items():
        for function in functions:
            assert kind in counted(lambda function=function: function(x)), f"{function} is not {kind}"


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def test_doubling_the_batch_doubles_the_flops_of_products() -> None:
    layer = block()
    once, twice = (counted(lambda n=n: layer(torch.randn(n, 6, 16))) for n in (3, 6))
    for kind in ("matmul", "attention", "normalization"):
        assert twice[kind].num_flops == 2 * once[kind].num_flops


def test_the_parts_of_a_window_add_up_to_the_whole() -> None:
    layer, x = block(), torch.randn(3, 6, 16)
    ticks = count()
    with WorkCounter(lambda: next(ticks)) as counter:
        y = layer(x)
        middle = next(ticks)
        layer(y)
        end = next(ticks)
    first, second, both = (total_work(counter.between(*w)) for w in ((0, middle), (middle, end), (0, end)))
    assert tuple(a + b for a, b in zip(first, second, strict=True)) == both
    assert first == second


def small_net_work() -> dict[str, Work]:
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    x = torch.randn(2, 3, 8, 8)
    return counted(lambda: layer(x))


@pytest.mark.parametrize("place", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_tensors_without_memory_count_like_real_ones(place: AbstractContextManager[object]) -> None:
    real = small_net_work()
    with place:
        assert small_net_work() == real


def test_the_dtype_is_that_of_most_flops_of_products() -> None:
    a, b = torch.randn(8, 8), torch.randn(4, 4)
    assert product_dtype(operations(lambda: (a.bfloat16() @ a.bfloat16(), b @ b))) == "bfloat16"
    assert product_dtype(operations(lambda: a + a)) == "float32"


def test_grouped_product_counts_every_token_once() -> None:
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, 12, requires_grad=True)
    ends = torch.tensor([1, 4, 4, 8], dtype=torch.int32)
    forward = counted(lambda: F.grouped_mm(a, b, offs=ends))["matmul"]
    assert forward.num_flops == 2 * 8 * 16 * 12
    assert backward_of(F.grouped_mm(a, b, offs=ends) ** 2)["matmul"].num_flops == 2 * forward.num_flops


def work(kind: OperationKind, *, flops: int = 0, moved: int = 0, count: int = 1) -> Work:
    return Work(kind=kind, num_operations=count, num_flops=flops, num_bytes=moved)


def test_a_kind_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    hardware = replace(CPU, launch_s=0.0)
    of_flops, of_bytes = work("matmul", flops=10**9, moved=10**6), work("matmul", flops=10**6, moved=10**8)
    assert roofline_seconds([of_flops], hardware, dtype="float32") == pytest.approx(1e9 / 0.5e11)
    assert roofline_seconds([of_flops], hardware, dtype="bfloat16") == pytest.approx(1e9 / 1e11)
    assert roofline_seconds([of_bytes], hardware, dtype="float32") == pytest.approx(1e8 / 0.25e10)
    other = work("pointwise", moved=10**8)
    assert roofline_seconds([of_flops, other], hardware, dtype="float32") == pytest.approx(0.02 + 0.04)


def test_launches_on_cpu_and_gpu() -> None:
    large, small = work("matmul", flops=10**9, count=10), work("pointwise", moved=100, count=10)
    assert roofline_seconds([large], CPU, dtype="float32") == pytest.approx(0.02 + 1e-4)
    assert roofline_seconds([large], GPU, dtype="float32") == pytest.approx(0.02)
    assert roofline_seconds([small], GPU, dtype="float32") == pytest.approx(1e-4)
    assert roofline_seconds([], GPU, dtype="float32") == 0.0


def test_more_work_never_takes_less_time() -> None:
    part = work("convolution", flops=10**8, moved=10**6, count=3)
    assert roofline_seconds([part + part], CPU, dtype="float32") == pytest.approx(
        2 * roofline_seconds([part], CPU, dtype="float32")
    )
