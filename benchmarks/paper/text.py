"""The report as Markdown: each table with the paper's figure, gplan's and the ratio, and what every gap comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pandas as pd

from paper.published import GB, GIB
from paper.reasons import REASONS, largest_reasons, memory_reasons, throughput_reasons


def report(tables: Mapping[str, pd.DataFrame], *, further: Sequence[str] = ()) -> str:
    """All tables and reasons; `further` sections stand before the last one."""
    parts = [
        REASONS["head"],
        "## Parameters of the paper's models\n",
        *counts_table(tables["counts"]),
        REASONS["counts"],
        "## Table 1: the largest model that fits\n",
        *largest_table(tables["largest"]),
        *largest_reasons(tables["largest"]),
        "![the largest models](largest.png)\n",
        "## Table 1: what the paper's own sizes take\n",
        *memory_table(tables["memory"]),
        *memory_reasons(tables["memory"]),
        "## Tables 2 and 3: throughput\n",
        REASONS["throughput"],
        *throughput_tables(tables["throughput"]),
        *throughput_reasons(tables["throughput"]),
        "![throughput](throughput.png)\n",
        *further,
        REASONS["foot"],
    ]
    return "\n".join(parts)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, with the empty line that ends it.

    >>> markdown(["a", "b"], [["1", "2"]])
    ['| a | b |', '|---|---|', '| 1 | 2 |', '']
    """
    lines = [head, ["---"] * len(head), *rows]
    return [*("|" + "|".join(x if x == "---" else f" {x} " for x in line) + "|" for line in lines), ""]


def counts_table(table: pd.DataFrame) -> list[str]:
    """Parameters, printed and exact."""
    rows = [[x.model, _parameters(x.printed), f"{int(x.exact):,}", _ratio(x.exact / x.printed)] for x in _rows(table)]
    return markdown(["model", "paper", "gplan", "ratio"], rows)


def largest_table(table: pd.DataFrame) -> list[str]:
    """One table for each model and way to count: sizes and parameters of both."""
    lines = []
    for (model, num_bytes), part in table.groupby(["model", "bytes_per_parameter"], sort=False):
        lines += [f"{_model_text(model)}, {num_bytes} bytes a parameter:\n"]
        rows = [
            [
                x.column,
                _size(x.num_layers, x.num_filters),
                _parameters(x.num_parameters),
                _size(x.found_layers, x.found_filters) if x.found_layers else "none fits",
                _parameters(x.found_parameters) if x.found_layers else "",
                _ratio(x.found_parameters / x.exact_parameters) if x.found_layers else "",
            ]
            for x in _rows(part)
        ]
        lines += markdown(["", "paper", "parameters", "gplan", "parameters", "ratio"], rows)
    return lines


def memory_table(table: pd.DataFrame) -> list[str]:
    """Parameter and activation memory of the paper's sizes, in the paper's units."""
    lines = []
    for model, part in table.groupby("model", sort=False):
        unit, name = (GB, "GB") if model == "AmoebaNet-D" else (GIB, "GiB")
        lines += [f"{_model_text(model)}, {name} of all accelerators together:\n"]
        rows = []
        for x in _rows(part):
            parameters, activations = x.parameter_bytes / unit, x.activation_bytes / unit
            rows.append(
                [
                    x.column,
                    _size(x.num_layers, x.num_filters),
                    f"{x.parameter_memory:g}",
                    f"{parameters:.2f}",
                    _ratio(parameters / x.parameter_memory),
                    f"{x.activation_memory:g}",
                    f"{activations:.2f}",
                    _ratio(activations / x.activation_memory),
                    f"{'yes' if x.does_fit else 'no'}, {x.largest_bytes / GIB:.1f} GiB",
                ]
            )
        head = [
            "",
            "size",
            "parameters, paper",
            "gplan",
            "ratio",
            "activations, paper",
            "gplan",
            "ratio",
            "fits by gplan, and the fullest accelerator",
        ]
        lines += markdown(head, rows)
    return lines


def throughput_tables(table: pd.DataFrame) -> list[str]:
    """One table for each model: K across, M and ways down, with the ratio to the paper."""
    lines = []
    for (name, model, hardware), part in table.groupby(["table", "model", "hardware"], sort=False):
        device_counts = sorted(set(part.k))
        rows = [row for m in sorted(set(part.m)) for row in _throughput_rows(part[part.m == m], m)]
        lines += [f"{name}, {model} on {hardware}:\n"]
        lines += markdown(["M", "", *(f"K = {k}" for k in device_counts)], rows)
    return lines


def _throughput_rows(part: pd.DataFrame, m: int) -> list[list[str]]:
    """The paper's row and one for each way to cut and to run."""
    layers = part[part.cut == "layers"]
    rows = [[f"{m}", "paper", *(f"{x:g}" for x in layers.paper)]]
    if layers.torchgpipe.notna().all():
        rows.append(["", "torchgpipe, 8 P40", *(f"{x:.2f}" for x in layers.torchgpipe)])
    for cut, found in part.groupby("cut", sort=False):
        for title, name in ((f"GPipe's rule, {cut}", "rule"), (f"gplan's best, {cut}", "best")):
            rows.append(["", title, *_with_ratios(found[name], found.paper)])
        if cut == "layers":
            rows.append(["", "GPipe's rule, layers, recomputing ahead", *_with_ratios(found.ahead, found.paper)])
    return rows


def _with_ratios(found: pd.Series[float], published: pd.Series[float]) -> list[str]:
    return ["no plan" if pd.isna(x) else f"{x:.2f} ({_ratio(x / y)})" for x, y in zip(found, published, strict=True)]


def _rows(table: pd.DataFrame) -> list[SimpleNamespace]:
    """Rows with their columns as attributes."""
    return [SimpleNamespace(**{str(key): value for key, value in row.items()}) for row in table.to_dict("records")]


def _model_text(model: object) -> str:
    return {
        "AmoebaNet-D": "AmoebaNet-D(L, D), 8 GiB each, batch 128",
        "Transformer": "Transformer-L, 16 GiB each, batch 32, attention that keeps its scores",
        "Transformer, fused": "Transformer-L, 16 GiB each, batch 32, fused attention",
    }[str(model)]


def _size(num_layers: float, num_filters: float) -> str:
    return f"{int(num_layers)}" if pd.isna(num_filters) else f"{int(num_layers)}, {int(num_filters)}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _ratio(value: float) -> str:
    return f"{value:.2f}"
