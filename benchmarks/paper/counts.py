"""Parameters of the paper's models, from the example files built on the meta device, which holds no weights."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from paper.profiles import EXAMPLES
from paper.published import AMOEBANET_LARGEST, TRANSFORMER_LARGEST

NMT = (  # T(layers of each half, feed-forward, heads) and what the paper says of it
    (6, 8192, 16, 400e6),
    (24, 8192, 16, 1.3e9),
    (12, 16384, 32, 1.3e9),
    (32, 16384, 32, 3e9),
    (64, 16384, 32, 6e9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Parameters of a model, as printed and as its example file builds it."""

    model: str
    printed: float
    exact: int


def num_parameters(example: str, **settings: Any) -> int:
    """Parameters of an example model with these settings."""
    with torch.device("meta"):
        model = _functions(example)["model"](**settings)
    return sum(x.numel() for x in model.parameters())


def counts() -> Iterator[Count]:
    """Every model that the paper names with a number of parameters."""
    for row in AMOEBANET_LARGEST:
        exact = num_parameters("amoebanet_d", num_layers=row.num_layers, num_filters=row.num_filters, num_classes=1000)
        yield Count(model=f"AmoebaNet-D({row.num_layers}, {row.num_filters})", printed=row.num_parameters, exact=exact)
    for row in TRANSFORMER_LARGEST:
        exact = num_parameters("transformer_l", num_layers=row.num_layers, paper=True)
        yield Count(model=f"Transformer-{row.num_layers}", printed=row.num_parameters, exact=exact)
    for num_layers, feed_forward, num_heads, printed in NMT:
        exact = num_parameters(
            "nmt_transformer", paper=True, num_layers=num_layers, feed_forward=feed_forward, num_heads=num_heads
        )
        yield Count(model=f"NMT T({num_layers}, {feed_forward}, {num_heads})", printed=printed, exact=exact)
    cells_of_d = num_parameters("amoebanet_d", num_layers=18, num_filters=512, num_classes=1000)
    yield Count(model="AmoebaNet-B(18, 512), by the cells of D", printed=557e6, exact=cells_of_d)


@lru_cache
def _functions(example: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{example}.py"))
