"""torch.profiler traces of torch.distributed.pipelining runs -> one measured step, a Run beside its plan.

Reading needs no torch. `read_traced` combines the files of all ranks, `traced_run` compares the result with the plan
that was run, and `ideal_timeline` simulates the step with free transfers.
"""

from gplan.interop.traces.measured_run import Traced, ideal_timeline, read_traced, traced_json, traced_run

__all__ = ["Traced", "ideal_timeline", "read_traced", "traced_json", "traced_run"]
