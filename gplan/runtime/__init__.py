"""Plans carried out: the torch engine (one process per device) and the virtual one, and the training loop over both."""
