"""GPipe's own tables, recomputed: what `benchmarks/gpipe_paper.py` and the notebook of that name are made of."""
