"""This host: its processes, cores, GPUs and the links between them."""
