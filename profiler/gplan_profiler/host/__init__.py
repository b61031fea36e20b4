"""This host: its processors, GPUs, jobs of several processes, and the links between them."""
