"""The rows of the report's tables, part by part: counts, memory of the paper's sizes, largest models, throughput.

Micro-batches: the paper does not print them for Table 1; M = 32, the largest of its Tables 2 and 3, is taken, 4 images
or one sequence each. Batches are Table 1's, 128 images and 32 sequences, throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gplan.core import Profile
from paper.counts import counts
from paper.largest import ENGINE_BYTES_PER_PARAMETER, Setting, deepest, memory_taken, widest
from paper.profiles import Target, amoebanet_profile, transformer_profile
from paper.published import (
    AMOEBANET_LARGEST,
    BYTES_PER_PARAMETER,
    DEVICE_COUNTS,
    GPU_AMOEBANET,
    GPU_TRANSFORMER,
    TORCHGPIPE_AMOEBANET,
    TPU_AMOEBANET,
    TPU_TRANSFORMER,
    TRANSFORMER_LARGEST,
    Largest,
    Throughputs,
    normalised,
)
from paper.throughput import cells, normalised_seconds

IMAGES, SEQUENCES = 128, 32
NUM_MICROBATCHES = 32
DEPTHS = (18, 36, 72)  # of AmoebaNet-D that are tried
FILTERS_STEP, MOST_FILTERS, MOST_LAYERS = 32, 1024, 8192

Row = dict[str, Any]


def count_rows() -> Iterator[Row]:
    """Parameters of every model that the paper names."""
    for count in counts():
        yield asdict(count)


def memory_rows() -> Iterator[Row]:
    """The paper's own sizes: what gplan says that they take."""
    for column in AMOEBANET_LARGEST:
        profile = amoebanet_profile(column.num_layers, column.num_filters or 0, _images(column))
        yield _memory_row("AmoebaNet-D", column, profile, IMAGES)
    for is_fused in (False, True):
        for column in TRANSFORMER_LARGEST:
            profile = transformer_profile(column.num_layers, _sequences(column, is_fused=is_fused))
            yield _memory_row("Transformer, fused" if is_fused else "Transformer", column, profile, SEQUENCES)


