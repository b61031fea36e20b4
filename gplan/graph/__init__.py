"""Where a layer graph can be cut, and what crosses each cut."""
