"""Training with a plan: the torch engine (one process per device), the virtual engine, the training loop over both."""
