"""Checkpoints of a run: written by all ranks, read by the ranks of any plan for the same model.

folder             names, completeness and locking of checkpoint folders
storage            keys and values in torch.distributed.checkpoint
state              what a rank saves; an optimizer's state by parameter name
collective         work that fails on every rank if it fails on one
saving, loading    the whole procedure
"""
