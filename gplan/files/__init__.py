"""Files that hold gplan's values: JSON for profiles, plans, runs and verifications; TOML for machines."""
