"""Exports proven by the receivers' own code."""
