"""What the choice of a replica rests on: the index of caches, costs and policies."""
