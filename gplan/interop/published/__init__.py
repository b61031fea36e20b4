"""Profiles that were published with other planners."""
