"""Why a plan is as it is, and what would change it."""
