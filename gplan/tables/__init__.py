"""What the command line prints: profiles, plans, runs and differences as tables of text, in any width."""

from gplan.tables.calibration import calibration_view
from gplan.tables.difference import difference_view
from gplan.tables.noun import noun_view
from gplan.tables.plan import plan_view
from gplan.tables.profile import profile_view
from gplan.tables.run import run_view
from gplan.tables.verify import verification_view

__all__ = [
    "calibration_view",
    "difference_view",
    "noun_view",
    "plan_view",
    "profile_view",
    "run_view",
    "verification_view",
]
