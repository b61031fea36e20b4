"""GPipe's semantics, one file per family: what a plan trains is what the plain model would, on both engines."""
