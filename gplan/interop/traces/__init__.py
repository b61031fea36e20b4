"""torch.profiler traces of torch.distributed.pipelining runs -> one measured step, a Run beside its plan.

Reading needs no torch. `traced` puts the ranks' files together; `run` lays the result beside the plan that was run;
`ideal` says what would be left without waiting for transfers.
"""

from gplan.interop.traces.measured_run import Traced, ideal_timeline, read_traced, traced_json, traced_run

__all__ = ["Traced", "ideal_timeline", "read_traced", "traced_json", "traced_run"]
