"""Plans in the syntax of other trainers."""
