"""Counters and trace contexts of one process."""
