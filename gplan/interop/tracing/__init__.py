"""torch.profiler traces of torch.distributed.pipelining runs -> one measured step, a Run beside its plan.

Reading needs no torch. `traced` puts the ranks' files together; `run` lays the result beside the plan that was run;
`ideal` says what would be left without waiting for transfers.
"""

from gplan.interop.tracing.ideal import ideal_timeline
from gplan.interop.tracing.run import traced_run
from gplan.interop.tracing.traced import Traced, read_traced, traced_json

__all__ = ["Traced", "ideal_timeline", "read_traced", "traced_json", "traced_run"]
