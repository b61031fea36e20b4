"""The search for a setting."""
