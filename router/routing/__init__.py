"""Which replica takes a request: facts, costs in seconds, and policies. Pure."""
