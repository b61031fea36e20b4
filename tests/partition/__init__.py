"""Tests of the balancer: every solver against brute force, and against the others."""
