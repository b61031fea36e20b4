"""Charts of a plan or a run, drawn with matplotlib."""
