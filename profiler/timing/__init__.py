"""What layers cost in time: rounds over a bench, with a clock."""
