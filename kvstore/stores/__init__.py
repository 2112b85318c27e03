"""The stores that come with Baton: memory, shm and file, redis."""
