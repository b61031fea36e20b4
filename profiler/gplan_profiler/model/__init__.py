"""Loading of model files, with weights or without them where they do not fit in memory."""
