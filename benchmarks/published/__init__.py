"""Published profiles with the objectives of the planners they come from: how gplan's algorithms are checked.

`read_graph` reads a file of PipeDream or dnn-partitioning, `solve` finds the best assignment of its nodes to devices.
"""

from __future__ import annotations

from pathlib import Path

from gplan.core.errors import FileError
from published.dnn_partitioning import dnn_partitioning_graph
from published.graph import PublishedGraph, check_connected
from published.pipedream import pipedream_graph
from published.solving import Answer, solve

__all__ = ["Answer", "PublishedGraph", "read_graph", "solve"]


def read_graph(path: Path) -> PublishedGraph:
    """The graph in a file of dnn-partitioning or PipeDream. Raises FileError with the place in the file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read as text: {error}; expected another planner's profile") from error
    if text.lstrip().startswith("{"):
        graph = dnn_partitioning_graph(text, name=str(path))
    elif " -- " in text.lstrip().partition("\n")[0]:
        graph = pipedream_graph(text, name=str(path))
    else:
        raise FileError(
            f"{path} begins with {text.strip()[:40]!r}; expected dnn-partitioning's JSON, which is an object {{...}}, or "
            f"PipeDream's graph.txt, whose lines read 'node1 -- description -- forward_compute_time=...'"
        )
    check_connected(graph, name=str(path))
    return graph
