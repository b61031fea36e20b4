"""Backward passes in two halves, or with recompute."""
