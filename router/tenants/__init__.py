"""Callers of the router, and their permissions."""
