"""`gplan run`: processes, training loop, results."""
