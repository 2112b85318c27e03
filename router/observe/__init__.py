"""Metrics, records and spans of the router's requests."""
