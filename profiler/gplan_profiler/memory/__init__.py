"""The memory of layers, by the allocator or by following storages."""
