"""`gplan run`: starts the processes of a run, trains for some steps, and summarises what was measured."""
