"""The best number of stages, replicas and micro-batches, schedule and recompute mode for a batch."""
