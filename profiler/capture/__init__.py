"""A model to a chain of layers that can be cut anywhere."""
