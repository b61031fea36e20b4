"""Predicted against measured: comparison, attribution of errors, calibration, verification and explanation."""
