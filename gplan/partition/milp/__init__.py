"""The same problem as a mixed-integer linear program: an independent check of the other solvers, and for large graphs.

Every objective, of chains and graphs, on unequal devices and with constraints, is a linear program over the choice of a
stage for each layer (`assignment`, with the constraints); `objective` and `memory_rows` state what the choices cost and
hold. Exact, within a time limit; ties are not settled.
"""

from gplan.partition.milp.program import SolverName
from gplan.partition.milp.solving import TIME_LIMIT_S, smallest_by_milp

__all__ = ["TIME_LIMIT_S", "SolverName", "smallest_by_milp"]
