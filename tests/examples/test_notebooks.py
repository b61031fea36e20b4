"""The notebooks run from top to bottom, and say what was committed with them."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
COMPUTED = ("choosing_m_and_k", "reading_a_bubble")
"""Those that measure nothing: they say the same everywhere."""


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell: NotebookNode) -> str:
    """The text that a cell printed."""
    return "".join(x.text for x in cell.outputs if x.output_type == "stream" and x.name == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    committed, notebook = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.get("execution_count") for cell in code_cells(notebook))
    for cell, old in zip(code_cells(notebook), code_cells(committed), strict=True):
        if path.stem in COMPUTED and "auto" not in cell.source:  # a search ends with its time
            assert said(cell) == said(old), "the outputs are of another day: execute the notebook again and commit it"


def test_there_are_notebooks_with_their_outputs_and_without_places_of_one_machine() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"tour", *COMPUTED}
    for path in NOTEBOOKS:
        cells = code_cells(nbformat.read(path, as_version=4))
        assert any(cell.outputs for cell in cells), f"{path.name} was committed without outputs"
        outputs = [x for cell in cells for x in cell.outputs]
        texts = [text for x in outputs for text in (x.get("text", ""), x.get("data", {}).get("text/plain", ""))]
        assert not [x for text in texts for x in re.findall(r"/(?:tmp|home|root|work|Users)/\S*", text)], path.name
        assert not [x for text in texts for x in re.findall(r"\w*(?:Error|Warning)\b.*", text)], path.name
