"""torch.profiler traces of torch.distributed.pipelining runs -> one measured step, a Run beside its plan.

Reading needs no torch. In `measured_run`, `read_traced` combines the files of all ranks, `traced_run` compares the
result with the plan that was run, and `ideal_timeline` simulates the step with free transfers.
"""
