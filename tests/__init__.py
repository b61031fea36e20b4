"""Tests of gplan; each module mirrors the one it tests."""
