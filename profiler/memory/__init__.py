"""What layers keep and need, by the allocator or by following storages."""
