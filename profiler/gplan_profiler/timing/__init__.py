"""The times of layers and of the optimizer, sampled in rounds."""
