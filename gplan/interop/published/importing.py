"""Profiles that were published with other planners -> a gplan Profile, so that answers can be compared like with like.

Two formats, told apart by their content: the JSON of dnn-partitioning (`dnn_partitioning`, its colour classes in
`classes`) and PipeDream's graph.txt (`pipedream`). Both give times in milliseconds; here they become seconds. All
figures are of one micro-batch, which is called size 1.
"""

from __future__ import annotations

from pathlib import Path

from gplan.core import Link, Profile
from gplan.core.errors import FileError
from gplan.interop.published.dnn_partitioning import dnn_partitioning_graph, is_dnn_partitioning
from gplan.interop.published.nodes import profile_of
from gplan.interop.published.pipedream import is_pipedream, pipedream_graph


def import_profile(path: Path, *, link: Link | None = None) -> Profile:
    """The profile in another planner's file; `link` joins the devices where the file has bytes but no link.

    Raises FileError that says where in the file what was found and expected; UsageError for a link that the file's own
    transfer times leave nothing to do.
    """
    content = _read(path)
    text = _text(content, path)
    if is_dnn_partitioning(text):
        graph = dnn_partitioning_graph(text, name=str(path), link=link)
    elif is_pipedream(text):
        graph = pipedream_graph(text, name=str(path), link=link)
    else:
        raise FileError(
            f"{path} begins with {text.strip()[:40]!r}; expected dnn-partitioning's JSON, which is an object {{...}}, or "
            f"PipeDream's graph.txt, whose lines read 'node1 -- description -- forward_compute_time=...'"
        )
    return profile_of(graph, name=path.name, content=content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; expected another planner's profile") from error


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text: byte {error.start} is no UTF-8; expected a planner's profile") from error
