"""Tests of the profiler: capture, memory and timing of real models."""
