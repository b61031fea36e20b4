"""Files that hold gplan's values: JSON for profiles, plans and runs; TOML for machines."""
