"""Counts of one engine, their export to Prometheus, and its log."""
