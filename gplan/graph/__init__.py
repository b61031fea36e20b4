"""The graph of layers, the positions at which it can be cut, and the tensors that cross each cut."""
