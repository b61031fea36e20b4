"""Tests of training with plans: both engines give the plain model's results."""
