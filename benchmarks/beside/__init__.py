"""What `benchmarks/peers.py` is made of: models, what users of each peer write, turns, rules, text."""
