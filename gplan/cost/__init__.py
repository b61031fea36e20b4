"""What a stage costs: seconds and bytes, from a profile."""
