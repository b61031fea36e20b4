"""torch.profiler traces of torch.distributed.pipelining runs -> one measured step, a Run beside its plan.

Reading needs no torch. In `measured_run`, `read_traced` combines the files of all ranks, and `traced_run` compares the
result with the plan that was run.
"""
