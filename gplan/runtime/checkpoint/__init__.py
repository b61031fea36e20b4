"""Checkpoints of a run: written by all its ranks, read by the ranks of any plan for the same model.

folder             names, whole or not, renamed when whole
storage            torch.distributed.checkpoint: keys written and read
optimizer_state    an optimizer's state by parameter name
together           what failed on one rank has failed on all
state              what a rank gives and gets, and what is written of it
saving, loading    all of it, in order
"""

from gplan.runtime.checkpoint.folder import candidates, checkpoint_path, newest_intact
from gplan.runtime.checkpoint.loading import Loaded, is_there, load_checkpoint
from gplan.runtime.checkpoint.saving import save_checkpoint
from gplan.runtime.checkpoint.state import Plain, State

__all__ = [
    "Loaded",
    "Plain",
    "State",
    "candidates",
    "checkpoint_path",
    "is_there",
    "load_checkpoint",
    "newest_intact",
    "save_checkpoint",
]
