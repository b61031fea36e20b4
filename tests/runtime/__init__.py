"""Tests of the engines: what they train is what the plain model trains."""
