"""Capture: a model as a chain of layers that can be cut anywhere."""
