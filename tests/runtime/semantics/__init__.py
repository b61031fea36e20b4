"""Training semantics: both engines train as the plain model does."""
