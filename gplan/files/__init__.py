"""Files that hold gplan's values: JSON for profiles, plans, runs, verifications and calibrations; TOML for machines."""
