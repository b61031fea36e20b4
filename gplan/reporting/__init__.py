"""Charts, the page, the trace and the tables of the terminal."""
