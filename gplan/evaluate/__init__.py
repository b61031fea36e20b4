"""Predicted against measured: comparison, attribution of errors, verification and explanation."""
