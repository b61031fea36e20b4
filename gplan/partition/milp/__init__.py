"""The planner's problem as a mixed-integer linear program (PuLP, HiGHS or CBC)."""
