"""Published profiles with the objectives of the planners they come from: how gplan's algorithms are checked.

`read_graph` reads a file of PipeDream or dnn-partitioning, `solve` finds the best assignment of its nodes to devices.
"""

from published.graph import PublishedGraph
from published.reading import read_graph
from published.solving import Answer, solve

__all__ = ["Answer", "PublishedGraph", "read_graph", "solve"]
