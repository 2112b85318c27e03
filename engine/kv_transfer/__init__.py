"""KV blocks that move between engines: loads, saves, prefetches. Pure."""