def largest_rows() -> Iterator[Row]:
    """The largest models that fit, parameters counted in both ways."""
    for bytes_per_parameter in (BYTES_PER_PARAMETER, ENGINE_BYTES_PER_PARAMETER):
        for is_fused in (False, True):
            for column in TRANSFORMER_LARGEST:
                yield _deepest_row(column, bytes_per_parameter, is_fused=is_fused)
    for column in AMOEBANET_LARGEST:
        yield _widest_row(column, BYTES_PER_PARAMETER)
    for column in AMOEBANET_LARGEST[1:]:
        yield _widest_row(column, ENGINE_BYTES_PER_PARAMETER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A row of Tables 2 and 3."""

    table: str
    model: str
    hardware: str
    cut: str  # what may be cut apart
    published: Throughputs
    batch_size: int
    profile: Callable[[Target], Profile]
    torchgpipe: Throughputs | None = None


def _transformers(num_layers: int, *, table: str, hardware: str, published: Throughputs) -> Iterator[Subject]:
    """One row, cut in both ways."""
    for cut in ("layers", "operations"):
        yield Subject(
            table=table,
            model=f"Transformer-{num_layers}",
            hardware=hardware,
            cut=cut,
            published=published,
            batch_size=SEQUENCES,
            profile=lambda target: transformer_profile(num_layers, target),
        )


SUBJECTS = (
    Subject(
        table="Table 2",
        model="AmoebaNet-D(18, 256)",
        hardware="tpu-v2",
        cut="layers",
        published=TPU_AMOEBANET,
        batch_size=IMAGES,
        profile=lambda target: amoebanet_profile(18, 256, target),
        torchgpipe=TORCHGPIPE_AMOEBANET,
    ),
    *_transformers(48, table="Table 2", hardware="tpu-v3", published=TPU_TRANSFORMER),
    Subject(
        table="Table 3",
        model="AmoebaNet-D(18, 128)",
        hardware="p100",
        cut="layers",
        published=GPU_AMOEBANET,
        batch_size=IMAGES,
        profile=lambda target: amoebanet_profile(18, 128, target),
    ),
    *_transformers(24, table="Table 3", hardware="p100", published=GPU_TRANSFORMER),
)


def throughput_rows() -> Iterator[Row]:
    """Tables 2 and 3, a row for each K and M."""
    for subject in SUBJECTS:
        yield from subject_rows(subject)


def subject_rows(subject: Subject) -> Iterator[Row]:
    """One model's K and M: the paper's throughput, gplan's, and what the plans look like."""
    rows = tuple(subject.published)
    target = Target(
        hardware=subject.hardware,
        microbatch_sizes=tuple(sorted(subject.batch_size // m for m in rows)),
        granularity="op" if subject.cut == "operations" else "layer",
    )
    found = cells(
        subject.profile(target), batch_size=subject.batch_size, device_counts=DEVICE_COUNTS, microbatch_counts=rows
    )
    relative = {name: normalised_seconds(found, f"{name}_s") for name in ("rule", "best", "ahead")}
    measured = normalised(subject.torchgpipe) if subject.torchgpipe else {}
    for cell in found:
        k, m = cell.num_devices, cell.num_microbatches
        place = DEVICE_COUNTS.index(k)
        yield {
            "table": subject.table,
            "model": subject.model,
            "hardware": subject.hardware,
            "cut": subject.cut,
            "k": k,
            "m": m,
            "paper": subject.published[m][place],
            **{name: values[k, m] for name, values in relative.items()},
            "torchgpipe": measured[m][place] if measured else None,
            **asdict(cell),
        }


def _setting(column: Largest, batch_size: int, bytes_per_parameter: int = BYTES_PER_PARAMETER) -> Setting:
    return Setting(
        num_devices=column.num_devices,
        batch_size=batch_size,
        num_microbatches=NUM_MICROBATCHES if column.is_pipelined else 1,
        bytes_per_parameter=bytes_per_parameter,
        is_pipelined=column.is_pipelined,
    )


def _images(column: Largest) -> Target:
    return Target(hardware="tpu-v2", microbatch_sizes=(_setting(column, IMAGES).microbatch_size,))


def _sequences(column: Largest, *, is_fused: bool) -> Target:
    sizes = (_setting(column, SEQUENCES).microbatch_size,)
    return Target(hardware="tpu-v3", microbatch_sizes=sizes, has_fused_attention=is_fused)


def _memory_row(model: str, column: Largest, profile: Profile, batch_size: int) -> Row:
    return {"model": model, **asdict(column), **asdict(memory_taken(profile, _setting(column, batch_size)))}


def _deepest_row(column: Largest, bytes_per_parameter: int, *, is_fused: bool) -> Row:
    target = _sequences(column, is_fused=is_fused)
    setting = _setting(column, SEQUENCES, bytes_per_parameter)
    num_layers = deepest(lambda x: transformer_profile(x, target), setting, at_most=MOST_LAYERS)
    return {
        "model": "Transformer, fused" if is_fused else "Transformer",
        "bytes_per_parameter": bytes_per_parameter,
        "found_layers": num_layers,
        "found_filters": None,
        "found_parameters": transformer_profile(num_layers, target).num_parameters if num_layers else 0,
        **asdict(column),
    }


def _widest_row(column: Largest, bytes_per_parameter: int) -> Row:
    """The most parameters over the depths that are tried."""
    target, setting = _images(column), _setting(column, IMAGES, bytes_per_parameter)
    found = [(0, 0, 0)]  # parameters, layers, filters
    for depth in DEPTHS if column.is_pipelined else DEPTHS[:1]:
        width = widest(
            lambda x, num_layers=depth: amoebanet_profile(num_layers, x, target),  # type: ignore[misc]
            setting,
            step=FILTERS_STEP,
            at_most=MOST_FILTERS,
        )
        if width:
            found.append((amoebanet_profile(depth, width, target).num_parameters, depth, width))
    num_parameters, num_layers, num_filters = max(found)
    return {
        "model": "AmoebaNet-D",
        "bytes_per_parameter": bytes_per_parameter,
        "found_layers": num_layers,
        "found_filters": num_filters,
        "found_parameters": num_parameters,
        **asdict(column),
    }


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "counts": count_rows, "memory": memory_rows, "largest": largest_rows, "throughput": throughput_rows,
}  # fmt: skip
