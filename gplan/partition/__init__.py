"""The provably best partition of a model's layers for K devices."""
