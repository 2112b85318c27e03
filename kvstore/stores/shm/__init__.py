"""The store `shm://NAME`: objects in memory that processes of one machine map."""
