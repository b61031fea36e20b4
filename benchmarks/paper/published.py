"""What the GPipe paper prints (Huang et al., NeurIPS 2019, arXiv 1811.06965v5), and torchgpipe for one model.

Table 1 gives memory in "GB" for AmoebaNet and in "G" for the Transformer: 12 bytes for each of their parameters come to
the printed figures in decimal GB in the one half and in GiB in the other. Its column Naive-1 of the Transformer has the
two memory rows swapped: 11.7 G stand where 282.2 M parameters of 12 bytes need 3.15 GiB. Here they are the right way
round.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_PARAMETER = 12  # "since we applied RMSProp during training": the weight, the mean square, the momentum
GB, GIB = 10**9, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """A column of Table 1: the largest model that the paper trained on so many accelerators."""

    column: str
    num_devices: int
    is_pipelined: bool  # with recompute and micro-batches; Naive-1 has neither
    num_layers: int
    num_filters: int | None  # D of AmoebaNet-D(L, D)
    num_parameters: float  # as printed
    exact_parameters: int  # of the model as examples/ builds it
    parameter_memory: float  # in the unit of its half of the table
    activation_memory: float


def _largest(column: str, size: tuple[int, int | None], *figures: float) -> Largest:
    num_parameters, exact_parameters, parameter_memory, activation_memory = figures
    return Largest(
        column=column,
        num_devices=int(column.rpartition("-")[2]),
        is_pipelined=column.startswith("Pipeline"),
        num_layers=size[0],
        num_filters=size[1],
        num_parameters=num_parameters,
        exact_parameters=int(exact_parameters),
        parameter_memory=parameter_memory,
        activation_memory=activation_memory,
    )


AMOEBANET_LARGEST = (
    _largest("Naive-1", (18, 208), 82e6, 81_505_540, 1.05, 6.26),
    _largest("Pipeline-1", (18, 416), 318e6, 319_024_120, 3.8, 3.46),
    _largest("Pipeline-2", (18, 544), 542e6, 542_734_840, 6.45, 8.11),
    _largest("Pipeline-4", (36, 544), 1.05e9, 1_055_832_376, 12.53, 15.21),
    _largest("Pipeline-8", (72, 512), 1.8e9, 1_844_858_344, 24.62, 26.24),
)
TRANSFORMER_LARGEST = (
    _largest("Naive-1", (3, None), 282.2e6, 282_182_912, 3.15, 11.7),
    _largest("Pipeline-1", (13, None), 785.8e6, 785_765_632, 8.8, 6.4),
    _largest("Pipeline-8", (103, None), 5.3e9, 5_318_010_112, 59.5, 50.9),
    _largest("Pipeline-32", (415, None), 21.0e9, 21_029_790_976, 235.1, 199.9),
    _largest("Pipeline-128", (1663, None), 83.9e9, 83_876_914_432, 937.9, 796.1),
)

Throughputs = dict[int, tuple[float, ...]]  # by M, for each K

DEVICE_COUNTS = (2, 4, 8)
TPU_AMOEBANET: Throughputs = {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)}  # (18, 256)
TPU_TRANSFORMER: Throughputs = {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}  # 48 layers
GPU_AMOEBANET: Throughputs = {32: (1, 1.7, 2.7)}  # (18, 128)
GPU_TRANSFORMER: Throughputs = {32: (1, 1.8, 3.3)}  # 24 layers
TORCHGPIPE_AMOEBANET: Throughputs = {1: (26.7, 26.8, 24.9), 4: (41.1, 44.5, 70.1), 32: (47.4, 72.4, 132.4)}
"""Samples/s of AmoebaNet-D(18, 256) on P40s, from torchgpipe's documentation; balanced by hand, except for M = 1."""


def normalised(throughputs: Throughputs) -> Throughputs:
    """All of them over that of the fewest micro-batches on the fewest devices.

    >>> normalised({1: (2.0, 3.0), 4: (4.0, 8.0)})
    {1: (1.0, 1.5), 4: (2.0, 4.0)}
    """
    base = throughputs[min(throughputs)][0]
    return {m: tuple(x / base for x in row) for m, row in throughputs.items()}
