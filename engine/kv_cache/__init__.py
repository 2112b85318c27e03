"""Block tables, block pools, the prefix cache and its events. Pure."""
